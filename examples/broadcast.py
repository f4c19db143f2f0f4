"""Copy an array to all ranks: the gradient that comes back to where it was sent from.

    mpiexec -n 4 python examples/broadcast.py

a = ones times the rank is broadcast from rank 3 (the last one, where there are fewer), L = the sum over all ranks of
the squares of what they got. The sender's a counts once for each rank; the others' a not at all.
"""

import autograd.numpy as np

import mpiad

rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
sender = min(3, size - 1)


def loss(a):
    b = mpiad.mpi_bcast(a, root=sender)
    return mpiad.mpi_sum(np.sum(b**2))


a = np.ones(10) * rank
value, gradient = mpiad.value_and_grad(loss)(a)
mpiad.mpi_print(f"rank {rank}: L = {value}, gradient of a = {gradient}")

assert value == 10 * size * sender**2, value
expected = 2 * size * sender if rank == sender else 0.0  # 24 with 4 ranks
assert np.array_equal(gradient, np.full(10, expected)), gradient
