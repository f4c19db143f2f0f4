# An integer isn't traced: the backward pass of one rank would have a communication more. The call itself says so before.
# environment: MPIAD_TIMEOUT=2
# raises: mpiad.errors.CommunicationMismatchError
# says: the dtype differs[^$]*mpi_allreduce[^\n]*int64[^\n]*{here}
# thorough: yes

import mpiad


def loss(x):
    share = x**2 if mpiad.mpi_rank() == 0 else 0
    return mpiad.mpi_allreduce(share)  # here


mpiad.grad(loss)(3.0)
