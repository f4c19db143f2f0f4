# A persistent send is started once, and its receive twice.
# arguments: -m mpiad.watch
# thorough: yes
# says: waits [0-9.]+ s +Wait\(Recv_init from rank 0 with tag 6, shape \(2,\), float64\) +{here} +rank 0
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
x = np.zeros(2)
request = comm.Send_init(x, 1, 6) if comm.rank == 0 else comm.Recv_init(x, 0, 6)
for _ in range(1 + comm.rank):
    request.Start()
    request.Wait()  # here
comm.Barrier()
