# One rank asks for the sum, the other for the maximum.
# together: yes
# environment: MPIAD_DEBUG=1
# raises: mpiad.errors.CommunicationMismatchError
# says: the reduction differs
# says: 0 +mpi_allreduce [^\n]*{here}
# says: 1 +mpi_allreduce [^\n]*MAX[^\n]*{here}

from mpi4py import MPI

import mpiad

mpiad.mpi_allreduce(1.0, MPI.MAX if mpiad.mpi_rank() else MPI.SUM)  # here
