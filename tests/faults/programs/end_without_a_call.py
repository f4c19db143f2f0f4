# One rank imports the library and ends, and the others make their first communicating call.
# raises: mpiad.errors.CommunicatorError
# says: mpi_sum: rank 0 has waited for \d seconds .* Rank 1 ended without such a call. .* mpiad\.mpi_init

import mpiad

if mpiad.mpi_rank() != 1:
    mpiad.mpi_sum(1.0)
