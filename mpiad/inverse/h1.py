"""A prior that penalizes gradients.

Its samples are rougher than those of `Bilaplacian`. A product with its covariance requires one solve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mpiad._typing import LocalArray
from mpiad.domain import Domain
from mpiad.inverse.gaussian_prior import EllipticSolver, GaussianPrior, agreed_fields, checked_block, inverse_diagonal
from mpiad.linalg import Multigrid


class H1(GaussianPrior):
    """The Gaussian field whose cost is half the integral of a |∇(m - mean)|² + c (m - mean)².

    In two and more dimensions the variance of a cell grows without bound as the mesh is refined. So this prior is useful
    for regularization, but not for uncertainties; for these, use `Bilaplacian`.

    Parameters
    ----------
    domain : Domain
    gradient, value : float
        The positive coefficients a and c. A small c makes the cost positive definite, and has little other effect.
    mean : float or array of shape local_shape
        The mean of each cell.
    spacing : float or sequence of float
        Distance between cells, or one distance per dimension.
    rtol : float
        Relative tolerance of solves by multigrid. On at most 4096 cells, the operator is factored instead.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if an argument is invalid on any rank, or if `gradient`, `value`, `spacing` or `rtol` differs between
        ranks. If `domain` isn't a Domain, only the ranks that passed it raise.

    Ranks
    -----
    All ranks of the domain construct it and call its methods.

    Examples
    --------
    >>> from mpiad.inverse import H1
    >>> domain = mpiad.Domain(16)
    >>> prior = H1(domain, gradient=1.0, value=0.0625, mean=3.0)
    >>> print(np.round(float(prior.cost(4.0 * np.ones(domain.local_shape))), 6))  # c / 2 for each of 16 cells
    0.5
    """

    def __init__(
        self, domain: Domain, gradient: float = 1.0, value: float = 1.0, mean: float | LocalArray = 0.0, *,
        spacing: float | Sequence[float] = 1.0, rtol: float = 1e-10,
    ):  # fmt: skip
        numbers = {"gradient": gradient, "value": value, "spacing": spacing, "rtol": rtol}
        (self.mean,) = agreed_fields(domain, {"mean": mean}, numbers, "inverse.H1")
        ndim = len(domain.shape)
        steps = np.broadcast_to(np.asarray(spacing, dtype=float), ndim)
        self.domain, self._volume, self.noise = domain, math.prod(steps), (ndim + 1,)
        self._rates, self._value = float(gradient) / steps**2, float(value)
        self._multigrid = Multigrid(domain, gradient, value, spacing=tuple(steps), boundary="neumann", centred=True)
        self._inverse = EllipticSolver(self._multigrid, float(rtol))
        self.variance = inverse_diagonal(domain, self._rates, self._value, 1) / self._volume

    def apply(self, v: LocalArray) -> LocalArray:
        """Return the product of the inverse covariance with blocks (..., *local_shape); collective, differentiable."""
        return self._volume * self._multigrid.matvec(v)

    def solve(self, g: LocalArray) -> LocalArray:
        """Return the product of the covariance with untraced blocks (..., *local_shape), by one solve; collective."""
        g = checked_block(self.domain, g, "inverse.H1.solve", several=True)
        return self._inverse(g) / self._volume

    def precondition(self, r: LocalArray) -> LocalArray:
        """Apply a symmetric positive definite approximation of the covariance to r, by one V-cycle; collective."""
        return self._multigrid(checked_block(self.domain, r, "inverse.H1.precondition")) / self._volume

    def sqrt(self, xi: LocalArray) -> LocalArray:
        """Return S ξ for noise ξ of shape (d + 1, *local_shape), where S Sᵀ is the covariance, by one solve; collective."""
        # The operator is GᵀG + c, where G computes differences across faces. The operator is also the covariance of the
        # right-hand side Gᵀξ₁ + √c ξ₂, for white noise ξ₁ on the faces and ξ₂ in the cells.
        padded = self._multigrid.domain.exchange(xi[:-1], "zero", corners=False)
        total = math.sqrt(self._value) * xi[-1]
        for axis, rate in enumerate(self._rates):
            previous = [slice(1, -1)] * len(self._rates)
            previous[axis] = slice(0, -2)
            upper = xi[axis].copy()
            if self.domain.neighbours[axis][1] is None:  # no face beyond the last cell
                upper[(slice(None),) * axis + (slice(-1, None),)] = 0.0
            total = total + math.sqrt(rate) * (padded[(axis, *previous)] - upper)
        return self._inverse(total) / math.sqrt(self._volume)
