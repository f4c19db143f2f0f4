# A send that was started outside of any trace, and never waited for.
# environment: MPIAD_DEBUG=1
# raises: mpiad.errors.CommunicationMismatchError
# says: Rank 0 started mpi_isend at {here} and never waited for it
# thorough: yes

import numpy as np

import mpiad

if mpiad.mpi_rank() == 0:
    mpiad.mpi_isend(np.ones(3), dest=1)  # here
else:
    mpiad.mpi_recv(np.ones(3), source=0)
