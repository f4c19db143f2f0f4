# The first use of a communicator is a message between two of its ranks.
# together: yes
# raises: mpiad.errors.CommunicatorError
# says: {here}.*CommunicatorError: mpi_send: this communicator of 2 ranks was never prepared.*mpi_init

from mpi4py import MPI

import mpiad

mpiad.mpi_send(1.0, dest=1 - mpiad.mpi_rank(), comm=MPI.COMM_WORLD.Dup())  # here
