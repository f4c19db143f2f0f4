# A rank receives once more than the other one has sent, whose earlier request is complete.
# arguments: -m mpiad.watch
# thorough: yes
# says: waits [0-9.]+ s +Recv\(from rank 0 with any tag, shape \(1,\), int64\) +{here} +rank 0
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
x = np.zeros(1, np.int64)
if comm.rank == 0:
    request = comm.Isend(x, 1)
    comm.Recv(x, 1)
    request.Wait()
else:
    comm.Recv(x, 0)
    comm.Recv(x, 0)  # here
    comm.Send(x, 0)
