# One of three ranks doesn't call the collective, and goes on to compute.
# ranks: 3
# environment: MPIAD_TIMEOUT=2
# raises: mpiad.errors.DeadlockError
# says: mpi_allreduce[^\n]*{here}[^\n]*rank 2
# says: 2 +computes

import time

import mpiad

mpiad.mpi_init()

if mpiad.mpi_rank() < 2:
    mpiad.mpi_allreduce(1.0)  # here
time.sleep(8)
