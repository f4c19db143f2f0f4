# The only rank receives what it hasn't sent.
# ranks: 1
# arguments: -m mpiad.watch
# thorough: yes
# says: rank 0 has waited for [0-9.]+ seconds in Recv at {here}, and this wait can't end: rank 0 -> rank 0
import numpy as np
from mpi4py import MPI

MPI.COMM_WORLD.Recv(np.zeros(1), 0)  # here
