# Each rank stops by its own residual.
# thorough: yes
# environment: MPIAD_TIMEOUT=2
# raises: mpiad.errors.DeadlockError
# says: 0 +left
# says: mpi_allreduce[^\n]*{here}

import mpiad

residual = 1.0 + 10.0 * mpiad.mpi_rank()
while residual > 1e-3:
    residual /= mpiad.mpi_allreduce(1.0)  # here
