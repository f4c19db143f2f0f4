"""`Flow`: a posterior made of a normal distribution and invertible layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import autograd.numpy as np
import numpy

from mpiad._typing import Array, Tree
from mpiad.vi.posterior import checked_dimension

__all__ = ["Flow", "Layer"]

_LOG_2PI = float(numpy.log(2 * numpy.pi))


class Layer(Protocol):
    """An invertible map of points of shape (S, dim), with the logarithm of its determinant at each of them."""

    def initial(self, dim: int, rng: numpy.random.Generator) -> Tree:
        """Return parameters to start from, near the identity."""
        ...

    def forward(self, params: Tree, z: Array) -> tuple[Array, Array]:
        """Return the images, and log |det ∂x/∂z| at each point."""
        ...

    def inverse(self, params: Tree, x: Array) -> tuple[Array, Array]:
        """Return the points whose images these are, and log |det ∂z/∂x| at each."""
        ...


class Flow:
    """Normalizing flow (Rezende and Mohamed, 2015): standard normal noise, taken through layers one after another.

    Parameters
    ----------
    dim : int
    layers : sequence of Layer
        `Planar`, `AffineCoupling`, `SplineCoupling`, `SplineAutoregressive`, `LULinear`, or anything with `initial`,
        `forward` and `inverse`.
    mean, sd : float or array of shape (dim,)
        What the flow's values are multiplied by and moved to at last; both are fitted.

    Examples
    --------
    >>> from mpiad.vi import AffineCoupling, Flow
    >>> q = Flow(2, [AffineCoupling(), AffineCoupling(swap=True)], mean=[1.0, 2.0])
    >>> params = q.initial(np.random.default_rng(0))
    >>> draws, density = q.draw(params, np.random.default_rng(1).standard_normal((5, 2)))
    >>> print(draws.shape, np.allclose(q.log_prob(params, draws), density))
    (5, 2) True
    """

    def __init__(self, dim: int, layers: Sequence[Layer], mean: float | Array = 0.0, sd: float | Array = 1.0):
        self.dim, self.layers = checked_dimension(dim, "Flow"), list(layers)
        for layer in self.layers:
            if not all(callable(getattr(layer, name, None)) for name in ("initial", "forward", "inverse")):
                raise TypeError(f"Flow: a layer must have initial, forward and inverse, but got {layer!r:.60}.")
        self._mean = numpy.broadcast_to(numpy.asarray(mean, float), (dim,))
        self._sd = numpy.broadcast_to(numpy.asarray(sd, float), (dim,))
        if not numpy.all(self._sd > 0):
            raise ValueError(f"Flow: sd must be above zero, but got {sd!r:.80}.")

    def initial(self, rng: numpy.random.Generator) -> dict[str, Any]:
        """Return parameters to start from."""
        layers = [layer.initial(self.dim, rng) for layer in self.layers]
        return {"layers": layers, "mean": self._mean.copy(), "log_sd": numpy.log(self._sd)}

    def draw(self, params: Tree, noise: Array) -> tuple[Array, Array]:
        """Return draws made of standard normal noise, both of shape (S, dim), and their log densities (S,)."""
        x, log_density = noise, -0.5 * np.sum(noise**2 + _LOG_2PI, axis=1)
        for layer, own in zip(self.layers, params["layers"]):
            x, change = layer.forward(own, x)
            log_density = log_density - change
        # The density of the noise, less what each map stretches: the change of variables.
        return params["mean"] + np.exp(params["log_sd"]) * x, log_density - np.sum(params["log_sd"])

    def log_prob(self, params: Tree, theta: Array) -> Array:
        """Return the log densities of points of shape (S, dim)."""
        x, change = self.inverse(params, theta)
        return change - 0.5 * np.sum(x**2 + _LOG_2PI, axis=1)

    def inverse(self, params: Tree, theta: Array) -> tuple[Array, Array]:
        """Return the noise that points are made of, and log |det ∂noise/∂θ| at each."""
        x = (theta - params["mean"]) * np.exp(-params["log_sd"])
        total = -np.sum(params["log_sd"])
        for layer, own in zip(reversed(self.layers), reversed(list(params["layers"]))):
            x, change = layer.inverse(own, x)
            total = total + change
        return x, total
