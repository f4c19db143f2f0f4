# drive is a collective, and the root alone calls it.
# environment: MPIAD_TIMEOUT=2
# raises: mpiad.errors.DeadlockError
# says: 0 +waits [^\n]*{here}[^\n]*rank 1
# says: 1 +left
# thorough: yes

import mpiad

mpiad.mpi_init()

if mpiad.mpi_rank() == 0:
    mpiad.drive(lambda f: f(1.0), lambda x: x**2)  # here
