# A rank of a chain receives from the wrong side.
# ranks: 3
# arguments: -m mpiad.watch
# thorough: yes
# says: waits [0-9.]+ s +recv\(from rank 2 with any tag\) +{here} +rank 2
# says: Rank 1: a message from rank 0 with tag 0 .* is there instead
from mpi4py import MPI

comm = MPI.COMM_WORLD
if comm.rank > 0:
    message = comm.recv(source=comm.rank - 1 if comm.rank == 2 else 2)  # here
if comm.rank < 2:
    comm.send({"rank": comm.rank}, comm.rank + 1)
