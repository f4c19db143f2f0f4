import numpy as np
import pytest
import reference
from against_reference import arrays, check, check_exact, check_new_memory
from arrays import each_array

import mpiad

UNEVEN = {
    0: [(2, 3), (0, 3), (1, 3), (4, 3), (0, 3)],
    1: [(2, 0), (2, 1), (2, 3), (2, 0), (2, 2)],
    -1: [(2, 1, 1), (2, 1, 0), (2, 1, 2), (2, 1, 0), (2, 1, 4)],
}
each_axis = pytest.mark.parametrize("axis", list(UNEVEN))


@each_array
def test_stacked(rngs, size, dtype, shape, layout):
    xs = arrays(rngs, shape, dtype, layout)
    check(mpiad.mpi_allgather, reference.allgather([shape] * size), xs, rngs)


@each_axis
@pytest.mark.parametrize("dtype", ["f8", "c8"])
@pytest.mark.parametrize("layout", [np.ascontiguousarray, np.asfortranarray], ids=["c", "fortran"])
def test_joined(rngs, size, axis, dtype, layout):
    shapes = UNEVEN[axis][:size]
    xs = arrays(rngs, shapes, dtype, layout)
    check(lambda x: mpiad.mpi_allgather(x, axis), reference.allgather(shapes, axis), xs, rngs)


def test_integers_and_booleans(rngs, size):
    check_exact(mpiad.mpi_allgather, reference.allgather([(2, 3)] * size), rngs)
    shapes = UNEVEN[1][:size]
    check_exact(lambda x: mpiad.mpi_allgather(x, 1), reference.allgather(shapes, 1), rngs)


def test_new_memory():
    check_new_memory(mpiad.mpi_allgather, np.ones(3))
    check_new_memory(lambda x: mpiad.mpi_allgather(x, axis=0), np.ones(3))


def test_numbers(rank, size):
    np.testing.assert_array_equal(mpiad.mpi_allgather(rank + 0.5), np.arange(size) + 0.5)
    np.testing.assert_array_equal(mpiad.mpi_allgather(rank == 0), np.arange(size) == 0)


@pytest.mark.mpi(min_size=2)
def test_unequal_shapes_are_raised_on_all_ranks(rank):
    with pytest.raises(ValueError, match=r"mpi_allgather: shapes .* equal.*rank 0: \(2,\) float64, rank 1: \(3,\)"):
        mpiad.mpi_allgather(np.ones(2 if rank == 0 else 3))
    with pytest.raises(ValueError, match=r"mpi_allgather: .* along axis 0 only.*rank 0: \(1, 2\) .*rank 1: \(1, 3\)"):
        mpiad.mpi_allgather(np.ones((1, 2 if rank == 0 else 3)), axis=0)


def test_axis_that_is_not_there():
    with pytest.raises(ValueError, match="mpi_allgather: axis must be None or from -1 to 0.*got 1"):
        mpiad.mpi_allgather(np.ones(2), axis=1)
