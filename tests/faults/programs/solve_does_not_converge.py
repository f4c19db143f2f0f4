# An iteration that doesn't come to its tolerance, on any rank.
# together: yes
# raises: mpiad.errors.ConvergenceError
# says: {here}.*ConvergenceError: linalg.solve: .*maxiter=2 iterations

import numpy as np

import mpiad
from mpiad.linalg import solve

scale = np.array([1.0, 10.0, 100.0]) * (1.0 + mpiad.mpi_rank())
solve(lambda x: scale * x, np.ones(3), maxiter=2)  # here
