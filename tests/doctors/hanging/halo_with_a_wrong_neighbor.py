# One rank of a halo exchange has a wrong number of a neighbor; the other messages arrive.
# ranks: 4
# arguments: -m mpiad.watch
# says: 0 +waits [0-9.]+ s +Waitall\(Irecv from rank 1 with tag 5, shape \(2,\), float64\) +{here} +rank 1
# thorough: yes
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
if comm.rank == 1:
    left = 3
halo, edge = np.zeros((2, 2)), np.ones((2, 2))
for _ in range(2):
    requests = [comm.Irecv(halo[0], left, 4), comm.Irecv(halo[1], right, 5)]
    requests += [comm.Isend(edge[0], left, 5), comm.Isend(edge[1], right, 4)]
    MPI.Request.Waitall(requests)  # here
