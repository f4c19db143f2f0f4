# All ranks receive before they send.
# ranks: 3
# arguments: -m mpiad.watch
# says: this wait can't end: rank 0 -> rank 1 -> rank 2 -> rank 0
# says: 1 +waits [0-9.]+ s +Recv\(from rank 2 with tag 3, shape \(4,\), float64\) +{here} +rank 2
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
x = np.ones(4)
comm.Recv(x, (comm.rank + 1) % comm.size, tag=3)  # here
comm.Send(x, (comm.rank - 1) % comm.size, tag=3)
