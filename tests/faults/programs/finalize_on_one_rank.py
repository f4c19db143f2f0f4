# One rank ends MPI while the others still communicate.
# environment: MPIAD_TIMEOUT=2
# raises: mpiad.errors.DeadlockError
# says: 0 +left [^\n]*mpi_finalize
# says: 1 +waits [^\n]*mpi_allreduce[^\n]*{here}

import mpiad

mpiad.mpi_init()

if mpiad.mpi_rank() == 0:
    mpiad.mpi_finalize()
else:
    mpiad.mpi_allreduce(1.0)  # here
