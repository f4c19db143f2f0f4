"""How the size of the next step follows from the error of the last, for each trajectory by itself.

With q the root mean square of the error over its tolerance, a step is accepted where q < 1. All here is elementwise, so
no trajectory sees another. `q2` is q², which spares the root.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.norms import constant

__all__ = ["LEAST_ERROR", "Controller", "IController", "PIController"]

# The least q² that is remembered: an error of zero says nothing about the next.
LEAST_ERROR = 1e-8


@dataclass(frozen=True)
class IController:
    """SciPy's controller: the factor is safety · q^(-1/order), and at most 1 after a rejection.

    Parameters
    ----------
    safety, least, most : float
        The safety factor, and the bounds of the factor.

    References
    ----------
    E. Hairer, S. P. Nørsett, G. Wanner, Solving Ordinary Differential Equations I, II.4.
    """

    safety: float = 0.9
    least: float = 0.2
    most: float = 10.0
    remembers: ClassVar[bool] = False

    def factor(self, q2: Array, q2_before: Array, accepted: Array, rejected: Array, order: int) -> Array:
        """Return the factor of the next step.

        Parameters
        ----------
        q2, q2_before : array, shape (n,)
            Of this step and of the last accepted one.
        accepted, rejected : array of bool, shape (n,)
            Whether this step is accepted, and whether the try before it was rejected.
        order : int
            Of the error estimate in the step: see `Tableau.error_order`.
        """
        # A root of q², of half the exponent; an error of zero gives infinity, which the bound takes down.
        number = _numbers_for(q2)
        factor = np.power(q2, number(-0.5 / order))
        factor *= number(self.safety)
        return _bounded(factor, rejected, self.least, self.most)


@dataclass(frozen=True)
class PIController:
    """A proportional-integral controller, smoother where stability bounds the step.

    Parameters
    ----------
    safety, least, most : float
        The safety factor, and the bounds of the factor.
    beta : float
        Weight of the error before, times the order; 0 gives `IController`.

    References
    ----------
    E. Hairer, G. Wanner, Solving Ordinary Differential Equations II, IV.2.
    """

    safety: float = 0.9
    least: float = 0.2
    most: float = 10.0
    beta: float = 0.2
    remembers: ClassVar[bool] = True

    def factor(self, q2: Array, q2_before: Array, accepted: Array, rejected: Array, order: int) -> Array:
        """Return the factor of the next step; parameters as for `IController`."""
        plain = np.power(q2, -0.5 / order)
        # After a rejection the step before says nothing about this one.
        steady = np.power(q2, -0.5 * (1 - 0.75 * self.beta) / order) * np.power(q2_before, 0.5 * self.beta / order)
        factor = self.safety * np.where(accepted, steady, plain)
        return _bounded(factor, rejected, self.least, self.most)


Controller: TypeAlias = IController | PIController


def _bounded(factor: Array, rejected: Array, least: float, most: float) -> Array:
    # fmax, because an error that is NaN must shrink the step.
    number = _numbers_for(factor)
    np.fmax(factor, number(least), out=factor)
    # On a device, to look would be to wait.
    bounded = type(rejected) is np.ndarray and not np.count_nonzero(rejected)
    return np.minimum(factor, number(most) if bounded else np.where(rejected, 1.0, most), out=factor)


def _numbers_for(x: Array) -> Callable[[float], Any]:
    """Return in which form ufuncs take numbers beside an array fastest."""
    return constant if type(x) is np.ndarray else float
