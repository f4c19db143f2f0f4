# A branch on the rank, and one rank is at the next collective already.
# together: yes
# environment: MPIAD_DEBUG=1
# raises: mpiad.errors.CommunicationMismatchError
# says: 0 +mpi_allreduce [^\n]*{inside}
# says: 1 +mpi_allreduce [^\n]*{after}

import mpiad

if mpiad.mpi_rank() == 0:
    mpiad.mpi_allreduce(1.0)  # inside
mpiad.mpi_allreduce(1.0)  # after
