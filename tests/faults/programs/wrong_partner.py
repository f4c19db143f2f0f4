# A message goes to another rank than the one that receives.
# ranks: 3
# environment: MPIAD_DEBUG=1 MPIAD_TIMEOUT=2
# raises: mpiad.errors.DeadlockError
# says: 1 +waits [^\n]*mpi_recv[^\n]*{receive}[^\n]*rank 0
# says: Rank 0 sent a message to rank 2 with tag 0 at {send}, not received there
# thorough: yes

import numpy as np

import mpiad

mpiad.mpi_init()

if mpiad.mpi_rank() == 0:
    mpiad.mpi_send(np.ones(3), dest=2)  # send
if mpiad.mpi_rank() == 1:
    mpiad.mpi_recv(np.ones(3), source=0)  # receive
