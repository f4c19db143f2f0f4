# reset is a collective, and one rank alone calls it.
# environment: MPIAD_TIMEOUT=2
# raises: mpiad.errors.DeadlockError
# says: 1 +waits [^\n]*reset[^\n]*{here}
# says: 0 +left
# thorough: yes

import mpiad

mpiad.mpi_init()

if mpiad.mpi_rank() == 1:
    mpiad.reset()  # here
