import autograd.numpy as anp
import numpy as np
import pytest
import reference
from against_reference import arrays, check, check_exact, check_new_memory
from arrays import EXACT_DTYPES, each_array

import mpiad


def summed(x):
    """Return the sum, waited for at once."""
    return mpiad.mpi_wait(mpiad.mpi_iallreduce(x))


@each_array
def test_arrays(rngs, size, dtype, shape, layout):
    check(summed, reference.allreduce([shape] * size), arrays(rngs, shape, dtype, layout), rngs)


def test_waited_for_in_orders_of_each_ranks_own(rngs, rank, size):
    order = np.random.default_rng(rank).permutation(5)

    def fun(x):
        requests = [mpiad.mpi_iallreduce(row) for row in x]
        values = {place: mpiad.mpi_wait(requests[place]) for place in order}
        return anp.stack([values[place] for place in range(5)])

    check(fun, reference.allreduce([(5, 3)] * size), arrays(rngs, (5, 3)), rngs)


def test_other_collectives_in_between(rngs, rank, size):
    def fun(x):
        request = mpiad.mpi_iallreduce(x)
        before = mpiad.mpi_scan(x)
        total = mpiad.mpi_wait(request) if rank % 2 else None
        largest = mpiad.mpi_bcast(x, size - 1)
        total = total if rank % 2 else mpiad.mpi_wait(request)
        return anp.stack((before, total, largest))

    shapes = [(3,)] * size
    program = reference.stack(reference.scan(shapes), reference.allreduce(shapes), reference.bcast(shapes, size - 1))
    check(fun, program, arrays(rngs, (3,)), rngs)


def test_changing_x_afterwards_changes_nothing(rank, size):
    x = np.full(10_000, 1.0 + rank)
    request = mpiad.mpi_iallreduce(x)
    x[:] = -1
    assert np.all(mpiad.mpi_wait(request) == size * (size + 1) / 2)


def test_integers(rngs, size):
    check_exact(summed, reference.allreduce([(2, 3)] * size), rngs, EXACT_DTYPES[1:])


def test_new_memory():
    check_new_memory(summed, np.ones(3))


def test_numbers(rank, size):
    for one in (1, 1.0, 1j, np.float32(1)):
        y = summed(one * (rank + 1))
        assert y == one * (size * (size + 1) // 2) and y.dtype == np.result_type(one)


def test_wrong_arguments():
    with pytest.raises(TypeError, match="mpi_iallreduce: x must be an array.* got list"):
        mpiad.mpi_iallreduce([1.0])
    with pytest.raises(TypeError, match="mpi_iallreduce: op must be MPI.LAND, .*bool.* got MPI.SUM"):
        mpiad.mpi_iallreduce(True)
