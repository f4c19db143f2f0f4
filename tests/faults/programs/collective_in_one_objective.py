# The ranks differentiate different functions, and one communicates.
# together: yes
# environment: MPIAD_DEBUG=1
# raises: mpiad.errors.CommunicationMismatchError
# says: 0 +mpi_allreduce [^\n]*{here}

import autograd.numpy as np

import mpiad


def coupled(x):
    return mpiad.mpi_allreduce(np.sum(x**2))  # here


def local(x):
    return np.sum(x**2)


mpiad.value_and_grad(coupled if mpiad.mpi_rank() == 0 else local)(np.ones(3))
