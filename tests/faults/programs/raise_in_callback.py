# The callback of minimize raises, on the root alone: all ranks raise it.
# raises: mpiad.errors.WorkerError
# says: WorkerError: minimize: the root, rank 0, raised KeyError: 'loss'
# says: rank 1 ended the job by an exception that nobody caught|rank 0 ended the job by an exception that nobody caught
# thorough: yes

import autograd.numpy as np

import mpiad


def callback(x):
    raise KeyError("loss")


mpiad.minimize(lambda x: mpiad.mpi_allreduce(np.sum(x**2)), np.ones(3), callback=callback)
