"""The derivative and the size of the first step of each trajectory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.ensemble.derivative import Derivative, locked
from mpiad.ensemble.norms import mean_square, tolerance

__all__ = ["derivative_at", "first_step"]


def derivative_at(derivative: Derivative, u: Array, p: Tree, t: Array, sign: Array | None) -> Array:
    """Return f in the direction of the solve, shape (d, n); t is in that direction too."""
    k = np.empty_like(u)
    time = (t if sign is None else t * sign).astype(u.real.dtype)
    derivative.write(k, locked(u), p, locked(time))
    return k if sign is None else np.multiply(k, sign, out=k)


def first_step(
    rate: Callable[[Array, Array], Array], u: Array, t: Array, end: Array, k: Array, rtol: Any, atol: Any, order: int
) -> Array:
    """Return the sizes of the first steps, as SciPy chooses them.

    Parameters
    ----------
    rate : callable
        ``rate(u, t)`` returns f in the direction of the solve; t is in that direction too.
    u, k : array, shape (d, n)
        The initial states and f there.
    t, end : array, shape (n,)
        In the direction of the solve.
    rtol, atol : array or number
        In the precision of the states.
    order : int
        Of the error estimate in the step: see `Tableau.error_order`.

    Returns
    -------
    array, shape (n,)

    References
    ----------
    E. Hairer, S. P. Nørsett, G. Wanner, Solving Ordinary Differential Equations I, II.4.
    """
    span = end - t
    scale = tolerance(u, rtol, atol)
    d0, d1 = np.sqrt(mean_square(u / scale)), np.sqrt(mean_square(k / scale))
    # All constants are those of Hairer's algorithm, as in SciPy: the same steps make the same numbers.
    h0 = np.where((d0 < 1e-5) | (d1 < 1e-5), 1e-6, 0.01 * d0 / d1)
    h0 = np.minimum(h0, span)
    # One step of Euler's tells how fast the derivative changes: a second derivative, for the price of one call of f.
    probe = u + h0.astype(u.real.dtype) * k
    d2 = np.sqrt(mean_square((rate(probe, t + h0) - k) / scale)) / h0
    steepest = np.maximum(d1, d2)
    h1 = np.where((d1 <= 1e-15) & (d2 <= 1e-15), np.maximum(1e-6, h0 * 1e-3), np.power(0.01 / steepest, 1 / order))
    # No step goes beyond the end of tspan.
    h = np.minimum(np.minimum(100 * h0, h1), span)
    # A derivative that isn't finite leaves no estimate; the first step then fails by itself.
    return np.where(np.isfinite(h), h, span)
