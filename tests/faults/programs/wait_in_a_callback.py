# The root's callback communicates, where no other rank has a callback: refused on all ranks.
# raises: ValueError
# says: mpi_allreduce: the callback runs on the root alone, and the other ranks take no part
# together: yes

import autograd.numpy as np

import mpiad


def callback(x):
    mpiad.mpi_allreduce(np.sum(x))  # here


mpiad.minimize(lambda x: mpiad.mpi_allreduce(np.sum(x**2)), np.ones(3), callback=callback)
