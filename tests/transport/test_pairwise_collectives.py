"""Long arrays of two ranks are exchanged, not handed to MPI's general algorithms; what comes out is the same."""

from __future__ import annotations

import math
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from autograd import make_vjp
from mpi4py import MPI

from mpiad import mpi_allgather, mpi_allreduce, mpi_reduce_scatter
from mpiad.debug import checked
from mpiad.transport import SUM, channel, collectives, pairwise_collectives
from mpiad.transport.buffers import spec_of

pytestmark = pytest.mark.unguarded

LONG = 1 << 14  # doubles: twice as many bytes as it takes


class Noted:
    """A module's functions, noted by their names when they are called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.names: list[str] = []
        for name in ("allgather", "allreduce", "reduce_scatter"):
            monkeypatch.setattr(pairwise_collectives, name, self._noting(name, getattr(pairwise_collectives, name)))

    def _noting(self, name: str, function: Any) -> Any:
        def noting(*arguments: Any) -> Any:
            self.names.append(name)
            return function(*arguments)

        return noting


def values(rank: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return whole numbers, whose sums are exact, others on each rank; complex where the dtype is."""
    count = np.arange(np.prod(shape)).reshape(shape)
    made = (count * (rank + 2) + 7 * rank) % 1000
    return (made + 1j * (count % 17 - rank)).astype(dtype) if np.dtype(dtype).kind == "c" else made.astype(dtype)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.complex128, np.int64, np.int16])
@pytest.mark.parametrize("count", [LONG, 19 * LONG + 1])
@pytest.mark.unguarded
def test_sums_and_extremes_of_long_arrays(
    dtype: Any, count: int, rank: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, used = Noted(monkeypatch), channel(None, "test")
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
    # Of very long arrays each rank combines a half.
    assert noted.names.count("allreduce") == (0 if size != 2 else 1 if found.dtype.kind == "c" else 3)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.unguarded
def test_pieces_of_uneven_lengths_are_gathered(
    axis: int, empty: bool, rank: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted(monkeypatch)
    lengths = [0 if empty and r == 0 else LONG + 5 * r for r in range(size)]
    shapes = [(length, 2) if axis == 0 else (2, length) for length in lengths]
    found = mpi_allgather(values(rank, shapes[rank], float), axis=axis)
    assert np.array_equal(found, np.concatenate([values(r, shapes[r], float) for r in range(size)], axis=axis))
    assert noted.names == (["allgather"] if size == 2 else [])


@pytest.mark.parametrize("axis", [0, 1])
def test_adjoints_of_what_is_gathered_are_summed_and_scattered(
    axis: int, rank: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted(monkeypatch)
    lengths = [LONG // (r + 1) for r in range(size)]
    shape = [2, 2]
    shape[axis] = lengths[rank]
    vjp, whole = make_vjp(lambda x: mpi_allgather(anp.sin(x), axis=axis))(np.full(shape, 0.1 * (rank + 1)))
    found = vjp(values(rank, whole.shape, float))
    mine = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
    total = np.sum([values(r, whole.shape, float) for r in range(size)], axis=0)
    expected = np.cos(0.1 * (rank + 1)) * (total[mine] if axis == 0 else total[:, mine])
    np.testing.assert_allclose(found, expected, rtol=1e-15)
    assert noted.names == (["allgather", "reduce_scatter"] if size == 2 else [])


def test_a_sum_that_is_scattered_and_its_adjoint(rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(monkeypatch)
    x = values(rank, (size * LONG,), float)
    vjp, block = make_vjp(lambda x: mpi_reduce_scatter(x**2, axis=0))(x)
    everything = np.sum([values(r, (size * LONG,), float) ** 2 for r in range(size)], axis=0)
    assert np.array_equal(block, everything[rank * LONG : (rank + 1) * LONG])
    bar = np.concatenate([values(r, (LONG,), float) for r in range(size)])
    assert np.array_equal(vjp(values(rank, (LONG,), float)), 2 * x * bar)
    assert noted.names == (["reduce_scatter", "allgather"] if size == 2 else [])


def test_what_is_short_watched_or_a_product_goes_the_general_way(
    rank: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, used = Noted(monkeypatch), channel(None, "test")
    short, long = np.full(10, rank + 1.0), np.full(LONG, rank + 1.0)
    assert np.array_equal(mpi_allreduce(short), np.full(10, size * (size + 1) / 2))
    assert np.array_equal(collectives.allreduce(used, long, MPI.PROD, "test"), np.full(LONG, math.factorial(size)))
    assert not pairwise_collectives.are_two(used, spec_of(long > 0, "test"))
    with checked():
        assert np.array_equal(mpi_allreduce(long), np.full(LONG, size * (size + 1) / 2))
    assert noted.names == []
