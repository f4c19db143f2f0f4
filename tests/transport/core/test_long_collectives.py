"""Collectives of long arrays, of all dtypes and of uneven parts, against NumPy."""

from __future__ import annotations

from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from autograd import make_vjp
from mpi4py import MPI

from mpiad import mpi_allgather, mpi_reduce_scatter
from mpiad.transport import SUM, channel
from mpiad.transport.core import collectives

LONG = 1 << 14


def values(rank: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return whole numbers, whose sums are exact, others on each rank; complex where the dtype is."""
    count = np.arange(np.prod(shape)).reshape(shape)
    made = (count * (rank + 2) + 7 * rank) % 1000
    return (made + 1j * (count % 17 - rank)).astype(dtype) if np.dtype(dtype).kind == "c" else made.astype(dtype)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.complex128, np.int64, np.int16])
@pytest.mark.parametrize("count", [LONG, 19 * LONG + 1])
def test_sums_and_extremes_of_long_arrays(dtype: Any, count: int, rank: int, size: int) -> None:
    used = channel(None, "test")
    x = values(rank, (3, 2 * count), dtype)[:, ::2]  # not contiguous
    found = collectives.allreduce(used, x, SUM, "test")
    expected = sum(values(r, (3, 2 * count), dtype)[:, ::2] for r in range(size))
    assert found.dtype == dtype and np.array_equal(found, expected)
    if found.dtype.kind != "c":
        for op, extreme in ((MPI.MAX, np.maximum), (MPI.MIN, np.minimum)):
            found = collectives.allreduce(used, x, op, "test")
            expected = extreme.reduce([values(r, (3, 2 * count), dtype)[:, ::2] for r in range(size)])
            np.testing.assert_array_equal(found, expected, strict=True)
    assert np.array_equal(x, values(rank, (3, 2 * count), dtype)[:, ::2])  # what was sent is as it was


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("empty", [False, True])
def test_pieces_of_uneven_lengths_are_gathered(axis: int, empty: bool, rank: int, size: int) -> None:
    lengths = [0 if empty and r == 0 else LONG + 5 * r for r in range(size)]
    shapes = [(length, 2) if axis == 0 else (2, length) for length in lengths]
    found = mpi_allgather(values(rank, shapes[rank], float), axis=axis)
    assert np.array_equal(found, np.concatenate([values(r, shapes[r], float) for r in range(size)], axis=axis))


@pytest.mark.parametrize("axis", [0, 1])
def test_adjoints_of_what_is_gathered_are_summed_and_scattered(axis: int, rank: int, size: int) -> None:
    lengths = [LONG // (r + 1) for r in range(size)]
    shape = [2, 2]
    shape[axis] = lengths[rank]
    vjp, whole = make_vjp(lambda x: mpi_allgather(anp.sin(x), axis=axis))(np.full(shape, 0.1 * (rank + 1)))
    found = vjp(values(rank, whole.shape, float))
    mine = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
    total = np.sum([values(r, whole.shape, float) for r in range(size)], axis=0)
    expected = np.cos(0.1 * (rank + 1)) * (total[mine] if axis == 0 else total[:, mine])
    np.testing.assert_allclose(found, expected, rtol=1e-15)


def test_a_sum_that_is_scattered_and_its_adjoint(rank: int, size: int) -> None:
    x = values(rank, (size * LONG,), float)
    vjp, block = make_vjp(lambda x: mpi_reduce_scatter(x**2, axis=0))(x)
    everything = np.sum([values(r, (size * LONG,), float) ** 2 for r in range(size)], axis=0)
    assert np.array_equal(block, everything[rank * LONG : (rank + 1) * LONG])
    bar = np.concatenate([values(r, (LONG,), float) for r in range(size)])
    assert np.array_equal(vjp(values(rank, (LONG,), float)), 2 * x * bar)
