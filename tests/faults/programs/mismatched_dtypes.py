# Sums of single and double precision.
# together: yes
# environment: MPIAD_DEBUG=1
# raises: mpiad.errors.CommunicationMismatchError
# says: the dtype differs
# says: 0 +mpi_allreduce [^\n]*float32[^\n]*{here}
# says: 1 +mpi_allreduce [^\n]*float64[^\n]*{here}

import numpy as np

import mpiad

mpiad.mpi_allreduce(np.ones(4, np.float32 if mpiad.mpi_rank() == 0 else np.float64))  # here
