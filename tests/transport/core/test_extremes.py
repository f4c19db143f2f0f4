"""Maxima and minima of floats on all ranks, to the bit, beside NumPy's of all ranks' arrays, in each way that they go."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest
from mpi4py import MPI

from mpiad.debug import checked
from mpiad.transport import channel
from mpiad.transport.core import collectives

WORLD = MPI.COMM_WORLD
LONG = 1 << 14
WAYS: dict[str, tuple[int, Callable[[], AbstractContextManager]]] = {
    "short": (7, nullcontext),
    "long": (19 * LONG + 1, nullcontext),
    "watched": (LONG, checked),
}


def values(rank: int, count: int, dtype: str) -> np.ndarray:
    """Return a rank's numbers: among them NaN on one rank or on all, of a sign and a payload of the rank's own."""
    x = np.random.default_rng([rank, count]).standard_normal(count).astype(dtype)
    bits = x.view(f"u{x.itemsize}")
    quiet = np.array(np.nan, dtype).view(bits.dtype)
    sign = np.array(-0.0 if rank % 2 else 0.0, dtype)
    bits[rank % count :: 5 * WORLD.size] = (quiet + 3 * rank + 1) | sign.view(bits.dtype)
    bits[-1] = quiet | sign.view(bits.dtype)
    x[-2], x[-3] = sign, np.inf if rank else -np.inf
    return x


@pytest.mark.parametrize("way", WAYS)
def test_a_nan_on_any_rank_is_the_result_on_all(way: str, rank: int, size: int) -> None:
    (count, entered), used = WAYS[way], channel(None, "test")
    with entered():
        for dtype in ("f8", "f4"):
            xs = [values(r, 2 * count, dtype).reshape(2, count) for r in range(size)]
            for op, extreme in ((MPI.MAX, np.maximum), (MPI.MIN, np.minimum)):
                found = collectives.allreduce(used, xs[rank][:, ::-1], op, "test")  # not contiguous
                expected = extreme.reduce(xs)[:, ::-1]
                np.testing.assert_array_equal(found, expected, strict=True)
                # The same NaN and the same zero on all ranks, whatever theirs were.
                expected = np.where(np.isnan(expected), np.nan, expected + 0.0).astype(dtype)
                assert found.tobytes() == expected.tobytes()
    np.testing.assert_array_equal(xs[rank], values(rank, 2 * count, dtype).reshape(2, count))


def test_numbers_and_empty_arrays(rank: int, size: int) -> None:
    used = channel(None, "test")
    for where in range(size):
        for scalar in (np.float32, np.float64):
            x = scalar(-np.nan if rank == where else 1 + rank)
            found = collectives.allreduce(used, x, MPI.MIN, "test")
            assert type(found) is scalar and found.tobytes() == scalar(np.nan).tobytes()
        zero = collectives.allreduce(used, -0.0 if rank == where else 0.0, MPI.MAX, "test")
        assert zero.tobytes() == np.float64(0.0).tobytes()
    empty = collectives.allreduce(used, np.zeros((3, 0), "f4"), MPI.MAX, "test")
    assert empty.shape == (3, 0) and empty.dtype == np.float32
    x = np.array([1e200, -np.inf, np.inf, 5e-324]) / (rank + 1)
    with np.errstate(all="raise"):  # as a user may have it, whose numbers these are
        largest = collectives.allreduce(used, x, MPI.MAX, "test")
    np.testing.assert_array_equal(largest, [1e200, -np.inf, np.inf, 5e-324])
