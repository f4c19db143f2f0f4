"""`Flow`: a posterior that transforms standard normal noise by invertible layers; `LULinear` and `Planar` layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import autograd.numpy as np
import numpy

from mpiad._typing import Array, Tree
from mpiad.primitives import stop_gradient
from mpiad.vi.posterior import LOG_2PI, LocationScale


class Layer(Protocol):
    """An invertible map of points of shape (S, dim)."""

    def initial(self, dim: int, rng: numpy.random.Generator) -> Tree:
        """Return initial parameters of the layer."""
        ...

    def forward(self, params: Tree, z: Array) -> tuple[Array, Array]:
        """Return the images, and log |det ∂x/∂z| at each point."""
        ...

    def inverse(self, params: Tree, x: Array) -> tuple[Array, Array]:
        """Return the preimages of points, and log |det ∂z/∂x| at each."""
        ...


class Flow(LocationScale):
    """Normalizing flow (Rezende and Mohamed, 2015): standard normal noise, transformed by a sequence of layers.

    Parameters
    ----------
    dim : int
        The number of model parameters θ, whose posterior is approximated.
    layers : sequence of Layer
        `Planar`, `AffineCoupling`, `SplineCoupling`, `SplineAutoregressive`, `LULinear`, or objects with `initial`,
        `forward` and `inverse`.
    mean, sd : float or array of shape (dim,)
        Initial shift and scale, which are applied after the layers; both are fitted.

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
        super().__init__(dim, mean, sd)
        self.layers = list(layers)
        for layer in self.layers:
            if not all(callable(getattr(layer, name, None)) for name in ("initial", "forward", "inverse")):
                raise TypeError(f"Flow: a layer must have initial, forward and inverse, but got {layer!r:.60}.")

    def initial(self, rng: numpy.random.Generator) -> dict[str, Array]:
        """Return the initial variational parameters of all layers, the shift and the scale."""
        return {"layers": [layer.initial(self.dim, rng) for layer in self.layers], **super().initial(rng)}

    def draw(self, params: Tree, noise: Array) -> tuple[Array, Array]:
        """Return draws computed from standard normal noise, both of shape (S, dim), and their log densities (S,)."""
        x, log_density = noise, -0.5 * np.sum(noise**2 + LOG_2PI, axis=1)
        for layer, layer_params in zip(self.layers, params["layers"]):
            x, change = layer.forward(layer_params, x)
            log_density = log_density - change
        # The log density of the noise, minus the log determinants of all maps.
        return params["mean"] + np.exp(params["log_sd"]) * x, log_density - np.sum(params["log_sd"])

    def log_prob(self, params: Tree, theta: Array) -> Array:
        """Return the log densities of points of shape (S, dim)."""
        x, change = self.inverse(params, theta)
        return change - 0.5 * np.sum(x**2 + LOG_2PI, axis=1)

    def inverse(self, params: Tree, theta: Array) -> tuple[Array, Array]:
        """Return the noise that is mapped to the points, and log |det ∂noise/∂θ| at each point."""
        x = (theta - params["mean"]) * np.exp(-params["log_sd"])
        total = -np.sum(params["log_sd"])
        for layer, layer_params in zip(reversed(self.layers), reversed(list(params["layers"]))):
            x, change = layer.inverse(layer_params, x)
            total = total + change
        return x, total


class LULinear:
    """x = P L U z + b, with a fixed permutation P, unit lower triangular L and upper triangular U (Oliva et al., 2018).

    Parameters
    ----------
    permute : bool
        Whether P is a random permutation; otherwise it is the identity.

    Examples
    --------
    >>> from mpiad.vi import LULinear
    >>> layer, z = LULinear(), np.array([[1.0, 2.0, 3.0]])
    >>> params = layer.initial(3, np.random.default_rng(0))
    >>> print(np.allclose(layer.inverse(params, layer.forward(params, z)[0])[0], z))
    True
    """

    def __init__(self, permute: bool = True):
        self.permute = permute

    def initial(self, dim: int, rng: numpy.random.Generator) -> dict[str, Array]:
        """Return initial parameters; the permutation is an array of integers and isn't fitted."""
        order = rng.permutation(dim) if self.permute else numpy.arange(dim)
        zeros = {name: numpy.zeros((dim, dim)) for name in ("lower", "upper")}
        return {**zeros, "log_diagonal": numpy.zeros(dim), "b": numpy.zeros(dim), "order": order}

    def forward(self, params: Tree, z: Array) -> tuple[Array, Array]:
        """Return the images, and log |det ∂x/∂z| at each point."""
        lower, upper = _factors(params)
        x = (z @ upper.T @ lower.T)[:, params["order"]] + params["b"]
        # |det P| = det L = 1, and det U is the product of the diagonal.
        return x, np.sum(params["log_diagonal"]) + np.zeros_like(z[:, 0])

    def inverse(self, params: Tree, x: Array) -> tuple[Array, Array]:
        """Return the preimages of points, and log |det ∂z/∂x| at each."""
        lower, upper = _factors(params)
        back = numpy.argsort(params["order"])
        y = (x - params["b"])[:, back].T
        z = np.linalg.solve(upper, np.linalg.solve(lower, y)).T
        return z, -np.sum(params["log_diagonal"]) + np.zeros_like(x[:, 0])


def _factors(params: Tree) -> tuple[Array, Array]:
    lower = np.tril(params["lower"], -1) + np.diag(np.ones_like(params["b"]))
    return lower, np.triu(params["upper"], 1) + np.diag(np.exp(params["log_diagonal"]))


_BISECTIONS, _NEWTON_STEPS = 60, 2  # bisection is accurate to rounding; Newton steps make the root differentiable


class Planar:
    """x = z + û tanh(wᵀz + b), with û computed from u such that the map is invertible (Rezende and Mohamed, 2015).

    The inverse finds wᵀz as the root of a monotone function of one variable.

    Examples
    --------
    >>> from mpiad.vi import Planar
    >>> layer, z = Planar(), np.random.default_rng(1).standard_normal((5, 2))
    >>> params = layer.initial(2, np.random.default_rng(0))
    >>> print(np.allclose(layer.inverse(params, layer.forward(params, z)[0])[0], z))
    True
    """

    def initial(self, dim: int, rng: numpy.random.Generator) -> dict[str, Array]:
        """Return initial parameters."""
        return {"u": 0.01 * rng.normal(size=dim), "w": rng.normal(size=dim) / dim**0.5, "b": np.zeros(())}

    def forward(self, params: Tree, z: Array) -> tuple[Array, Array]:
        """Return the images, and log |det ∂x/∂z| at each point."""
        u, wu = _invertible(params)
        bend = np.tanh(z @ params["w"] + params["b"])
        # The matrix determinant lemma, with 0 < h = tanh' ≤ 1: det (I + h û wᵀ) = 1 + h wᵀû, positive since wᵀû > -1.
        return z + bend[:, None] * u, np.log1p(wu * (1 - bend**2))

    def inverse(self, params: Tree, x: Array) -> tuple[Array, Array]:
        """Return the preimages of points, and log |det ∂z/∂x| at each."""
        u, wu = _invertible(params)
        w, b = params["w"], params["b"]
        target = x @ w
        a = _root(stop_gradient(target), stop_gradient(wu), stop_gradient(b))
        for _ in range(_NEWTON_STEPS):  # traced, unlike the bisection, to give the derivative of the root
            bend = np.tanh(a + b)
            a = a - (a + wu * bend - target) / (1 + wu * (1 - bend**2))
        bend = np.tanh(a + b)
        return x - bend[:, None] * u, -np.log1p(wu * (1 - bend**2))


def _invertible(params: Tree) -> tuple[Array, Array]:
    """Return û and wᵀû, which is greater than -1."""
    w = params["w"]
    found = np.sum(w * params["u"])
    # The paper's appendix A.1: wᵀû = m(wᵀu) with m(a) = log(1 + eᵃ) - 1. The term 1e-30 is for w = 0.
    wu = np.logaddexp(0.0, found) - 1
    return params["u"] + (wu - found) * w / (np.sum(w**2) + 1e-30), wu


def _root(target: Array, wu: Array, b: Array) -> Array:
    """Solve a + wu·tanh(a + b) = target for a by bisection; the left side increases with a."""
    # Since |tanh| ≤ 1, the distance of the root from the target is at most |wu|.
    low, high = target - abs(wu) - 1e-9, target + abs(wu) + 1e-9
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        above = middle + wu * numpy.tanh(middle + b) > target
        low, high = numpy.where(above, low, middle), numpy.where(above, middle, high)
    return (low + high) / 2
