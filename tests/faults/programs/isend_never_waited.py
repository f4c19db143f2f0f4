# A send that was started in a trace is never waited for.
# together: yes
# raises: mpiad.errors.RequestError
# says: RequestError: 1 request\(s\) were never waited for in the trace.*mpi_isend of shape \(3,\).*This happened on rank 0

import autograd.numpy as np

import mpiad


def loss(x):
    if mpiad.mpi_rank() == 0:
        mpiad.mpi_isend(x, dest=1)
        return np.sum(x)
    return np.sum(mpiad.mpi_recv(x, source=0) ** 2)


mpiad.value_and_grad(loss, objective="sum")(np.ones(3))
