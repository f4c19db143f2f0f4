"""The interface of posteriors; Gaussian posteriors with diagonal or full covariance."""

from __future__ import annotations

from typing import Protocol

import autograd.numpy as np
import numpy

from mpiad._typing import Array, Tree
from mpiad.primitives.checks import positive_count


class Posterior(Protocol):
    """A family of distributions of parameters θ of shape (dim,); the variational parameters are any pytree of arrays."""

    dim: int

    def initial(self, rng: numpy.random.Generator) -> Tree:
        """Return initial variational parameters."""
        ...

    def draw(self, params: Tree, noise: Array) -> tuple[Array, Array]:
        """Return draws computed from standard normal noise, both of shape (S, dim), and their log densities (S,)."""
        ...

    def log_prob(self, params: Tree, theta: Array) -> Array:
        """Return the log densities of points of shape (S, dim)."""
        ...


LOG_2PI = float(numpy.log(2 * numpy.pi))


class LocationScale:
    """The base class of families whose variational parameters include a shift, `mean`, and logarithms of scales."""

    def __init__(self, dim: int, mean: float | Array = 0.0, sd: float | Array = 1.0):
        name = type(self).__name__
        self.dim = positive_count(dim, f"{name}: dim")
        self._mean, self._sd = (numpy.broadcast_to(numpy.asarray(x, float), (dim,)) for x in (mean, sd))
        if not (numpy.all(self._sd > 0) and numpy.all(numpy.isfinite(self._sd))):
            raise ValueError(f"{name}: sd must be above zero and finite, but got {sd!r:.80}.")

    def initial(self, rng: numpy.random.Generator) -> dict[str, Array]:
        """Return the initial variational parameters: the mean and the logarithm of the standard deviation."""
        return {"mean": self._mean.copy(), "log_sd": numpy.log(self._sd)}


def _log_density(scaled: Array, params: Tree) -> Array:
    """Return the log densities of points mean + L ε, given ε (`scaled`): log N(ε; 0, I) - log det L."""
    return -0.5 * np.sum(scaled**2 + LOG_2PI, axis=1) - np.sum(params["log_sd"])


class MeanFieldGaussian(LocationScale):
    """A normal distribution for each parameter, independent of the others.

    Parameters
    ----------
    dim : int
        The number of model parameters θ.
    mean, sd : float or array of shape (dim,)
        The initial mean and standard deviation of each parameter.

    Examples
    --------
    >>> from mpiad.vi import MeanFieldGaussian
    >>> q = MeanFieldGaussian(2, mean=[0.0, 1.0], sd=2.0)
    >>> params = q.initial(np.random.default_rng(0))
    >>> print(q.moments(params)[1], q.log_prob(params, np.array([[0.0, 1.0]])).round(3))
    [[4. 0.]
     [0. 4.]] [-3.224]
    """

    def draw(self, params: Tree, noise: Array) -> tuple[Array, Array]:
        """Return draws computed from standard normal noise, both of shape (S, dim), and their log densities (S,)."""
        return params["mean"] + np.exp(params["log_sd"]) * noise, _log_density(noise, params)

    def log_prob(self, params: Tree, theta: Array) -> Array:
        """Return the log densities of points of shape (S, dim)."""
        return _log_density((theta - params["mean"]) * np.exp(-params["log_sd"]), params)

    def moments(self, params: Tree) -> tuple[Array, Array]:
        """Return the mean and the covariance."""
        return params["mean"], np.diag(np.exp(2 * params["log_sd"]))


class FullRankGaussian(LocationScale):
    """A normal distribution with any covariance, L Lᵀ with a lower triangular L.

    Parameters
    ----------
    dim : int
        The number of model parameters θ.
    mean, sd : float or array of shape (dim,)
        The initial mean and standard deviation of each parameter; the initial correlations are zero.

    Examples
    --------
    >>> from mpiad.vi import FullRankGaussian
    >>> q = FullRankGaussian(2)
    >>> params = {**q.initial(np.random.default_rng(0)), "below": 0.5 * np.ones((2, 2))}
    >>> print(q.moments(params)[1])
    [[1.   0.5 ]
     [0.5  1.25]]
    """

    def initial(self, rng: numpy.random.Generator) -> dict[str, Array]:
        """Return the initial variational parameters: mean, logarithm of L's diagonal, and the strict lower triangle.

        Entries of the triangle are in units of the diagonal entry of their row, so that one learning rate suits all
        parameters.
        """
        return {**super().initial(rng), "below": numpy.zeros((self.dim, self.dim))}

    def factor(self, params: Tree) -> Array:
        """Return the lower triangular factor L of the covariance."""
        scale = np.exp(params["log_sd"])
        return np.diag(scale) + scale[:, None] * np.tril(params["below"], -1)

    def draw(self, params: Tree, noise: Array) -> tuple[Array, Array]:
        """Return draws computed from standard normal noise, both of shape (S, dim), and their log densities (S,)."""
        return params["mean"] + noise @ self.factor(params).T, _log_density(noise, params)

    def log_prob(self, params: Tree, theta: Array) -> Array:
        """Return the log densities of points of shape (S, dim)."""
        return _log_density(np.linalg.solve(self.factor(params), (theta - params["mean"]).T).T, params)

    def moments(self, params: Tree) -> tuple[Array, Array]:
        """Return the mean and the covariance."""
        factor = self.factor(params)
        return params["mean"], factor @ factor.T
