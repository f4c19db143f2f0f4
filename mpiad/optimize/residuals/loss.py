"""Robust losses: ρ(z) of squared residuals z, so that outliers count less. SciPy's names and formulas.

References
----------
.. [1] B. Triggs et al., "Bundle adjustment - a modern synthesis" (2000), section 4.3: how ρ changes residuals and Jacobian
   so that their Gauss-Newton model is that of the robust cost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from mpiad._typing import Scalar


@np.errstate(all="ignore")
def _soft_l1(z: np.ndarray) -> list[np.ndarray]:
    t = 1.0 + z
    return [2.0 * (np.sqrt(t) - 1.0), t**-0.5, -0.5 * t**-1.5]


@np.errstate(all="ignore")
def _huber(z: np.ndarray) -> list[np.ndarray]:
    near, root = z <= 1.0, np.sqrt(np.maximum(z, 1.0))
    return [np.where(near, z, 2.0 * root - 1.0), np.where(near, 1.0, 1.0 / root), np.where(near, 0.0, -0.5 / root**3)]


@np.errstate(all="ignore")
def _cauchy(z: np.ndarray) -> list[np.ndarray]:
    t = 1.0 + z
    return [np.log1p(z), 1.0 / t, -1.0 / t**2]


@np.errstate(all="ignore")
def _arctan(z: np.ndarray) -> list[np.ndarray]:
    t = 1.0 + z**2
    return [np.arctan(z), 1.0 / t, -2.0 * z / t**2]


LOSSES: dict[str, Any] = {"linear": None, "soft_l1": _soft_l1, "huber": _huber, "cauchy": _cauchy, "arctan": _arctan}


class Loss:
    """ρ with its scale: residuals beyond `scale` are outliers.

    `rho`: ``rho(z)`` returns ρ and its first two derivatives, shape (3, m).
    """

    def __init__(self, rho: Callable[[np.ndarray], Any], scale: float):
        self._rho, self._scale = rho, scale

    def weighed(self, f: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """Return twice this rank's cost, the residuals of its Gauss-Newton model, and the factors of its Jacobian rows."""
        # Of a trial point outside of where the residuals are finite the trust region learns by the cost: nothing of ours
        # warns of it. A loss of the user's own warns as it likes.
        with np.errstate(all="ignore"):
            z = (f / self._scale) ** 2
        rho = np.asarray(self._rho(z), dtype=float)
        if rho.shape != (3, f.size):
            raise ValueError(f"least_squares: loss must return shape {(3, f.size)}, but got {rho.shape}.")
        # Where the cost curves downwards, as far outliers' does, its model mustn't.
        # The second derivative of ρ(f²)/2 by f, at a scale of one: ρ' + 2 ρ'' f².
        with np.errstate(all="ignore"):
            factors = np.sqrt(np.maximum(rho[1] + 2.0 * rho[2] * z, sys.float_info.epsilon))
            return float(self._scale**2 * np.sum(rho[0])), f * rho[1] / factors, factors


def loss_of(loss: object, scale: Scalar) -> Loss | None:
    """Return the loss of a name, None for the sum of squares; a ValueError where there is none, or no such scale."""
    if not (callable(loss) or (isinstance(loss, str) and loss in LOSSES)):
        raise ValueError(f"least_squares: loss must be a function or one of {', '.join(LOSSES)}, but got {loss!r}.")
    if not (np.ndim(scale) == 0 and np.isreal(scale) and scale > 0.0):
        raise ValueError(f"least_squares: f_scale must be one positive number, but got {scale!r}.")
    rho = LOSSES[loss] if isinstance(loss, str) else loss
    return None if rho is None else Loss(rho, float(scale))
