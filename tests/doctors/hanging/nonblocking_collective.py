# One rank doesn't start a nonblocking collective.
# ranks: 3
# arguments: -m mpiad.watch
# thorough: yes
# says: waits [0-9.]+ s +Wait\(Iallreduce shape \(1,\), float64.*\) +{here} +rank 1
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
total = np.zeros(1)
if comm.rank == 1:
    comm.recv(source=0)
else:
    comm.Iallreduce(np.ones(1), total).Wait()  # here
