# The root's callback communicates, where no other rank has a callback.
# environment: MPIAD_TIMEOUT=2
# raises: mpiad.errors.DeadlockError
# says: 0 +waits [^\n]*mpi_allreduce[^\n]*{here}

import autograd.numpy as np

import mpiad


def callback(x):
    mpiad.mpi_allreduce(np.sum(x))  # here


mpiad.minimize(lambda x: mpiad.mpi_allreduce(np.sum(x**2)), np.ones(3), callback=callback)
