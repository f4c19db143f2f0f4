# mpi_print is a collective, and one rank alone calls it.
# thorough: yes
# environment: MPIAD_TIMEOUT=2
# raises: mpiad.errors.DeadlockError
# says: 0 +waits [^\n]*mpi_print[^\n]*{here}[^\n]*rank 1
# says: 1 +left

import mpiad

mpiad.mpi_init()

if mpiad.mpi_rank() == 0:
    mpiad.mpi_print("loss 3.0")  # here
