# A communicator is freed between the forward and the backward pass.
# together: yes
# raises: mpiad.errors.CommunicatorError
# says: {here}.*CommunicatorError: a communicator was freed before the reverse pass

import autograd.numpy as np
from mpi4py import MPI

import mpiad


def loss(x):
    comm = MPI.COMM_WORLD.Dup()
    y = np.sum(mpiad.mpi_allreduce(x**2, comm=comm))
    comm.Free()
    return y


mpiad.grad(loss)(np.ones(3))  # here
