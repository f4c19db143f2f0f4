# The adjoint of an operator communicates on one rank only.
# together: yes
# environment: MPIAD_DEBUG=1
# raises: mpiad.errors.CommunicationMismatchError
# says: adjoint
# says: {there}

import autograd.numpy as np

import mpiad
from mpiad.extend import custom_operator, defadjoint


@custom_operator
def total(x):
    return mpiad.mpi_allreduce(x)


@custom_operator
def spread(x):
    return mpiad.mpi_bcast(x) if mpiad.mpi_rank() == 0 else mpiad.mpi_allreduce(x)  # there


defadjoint(total, spread)
mpiad.grad(lambda x: np.sum(total(x)))(np.ones(3))
