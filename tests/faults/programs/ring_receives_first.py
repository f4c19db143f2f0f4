# A ring of three, in which each receives from the one before it.
# ranks: 3
# environment: MPIAD_TIMEOUT=2
# raises: mpiad.errors.DeadlockError
# says: this wait can't end: rank \d -> rank \d -> rank \d -> rank \d
# says: 2 +waits [^\n]*mpi_recv[^\n]*{here}[^\n]*rank 1
# thorough: yes

import numpy as np

import mpiad

rank = mpiad.mpi_rank()
mpiad.mpi_recv(np.ones(3), source=(rank - 1) % 3)  # here
mpiad.mpi_send(np.ones(3), dest=(rank + 1) % 3)
