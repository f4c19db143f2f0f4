# A local tangent raises on one rank, while the others communicate tangents.
# raises: FloatingPointError
# says: rank 1 ended the job.*{here}.*FloatingPointError: overflow
# thorough: yes

import autograd.numpy as np
from autograd.extend import defjvp, primitive

import mpiad


def tangent(g, ans, x):
    if mpiad.mpi_rank() == 1:
        raise FloatingPointError("overflow")  # here
    return g


local = primitive(lambda x: x * 1.0)
defjvp(local, tangent)
mpiad.jvp(lambda x: mpiad.mpi_allreduce(np.sum(local(x))), np.ones(3), np.ones(3))
