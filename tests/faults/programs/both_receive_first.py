# Two ranks that receive before they send.
# environment: MPIAD_TIMEOUT=2
# raises: mpiad.errors.DeadlockError
# says: this wait can't end: rank (0 -> rank 1 -> rank 0|1 -> rank 0 -> rank 1)
# says: 0 +waits [^\n]*mpi_recv[^\n]*{here}
# thorough: yes

import numpy as np

import mpiad

other = 1 - mpiad.mpi_rank()
mpiad.mpi_recv(np.ones(3), source=other)  # here
mpiad.mpi_send(np.ones(3), dest=other)
