# An operator of the user's own has no adjoint.
# together: yes
# raises: NotImplementedError
# says: NotImplementedError: .*total

import numpy as np
from mpi4py import MPI

import mpiad
from mpiad.extend import custom_operator


@custom_operator
def total(x):
    return MPI.COMM_WORLD.allreduce(x)


mpiad.grad(lambda x: total(x) ** 2)(np.array(3.0))
