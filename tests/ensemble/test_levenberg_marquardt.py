"""Levenberg-Marquardt for many problems at once, on functions whose minima are known, counted by stubs."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import lsq_linear

from mpiad.ensemble.levenberg_marquardt import Evaluation, LeastSquares, Stopping

pytestmark = pytest.mark.serial

TIGHT = Stopping(1e-12, 1e-12, 1e-12, 200)


def evaluation(r, jacobian):
    """Return what `LeastSquares` wants of residuals, shape (n, k), and Jacobians, shape (n, k, m)."""
    table = np.concatenate([jacobian, r[..., None]], axis=2)
    factor = np.zeros((len(r), table.shape[2], table.shape[2]))
    triangle = np.linalg.qr(table, mode="r")
    factor[:, : triangle.shape[1]] = triangle
    return Evaluation(0.5 * np.sum(r**2, axis=1), factor)


class Rosenbrock:
    """Residuals 10 (y - x²) and 1 - x, least at (1, 1); notes who was asked for."""

    def __init__(self):
        self.asked = []

    def __call__(self, x, ids):
        self.asked.append(ids.tolist())
        a, b = x.T
        jacobian = np.stack([np.stack([-20 * a, np.full_like(a, 10.0)], 1), np.stack([-1 + 0 * a, 0 * a], 1)], 1)
        return evaluation(np.stack([10 * (b - a**2), 1 - a], 1), jacobian)


def boundless(x):
    return np.full_like(x, -np.inf), np.full_like(x, np.inf)


def test_each_ends_by_itself_and_is_evaluated_no_more():
    fun, x0 = Rosenbrock(), np.array([[-1.2, 1.0], [1.0, 1.0], [0.9, 0.8]])
    found = LeastSquares(fun, x0, *boundless(x0), None, TIGHT).minimize()
    np.testing.assert_allclose(found.x, 1.0, rtol=1e-9)
    assert not found.codes.any() and found.nfev[1] == found.njev[1] == 1
    counts = np.bincount(np.concatenate([np.array(ids) for ids in fun.asked]))
    assert counts.tolist() == found.nfev.tolist()
    assert len(fun.asked) == found.nfev.max() and (found.njev <= found.nfev).all()
    # A problem's numbers are the same without the others, to the last bit.
    for i in range(3):
        alone = LeastSquares(fun, x0[i : i + 1], *boundless(x0[i : i + 1]), None, TIGHT).minimize()
        for name in ("x", "cost", "optimality", "nfev", "factor"):
            np.testing.assert_array_equal(getattr(alone, name)[0], getattr(found, name)[i], err_msg=name)


@pytest.mark.parametrize("scaled", [False, True])
def test_linear_problems_in_boxes(scaled):
    # BVLS solves them exactly, whichever bounds are active.
    rng, count, k, m = np.random.default_rng(5), 60, 9, 4
    a, b = rng.normal(size=(count, k, m)), 2 * rng.normal(size=(count, k))
    size = np.array([1e-3, 1.0, 1e3, 1.0]) if scaled else np.ones(m)
    a /= size
    lower, upper = -0.3 * size * np.ones((count, m)), 0.4 * size * np.ones((count, m))
    lower[::7, 0] = upper[::7, 0] = 0.1 * size[0]  # a variable that can't move

    def residuals(x, ids):
        return evaluation(np.einsum("nkm,nm->nk", a[ids], x) - b[ids], a[ids])

    found = LeastSquares(residuals, np.clip(np.zeros((count, m)), lower, upper), lower, upper, None, TIGHT).minimize()
    assert not found.codes.any()
    sides = set()
    for i in range(count):
        free = lower[i] < upper[i]
        fixed = a[i][:, ~free] @ lower[i][~free]
        exact = np.where(free, 0.0, lower[i])
        best = lsq_linear(a[i][:, free], b[i] - fixed, (lower[i][free], upper[i][free]), method="bvls", tol=1e-15)
        exact[free] = best.x
        np.testing.assert_allclose(found.x[i] / size, exact / size, atol=1e-7)
        sides.add(tuple(found.active_mask[i]))
    assert len(sides) > 15


def test_return_codes():
    def residuals(x, ids):
        r = np.stack([x[:, 0] - 1, x[:, 1] - 2, 0 * x[:, 0]], 1)
        jacobian = np.zeros((len(x), 3, 2))
        jacobian[:, 0, 0] = jacobian[:, 1, 1] = 1
        r[ids == 1, 1], jacobian[ids == 1, 1] = 0, 0  # nothing is said of the second variable
        # Downhill lies where there are no numbers.
        edge = (ids == 2) & (x[:, 0] > 0.25)
        found = evaluation(r, jacobian)
        found.cost[edge | (ids == 3)] = np.inf
        return found

    x0 = np.zeros((5, 2))
    found = LeastSquares(residuals, x0, *boundless(x0), None, TIGHT).minimize()
    # Success, Singular, ConvergenceFailure, InitialFailure, Success
    assert found.codes.tolist() == [0, 2, 4, 3, 0]
    np.testing.assert_allclose(found.x[[0, 4]], [[1, 2], [1, 2]], rtol=1e-10)
    assert found.x[1, 0] == pytest.approx(1) and found.x[1, 1] == 0
    assert found.x[2, 0] <= 0.25 and np.isnan(found.cost[3])
    for most in (1, 4):
        few = LeastSquares(
            Rosenbrock(), np.array([[-1.2, 1.0]]), *boundless(x0[:1]), None, TIGHT._replace(max_nfev=most)
        ).minimize()
        assert few.codes.tolist() == [1] and few.nfev.tolist() == [most]
