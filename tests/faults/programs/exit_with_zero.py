# One rank leaves before the others are done.
# environment: MPIAD_TIMEOUT=2
# raises: mpiad.errors.DeadlockError
# says: rank 0.*mpi_allreduce.*{here}
# says: rank 1.*left
# thorough: yes

import sys

import mpiad

mpiad.mpi_init()

if mpiad.mpi_rank() == 1:
    sys.exit(0)
mpiad.mpi_allreduce(1.0)  # here
