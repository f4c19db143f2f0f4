"""Add up arrays on the root: every rank's gradient of a loss that only the root computes.

    mpiexec -n 4 python examples/reduce_sum.py

a = (1, ..., 10) times the rank, b = the sum of all a, L = the sum of b.
"""

import autograd.numpy as np

import mpiad

rank, size = mpiad.mpi_rank(), mpiad.mpi_size()


def loss(a):
    b = mpiad.mpi_sum(a)  # zeros off the root
    return np.sum(b)


a = np.arange(1.0, 11.0) * rank
value, gradient = mpiad.value_and_grad(loss)(a)
mpiad.mpi_print(f"rank {rank}: L = {value}, gradient of a = {gradient}")

assert value == 55 * sum(range(size)), value
assert np.array_equal(gradient, np.ones(10)), gradient  # the root's loss depends on every rank's a alike
