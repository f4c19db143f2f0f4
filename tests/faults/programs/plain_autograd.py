# autograd's own gradient, around messages whose order it doesn't keep.
# together: yes
# raises: mpiad.errors.ForeignTraceError
# says: {here}.*ForeignTraceError: mpi_exchange.*mpiad.grad

import autograd
import autograd.numpy as np

import mpiad

other = 1 - mpiad.mpi_rank()


def loss(x):
    return np.sum(mpiad.mpi_exchange(x, dest=other, source=other) ** 2)  # here


autograd.grad(loss)(np.ones(3))
