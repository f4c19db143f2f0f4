"""Bounds of variables: projection, and the set of free variables.

References
----------
.. [1] D. P. Bertsekas, "Projected Newton methods for optimization problems with simple constraints", SIAM J. Control
   Optim. 20 (1982): the direction is scaled by second-order information on the free variables only, and steps are
   projected.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy

from mpiad.device import to_host
from mpiad.optimize.checkpoint import fingerprint
from mpiad.transport.device_arrays import is_device_array, named

# Variables this close to a bound go straight to it if a descent step leads outwards. (Bertsekas's epsilon.)
_CLOSE = 1e-6


class Box:
    """Lower and upper bounds, shape (n,) each.

    `low`, `high`: infinite if there is no bound.
    """

    def __init__(self, low: np.ndarray, high: np.ndarray):
        self._low, self._high = low, high

    @property
    def limits(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the lower and the upper bounds."""
        return self._low, self._high

    def excess(self, x: np.ndarray) -> float:
        """Return the largest violation of a bound by x."""
        return float(max(np.max(self._low - x, initial=0.0), np.max(x - self._high, initial=0.0)))

    @property
    def fingerprint(self) -> str:
        """Return a checksum: equal bounds have the same."""
        return fingerprint(self._low, self._high)

    def project(self, x: np.ndarray, part: slice = slice(None)) -> bool:
        """Project a part of x onto its bounds, in place; return whether any variable moved."""
        moved = bool(to_host(np.any(x < self._low[part]) | np.any(x > self._high[part])))
        if moved:
            np.clip(x, self._low[part], self._high[part], out=x)
        return moved

    def way(self, x: np.ndarray, gradient: np.ndarray, part: slice) -> np.ndarray:
        """Return a part of the projected gradient step, P(x - g) - x: zero at stationary variables."""
        return np.clip(x - gradient, self._low[part], self._high[part]) - x

    def free(self, x: np.ndarray, gradient: np.ndarray, norm: float, part: slice) -> np.ndarray:
        """Return a mask of a part's variables that no bound holds, if the largest entry of the step `way` is `norm`."""
        # Near a minimizer the margin goes to zero with the step, so that no free variable is held forever.
        close = min(_CLOSE, norm)
        held = (x - self._low[part] <= close) & (gradient > 0.0)
        held |= (self._high[part] - x <= close) & (gradient < 0.0)
        return ~held

    def inside(self, x: np.ndarray, part: slice) -> np.ndarray:
        """Return a mask of a part's variables that lie strictly between their bounds."""
        return (x > self._low[part]) & (x < self._high[part])


def box_of(bounds: Any, size: int) -> Box | None:
    """Return the bounds of `size` variables, None if there are none.

    A TypeError if they are on a device; a ValueError if there are too few or too many, or a lower one is above its upper
    one.
    """
    if bounds is None:
        return None
    _require_host(bounds)
    if isinstance(bounds, scipy.optimize.Bounds):
        low, high = (np.asarray(limit, dtype=float).reshape(-1) for limit in (bounds.lb, bounds.ub))
    else:
        pairs = [tuple(pair) for pair in bounds]
        if any(len(pair) != 2 for pair in pairs):
            raise ValueError(f"minimize: bounds must be pairs (low, high), but got {bounds!r:.60}.")
        low = np.array([-np.inf if pair[0] is None else pair[0] for pair in pairs], dtype=float)
        high = np.array([np.inf if pair[1] is None else pair[1] for pair in pairs], dtype=float)
    try:
        low, high = np.broadcast_to(low, size).copy(), np.broadcast_to(high, size).copy()
    except ValueError:
        raise ValueError(
            f"minimize: expected one pair of bounds for each of the {size} variables, but got "
            f"{low.size} lower and {high.size} upper bounds."
        ) from None
    wrong = np.flatnonzero(~(low <= high))
    if wrong.size:
        k = int(wrong[0])
        raise ValueError(f"minimize: variable {k} has lower bound {low[k]} and upper bound {high[k]}: nothing between.")
    return Box(low, high)


def _require_host(bounds: Any) -> None:
    limits = (bounds.lb, bounds.ub) if isinstance(bounds, scipy.optimize.Bounds) else (bounds,)
    for limit in limits:
        if is_device_array(limit):
            raise TypeError(
                f"minimize: bounds must be on the host, where they are checked, but got {named(limit)}. Pass "
                "mpiad.device.to_host(bounds): what the method needs on a device it copies there once."
            )
