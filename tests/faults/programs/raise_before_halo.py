# The matrix product of a distributed solve raises on one rank, where the others wait for its side of a block.
# raises: ValueError
# says: linalg.solve can't raise this exception on all ranks: others .* within 1 s.*{here}.*ValueError: no row 3
# thorough: yes

import numpy as np

import mpiad
import mpiad.transport.exits.user_failures
from mpiad.linalg import solve

mpiad.transport.exits.user_failures.SOON = 1.0  # seconds, so that nobody waits for this program
domain = mpiad.Domain((8,))


def matvec(x):
    if mpiad.mpi_rank() == 1:
        raise ValueError("no row 3")  # here
    padded = domain.exchange(x)
    return 3.0 * x - padded[2:] - padded[:-2]


try:
    solve(matvec, np.ones(4))
except ValueError:
    pass  # it would go on alone
