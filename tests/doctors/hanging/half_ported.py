# A message is sent by mpiad and received by mpi4py, which use different communicators.
# arguments: -m mpiad.watch
# says: rank 0 -> rank 1 -> rank 0. The lines below the table say why
# says: waits [0-9.]+ s +Wait\(Irecv from rank 1 with tag 6, shape \(1,\), float64\) +{receives} in loss +rank 1
# says: Rank 0: the message from rank 1 with tag 6 was sent by mpiad, on another communicator: both ends
import numpy as np
from mpi4py import MPI

import mpiad

comm = MPI.COMM_WORLD
left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size


def loss(x):
    halo = np.empty(1)
    request = comm.Irecv(halo, right, tag=6)
    sent = mpiad.mpi_isend(x[:1], left, tag=6)
    request.Wait()  # receives
    mpiad.mpi_wait(sent)
    return (x**2).sum() * halo[0]


mpiad.value_and_grad(loss)(np.ones(2))
