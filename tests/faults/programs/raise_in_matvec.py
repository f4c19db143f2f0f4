# The matrix product of a distributed solve raises on one rank.
# raises: ValueError
# says: {here}.*ValueError: no row 3
# thorough: yes

import numpy as np

import mpiad
from mpiad.linalg import solve


def matvec(x):
    if mpiad.mpi_rank() == 1:
        raise ValueError("no row 3")  # here
    return 2.0 * x


solve(matvec, np.ones(3))
