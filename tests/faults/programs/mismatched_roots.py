# Each rank takes itself for the root.
# together: yes
# environment: MPIAD_DEBUG=1
# raises: mpiad.errors.CommunicationMismatchError
# says: the root differs
# says: 0 +mpi_bcast +root=0[^\n]*{here}
# says: 1 +mpi_bcast +root=1[^\n]*{here}

import mpiad

mpiad.mpi_bcast(1.0, root=mpiad.mpi_rank())  # here
