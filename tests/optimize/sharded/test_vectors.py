"""The passes over a piece's rows, tile by tile, compared with those over whole arrays."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad.optimize.sharded.vectors import LENGTH, HostVectors, Parts, Ring

RNG = np.random.default_rng(8)


def filled(height: int, size: int) -> HostVectors:
    """Return random rows, where what lies between them would spoil any sum."""
    tiles = HostVectors(height, size)
    tiles.memory.base[:] = np.nan
    for _, tile in tiles:
        tile[:] = RNG.normal(size=tile.shape)
    return tiles


def whole(tiles: HostVectors) -> np.ndarray:
    """Return all rows, shape (height, size)."""
    return tiles.memory.copy()


ROWS = [[slice(0, 9)], [slice(5, 9), slice(0, 3)], [slice(2, 3)], [slice(0, 7)]]


def parts_of(rows: list[slice]) -> tuple[Parts, list[int]]:
    parts, count = [], 0
    for part in rows:
        parts.append((part, slice(count, count + part.stop - part.start)))
        count += part.stop - part.start
    return parts, [row for part in rows for row in range(part.start, part.stop)]


@pytest.mark.serial
@pytest.mark.parametrize("size", [1, 7, 1000, LENGTH, 2 * LENGTH + 5])
@pytest.mark.parametrize("rows", ROWS)
def test_rows_and_vectors(size: int, rows: list[slice]) -> None:
    (parts, numbers), tiles = parts_of(rows), filled(11, size)
    before, weights = whole(tiles), RNG.normal(size=len(numbers))
    here = RNG.normal(size=size)
    tiles.combine(parts, weights, 10)
    np.testing.assert_allclose(whole(tiles)[10], weights @ before[numbers], rtol=1e-11, atol=1e-12)
    np.testing.assert_array_equal(whole(tiles)[:10], before[:10])
    there = np.empty(size)
    tiles.advance(10, here, 0.6, there)
    np.testing.assert_allclose(there, here + 0.6 * weights @ before[numbers], rtol=1e-11, atol=1e-12)


@pytest.mark.serial
@pytest.mark.parametrize(("change", "gradient"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("first", "count"), [(0, 0), (0, 2), (2, 3), (4, 3)])
@pytest.mark.parametrize("size", [1, 7, 1000, LENGTH, 2 * LENGTH + 5])
def test_products(size: int, first: int, count: int, change: bool, gradient: bool) -> None:
    ring = Ring(3)
    ring.first, ring.count = first, count
    tiles = filled(ring.height, size)
    expected = whole(tiles)
    if change:
        expected[ring.newest] = expected[ring.gradient] - expected[ring.newest]
    of_change, of_gradient, square = tiles.products(ring, change, gradient)
    np.testing.assert_array_equal(whole(tiles), expected)
    rows = expected[ring.rows()]
    np.testing.assert_allclose(of_change, rows @ expected[ring.newest] * change, rtol=1e-11, atol=1e-10)
    np.testing.assert_allclose(of_gradient, rows @ expected[ring.gradient] * gradient, rtol=1e-11, atol=1e-10)
    np.testing.assert_allclose(square, expected[ring.gradient] @ expected[ring.gradient])


@pytest.mark.serial
@pytest.mark.parametrize("value", [3.0, -7.0, np.inf, -np.inf, np.nan, -0.0])
@pytest.mark.parametrize("writeable", [True, False])
def test_gradients(value: float, writeable: bool) -> None:
    size = LENGTH + 300
    tiles, gradient = filled(3, size), RNG.uniform(-2.0, 2.0, size)
    gradient[LENGTH + 200] = value
    gradient.flags.writeable = writeable
    way = whole(tiles)[1]
    largest, *products = tiles.store_trial(gradient, 1, 2)
    np.testing.assert_array_equal(whole(tiles)[2], gradient)
    np.testing.assert_array_equal(whole(tiles)[1], way)
    expected = np.abs(gradient).max()
    assert largest == (expected if np.isfinite(expected) else np.inf)
    np.testing.assert_allclose(products, (gradient @ way, way @ way), rtol=1e-11, atol=1e-10)


def test_a_solve(rank: int) -> None:
    def valley(x: Any) -> Any:
        whole = mpiad.mpi_allgather(x, axis=0)
        return anp.sum(100.0 * (whole[1:] - whole[:-1] ** 2) ** 2 + (1.0 - whole[:-1]) ** 2)

    result = mpiad.minimize(
        valley, np.tile([-1.2, 1.0], 2 + rank), method="L-BFGS-sharded", options={"gtol": 1e-8, "ftol": 0.0, "m": 3}
    )
    assert result.success and result.history.gradient_norm[-1] <= 1e-8
    iterates = MPI.COMM_WORLD.allreduce(result.nit) / MPI.COMM_WORLD.size
    assert iterates == result.nit


def test_a_solve_that_leaves_the_domain() -> None:
    result = mpiad.minimize(
        lambda x: anp.sum(10.0 * x - anp.log(anp.where(x > 0.0, x, np.nan))), np.full(3, 2.0), objective="sum",
        method="L-BFGS-sharded", options={"ftol": 0.0},
    )  # fmt: skip
    assert result.success and result.nfev <= 35
    np.testing.assert_allclose(result.x, 0.1, rtol=1e-4)


def test_vectors_in_memory() -> None:
    """2 m + 6 of them with m pairs: four besides the pairs' slots, the point and the trial."""
    n, pairs, kept = 100_000, 5, []
    weights, target = np.linspace(1.0, 50.0, n), np.sin(np.arange(n))

    def value_and_gradient(x: np.ndarray) -> tuple[float, np.ndarray]:
        return float(np.sum(weights * (x - target) ** 2)), 2.0 * weights * (x - target)

    def solve(callback: Callable[..., None]) -> None:
        options = {"maxcor": pairs, "maxiter": 12}
        mpiad.minimize(
            value_and_gradient, np.zeros(n), method="L-BFGS-sharded", jac=True, options=options, callback=callback
        )

    solve(lambda x: None)  # imports what it needs
    tracemalloc.start()
    try:
        solve(lambda x: kept.append(tracemalloc.get_traced_memory()[0] / (8 * n)))
    finally:
        tracemalloc.stop()
    assert len(kept) == 12
    # The start that the caller has made, the callback's copy, and before Python 3.11 an argument that its caller keeps.
    others = 2 + (sys.version_info < (3, 11))
    assert max(kept) < 2 * pairs + 6 + others + 0.3
