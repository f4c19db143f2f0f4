# One rank's part of minimize's function raises, and no rank waits for it: all ranks raise it.
# together: yes
# raises: mpiad.errors.WorkerError
# says: WorkerError: minimize: rank 1 raised LookupError: no data.*The traceback of rank 1:.*{here}

import autograd.numpy as np

import mpiad


def misfit(x):
    if mpiad.mpi_rank() == 1:
        raise LookupError("no data")  # here
    return np.sum(x**2)


mpiad.minimize(misfit, np.ones(3), objective="sum")
