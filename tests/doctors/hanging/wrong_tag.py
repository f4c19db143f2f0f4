# The receiver expects another tag.
# arguments: -m mpiad.watch
# says: waits [0-9.]+ s +Recv\(from rank 0 with tag 2, shape \(3,\), float64\) +{receives} +rank 0
# says: waits [0-9.]+ s +Barrier\(\) +{here} +rank 1
# says: Rank 1: a message from rank 0 with tag 1 \(24 bytes\) is there instead
# thorough: yes
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
x = np.ones(3)
if comm.rank == 0:
    comm.Send(x, 1, tag=1)
else:
    comm.Recv(x, 0, tag=2)  # receives
comm.Barrier()  # here
