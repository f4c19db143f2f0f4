# A rank skips a collective on a communicator of some ranks; the ranks outside of it wait, too.
# ranks: 4
# arguments: -m mpiad.watch
# thorough: yes
# says: waits [0-9.]+ s +allgather\(on communicator .* of ranks \[0, 2\]\) +{here} +rank 2
# says: 2 +waits [0-9.]+ s +Barrier\(\) +{end} +rank 0
from mpi4py import MPI

comm = MPI.COMM_WORLD
half = comm.Split(comm.rank % 2, comm.rank)
if comm.rank != 2:
    half.allgather(comm.rank)  # here
comm.Barrier()  # end
