# A communicator between two groups.
# together: yes
# raises: mpiad.errors.CommunicatorError
# says: {here}.*CommunicatorError: mpi_allreduce: comm is an intercommunicator .*Merge

from mpi4py import MPI

import mpiad

rank = mpiad.mpi_rank()
mine = MPI.COMM_WORLD.Split(rank)
between = mine.Create_intercomm(0, MPI.COMM_WORLD, 1 - rank)
mpiad.mpi_allreduce(1.0, comm=between)  # here
