# A receive that was started outside of any trace, and never waited for.
# environment: MPIAD_DEBUG=1
# raises: mpiad.errors.CommunicationMismatchError
# says: Rank 1 started mpi_irecv at {here} and never waited for it
# thorough: yes

import numpy as np

import mpiad

if mpiad.mpi_rank() == 1:
    mpiad.mpi_irecv(np.ones(3), source=0)  # here
else:
    mpiad.mpi_send(np.ones(3), dest=1)
