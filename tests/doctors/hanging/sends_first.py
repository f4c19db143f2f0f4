# Both ranks send a long message before they receive.
# arguments: -m mpiad.watch
# thorough: yes
# says: this wait can't end: rank 0 -> rank 1 -> rank 0
# says: waits [0-9.]+ s +Send\(to rank 0 with tag 0, shape \(3000000,\), float64\) +{here} +rank 0
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
x = np.ones(3_000_000)
comm.Send(x, 1 - comm.rank)  # here
comm.Recv(x, 1 - comm.rank)
