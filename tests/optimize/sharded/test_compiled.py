"""What numba compiles beside the same in NumPy."""

from __future__ import annotations

from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad.optimize.sharded import compiled
from mpiad.optimize.sharded.arithmetic import Arithmetic

pytest.importorskip("numba")
RNG = np.random.default_rng(8)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_LARGE", 0)


@pytest.mark.serial
@pytest.mark.parametrize("length", [1, 7, 1000])
@pytest.mark.parametrize("rows", [[slice(0, 9)], [slice(5, 9), slice(0, 3)], [slice(2, 3)]])
def test_rows_and_vectors(length: int, rows: list[slice], always: None) -> None:
    plain, other = Arithmetic(), compiled.arithmetic_for(1)
    assert isinstance(other, compiled.Compiled)
    tile, parts, count = RNG.normal(size=(9, length)), [], 0
    for part in rows:
        parts.append((part, slice(count, count + part.stop - part.start)))
        count += part.stop - part.start
    vector, coefficients = RNG.normal(size=length), RNG.normal(size=count)
    sums = [np.ones(count), np.ones(count)]
    outs = [np.full(length, np.nan), np.full(length, np.nan)]
    for arithmetic, out, total in zip((plain, other), outs, sums):
        arithmetic.add_products(tile, parts, vector, total)
        arithmetic.combine(tile, parts, coefficients, out)
    np.testing.assert_allclose(sums[1], sums[0], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(outs[1], outs[0], rtol=1e-12, atol=1e-12)


@pytest.mark.serial
@pytest.mark.parametrize("value", [3.0, -7.0, np.inf, -np.inf, np.nan, -0.0])
@pytest.mark.parametrize("writeable", [True, False])
def test_gradients(value: float, writeable: bool, always: None) -> None:
    gradient, way = RNG.uniform(-2.0, 2.0, 300), RNG.normal(size=300)
    gradient[200] = value
    gradient.flags.writeable = writeable
    found, copies = [], []
    for arithmetic in (Arithmetic(), compiled.arithmetic_for(1)):
        copies.append(np.empty(300))
        found.append(arithmetic.take(gradient, way, copies[-1]))
        np.testing.assert_array_equal(copies[-1], gradient)
    assert found[0][0] == found[1][0] == (max(2.0, abs(value)) if abs(value) > 2.0 else np.abs(gradient).max()) or (
        np.isnan(value) and found[0][0] == found[1][0] == np.inf
    )
    np.testing.assert_allclose(found[1][1:], found[0][1:], rtol=1e-12)


@pytest.mark.serial
def test_steps_and_changes(always: None) -> None:
    here, way, before = RNG.normal(size=(3, 50))
    results = []
    for arithmetic in (Arithmetic(), compiled.arithmetic_for(1)):
        out, copy, change = np.empty(50), np.empty(50), before.copy()
        arithmetic.move(here, way, 0.3, out, copy)
        np.testing.assert_array_equal(out, copy)
        results.append((out, change, arithmetic.change(here, change)))
    for one, other in zip(*results):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-15)


def test_a_solve(always: None, rank: int) -> None:
    def valley(x: Any) -> Any:
        whole = mpiad.mpi_allgather(x, axis=0)
        return anp.sum(100.0 * (whole[1:] - whole[:-1] ** 2) ** 2 + (1.0 - whole[:-1]) ** 2)

    result = mpiad.minimize(
        valley, np.tile([-1.2, 1.0], 2 + rank), method="L-BFGS-sharded", options={"gtol": 1e-8, "ftol": 0.0, "m": 3}
    )
    assert result.success and result.history.gradient_norm[-1] <= 1e-8
    iterates = MPI.COMM_WORLD.allreduce(result.nit) / MPI.COMM_WORLD.size
    assert iterates == result.nit


def test_a_solve_that_leaves_the_domain(always: None) -> None:
    result = mpiad.minimize(
        lambda x: anp.sum(10.0 * x - anp.log(anp.where(x > 0.0, x, np.nan))), np.full(3, 2.0), objective="sum",
        method="L-BFGS-sharded", options={"ftol": 0.0},
    )
    assert result.success and result.nfev <= 35
    np.testing.assert_allclose(result.x, 0.1, rtol=1e-4)
