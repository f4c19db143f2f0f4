# A gradient is a collective, also of a function that communicates nothing.
# environment: MPIAD_TIMEOUT=2
# raises: mpiad.errors.DeadlockError
# says: 1 +waits [^\n]*{here}[^\n]*rank 0
# says: 0 +left
# thorough: yes

import autograd.numpy as np

import mpiad

mpiad.mpi_init()

if mpiad.mpi_rank() == 1:
    mpiad.grad(lambda x: np.sum(x**2))(np.ones(3))  # here
