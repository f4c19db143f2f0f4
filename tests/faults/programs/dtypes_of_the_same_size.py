# An integer among floats: MPI would add the bits.
# together: yes
# environment: MPIAD_DEBUG=1
# raises: mpiad.errors.CommunicationMismatchError
# says: the dtype differs
# says: 0 +mpi_sum [^\n]*float64[^\n]*{here}
# says: 1 +mpi_sum [^\n]*int64[^\n]*{here}

import mpiad

mpiad.mpi_sum(1.0 if mpiad.mpi_rank() == 0 else 1)  # here
