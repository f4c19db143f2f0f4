# Two communicators are used in opposite orders.
# arguments: -m mpiad.watch
# thorough: yes
# says: this wait can't end: rank 0 -> rank 1 -> rank 0
# says: waits [0-9.]+ s +Barrier\(on communicator .* of ranks \[0, 1\]\) +{here} +rank 1
from mpi4py import MPI

comm = MPI.COMM_WORLD
first, second = comm.Dup(), comm.Split(0, comm.rank)
for each in (first, second) if comm.rank == 0 else (second, first):
    each.Barrier()  # here
