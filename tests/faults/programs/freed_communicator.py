# A communicator is used after its end.
# together: yes
# raises: mpiad.errors.CommunicatorError
# says: {here}.*CommunicatorError: mpi_allreduce: comm is the null communicator: it was freed

import numpy as np
from mpi4py import MPI

import mpiad

comm = MPI.COMM_WORLD.Dup()
mpiad.mpi_init(comm)
comm.Free()
mpiad.mpi_allreduce(np.ones(3), comm=comm)  # here
