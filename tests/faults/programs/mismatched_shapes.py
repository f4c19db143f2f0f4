# Sums of arrays of different shapes.
# ranks: 3
# environment: MPIAD_DEBUG=1
# raises: mpiad.errors.CommunicationMismatchError
# says: the shape differs
# says: 0 +mpi_allreduce [^\n]*\(3,\)[^\n]*{here}
# says: 2 +mpi_allreduce [^\n]*\(4,\)[^\n]*{here}

import numpy as np

import mpiad

mpiad.mpi_allreduce(np.ones(3 + mpiad.mpi_rank() // 2))  # here
