import numpy as np
import reference
from against_reference import arrays, check, check_exact, check_new_memory
from arrays import EXACT_DTYPES, each_array, each_root

import mpiad


@each_array
def test_arrays(rngs, size, dtype, shape, layout):
    xs, root = arrays(rngs, shape, dtype, layout), size - 1
    check(lambda x: mpiad.mpi_sum(x, root), reference.sum_to_root([shape] * size, root), xs, rngs)


@each_root
def test_roots(rngs, size, root):
    root %= size
    check(lambda x: mpiad.mpi_sum(x, root), reference.sum_to_root([(2, 3)] * size, root), arrays(rngs, (2, 3)), rngs)


def test_integers(rngs, size):
    program = reference.sum_to_root([(2, 3)] * size, size - 1)
    check_exact(lambda x: mpiad.mpi_sum(x, size - 1), program, rngs, EXACT_DTYPES[1:])


def test_new_memory():
    check_new_memory(mpiad.mpi_sum, np.ones(3))


def test_numbers(rank, size):
    total = size * (size + 1) // 2
    for one in (1, 1.0, 1j, np.float32(1)):
        y = mpiad.mpi_sum(one * (rank + 1))
        assert y == (one * total if rank == 0 else 0) and y.dtype == np.result_type(one)


def test_gradient_by_a_number(rank, size):
    value, gradient = mpiad.value_and_grad(lambda x: mpiad.mpi_sum(x) ** 2)(rank + 1.0)
    total = size * (size + 1) / 2
    assert (value, gradient) == (total**2, 2 * total)


def test_published_sum_of_powers(rank, size):
    """On P ranks θ**rank, summed to the root; θ = 1 gives P and P(P-1)/2."""
    f = mpiad.value_and_grad(lambda theta: mpiad.mpi_sum(mpiad.mpi_bcast(theta) ** rank))
    value, gradient = f(1.0)
    assert (value, gradient) == (size, size * (size - 1) / 2 if rank == 0 else 0)
