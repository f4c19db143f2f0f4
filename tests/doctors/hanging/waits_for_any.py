# No request of a Waitany can be completed.
# arguments: -m mpiad.watch
# thorough: yes
# says: waits [0-9.]+ s +Waitany\(Irecv from rank 0 with tag 1.*; Irecv from rank 0 with tag 2.*\) +{here} +rank 0
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
x, y = np.zeros(1), np.zeros(1)
if comm.rank == 1:
    MPI.Request.Waitany([comm.Irecv(x, 0, 1), comm.Irecv(y, 0, 2)])  # here
comm.Barrier()
