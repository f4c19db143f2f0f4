# A local adjoint raises on one rank, while the others wait in the backward pass.
# raises: FloatingPointError
# says: rank 1 ended the job.*{here}.*FloatingPointError: overflow
# thorough: yes

import autograd.numpy as np
from autograd.extend import defvjp, primitive

import mpiad


def adjoint(g):
    if mpiad.mpi_rank() == 1:
        raise FloatingPointError("overflow")  # here
    return g


local = primitive(lambda x: x * 1.0)
defvjp(local, lambda ans, x: adjoint)
mpiad.grad(lambda x: mpiad.mpi_allreduce(np.sum(local(mpiad.mpi_allreduce(x)))))(np.ones(3))
