# An operator's body writes into the array that it was lent.
# together: yes
# raises: ValueError
# says: {here}.*ValueError: .*read-only

import autograd.numpy as np
from mpi4py import MPI

import mpiad
from mpiad.extend import custom_operator, defadjoint


@custom_operator
def total(x):
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x)  # here
    x += 1.0
    return x


defadjoint(total, total)
mpiad.grad(lambda x: np.sum(total(x)))(np.ones(3))
