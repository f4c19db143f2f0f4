"""A Matérn field whose inverse covariance is a scaled square of an elliptic operator; samples require a solve."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpiad._typing import LocalArray
from mpiad.domain import Domain
from mpiad.inverse.gaussian_prior import EllipticSolver, GaussianPrior, agreed_fields, checked_block, inverse_diagonal
from mpiad.linalg import Multigrid


class Bilaplacian(GaussianPrior):
    """The Gaussian field with covariance D A⁻² D and A = 1 - ∇·(Θ∇)/κ², without flux through the sides.

    Θ is the diagonal matrix of the squared factors `anisotropy`. A⁻² is the covariance of the Matérn family with
    smoothness ν = 2 - d/2 in d dimensions; κ = √(8ν) / correlation length. Near the sides of the domain, the variance of
    A⁻² is up to 2ᵈ times as large as inside. The diagonal matrix D corrects this: the discrete field has the given
    standard deviation in every cell, and the domain needs no margin.

    Parameters
    ----------
    domain : Domain
    correlation_length : float
        Distance at which the correlation has fallen to about 0.1, in the units of `spacing`.
    std : float or array of shape local_shape
        Standard deviation of each cell.
    anisotropy : sequence of float, optional
        Factors of the correlation length along each dimension.
    mean : float or array of shape local_shape
        The mean of each cell.
    spacing : float or sequence of float
        Distance between cells, or one distance per dimension.
    rtol : float
        Relative tolerance of solves by multigrid. On at most 4096 cells, the operator is factored instead.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if an argument is invalid on any rank, or if `correlation_length`, `anisotropy`, `spacing` or `rtol`
        differs between ranks. If `domain` isn't a Domain, only the ranks that passed it raise.

    Ranks
    -----
    All ranks of the domain construct it and call its methods.

    References
    ----------
    .. [1] F. Lindgren, H. Rue and J. Lindström, "An explicit link between Gaussian fields and Gaussian Markov random
       fields: the stochastic partial differential equation approach", J. R. Stat. Soc. B 73 (2011).
    .. [2] U. Khristenko et al., "Analysis of boundary effects on PDE-based sampling of Whittle-Matérn random fields",
       SIAM/ASA J. Uncertainty Quantification 7 (2019).

    Examples
    --------
    >>> from mpiad.inverse import Bilaplacian
    >>> prior = Bilaplacian(mpiad.Domain((16, 16)), correlation_length=0.3, std=2.0, spacing=1 / 16)
    >>> print(np.allclose(prior.variance, 4.0), prior.sample(rng=0).shape == prior.domain.local_shape)
    True True
    """

    def __init__(
        self, domain: Domain, correlation_length: float, std: float | LocalArray = 1.0,
        anisotropy: Sequence[float] | None = None, mean: float | LocalArray = 0.0, *,
        spacing: float | Sequence[float] = 1.0, rtol: float = 1e-10,
    ):  # fmt: skip
        ratios = 1.0 if anisotropy is None else anisotropy
        numbers = {"correlation_length": correlation_length, "anisotropy": ratios, "spacing": spacing, "rtol": rtol}
        fields = {"mean": mean, "std": std}
        self.mean, deviation = agreed_fields(domain, fields, numbers, "inverse.Bilaplacian")
        self.domain, ndim = domain, len(domain.shape)
        # Since the diagonal of Θ contains the squared ratios, the operator is isotropic for spacings divided by the ratios.
        steps = np.broadcast_to(np.asarray(spacing, dtype=float), ndim) / ratios
        diffusion = float(correlation_length) ** 2 / (8.0 * (2.0 - ndim / 2.0))  # 1 / κ²
        self._multigrid = Multigrid(domain, diffusion, 1.0, spacing=tuple(steps), boundary="neumann", centred=True)
        self._inverse = EllipticSolver(self._multigrid, float(rtol))
        self._scale = deviation / np.sqrt(inverse_diagonal(domain, diffusion / steps**2, 1.0, 2))
        self.variance = deviation**2

    def apply(self, v: LocalArray) -> LocalArray:
        """Return the product of the inverse covariance with blocks (..., *local_shape); collective, differentiable."""
        return self._multigrid.matvec(self._multigrid.matvec(v / self._scale)) / self._scale

    def solve(self, g: LocalArray) -> LocalArray:
        """Return the product of the covariance with untraced blocks (..., *local_shape), by two solves; collective."""
        g = checked_block(self.domain, g, "inverse.Bilaplacian.solve", several=True)
        return self._scale * self._inverse(self._inverse(self._scale * g))

    def precondition(self, r: LocalArray) -> LocalArray:
        """Apply a symmetric positive definite approximation of the covariance to r, by two V-cycles; collective."""
        r = checked_block(self.domain, r, "inverse.Bilaplacian.precondition")
        return self._scale * self._multigrid(self._multigrid(self._scale * r))

    def sqrt(self, xi: LocalArray) -> LocalArray:
        """Return S ξ for untraced noise ξ of shape local_shape, where S Sᵀ is the covariance, by one solve; collective."""
        return self._scale * self._inverse(xi)
