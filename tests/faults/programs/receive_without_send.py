# A receive of what nobody sends.
# environment: MPIAD_TIMEOUT=2
# raises: mpiad.errors.DeadlockError
# says: 1 +waits [^\n]*mpi_recv[^\n]*{here}[^\n]*rank 0
# says: 0 +left
# thorough: yes

import numpy as np

import mpiad

mpiad.mpi_init()

if mpiad.mpi_rank() == 1:
    mpiad.mpi_recv(np.ones(3), source=0)  # here
