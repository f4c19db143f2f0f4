# The ranks start minimize from different points, each of its own random numbers.
# together: yes
# raises: mpiad.errors.ReplicationError
# says: {here}.*x0.*rank 1

import autograd.numpy as np

import mpiad

start = np.random.default_rng(mpiad.mpi_rank()).normal(size=3)
mpiad.minimize(lambda x: mpiad.mpi_allreduce(np.sum(x**2)), start)  # here
