# A collective after the end of MPI.
# raises: mpiad.errors.CommunicatorError
# says: {here}.*CommunicatorError: mpi_allreduce: called after mpi_finalize
# thorough: yes

import mpiad

mpiad.mpi_finalize()
mpiad.mpi_allreduce(1.0)  # here
