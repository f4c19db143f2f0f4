# The root's part of minimize's function raises: all ranks raise it.
# together: yes
# raises: mpiad.errors.WorkerError
# says: WorkerError: minimize: rank 0 raised EOFError: no data.*The traceback of rank 0:.*{here}

import autograd.numpy as np

import mpiad


def misfit(x):
    if mpiad.mpi_rank() == 0:
        raise EOFError("no data")  # here
    return np.sum(x**2)


mpiad.minimize(misfit, np.ones(3), objective="sum")
