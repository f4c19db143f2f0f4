# Sender and receiver name different tags.
# environment: MPIAD_DEBUG=1 MPIAD_TIMEOUT=2
# raises: mpiad.errors.DeadlockError
# says: 1 +waits [^\n]*mpi_recv[^\n]*tag 2[^\n]*{receive}
# says: Rank 0 sent a message to rank 1 with tag 1 at {send}, not received there
# thorough: yes

import numpy as np

import mpiad

if mpiad.mpi_rank() == 0:
    mpiad.mpi_send(np.ones(3), dest=1, tag=1)  # send
else:
    mpiad.mpi_recv(np.ones(3), source=0, tag=2)  # receive
