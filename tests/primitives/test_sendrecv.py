import autograd.numpy as anp
import numpy as np
import pytest
import reference
from against_reference import arrays, assert_close, check, check_exact
from arrays import each_array
from mpi4py import MPI

import mpiad

each_pair = pytest.mark.parametrize("dest, source", [(0, -1), (-1, 0), (1, 0), (0, 0)], ids=str)
"""Pairs counted as Python counts ranks."""


def pair_moved(shapes, dest, source):
    """Return the program y_dest = x_source, y_r = x_r elsewhere."""
    return reference.move(shapes, [source if rank == dest else rank for rank in range(len(shapes))])


@each_array
def test_arrays(rngs, size, dtype, shape, layout):
    xs, program = arrays(rngs, shape, dtype, layout), pair_moved([shape] * size, size - 1, 0)
    check(lambda x: mpiad.mpi_sendrecv(x, size - 1, 0), program, xs, rngs)


@each_pair
def test_pairs(rngs, size, dest, source):
    dest, source = dest % size, source % size
    program = pair_moved([(2, 3)] * size, dest, source)
    check(lambda x: mpiad.mpi_sendrecv(x, dest, source, tag=40_000), program, arrays(rngs, (2, 3)), rngs)


def test_integers_and_booleans(rngs, size):
    program = pair_moved([(2, 3)] * size, 0, size - 1)
    dtypes = ["?", "i4", "u8"]
    check_exact(lambda x: mpiad.mpi_sendrecv(x, 0, size - 1), program, rngs, dtypes)


def test_no_partner(rngs, size):
    for dest, source in ((None, 0), (0, None), (MPI.PROC_NULL, 0), (0, MPI.PROC_NULL)):
        x = np.ones(3)
        assert mpiad.mpi_sendrecv(x, dest, source) is x


def test_memory(rank, size):
    x = np.ones(3)
    y = mpiad.mpi_sendrecv(x, 0, size - 1)
    assert np.shares_memory(x, y) == (rank > 0 or size == 1)


def test_published_example(rank, size):
    """a = ones(10)·rank, sent from the last rank to the first; L = sum(a²) on each rank."""

    def fun(a):
        return anp.sum(mpiad.mpi_sendrecv(a, 0, size - 1) ** 2)

    factor = 2 if size == 1 else 0 if rank == 0 else 4 if rank == size - 1 else 2
    gradient = mpiad.grad(fun, objective="sum")(np.ones(10) * rank)
    assert_close(gradient, np.full(10, float(factor * rank)), "f8")


@pytest.mark.mpi(min_size=2)
def test_pairs_that_differ_are_raised_on_all_ranks(rank, size):
    """Each rank names its own neighbours, as an MPI user would."""
    comm = MPI.COMM_WORLD.Dup()
    text = rf"mpi_sendrecv: all ranks must name the same pair.*rank 0: \(1, {size - 1}\), rank 1: \({2 % size}, 0\)"
    try:
        for _ in range(2):
            with pytest.raises(ValueError, match=f"{text}.*mpi_exchange"):
                mpiad.mpi_sendrecv(1.0, (rank + 1) % size, (rank - 1) % size, comm=comm)
        assert mpiad.mpi_sendrecv(1.0 * rank, 1, 0, comm=comm) == (0 if rank == 1 else rank)
    finally:
        comm.Free()


def test_ranks_that_are_not_there(size):
    for name, pair in (("dest", (size, 0)), ("source", (0, size))):
        with pytest.raises(ValueError, match=f"mpi_sendrecv: {name} must be a rank from 0 to {size - 1}.*got {size}"):
            mpiad.mpi_sendrecv(1.0, *pair)
    with pytest.raises(TypeError, match="mpi_sendrecv: source must be .*got float 0.0"):
        mpiad.mpi_sendrecv(1.0, 0, 0.0)
