"""What `fit` returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.levenberg_marquardt import Minima, scaled_factor
from mpiad.ensemble.outcome import ConvergenceCode


@dataclass(frozen=True, repr=False)
class FitResult:
    """Where the fits of N trajectories ended.

    Attributes
    ----------
    p : array, shape (N, m)
    cost : array, shape (N,)
        Half the sum of squared residuals; NaN where a fit couldn't begin.
    optimality : array, shape (N,)
        The largest entry of the gradient of the cost, by size, among the variables that no bound holds.
    active_mask : array of int, shape (N, m)
        -1 where a variable is at its lower bound, 1 where at its upper one, 0 inside.
    nfev : array of int, shape (N,)
        Solves, each with all derivatives.
    njev : array of int, shape (N,)
        How many of their derivatives were taken up: one at the start, and one for each step that was taken.
    retcode : array of str, shape (N,)
        Names of `ConvergenceCode`.
    indices : array of int, shape (N,)
        The numbers of the trajectories, from 0; this rank's share with ``EnsembleMPI(gather=False)``.

    Examples
    --------
    >>> from mpiad.ensemble import ODEProblem, fit
    >>> decay = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (0.0, 1.0), [1.0])
    >>> measured = np.array([[0.8, 0.6], [0.3, 0.2]])
    >>> found = fit(decay, lambda u, p, data: u[:, 0] - data, np.ones((2, 1)), data=measured, saveat=[0.5, 1.0])
    >>> print(found.p.ravel().round(2), found.success, found.covariance().shape)
    [0.49 2.08] [ True  True] (2, 1, 1)
    """

    p: Array
    cost: Array
    optimality: Array
    active_mask: Array
    nfev: Array
    njev: Array
    retcode: Array
    indices: Array
    _factor: Array
    _residuals: Array
    _tries: Array

    def __len__(self) -> int:
        return len(self.p)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} fits, {np.count_nonzero(self.success)} Success)"

    @property
    def success(self) -> Array:
        """Which fits converged to a minimum that the data determine: array of bool, shape (N,)."""
        return self.retcode == "Success"

    def covariance(self, absolute_sigma: bool = False) -> Array:
        """Return the covariance of each fit's variables by linearisation, (JᵀJ)⁻¹ times the variance of the residuals.

        Parameters
        ----------
        absolute_sigma : bool
            Whether residuals are already divided by their standard deviations, as in `scipy.optimize.curve_fit`.
            Otherwise their variance is taken to be ``2 * cost / (k - m)``, k residuals less the variables that are free.

        Returns
        -------
        array, shape (N, m, m)
            Zeros for variables that a bound holds; NaN where the fit didn't succeed.
        """
        free = self.active_mask == 0
        columns, norms = scaled_factor(self._factor, free)
        _, values, rows = np.linalg.svd(columns, full_matrices=False)
        # Variables that are held make zeros.
        place = np.arange(values.shape[1]) < np.count_nonzero(free, axis=1)[:, None]
        with np.errstate(all="ignore"):
            root = np.where(place[..., None], rows / values[..., None], 0.0) / norms[:, None]
            found = np.swapaxes(root, 1, 2) @ root
            if not absolute_sigma:
                excess = self._residuals - np.count_nonzero(free, axis=1)
                found = found * np.where(excess > 0, 2 * self.cost / excess, np.nan)[:, None, None]
        found[~self.success] = np.nan
        return found


def fits_of(minima: Minima, indices: Array, residuals: int, tries: Array) -> FitResult:
    """Return the result of some fits."""
    x, cost, optimality, mask, nfev, njev, codes, factor = minima
    retcode, counts = ConvergenceCode.names_of(codes), np.full(len(x), residuals)
    return FitResult(x, cost, optimality, mask, nfev, njev, retcode, indices, factor, counts, tries)


def joined_fits(parts: Sequence[FitResult]) -> FitResult:
    """Return one result of several, one after the other."""
    if len(parts) == 1:
        return parts[0]
    names = [field.name for field in fields(FitResult)]
    return FitResult(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
