# One variable, of which the ranks hold different copies: all ranks raise.
# together: yes
# environment: MPIAD_DEBUG=1
# raises: ValueError|mpiad.errors.ReplicationError
# says: {here}.*shared.*rank 1

import autograd.numpy as np

import mpiad

start = np.random.default_rng(mpiad.mpi_rank()).normal(size=3)
mpiad.grad(lambda x: mpiad.mpi_allreduce(np.sum(x**2)), shared=True)(start)  # here
