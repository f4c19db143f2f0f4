# The only rank sends itself a message, and doesn't receive it.
# ranks: 1
# environment: MPIAD_DEBUG=1
# raises: mpiad.errors.CommunicationMismatchError
# says: Rank 0 sent a message to rank 0 with tag 4 at {here}, not received there

import mpiad

mpiad.mpi_send(1.0, mpiad.mpi_rank(), tag=4)  # here
