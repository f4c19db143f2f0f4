# One rank ends by sys.exit, and the others wait in a reduction.
# ranks: 3
# arguments: -m mpiad.watch
# says: in Allreduce at {here}, for rank 2, which left the program
# says: 2 +left [0-9.]+ s ago +sys.exit\(0\) +{leaves}
# thorough: yes
import sys

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
if comm.rank == 2:
    sys.exit(0)  # leaves
total = np.zeros(1)
comm.Allreduce(np.ones(1), total)  # here
