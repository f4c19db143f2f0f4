import numpy as np
import pytest
import reference
from against_reference import arrays, check, check_exact, check_new_memory
from arrays import EXACT_DTYPES, each_array

import mpiad

COUNTS = [2, 0, 3, 1, 0]


@each_array
def test_blocks(rngs, size, dtype, shape, layout):
    shape = (size, *shape)
    xs = arrays(rngs, shape, dtype, layout)
    check(mpiad.mpi_reduce_scatter, reference.reduce_scatter([shape] * size), xs, rngs)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("dtype", ["f8", "c8"])
@pytest.mark.parametrize("layout", [np.ascontiguousarray, np.asfortranarray], ids=["c", "fortran"])
def test_counts(rngs, size, axis, dtype, layout):
    counts, shape = COUNTS[:size], [2, 3, 2]
    shape[axis] = sum(counts)
    program = reference.reduce_scatter([tuple(shape)] * size, axis, counts)
    xs = arrays(rngs, tuple(shape), dtype, layout)
    check(lambda x: mpiad.mpi_reduce_scatter(x, axis, counts), program, xs, rngs)


@pytest.mark.parametrize("length", [0, 3, 7])
def test_even_shares(rngs, size, length):
    program = reference.reduce_scatter([(2, length)] * size, 1)
    check(lambda x: mpiad.mpi_reduce_scatter(x, 1), program, arrays(rngs, (2, length)), rngs)


def test_integers(rngs, size):
    check_exact(mpiad.mpi_reduce_scatter, reference.reduce_scatter([(size, 3)] * size), rngs, EXACT_DTYPES[1:])


def test_new_memory(size):
    check_new_memory(mpiad.mpi_reduce_scatter, np.ones((size, 3)))
    check_new_memory(lambda x: mpiad.mpi_reduce_scatter(x, 0), np.ones(4))


def test_what_cannot_be_divided(size):
    with pytest.raises(ValueError, match=rf"mpi_reduce_scatter: .*first axis of x .* number of ranks.*\({size + 1},\)"):
        mpiad.mpi_reduce_scatter(np.ones(size + 1))
    with pytest.raises(ValueError, match="mpi_reduce_scatter: counts must be .*add up to 5"):
        mpiad.mpi_reduce_scatter(np.ones(5), 0, [6] * size)
    with pytest.raises(ValueError, match="mpi_reduce_scatter: axis must be None or from -1 to 0.*got 2"):
        mpiad.mpi_reduce_scatter(np.ones(5), 2)
    with pytest.raises(ValueError, match="mpi_reduce_scatter: counts need an axis"):
        mpiad.mpi_reduce_scatter(np.ones(size), counts=[1] * size)
