# A local stopping test lets one rank leave an iteration earlier, for the barrier of another communicator.
# arguments: -m mpiad.watch
# thorough: yes
# says: this wait can't end: rank 0 -> rank 1 -> rank 0
# says: waits [0-9.]+ s +allreduce\(.*\) +{iterates} +rank 1
# says: waits [0-9.]+ s +Barrier\(on communicator .* of ranks \[0, 1\]\) +{here} +rank 0
from mpi4py import MPI

comm = MPI.COMM_WORLD
other = comm.Dup()
for _ in range(3 - comm.rank):
    comm.allreduce(1.0)  # iterates
other.Barrier()  # here
