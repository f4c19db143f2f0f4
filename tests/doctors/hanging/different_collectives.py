# The ranks call different collectives, with long arrays.
# arguments: -m mpiad.watch
# thorough: yes
# says: waits [0-9.]+ s +Gather\(root=0.* +{gathers} +rank 1
# says: waits [0-9.]+ s +Bcast\(root=0.* +{sends} +rank 0
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
x = np.ones(1_000_000)
if comm.rank == 0:
    every = np.zeros((2, x.size))
    comm.Gather(x, every)  # gathers
else:
    comm.Bcast(x)  # sends
