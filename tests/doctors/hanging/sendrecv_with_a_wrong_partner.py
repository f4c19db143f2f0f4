# The partners of an exchange don't agree.
# ranks: 3
# arguments: -m mpiad.watch
# thorough: yes
# says: waits [0-9.]+ s +Sendrecv\(from rank 2 with any tag, .*\) +{here} +rank 2
# says: Rank 1: a message from rank 0 with tag 0 .* is there instead
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
partner = [1, 2, 0][comm.rank]
x, y = np.ones(2), np.zeros(2)
comm.Sendrecv(x, partner, recvbuf=y, source=partner)  # here
