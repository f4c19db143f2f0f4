# One rank's part of minimize's function raises, and the root waits for it inside a communication.
# raises: LookupError
# says: minimize can't raise this exception on all ranks.*{here}.*LookupError: no data
# thorough: yes

import autograd.numpy as np

import mpiad


def misfit(x):
    if mpiad.mpi_rank() == 1:
        raise LookupError("no data")  # here
    return mpiad.mpi_allreduce(np.sum(x**2))


mpiad.minimize(misfit, np.ones(3))
