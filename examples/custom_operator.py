"""An operator of one's own: a periodic halo exchange in bare mpi4py with its adjoint beside it, in a diffusion loop.

    mpiexec -n 4 python examples/custom_operator.py

Post the receives, post the sends, wait for all. The ordered tape treats the operator like the library's own: the
adjoint runs on all ranks in exact reverse order, so that it can't deadlock.
"""

import autograd.numpy as np
import numpy
from mpi4py import MPI

import mpiad
from mpiad.extend import custom_operator, defadjoint
from mpiad.testing import check_adjoint

comm = MPI.COMM_WORLD.Dup()  # apart from the library's messages and from those of other operators
rank, size = comm.rank, comm.size
left, right = (rank - 1) % size, (rank + 1) % size


def swap(to_left, to_right):
    """Send one number to each neighbour; return those that come from the left and from the right."""
    got = numpy.empty(2)
    requests = [comm.Irecv(got[:1], left, tag=1), comm.Irecv(got[1:], right, tag=0)]
    requests += [comm.Isend(to_left, left, tag=0), comm.Isend(to_right, right, tag=1)]
    MPI.Request.Waitall(requests)
    return got


@custom_operator
def with_halo(u):
    from_left, from_right = swap(u[:1].copy(), u[-1:].copy())
    return numpy.concatenate([[from_left], u, [from_right]])


def adjoint_of_halo(y):
    u = y[1:-1].copy()
    from_left, from_right = swap(y[:1].copy(), y[-1:].copy())  # halo cells go back to the ranks that own them
    u[0] += from_left
    u[-1] += from_right
    return u


defadjoint(with_halo, adjoint_of_halo)
CELLS, STEPS, RATE = 8, 20, 0.2


def diffused(u):
    for _ in range(STEPS):
        padded = with_halo(u)
        u = u + RATE * (padded[:-2] - 2 * u + padded[2:])
    return u


def loss(u):
    return np.sum(diffused(u) ** 2)


start = numpy.sin(1.0 + numpy.arange(rank * CELLS, (rank + 1) * CELLS) ** 2)
check_adjoint(with_halo, start)
value, gradient = mpiad.value_and_grad(loss, objective="sum")(start)

# The same in one process, with the whole ring as a matrix D: J = |D^n u|², so dJ/du = 2 (D^n)ᵀ D^n u.
n = CELLS * size
ring = numpy.roll(numpy.eye(n), 1, axis=0)
steps = numpy.linalg.matrix_power((1 - 2 * RATE) * numpy.eye(n) + RATE * (ring + ring.T), STEPS)
whole = steps @ numpy.sin(1.0 + numpy.arange(n) ** 2)
expected = (2 * steps.T @ whole)[rank * CELLS : (rank + 1) * CELLS]
mpiad.mpi_print(f"rank {rank}: J = {value:.12f}, gradient of its first cell {gradient[0]:.12f}")

assert abs(value - whole @ whole) < 1e-13 * value, value
assert numpy.allclose(gradient, expected, rtol=1e-12, atol=1e-14), gradient - expected
