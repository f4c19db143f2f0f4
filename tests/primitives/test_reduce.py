import autograd.numpy as anp
import numpy as np
import pytest
import reference
from against_reference import arrays, check, check_exact, check_new_memory
from arrays import EXACT_DTYPES, each_array, each_root
from mpi4py import MPI

import mpiad

OPS = {"PROD": MPI.PROD, "MAX": MPI.MAX, "MIN": MPI.MIN}


@each_root
def test_sum(rngs, size, root):
    root %= size
    xs = arrays(rngs, (2, 3))
    check(lambda x: mpiad.mpi_reduce(x, MPI.SUM, root), reference.sum_to_root([(2, 3)] * size, root), xs, rngs)


@each_array
def test_product(rngs, size, dtype, shape, layout):
    xs, root = arrays(rngs, shape, dtype, layout), size // 2
    program = reference.reduction("PROD", [shape] * size, root)
    check(lambda x: mpiad.mpi_reduce(x, MPI.PROD, root), program, xs, rngs)


@each_root
@pytest.mark.parametrize("name", list(OPS))
def test_ties_and_zeros(rngs, size, root, name):
    xs = [rng.integers(0, 3, 8).astype("f8") for rng in rngs]
    program = reference.reduction(name, [(8,)] * size, root % size)
    check(lambda x: mpiad.mpi_reduce(x, OPS[name], root % size), program, xs, rngs)


@pytest.mark.parametrize("name, op", [("MAX", MPI.MAX), ("MIN", MPI.MIN)])
def test_a_nan_on_any_rank_is_the_roots_result(rank, size, name, op):
    for where in range(size):
        x, root = np.array([np.nan if rank == where else 1.0, 2.0 + rank]), (where + 1) % size
        y, gradient = mpiad.value_and_grad(lambda x, r: anp.sum(mpiad.mpi_reduce(x, op, r)), root=root)(x, root)
        assert np.isnan(y)
        np.testing.assert_array_equal(gradient, [np.nan, rank == (size - 1 if name == "MAX" else 0)])


def test_integers(rngs, size):
    program = reference.reduction("MAX", [(2, 3)] * size, size - 1)
    check_exact(lambda x: mpiad.mpi_reduce(x, MPI.MAX, size - 1), program, rngs, EXACT_DTYPES[1:])


def test_bits_and_booleans(rank, size):
    assert mpiad.mpi_reduce(1 << rank, MPI.BOR) == (2**size - 1 if rank == 0 else 0)
    everywhere = mpiad.mpi_reduce(np.array([rank == 0, True]), MPI.LAND)
    np.testing.assert_array_equal(everywhere, [size == 1, True] if rank == 0 else [False, False])


@pytest.mark.parametrize("op", [MPI.SUM, MPI.PROD, MPI.MIN])
def test_new_memory(op):
    check_new_memory(lambda x: mpiad.mpi_reduce(x, op), np.ones(3))


def test_what_cannot_be_reduced():
    with pytest.raises(TypeError, match="mpi_reduce: op must be MPI.SUM, MPI.PROD for .*complex128.* got MPI.MAX"):
        mpiad.mpi_reduce(1j, MPI.MAX)
    with pytest.raises(TypeError, match="mpi_reduce: op must be MPI.SUM, .*MPI.MIN for .*float64.* got MPI.LOR"):
        mpiad.mpi_reduce(1.0, MPI.LOR)
    with pytest.raises(TypeError, match="mpi_reduce: op must be an mpi4py operation.*got str 'max'"):
        mpiad.mpi_reduce(1.0, "max")
