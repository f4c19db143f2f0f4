# A receive that was started in a trace is never waited for.
# together: yes
# raises: mpiad.errors.RequestError
# says: RequestError: 1 request\(s\) were never waited for in the trace.*mpi_irecv of shape \(3,\).*This happened on rank 1

import autograd.numpy as np

import mpiad


def loss(x):
    if mpiad.mpi_rank() == 1:
        mpiad.mpi_irecv(x, source=0)
    else:
        mpiad.mpi_send(x, dest=1)
    return np.sum(x)


mpiad.value_and_grad(loss, objective="sum")(np.ones(3))
