"""The recursion in coordinates beside the inverse Hessian that SciPy makes of the same pairs."""

from __future__ import annotations

import numpy as np
from scipy.optimize import LbfgsInvHessProduct

from mpiad.optimize.sharded.limited_memory import two_loop_recursion


def test_direction_is_that_of_the_inverse_hessian() -> None:
    rng = np.random.default_rng(1)
    a = rng.normal(size=(12, 12))
    s = rng.normal(size=(4, 12))
    y, g = s @ (a @ a.T + np.eye(12)), rng.normal(size=12)
    rows = np.stack([y, s], axis=1).reshape(8, 12)
    products = rows @ rows.T
    products[1::2, 1::2] = rng.normal(size=(4, 4))  # steps with steps are never asked for
    coefficients, slope = two_loop_recursion(products, rows @ g, g @ g)
    gamma = (s[3] @ y[3]) / (y[3] @ y[3])
    # SciPy's product starts from the identity: scaled variables give it the initial scaling.
    root = np.sqrt(gamma)
    inverse = LbfgsInvHessProduct(s / root, y * root)
    expected = -root * (inverse @ (root * g))
    np.testing.assert_allclose(coefficients @ np.vstack([rows, g]), expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(slope, g @ expected, rtol=1e-9)


def test_pairs_of_no_curvature_are_left_out() -> None:
    rows = np.array([[-1.0, 0.0], [1.0, 0.0], [0.0, 2.0], [0.0, 1.0]])
    g = np.array([3.0, 4.0])
    coefficients, slope = two_loop_recursion(rows @ rows.T, rows @ g, g @ g)
    np.testing.assert_allclose(coefficients @ np.vstack([rows, g]), [-1.5, -2.0])
    assert slope == -12.5
