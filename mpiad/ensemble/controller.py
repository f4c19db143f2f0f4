"""The size of the next step as a function of the errors of previous steps, elementwise over trajectories (columns).

A step is accepted if q < 1, with q the root mean square of the error relative to its tolerance. `q2` is q².

The norm of a column must not depend on the other columns. NumPy's reductions along the first axis of a contiguous array add
row after row if there are at least two columns, but in another order for one column. So arrays have two columns or more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpiad._typing import Array

# The smallest q² that is stored, since an error of zero doesn't predict the next error.
LEAST_ERROR = 1e-8


def mean_square(e: Array) -> Array:
    """Return the mean of |e|² over the rows, float64, shape (n,); e, shape (d, n) with n ≥ 2, may be overwritten."""
    if e.dtype.kind == "c":
        e = np.abs(e)
    np.multiply(e, e, out=e)
    return np.sum(e, axis=0).astype(float, copy=False) / len(e)


@dataclass(frozen=True)
class PIController:
    """A proportional-integral controller, which gives smoother step sizes if the stability of the method limits them.

    Parameters
    ----------
    safety : float
        Factor of the step size that the error estimate gives.
    least, most : float
        Bounds of the ratio of successive step sizes.
    beta : float
        Exponent of the previous error, times the order. The methods use 0 by default, which gives SciPy's controller.

    References
    ----------
    E. Hairer, S. P. Nørsett, G. Wanner, Solving Ordinary Differential Equations I, II.4; E. Hairer, G. Wanner, Solving
    Ordinary Differential Equations II, IV.2.

    Examples
    --------
    >>> from mpiad.ensemble import RK45, ODEProblem, PIController, solve
    >>> decay = ODEProblem(lambda u, p, t: [-50 * (u[0] - np.cos(t))], [1.0], (0.0, 2.0))
    >>> sol = solve(decay, RK45(controller=PIController()))
    >>> print(sol.retcode, sol.nreject <= solve(decay).nreject)
    Success True
    """

    safety: float = 0.9
    least: float = 0.2
    most: float = 10.0
    beta: float = 0.2

    @property
    def remembers(self) -> bool:
        """Whether the factor depends on the error of the previous step."""
        return self.beta != 0

    def factor(self, q2: Array, q2_before: Array, accepted: Array, rejected: Array, order: int) -> Array:
        """Return the ratio of the next step size to this one, shape (n,).

        If beta is 0, the ratio is safety · q^(-1/order), limited to the range from `least` to `most`; after a rejection the
        maximum is 1.

        Parameters
        ----------
        q2, q2_before : array, shape (n,)
            The squared errors of this step and of the last accepted step.
        accepted, rejected : array of bool, shape (n,)
            Whether this step is accepted, and whether the previous attempt was rejected.
        order : int
            The order of the error estimate: see `Tableau.error_order`.
        """
        # The exponents are halved, since q2 is q². An error of zero gives infinity, which `most` limits.
        factor = np.power(q2, -0.5 / order)
        if self.remembers:
            # After a rejection, the error of the previous step doesn't predict the error of this one.
            steady = np.power(q2, -0.5 * (1 - 0.75 * self.beta) / order) * np.power(q2_before, 0.5 * self.beta / order)
            factor = np.where(accepted, steady, factor)
        factor *= self.safety
        # fmax, because a NaN error must shrink the step.
        np.fmax(factor, self.least, out=factor)
        # On a device, reading the mask would synchronize.
        bounded = type(rejected) is np.ndarray and not np.count_nonzero(rejected)
        return np.minimum(factor, self.most if bounded else np.where(rejected, 1.0, self.most), out=factor)
