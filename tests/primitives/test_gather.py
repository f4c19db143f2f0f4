import numpy as np
import pytest
import reference
from against_reference import arrays, check, check_exact, check_new_memory
from arrays import each_array, each_root

import mpiad

each_axis = pytest.mark.parametrize("axis", [0, 1, -1])
LENGTHS = [[2, 0, 3, 1, 2], [0, 1, 2, 4, 0], [0, 0, 0, 0, 0]]


def uneven(lengths, axis, size):
    """Return shapes of three dimensions with each rank's own length along the axis."""
    shapes = []
    for length in lengths[:size]:
        shape = [2, 3, 2]
        shape[axis] = length
        shapes.append(tuple(shape))
    return shapes


@each_array
def test_stacked(rngs, size, dtype, shape, layout):
    xs, root = arrays(rngs, shape, dtype, layout), size - 1
    check(lambda x: mpiad.mpi_gather(x, root), reference.gather([shape] * size, root), xs, rngs)


@each_root
def test_roots(rngs, size, root):
    root %= size
    check(lambda x: mpiad.mpi_gather(x, root), reference.gather([(3,)] * size, root), arrays(rngs, (3,)), rngs)


@each_axis
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_joined(rngs, size, axis, lengths):
    shapes, root = uneven(lengths, axis, size), size // 2
    check(lambda x: mpiad.mpi_gather(x, root, axis), reference.gather(shapes, root, axis), arrays(rngs, shapes), rngs)


@each_axis
def test_joined_fortran_ordered(rngs, size, axis):
    shapes = uneven(LENGTHS[0], axis, size)
    xs = arrays(rngs, shapes, "c8", np.asfortranarray)
    check(lambda x: mpiad.mpi_gather(x, 0, axis), reference.gather(shapes, 0, axis), xs, rngs)


def test_integers_and_booleans(rngs, size):
    check_exact(mpiad.mpi_gather, reference.gather([(2, 3)] * size, 0), rngs)
    shapes = uneven(LENGTHS[0], 1, size)
    check_exact(lambda x: mpiad.mpi_gather(x, 0, 1), reference.gather(shapes, 0, 1), rngs)


def test_new_memory():
    check_new_memory(mpiad.mpi_gather, np.ones(3))
    check_new_memory(lambda x: mpiad.mpi_gather(x, axis=0), np.ones(3))


def test_numbers(rank, size):
    np.testing.assert_array_equal(mpiad.mpi_gather(rank + 0.5), np.arange(size if rank == 0 else 0) + 0.5)
    assert mpiad.mpi_gather(rank).dtype == np.result_type(int)


@pytest.mark.mpi(min_size=2)
def test_unequal_shapes_are_raised_on_all_ranks(rank, size):
    others = ", ".join([r"rank \d: \(3,\) float64"] * (size - 1))
    with pytest.raises(ValueError, match=rf"mpi_gather: shapes and dtypes must be equal.*rank 0: \(2,\) float64, {others}"):
        mpiad.mpi_gather(np.ones(2 if rank == 0 else 3))
    with pytest.raises(ValueError, match=r"may differ along axis 1 only.*rank 0: \(2, 1\) float64, rank 1: \(3, 1\)"):
        mpiad.mpi_gather(np.ones((2 if rank == 0 else 3, 1)), axis=1)
    with pytest.raises(ValueError, match=r"rank 0: \(2,\) float32, rank 1: \(2,\) float64"):
        mpiad.mpi_gather(np.ones(2, "f4" if rank == 0 else "f8"))
    with pytest.raises(ValueError, match=r"rank 0: \(2, 2\) float64, rank 1: \(2,\) float64"):
        mpiad.mpi_gather(np.ones((2, 2) if rank == 0 else (2,)), axis=0)
    assert len(mpiad.mpi_gather(1.0)) == (size if rank == 0 else 0)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("call", [mpiad.mpi_gather, mpiad.mpi_allgather])
def test_unequal_lengths_name_the_axis_that_concatenates(call, rank):
    length = 2 if rank == 0 else 3
    for shape, axis in (((length,), 0), ((length, 3), 0), ((1, length), 1)):
        with pytest.raises(ValueError, match=f"Pass axis={axis} to concatenate arrays of different lengths"):
            call(np.ones(shape))
    for shape, dtype in (((length, length), "f8"), ((length,), "f4" if rank == 0 else "f8"), ((2,) * length, "f8")):
        with pytest.raises(ValueError, match=r"\.$") as raised:
            call(np.ones(shape, dtype))
        assert "Pass axis" not in str(raised.value)


def test_axis_that_is_not_there():
    for axis in (2, -3):
        with pytest.raises(ValueError, match=f"mpi_gather: axis must be None or from -2 to 1.*got {axis}"):
            mpiad.mpi_gather(np.ones((2, 2)), axis=axis)
    with pytest.raises(ValueError, match="mpi_gather: axis .* 0 dimensions, but got 0"):
        mpiad.mpi_gather(1.0, axis=0)
    with pytest.raises(TypeError, match="mpi_gather: axis must be None or an integer, but got float 1.0"):
        mpiad.mpi_gather(np.ones((2, 2)), axis=1.0)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("call", [mpiad.mpi_gather, mpiad.mpi_allgather])
def test_a_mistake_of_one_rank_is_raised_on_all(call, rank, size):
    with pytest.raises(ValueError, match=r"axis must be None or from -1 to 0 for 1 dimensions, but got 1"):
        call(np.ones(3) if rank == 1 else np.ones((3, 3)), axis=1)
    with pytest.raises(TypeError, match="x must be an array or number"):
        call("text" if rank == 1 else np.ones(3))
    assert mpiad.mpi_allreduce(1) == size
