import numpy as np
import pytest
import reference
from against_reference import arrays, check, check_exact, check_new_memory
from arrays import each_array, each_root

import mpiad

each_axis = pytest.mark.parametrize("axis", [0, 1, -1])
COUNTS = [2, 0, 3, 1, 0]


def whole(axis, length):
    """Return a shape of three dimensions with that length along the axis."""
    shape = [2, 3, 2]
    shape[axis] = length
    return tuple(shape)


@each_array
def test_blocks(rngs, size, dtype, shape, layout):
    shape, root = (size, *shape), size - 1
    xs = arrays(rngs, shape, dtype, layout)
    check(lambda x: mpiad.mpi_scatter(x, root), reference.scatter([shape] * size, root), xs, rngs)


@each_axis
@each_root
def test_counts(rngs, rank, size, axis, root):
    counts, root = COUNTS[:size], root % size
    shape = whole(axis, sum(counts))

    def fun(x):
        return mpiad.mpi_scatter(x, root, axis, counts if rank == root else None)

    check(fun, reference.scatter([shape] * size, root, axis, counts), arrays(rngs, shape), rngs)


@each_axis
@pytest.mark.parametrize("length", [0, 3, 7])
def test_even_shares(rngs, size, axis, length):
    shape = whole(axis, length)
    xs = arrays(rngs, shape, "c8", np.asfortranarray)
    check(lambda x: mpiad.mpi_scatter(x, 0, axis), reference.scatter([shape] * size, 0, axis), xs, rngs)


@each_root
def test_without_template(rngs, rank, size, root):
    root %= size

    def fun(x):
        return mpiad.mpi_scatter(x if rank == root else None, root, 0)

    check(fun, reference.scatter([(5, 2)] * size, root, 0), arrays(rngs, (5, 2)), rngs)


@each_root
def test_template_of_another_shape(rngs, size, root):
    root %= size
    shapes = [(5, 2) if rank == root else (rank,) for rank in range(size)]
    check(lambda x: mpiad.mpi_scatter(x, root, 0), reference.scatter(shapes, root, 0), arrays(rngs, shapes), rngs)


def test_integers_and_booleans(rngs, size):
    check_exact(mpiad.mpi_scatter, reference.scatter([(size, 3)] * size, 0), rngs)
    check_exact(lambda x: mpiad.mpi_scatter(x, 0, 1), reference.scatter([(3, 5)] * size, 0, 1), rngs)


def test_new_memory(size):
    check_new_memory(mpiad.mpi_scatter, np.ones((size, 3)))
    check_new_memory(lambda x: mpiad.mpi_scatter(x, axis=0), np.ones(4))


def test_numbers(rank, size):
    y = mpiad.mpi_scatter(np.arange(size) + 0.5 if rank == 0 else None)
    assert y == rank + 0.5 and y.dtype == "f8"


def mistakes(size):
    """Return kinds of error, parts of their text, and the root's x, axis and counts."""
    ones, each = np.ones(size), [1] * size
    return [
        (TypeError, "x must be an array.*got list", [1.0], None, None),
        (TypeError, "x must be an array.*got NoneType", None, None, None),
        (ValueError, f"first axis of x must be the number of ranks, {size}", np.ones((size + 1, 2)), None, None),
        (ValueError, r"first axis of x must be the number of ranks.* shape \(\)", 1.0, None, None),
        (ValueError, "axis must be None or from -1 to 0.*got 1", ones, 1, None),
        (TypeError, "axis must be None or an integer, but got str 'x'", ones, "x", None),
        (ValueError, f"counts must be {size} integers.*add up to {size + 1}", np.ones(size + 1), 0, each),
        (ValueError, f"counts must be {size} integers", ones, 0, [*each, 0]),
        (ValueError, r"none negative.*got \[-1, ", np.ones(2), 0, [-1, 3, *each[2:]]),
        (ValueError, "counts need an axis.*axis=None", ones, None, each),
        (TypeError, "counts must be integers, but got float 1.0", ones, 0, [1.0] * size),
        (TypeError, f"counts must be a list of {size} integers, but got int 3", ones, 0, 3),
    ]


def test_mistake_of_the_root_is_raised_on_all_ranks(rank, size):
    root = size - 1
    for kind, text, x, axis, counts in mistakes(size):
        with pytest.raises(kind, match=f"mpi_scatter: .*{text}"):
            if rank == root:
                mpiad.mpi_scatter(x, root, axis, counts)
            else:
                mpiad.mpi_scatter(None, root, None if axis is None else 0)
        assert mpiad.mpi_bcast(rank, root) == root
