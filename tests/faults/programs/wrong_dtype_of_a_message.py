# A message of another dtype, with the same number of bytes.
# thorough: yes
# environment: MPIAD_DEBUG=1
# raises: mpiad.errors.MessageMismatchError
# says: {here}.*MessageMismatchError: mpi_recv: rank 0 sent
# says: float64
# says: int64

import numpy as np

import mpiad

if mpiad.mpi_rank() == 0:
    mpiad.mpi_send(np.ones(3), dest=1)
else:
    mpiad.mpi_recv(np.ones(3, np.int64), source=0)  # here
