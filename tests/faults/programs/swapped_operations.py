# Two collectives in another order on one rank.
# together: yes
# environment: MPIAD_DEBUG=1
# raises: mpiad.errors.CommunicationMismatchError
# says: the operation differs
# says: 0 +mpi_bcast [^\n]*{first}
# says: 1 +mpi_allreduce [^\n]*{other}

import mpiad

if mpiad.mpi_rank() == 0:
    mpiad.mpi_bcast(1.0)  # first
    mpiad.mpi_allreduce(2.0)
else:
    mpiad.mpi_allreduce(2.0)  # other
    mpiad.mpi_bcast(1.0)
