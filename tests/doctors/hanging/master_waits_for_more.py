# A master expects a result of each rank, its own one included.
# ranks: 3
# arguments: -m mpiad.watch
# thorough: yes
# says: waits [0-9.]+ s +recv\(from any rank with tag 7\) +{here}.* +ranks 1-2
# says: for ranks 1-2, which left the program
from mpi4py import MPI

comm = MPI.COMM_WORLD
if comm.rank == 0:
    results = [comm.recv(source=MPI.ANY_SOURCE, tag=7) for _ in range(comm.size)]  # here
else:
    comm.send(comm.rank**2, 0, tag=7)
