"""The Laplace approximation: a Gaussian around the most probable field, from leading eigenpairs of the misfit's Hessian.

Let H be the Hessian of the data misfit and R the inverse covariance of the prior. With the eigenpairs H u = λ R u,
uᵀ R u = 1, the covariance of the posterior is R⁻¹ - Σ λ/(1 + λ) u uᵀ. Terms with small λ are omitted, since the data don't
determine their directions u.

References
----------
.. [1] T. Bui-Thanh, O. Ghattas, J. Martin and G. Stadler, "A computational framework for infinite-dimensional Bayesian
   inverse problems, part I", SIAM J. Sci. Comput. 35 (2013), sections 5.3 and 5.4.
.. [2] A. Alexanderian, P. J. Gloor and O. Ghattas, "On Bayesian A- and D-optimal experimental designs in infinite
   dimensions", Bayesian Analysis 11 (2016), for the information gain.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cached_property

import numpy as np

from mpiad._typing import LocalArray, Rng
from mpiad.inverse.gaussian_prior import GaussianPrior, checked_block
from mpiad.linalg.eigenpairs import EigenPairs, ritz_pairs, shortcoming
from mpiad.transport import channel
from mpiad.transport.core.random_keys import generator_of, shared_key
from mpiad.transport.devices.device_arrays import copied

# Tolerances for negative Ritz values: absolute (for H = R they would all be 1), and relative to the largest value.
_ZERO, _ROUNDING = 1e-3, 1e-6


class Posterior:
    """The Gaussian distribution that `laplace_approximation` returns.

    Attributes
    ----------
    mean : array of shape local_shape
        This rank's block of the most probable field.
    prior : GaussianPrior
        The prior, with the inverse covariance R.
    values : array, shape (n,)
        The eigenvalues λ in descending order; n is at most k.
    vectors : array, shape (n, *local_shape)
        This rank's blocks of the eigenvectors u, with uᵀ R u = 1.
    residuals : array, shape (n,)
        The norms of R⁻¹H u - λ u in the inner product of R, divided by the larger of λ and 1.
    products : int
        The number of fields to which H was applied.

    Examples
    --------
    >>> from mpiad.inverse import Bilaplacian, laplace_approximation
    >>> domain = mpiad.Domain(32)
    >>> prior = Bilaplacian(domain, correlation_length=8.0)
    >>> measured = np.arange(32)[domain.owned] == 16
    >>> product = lambda v: measured * v / 0.5**2
    >>> posterior = laplace_approximation(product, np.zeros(domain.local_shape), prior, k=2)
    >>> print(round(posterior.information_gain(), 4), round(0.5 * (np.log(5.0) - 4 / 5), 4))
    0.4047 0.4047
    """

    def __init__(self, mean: LocalArray, prior: GaussianPrior, pairs: EigenPairs):
        self.mean, self.prior, self.vectors = mean, prior, pairs.vectors
        self.values, self.residuals, self.products = np.maximum(pairs.values, 0.0), pairs.residuals, pairs.products

    @property
    def variance(self) -> LocalArray:
        """Return the variance of each cell, of shape local_shape."""
        return self.prior.variance - np.tensordot(self.values / (1.0 + self.values), self.vectors**2, 1)

    def apply(self, g: LocalArray) -> LocalArray:
        """Return the product of the covariance with a block of shape local_shape; collective."""
        weights = self.values / (1.0 + self.values) * self.prior.domain.gram(self.vectors, g[None])[:, 0]
        return self.prior.solve(g) - np.tensordot(weights, self.vectors, 1)

    def sample(self, rng: Rng = None) -> LocalArray:
        """Return this rank's block of a sample, which is the same on any number of ranks; collective.

        `rng`: as for the prior's samples.
        """
        return self.mean + self.narrowed(self.prior.sample(rng) - self.prior.mean)

    @cached_property
    def duals(self) -> LocalArray:
        """Return R u for each eigenvector u, of shape (n, *local_shape); collective at the first use."""
        return self.prior.apply(self.vectors)

    def coordinates(self, deviation: LocalArray) -> np.ndarray:
        """Return uᵀ R v for each eigenvector u and a deviation v of shape local_shape; collective."""
        return self.prior.domain.gram(self.duals, deviation[None])[:, 0]

    def narrowed(self, deviation: LocalArray) -> LocalArray:
        """Scale the informed part of a deviation such that the prior's covariance becomes the posterior's; collective."""
        weights = (1.0 - 1.0 / np.sqrt(1.0 + self.values)) * self.coordinates(deviation)
        return deviation - np.tensordot(weights, self.vectors, 1)

    def information_gain(self) -> float:
        """Return the Kullback-Leibler divergence KL(posterior‖prior) in nats; collective."""
        terms = np.sum(np.log1p(self.values) - self.values / (1.0 + self.values))
        return float(0.5 * terms + self.prior.cost(self.mean))

    def predict(
        self, fun: Callable[[LocalArray], LocalArray], draws: int, rng: Rng = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and standard deviation of `fun` at samples, drawn with `rng` as the prior's are; collective."""
        call = "inverse.Posterior.predict"
        generator = generator_of(shared_key(rng, channel(self.prior.domain.comm, call), call))
        found = np.stack([np.asarray(fun(self.sample(generator))) for _ in range(draws)])
        return found.mean(axis=0), found.std(axis=0, ddof=1)


def laplace_approximation(
    product: Callable[[LocalArray], LocalArray],
    m: LocalArray,
    prior: GaussianPrior,
    k: int,
    *,
    tol: float = 1e-6,
    ncv: int | None = None,
    rng: Rng = 0,
    batch: bool = False,
) -> Posterior:
    """Approximate the posterior by a Gaussian around its most probable field.

    Parameters
    ----------
    product : callable
        ``product(v)`` returns H v, where H is the Hessian at m of the objective without the prior's cost (see `make_hvp`),
        or its Gauss-Newton approximation JᵀJ.
    m : array of shape local_shape
        This rank's block of the most probable field.
    prior : GaussianPrior
        The prior, whose cost isn't part of H.
    k : int
        The largest number of eigenpairs. H is usually applied 1.2 k to 2.5 k times.
    tol : float
        Largest norm of the residual of an eigenpair, relative to the larger of λ and 1: eigenvalues far below 1 need no
        relative accuracy, since they don't change the posterior.
    ncv : int, optional
        Largest number of products with H, as in `mpiad.linalg.eigsh`.
    rng : Generator, SeedSequence or int, optional
        The source of the random directions, which don't depend on the number of ranks. None: other ones in each call.
    batch : bool
        Whether `product` takes several fields at once, along a first axis, as in `mpiad.linalg.eigsh`.

    Returns
    -------
    Posterior

    Raises
    ------
    TypeError, ValueError
        On all ranks, if an argument is invalid, or the product isn't symmetric.

    Warns
    -----
    RuntimeWarning
        If the last eigenvalue exceeds 1, since k pairs then may not contain all information of the data; if a residual is
        above `tol`; or if a Ritz value is negative beyond rounding, since `product` then has the wrong sign or is
        indefinite. The value is replaced by 0.

    Ranks
    -----
    All ranks of the prior's domain call it and the methods of the result.

    Examples
    --------
    >>> from mpiad.inverse import Bilaplacian, laplace_approximation
    >>> domain = mpiad.Domain(32)
    >>> prior = Bilaplacian(domain, correlation_length=8.0)
    >>> measured = np.arange(32)[domain.owned] % 8 == 0
    >>> product = lambda v: measured * v / 0.1**2
    >>> posterior = laplace_approximation(product, np.zeros(domain.local_shape), prior, k=6)
    >>> print(posterior.values.shape, domain.max(np.where(measured, posterior.variance, 0.0)) < 0.011)
    (4,) True
    """
    call = "laplace_approximation"
    checked_block(prior.domain, m, call)
    key = shared_key(rng, channel(prior.domain.comm, call), call)

    def direction(n: int) -> LocalArray:
        return prior.domain.normal(np.random.SeedSequence(key, spawn_key=(n,)))

    pairs, least, _ = ritz_pairs(
        product, m, k, prior.apply, prior.solve, tol, ncv, direction, batch, prior.domain.comm, floor=1.0
    )
    largest = np.max(pairs.values, initial=least)
    if not np.all(pairs.residuals <= tol):
        warnings.warn(f"laplace_approximation: {shortcoming(pairs, tol)}", RuntimeWarning, stacklevel=2)
    if least < -max(_ZERO, _ROUNDING * largest):
        text = (
            f"laplace_approximation: product has Ritz values from {least:.3g} to {largest:.3g} in the prior's "
            "inner product. Negative values are replaced by zero, as if there were no data in these directions. If all are "
            "negative, product has the wrong sign: it must be the product with the Hessian of the negative log-likelihood. "
            "Otherwise the Hessian is indefinite at m: use the Gauss-Newton product, JᵀJ."
        )
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    if len(pairs.values) == k and pairs.values[-1] > 1.0:
        text = (
            f"laplace_approximation: the last of {len(pairs.values)} eigenvalues is {pairs.values[-1]:.3g}. "
            "The data determine directions with eigenvalues above 1 more than the prior does, and some may be missing. "
            "Then the computed variance is too large: increase k."
        )
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return Posterior(copied(m), prior, pairs)  # a program may change m later
