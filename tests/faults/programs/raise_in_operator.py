# The body of an operator raises on one rank, between its communications.
# raises: ValueError
# says: rank 1 ended the job.*{here}.*ValueError: singular

import numpy as np
from mpi4py import MPI

import mpiad
from mpiad.extend import custom_operator, defadjoint


@custom_operator
def solve(b):
    MPI.COMM_WORLD.barrier()
    if mpiad.mpi_rank() == 1:
        raise ValueError("singular")  # here
    return MPI.COMM_WORLD.allreduce(b)


defadjoint(solve, solve)
mpiad.grad(lambda x: solve(np.sum(x**2)))(np.ones(3))
