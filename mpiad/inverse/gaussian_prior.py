"""The base class of Gaussian priors, checks of their arguments, and their pointwise variances.

Before scaling, variances are the diagonal entries of A⁻ᵖ, with A = c - ∇·(a∇) discretized on a box. These are computed
without a solve, from the heat kernel: A⁻ᵖ = ∫ tᵖ⁻¹ e^(-tA) dt / Γ(p). On a box e^(-tA) is a product of one factor per
dimension, and the diagonal of each factor is a sum over the cosine modes of its dimension (Fourier modes if periodic). With
t = eˢ the trapezoidal rule converges geometrically.

References
----------
L. N. Trefethen and J. A. C. Weideman, "The exponentially convergent trapezoidal rule", SIAM Review 56 (2014), sections 5
and 15.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from mpiad._typing import LocalArray, ReplicatedArray, Rng
from mpiad.domain import Domain
from mpiad.linalg import Multigrid, factorized
from mpiad.primitives import stop_gradient
from mpiad.primitives.operation import suspended
from mpiad.transport import channel
from mpiad.transport.core.agreement import raising_together, require_same
from mpiad.transport.core.channels import on_any_rank
from mpiad.transport.core.random_keys import shared_key
from mpiad.transport.core.tracing import restoring_state
from mpiad.transport.devices.device_arrays import is_device_array

_STEP = 0.2  # step of s = log t, for an error below 1e-12
# The first t is _FIRST_TIME / (largest eigenvalue of A). For smaller t, e^(-tA) is replaced by the identity.
_FIRST_TIME = 1e-8
# The last t is _LAST_TIME / (smallest eigenvalue of A). For larger t, the integrand is negligible.
_LAST_TIME = 40.0
_MOST_FACTORED = 4096  # cells for which the operator is factored: a solve takes less time than by multigrid


class GaussianPrior:
    """A Gaussian random field on the cells of a domain.

    Attributes
    ----------
    domain : Domain
    mean : array of shape local_shape
        This rank's block of the mean.
    variance : array of shape local_shape
        The variance of each cell.
    noise : tuple of int
        The shape of the leading axes of the argument of `sqrt`.

    Examples
    --------
    >>> from mpiad.inverse import Bilaplacian, GaussianPrior
    >>> prior = Bilaplacian(mpiad.Domain(32), correlation_length=8.0)
    >>> m = prior.sample(rng=1)
    >>> print(isinstance(prior, GaussianPrior), np.allclose(prior.solve(prior.apply(m)), m))
    True True
    """

    domain: Domain
    mean: LocalArray
    variance: LocalArray
    noise: tuple[int, ...] = ()

    def apply(self, v: LocalArray) -> LocalArray:
        """Return the product of the inverse covariance with blocks (..., *local_shape); collective, differentiable."""
        raise NotImplementedError

    def solve(self, g: LocalArray) -> LocalArray:
        """Return the product of the covariance with untraced blocks (..., *local_shape); collective."""
        raise NotImplementedError

    def precondition(self, r: LocalArray) -> LocalArray:
        """Apply a symmetric positive definite approximation of the covariance, by V-cycles, not solves; collective."""
        raise NotImplementedError

    def sqrt(self, xi: LocalArray) -> LocalArray:
        """Return S ξ for untraced noise ξ of shape (*noise, *local_shape), where S Sᵀ is the covariance; collective."""
        raise NotImplementedError

    def cost(self, m: LocalArray) -> ReplicatedArray:
        """Return ½ (m - mean)ᵀ R (m - mean) for the inverse covariance R: the negative log density up to a constant.

        Parameters
        ----------
        m : array of shape local_shape

        Returns
        -------
        scalar
            The cost, the same on all ranks.

        Ranks
        -----
        All ranks of the domain call it.

        Adjoint
        -------
        The cotangent of m is the product of the inverse covariance with m - mean.
        """
        deviation = m - self.mean
        return 0.5 * self.domain.dot(deviation, self.apply(deviation))

    def sample(self, rng: Rng = None) -> LocalArray:
        """Return this rank's block of a sample, which is the same field for any number of ranks; collective.

        `rng` is a Generator, a SeedSequence or an int, the same on all ranks, or None for another sample at each call.
        Raise a TypeError or ValueError on all ranks if it is none of these or differs between ranks.
        """
        call = f"inverse.{type(self).__name__}.sample"
        key = shared_key(rng, channel(self.domain.comm, call), call)
        return self.mean + self.sqrt(self.domain.normal(np.random.SeedSequence(key), self.noise))


class EllipticSolver:
    """Solves with the operator of a `Multigrid` for untraced blocks (..., *local_shape)."""

    def __init__(self, multigrid: Multigrid, rtol: float):
        self._multigrid, self._rtol, self._factors = multigrid, rtol, None

    def __call__(self, b: LocalArray) -> LocalArray:
        """Return the solution for b; collective."""
        domain = self._multigrid.domain
        if math.prod(domain.shape) <= _MOST_FACTORED and not is_device_array(b):
            with restoring_state(), suspended():
                if self._factors is None:
                    self._factors = factorized(self._multigrid.matvec, np.empty(domain.local_shape), pattern=domain)
                found = self._factors(b).astype(b.dtype, copy=False)
            if not on_any_rank(channel(domain.comm, "inverse").data, not np.isfinite(found).all()):
                return found
        return self._multigrid.solve(b, rtol=self._rtol)  # it raises if b isn't finite


def checked_block(domain: Domain, block: LocalArray, call: str, several: bool = False) -> LocalArray:
    """Return the block; raise a ValueError on all ranks if its shape is wrong. `several`: allow leading axes."""
    with raising_together(channel(domain.comm, call)):
        shape = np.shape(block)
        if (shape[-len(domain.shape) :] if several else shape) != domain.local_shape:
            raise ValueError(
                f"{call}: expected this rank's block of a field on a grid of {domain.shape} cells, of shape "
                f"{domain.local_shape}, but got a block of shape {shape}."
            )
    return block


def agreed_fields(
    domain: Domain, fields: Mapping[str, object], numbers: Mapping[str, object], call: str
) -> list[LocalArray]:
    """Return the fields as blocks; raise on all ranks if a field or number is invalid, or a number differs; collective."""
    if not isinstance(domain, Domain):
        raise TypeError(f"{call}: domain must be an mpiad.Domain, but got {type(domain).__name__} {domain!r:.60}.")
    used, blocks = channel(domain.comm, call), []
    with raising_together(used):
        # Numbers, and sequences with one number per dimension, must be positive and the same on all ranks.
        for name, value in numbers.items():
            several = isinstance(value, (Sequence, np.ndarray))
            if several and len(value) != len(domain.shape):
                raise ValueError(
                    f"{call}: {name} must be a number, or one number for each of {len(domain.shape)} dimensions, but got "
                    f"{value!r:.60}."
                )
            for each in value if several else [value]:
                if not (isinstance(each, (int, float, np.integer, np.floating)) and 0.0 < each < math.inf):
                    raise ValueError(f"{call}: {name} must be a positive number, but got {each!r:.60}.")
        # Fields are numbers or blocks. All fields except the first, the mean, must be positive.
        for k, (name, value) in enumerate(fields.items()):
            block = np.asarray(stop_gradient(value), dtype=float)
            if block.shape not in ((), domain.local_shape):
                raise ValueError(
                    f"{call}: {name} must be a number or a block of shape {domain.local_shape}, but has shape "
                    f"{block.shape}."
                )
            if not np.all(np.isfinite(block)) or (k > 0 and not np.all(block > 0.0)):
                raise ValueError(f"{call}: {name} must be {'finite' if k == 0 else 'positive and finite'} in all cells.")
            blocks.append(np.broadcast_to(block, domain.local_shape).copy())
    require_same(used, ", ".join(f"{name}={value!r}" for name, value in numbers.items()), call)
    return blocks


def inverse_diagonal(domain: Domain, a: np.ndarray, c: float, power: int) -> LocalArray:
    """Return this rank's block of the diagonal of A⁻ᵖ, for A = c - Σ a_i ∂²_i and p = `power`."""
    # c > 0 and p is 1 or 2. The coefficients `a`, of shape (d,), include the factors 1 / spacing². There is no flux across
    # the boundaries of dimensions that aren't periodic.
    largest = c + 4.0 * sum(a)
    s = np.arange(math.log(_FIRST_TIME / largest), math.log(_LAST_TIME / c), _STEP)
    times = np.exp(s)
    weights = _STEP * times**power * np.exp(-c * times) / math.gamma(power)
    factors = [
        _diagonal(n, cells, rate, periodic, times)
        for n, cells, rate, periodic in zip(domain.shape, domain.owned, a, domain.periodic)
    ]
    single = np.ones((1, len(times)))  # for each dimension below three
    first, second, third = [*factors, single, single][:3]
    found = np.stack([(weights * row * second) @ third.T for row in first]).reshape([len(each) for each in factors])
    # The second term is the integral from 0 to half a step before the first t, where the integrand is nearly tᵖ⁻¹ / Γ(p).
    return found + (times[0] * math.exp(-0.5 * _STEP)) ** power / math.gamma(power + 1)


def _diagonal(n: int, cells: slice, rate: float, periodic: bool, times: np.ndarray) -> np.ndarray:
    """Return the diagonal of one dimension's factor of e^(-tA), without e^(-tc), of shape (cells, times)."""
    k, i = np.arange(n), np.arange(cells.start, cells.stop)
    decay = np.exp(-np.outer(rate * (2.0 - 2.0 * np.cos((2.0 if periodic else 1.0) * math.pi * k / n)), times))
    if periodic:
        squares = np.full((i.size, n), 1.0 / n)
    else:
        squares = 2.0 / n * np.cos(math.pi * np.outer(i + 0.5, k) / n) ** 2
        squares[:, 0] = 1.0 / n
    return squares @ decay
