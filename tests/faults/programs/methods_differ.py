# The ranks call minimize with different methods: all raise.
# together: yes
# raises: ValueError
# says: {here}.*ValueError: minimize: .*CG.*BFGS

import autograd.numpy as np

import mpiad

method = ("CG", "BFGS")[mpiad.mpi_rank()]
mpiad.minimize(lambda x: mpiad.mpi_allreduce(np.sum(x**2)), np.ones(3), method=method)  # here
