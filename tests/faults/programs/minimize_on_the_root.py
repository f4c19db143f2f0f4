# minimize is a collective, and the root alone calls it.
# environment: MPIAD_TIMEOUT=2
# raises: mpiad.errors.DeadlockError
# says: 0 +waits [^\n]*{here}[^\n]*rank 1
# says: 1 +left
# thorough: yes

import autograd.numpy as np

import mpiad

mpiad.mpi_init()

if mpiad.mpi_rank() == 0:
    mpiad.minimize(lambda x: np.sum(x**2), np.ones(3))  # here
