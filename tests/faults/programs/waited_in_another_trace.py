# A request is started before the gradient, and waited for in it.
# together: yes
# raises: mpiad.errors.RequestError
# says: {here}.*RequestError: .*trace

import autograd.numpy as np

import mpiad

other = 1 - mpiad.mpi_rank()
request = mpiad.mpi_irecv(np.ones(3), source=other)
mpiad.mpi_send(np.ones(3), dest=other)


def loss(x):
    return np.sum(x * mpiad.mpi_wait(request))  # here


mpiad.grad(loss, objective="sum")(np.ones(3))
