# The adjoint of an operator communicates on one rank only.
# together: yes
# environment: MPIAD_DEBUG=1
# raises: mpiad.errors.CommunicationMismatch
# says: adjoint
# says: {there}

import autograd.numpy as np

import mpiad
from mpiad.extend import communicating, defadjoint


@communicating
def total(x):
    return mpiad.mpi_allreduce(x)


@communicating
def spread(x):
    return mpiad.mpi_bcast(x) if mpiad.mpi_rank() == 0 else mpiad.mpi_allreduce(x)  # there


defadjoint(total, spread)
mpiad.grad(lambda x: np.sum(total(x)))(np.ones(3))
