# A nonblocking reduction that one rank doesn't start.
# environment: MPIAD_TIMEOUT=2
# raises: mpiad.errors.DeadlockError
# says: 1 +waits [^\n]*{here}[^\n]*rank 0
# says: 0 +left
# thorough: yes

import mpiad

mpiad.mpi_init()

if mpiad.mpi_rank() == 1:
    request = mpiad.mpi_iallreduce(1.0)  # here
    mpiad.mpi_wait(request)
