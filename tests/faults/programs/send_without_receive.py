# A message that nobody receives.
# environment: MPIAD_DEBUG=1
# raises: mpiad.errors.CommunicationMismatchError
# says: Rank 0 sent a message to rank 1 with tag 0 at {here}, not received there

import numpy as np

import mpiad

if mpiad.mpi_rank() == 0:
    mpiad.mpi_send(np.ones(3), dest=1)  # here
mpiad.mpi_barrier()
