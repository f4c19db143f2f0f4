# A branch on the rank, with another collective on each side.
# together: yes
# environment: MPIAD_DEBUG=1
# raises: mpiad.errors.CommunicationMismatchError
# says: the operation differs
# says: 0 +mpi_allreduce [^\n]*{root}
# says: 1 +mpi_barrier [^\n]*{others}

import mpiad

if mpiad.mpi_rank() == 0:
    mpiad.mpi_allreduce(1.0)  # root
else:
    mpiad.mpi_barrier()  # others
