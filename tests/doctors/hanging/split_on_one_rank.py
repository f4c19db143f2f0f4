# One rank creates a communicator, and the other one doesn't take part.
# arguments: -m mpiad.watch
# thorough: yes
# says: waits [0-9.]+ s +Split\(\) +{here} +rank 1
# says: waits [0-9.]+ s +recv\(from rank 0 with any tag\) +{receives} +rank 0
from mpi4py import MPI

comm = MPI.COMM_WORLD
if comm.rank == 0:
    comm.Split(0, 0)  # here
else:
    comm.recv(source=0)  # receives
