"""Priors: SciPy's distributions with a differentiable log density."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import autograd.numpy as np
import numpy
import scipy
from autograd.extend import defvjp, primitive

from mpiad._typing import Array
from mpiad.device import to_device, to_host
from mpiad.device.transfer import Constants
from mpiad.primitives import stop_gradient
from mpiad.vi.posterior import LOG_2PI

# Step of a central difference, in units of the distribution's scale. The cube root of the machine epsilon balances the
# errors of truncation (step²) and rounding (epsilon / step).
_STEP = 6e-6
# Maximum step, in units of the distance from the nearest end of the support.
_MAX_END_FRACTION = 1e-4


class Density(Protocol):
    """The interface of prior distributions; `Prior` implements it."""

    def log_prob(self, theta: Array) -> Array:
        """Return the log densities of points of shape (S, dim)."""
        ...


class Prior:
    """A prior distribution of parameters θ of shape (dim,).

    Parameters
    ----------
    distribution : frozen distribution of scipy.stats, (name, *arguments), or a sequence of them
        The distribution of every parameter, or a sequence with one distribution per parameter; the parameters are
        independent. The arguments of a distribution may be arrays with one entry per parameter. A frozen
        `scipy.stats.multivariate_normal` is the joint distribution of all parameters. A name is the name of a distribution
        in scipy.stats, for example ``("norm", -2.0, 1.0)``.
    dim : int
        The number of parameters.

    Raises
    ------
    TypeError, ValueError
        If the distribution is unknown, its arguments are invalid, or its dimension isn't `dim`.

    Examples
    --------
    >>> from mpiad.vi import Prior
    >>> prior = Prior([("norm", 0.0, 1.0), ("expon",)], 2)
    >>> print(prior.log_prob(np.array([[0.0, 1.0]])).round(3), round(-0.5 * np.log(2 * np.pi) - 1.0, 3))
    [-1.919] -1.919
    """

    def __init__(self, distribution: Any, dim: int):
        self.dim = dim
        # SciPy has no public name for the type of a frozen multivariate normal.
        normal: Any = type(scipy.stats.multivariate_normal(numpy.zeros(1)))
        self.joint: Any = distribution if isinstance(distribution, normal) else None
        if self.joint is not None:
            if self.joint.dim != dim:
                raise ValueError(f"VI: the posterior has dimension {dim}, but the prior has {self.joint.dim}.")
            if not (numpy.isfinite(self.joint.mean).all() and numpy.isfinite(self.joint.cov).all()):
                raise ValueError("VI: mean and covariance of the prior must be finite.")
            return
        # A tuple that begins with a name is one distribution, not a sequence of them.
        if isinstance(distribution, Sequence) and not (distribution and isinstance(distribution[0], str)):
            given = list(distribution)
        else:  # one distribution per parameter, since the arguments may be arrays
            one = _frozen(distribution)
            count = max([numpy.size(x) for x in (*one.args, *one.kwds.values()) if numpy.ndim(x)], default=dim)
            columns = [numpy.broadcast_to(x, (count,)) for x in one.args]
            named = {name: numpy.broadcast_to(x, (count,)) for name, x in one.kwds.items()}
            given = [one.dist(*[c[k] for c in columns], **{name: c[k] for name, c in named.items()}) for k in range(count)]
        if len(given) != dim:
            raise ValueError(f"VI: the posterior has dimension {dim}, but the prior has {len(given)} distributions.")
        self.marginals = [_frozen(part) for part in given]
        for k, marginal in enumerate(self.marginals):
            if not numpy.isfinite(marginal.median()):  # SciPy returns NaN for invalid arguments
                raise ValueError(
                    f"VI: the prior of parameter {k} must have valid arguments of scipy.stats.{marginal.dist.name}, but "
                    f"got {[float(v) for v in (*marginal.args, *marginal.kwds.values())]}, with which the density is NaN."
                )

    def log_prob(self, theta: Array) -> Array:
        """Return the log densities of points of shape (S, dim), on their device; differentiable with respect to the points.

        For distributions that aren't normal, SciPy computes log densities on the host, and only first derivatives exist, by
        central differences.
        """
        if self.normal is not None:
            mean, whitening, diagonal = self.terms.like(theta)
            scaled = (theta - mean) * diagonal if self.joint is None else (theta - mean) @ whitening.T
            return -0.5 * np.sum(scaled**2 + LOG_2PI, axis=1) + numpy.sum(numpy.log(self.terms.on(None)[2]))
        points = to_host(theta)
        found = sum(_log_density(points[:, k], marginal) for k, marginal in enumerate(self.marginals))
        return found if points is theta else to_device(found, like=stop_gradient(theta))

    @functools.cached_property
    def terms(self) -> Constants:
        """Return the mean of a normal prior, the inverse of the Cholesky factor, and the diagonal of this inverse."""
        mean, covariance = self.normal  # type: ignore[misc]
        inverse = scipy.linalg.solve_triangular(numpy.linalg.cholesky(covariance), numpy.eye(self.dim), lower=True)
        return Constants(mean, inverse, numpy.diag(inverse))

    @functools.cached_property
    def inverse(self) -> Constants:
        """Return the mean and the inverse covariance of a normal prior."""
        return Constants(self.normal[0], numpy.linalg.inv(self.normal[1]))  # type: ignore[index]

    @functools.cached_property
    def normal(self) -> tuple[Array, Array] | None:
        """Return the mean and the covariance if the prior is normal and their inverses are finite, else None."""
        if self.joint is not None:
            return self.joint.mean, self.joint.cov
        if any(marginal.dist.name != "norm" for marginal in self.marginals):
            return None
        # If a variance or its inverse overflows, SciPy's log density, without squares of the scale, is used instead.
        with numpy.errstate(divide="ignore", over="ignore"):
            mean, variance = numpy.array([(marginal.mean(), marginal.var()) for marginal in self.marginals]).T
            is_usable = numpy.isfinite([variance, 1 / variance]).all()
        return (mean, numpy.diag(variance)) if is_usable else None


def prior_of(distribution: Any, dim: int) -> Density:
    """Return a `Prior` of the given distribution; an object with `log_prob` is returned unchanged."""
    if isinstance(distribution, Prior) or callable(getattr(distribution, "log_prob", None)):
        if getattr(distribution, "dim", dim) != dim:
            raise ValueError(f"VI: the posterior has dimension {dim}, but the prior has {distribution.dim}.")
        return distribution
    return Prior(distribution, dim)


def log_prior(prior: Density, theta: Array) -> Array:
    """Return the log densities at points of shape (S, dim), after a check of their shape."""
    found = prior.log_prob(theta)
    if np.shape(found) != theta.shape[:1]:
        raise ValueError(f"VI: log_prob of the prior must return shape {theta.shape[:1]}, but returned {np.shape(found)}.")
    return found


def _frozen(distribution: object) -> Any:
    if isinstance(distribution, (tuple, list)) and distribution and isinstance(distribution[0], str):
        found: Any = getattr(scipy.stats, distribution[0], None)
        if not isinstance(found, scipy.stats.rv_continuous):
            raise ValueError(f"VI: scipy.stats has no continuous distribution {distribution[0]!r}.")
        return found(*distribution[1:])
    if callable(getattr(distribution, "logpdf", None)) and hasattr(distribution, "dist"):
        return distribution
    raise TypeError(
        "VI: a prior must be a frozen distribution of scipy.stats, its name with its arguments, a sequence of them, or "
        f"have log_prob(theta), but got {type(distribution).__name__} {distribution!r:.60}."
    )


@primitive
def _log_density(x: Array, marginal: Any) -> Array:
    return marginal.logpdf(x)


@primitive
def _slope(x: Array, marginal: Any) -> Array:
    """Return the derivative of a log density by central differences; NaN outside of the support."""
    scale = float(marginal.ppf(0.75) - marginal.ppf(0.25))  # finite, even if the standard deviation is infinite
    low, high = marginal.support()
    # The step is limited near an end of the support, since the log density may be steep there.
    step = numpy.minimum(_STEP * scale, _MAX_END_FRACTION * numpy.minimum(x - low, high - x))
    after, before = x + step, x - step  # the divisor is twice the step, after rounding
    with numpy.errstate(invalid="ignore", divide="ignore"):
        return numpy.where(step > 0, (marginal.logpdf(after) - marginal.logpdf(before)) / (after - before), numpy.nan)


defvjp(_log_density, lambda ans, x, marginal: lambda g: g * _slope(x, marginal), None)
