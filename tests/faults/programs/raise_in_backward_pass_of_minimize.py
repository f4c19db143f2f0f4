# A local adjoint raises on one rank, inside minimize.
# thorough: yes
# raises: FloatingPointError
# says: {here}.*FloatingPointError: overflow

import autograd.numpy as np
from autograd.extend import defvjp, primitive

import mpiad


def adjoint(g):
    if mpiad.mpi_rank() == 1:
        raise FloatingPointError("overflow")  # here
    return g


local = primitive(lambda x: x * 1.0)
defvjp(local, lambda ans, x: adjoint)
mpiad.minimize(lambda x: mpiad.mpi_allreduce(np.sum(local(mpiad.mpi_bcast(x)) ** 2)), np.ones(3))
