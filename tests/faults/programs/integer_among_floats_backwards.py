# An integer isn't traced: the backward pass of one rank has a communication more.
# environment: MPIAD_TIMEOUT=2
# raises: mpiad.errors.DeadlockError
# says: adjoint of mpi_allreduce[^\n]*{here}

import mpiad


def loss(x):
    share = x**2 if mpiad.mpi_rank() == 0 else 0
    return mpiad.mpi_allreduce(share)  # here


mpiad.grad(loss)(3.0)
