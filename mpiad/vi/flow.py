"""`Flow`: a posterior that transforms standard normal noise by invertible layers, and these layers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import autograd.numpy as np
import numpy

from mpiad._typing import Array, Tree
from mpiad.device.numpy import concatenate
from mpiad.device.transfer import Constants
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


# Layers of flows that transform each coordinate with parameters that depend on other coordinates: affine or by splines.
#
# Neural spline layers (Durkan et al., 2019) use rational-quadratic splines (Gregory and Delbourgo, 1982). The widths and
# heights of the bins are softmaxes of unconstrained parameters, and the slopes at inner knots are softpluses. Outside of
# the bins the spline is the identity, and the slopes at both ends are 1. If all parameters are zero, the spline is the
# identity everywhere.


class _Coupling:
    """A layer that changes half of the coordinates by maps whose parameters a network computes from the other half."""

    swap: bool
    hidden: int
    per_coordinate: int  # the number of the network's outputs for each changed coordinate

    def _map(self, x: Array, outputs: Array, inverse: bool) -> tuple[Array, Array]:
        """Return the images of the changed half, or the preimages, and the logarithms of the slopes."""
        raise NotImplementedError

    def initial(self, dim: int, rng: numpy.random.Generator) -> list[tuple[Array, Array]]:
        """Return the initial parameters of the network."""
        kept, changed = self._halves(dim)
        return initial_network(
            kept.stop - kept.start, self.hidden, self.per_coordinate * (changed.stop - changed.start), rng
        )

    def forward(self, params: Tree, z: Array) -> tuple[Array, Array]:
        """Return the images, and log |det ∂x/∂z| at each point."""
        return self._mapped(params, z, False)

    def inverse(self, params: Tree, x: Array) -> tuple[Array, Array]:
        """Return the preimages of points, and log |det ∂z/∂x| at each."""
        return self._mapped(params, x, True)

    def _mapped(self, params: Tree, x: Array, inverse: bool) -> tuple[Array, Array]:
        kept, changed = self._halves(x.shape[1])
        y, log_slopes = self._map(x[:, changed], evaluated(params, x[:, kept]), inverse)
        parts = (y, x[:, kept]) if kept.start else (x[:, kept], y)
        return concatenate(parts, axis=1), np.sum(log_slopes, axis=1)

    def _halves(self, dim: int) -> tuple[slice, slice]:
        # If there is only one coordinate, it is changed.
        first, second = slice(0, dim // 2), slice(dim // 2, dim)
        return (second, first) if self.swap and dim > 1 else (first, second)


class AffineCoupling(_Coupling):
    """The layer of Real NVP (Dinh et al., 2017): x_b = z_b exp(s(z_a)) + t(z_a), x_a = z_a.

    Parameters
    ----------
    swap : bool
        Whether the first half of the coordinates is changed instead of the second.
    hidden : int
        The number of units in each of the network's two hidden layers.

    Examples
    --------
    >>> from mpiad.vi import AffineCoupling
    >>> layer, z = AffineCoupling(hidden=8), np.random.default_rng(1).standard_normal((5, 3))
    >>> params = layer.initial(3, np.random.default_rng(0))
    >>> x, volume = layer.forward(params, z)
    >>> print(np.array_equal(x[:, 0], z[:, 0]), np.allclose(layer.inverse(params, x)[1], -volume))
    True True
    """

    per_coordinate = 2

    def __init__(self, swap: bool = False, hidden: int = 32):
        self.swap, self.hidden = swap, hidden

    def _map(self, x: Array, outputs: Array, inverse: bool) -> tuple[Array, Array]:
        count = outputs.shape[1] // 2
        scale = 2 * np.tanh(outputs[:, :count] / 2)  # limiting scales to e² keeps the fit stable
        move = outputs[:, count:]
        return ((x - move) * np.exp(-scale), -scale) if inverse else (x * np.exp(scale) + move, scale)


def initial_network(inputs: int, hidden: int, outputs: int, rng: numpy.random.Generator) -> list[tuple[Array, Array]]:
    """Return weights and biases of a network with two hidden layers, whose outputs are zero."""
    sizes = [inputs, hidden, hidden, outputs]
    # Divided by the square root of the number of inputs, so that activations don't grow with this number.
    weights = [rng.normal(size=(n, m)) / max(n, 1) ** 0.5 for n, m in zip(sizes, sizes[1:])]
    weights[-1] *= 0
    return [(w, numpy.zeros(w.shape[1])) for w in weights]


def evaluated(network: list[tuple[Array, Array]], x: Array, masks: Constants | None = None) -> Array:
    """Return the network's outputs at points of shape (S, inputs); weights are multiplied by the masks, if given."""
    factors = None if masks is None else masks.like(network[0][0])
    for k, (w, b) in enumerate(network):
        x = x @ (w if factors is None else w * factors[k]) + b
        if k < len(network) - 1:
            x = np.tanh(x)
    return x


@functools.lru_cache(maxsize=64)
def masked_network(dim: int, hidden: int, per_output: int) -> Constants:
    """Return masks with which `per_output` outputs for each input depend only on earlier inputs (Germain et al., 2015)."""
    degrees = numpy.arange(hidden) % max(dim, 1)  # hidden unit k depends on the first `degrees[k]` inputs
    first = numpy.arange(dim)[:, None] < degrees[None, :]
    middle = degrees[:, None] <= degrees[None, :]
    last = degrees[:, None] <= numpy.repeat(numpy.arange(dim), per_output)[None, :]
    return Constants(*[mask.astype(float) for mask in (first, middle, last)])


# Lower bounds of bin lengths (fractions of the interval) and of slopes, for a well-conditioned inverse.
_MIN_BIN, _MIN_SLOPE = 1e-3, 1e-3
# With this offset, parameters of zero give slopes of one.
_SLOPE_OFFSET = float(numpy.log(numpy.expm1(1 - _MIN_SLOPE)))


class SplineCoupling(_Coupling):
    """Apply rational-quadratic splines to half of the coordinates, with knots that depend on the other half.

    Parameters
    ----------
    bins : int
        The number of bins of a spline.
    bound : float
        The bins of a spline cover [-bound, bound]; outside of this interval the map is the identity.
    swap : bool
        Whether the first half is changed instead of the second.
    hidden : int
        The number of units in each of the network's two hidden layers.

    Examples
    --------
    >>> from mpiad.vi import SplineCoupling
    >>> layer, z = SplineCoupling(bins=4, hidden=8), np.array([[0.5, -1.0], [0.5, 10.0]])
    >>> params = layer.initial(2, np.random.default_rng(0))
    >>> x, _ = layer.forward(params, z)
    >>> print(x[1], np.allclose(layer.inverse(params, x)[0], z))
    [ 0.5 10. ] True
    """

    def __init__(self, bins: int = 8, bound: float = 4.0, swap: bool = False, hidden: int = 32):
        self.bins, self.bound, self.swap, self.hidden = bins, bound, swap, hidden
        self.per_coordinate = parameters_per_spline(bins)

    def _map(self, x: Array, outputs: Array, inverse: bool) -> tuple[Array, Array]:
        return spline(x, np.reshape(outputs, (*x.shape, -1)), self.bins, self.bound, inverse)


class SplineAutoregressive:
    """Apply a rational-quadratic spline to each coordinate, with knots that depend on the coordinates before it.

    The forward map takes one pass through the network. The inverse, which `log_prob` uses, takes one pass per coordinate.

    Parameters
    ----------
    bins, bound, hidden
        As for `SplineCoupling`.

    Examples
    --------
    >>> from mpiad.vi import SplineAutoregressive
    >>> layer, z = SplineAutoregressive(bins=4, hidden=8), np.array([[0.5, -1.0], [0.5, 1.0]])
    >>> params = layer.initial(2, np.random.default_rng(0))
    >>> x, _ = layer.forward(params, z)
    >>> print(x[0, 0] == x[1, 0], np.allclose(layer.inverse(params, x)[0], z))
    True True
    """

    def __init__(self, bins: int = 8, bound: float = 4.0, hidden: int = 32):
        self.bins, self.bound, self.hidden = bins, bound, hidden

    def initial(self, dim: int, rng: numpy.random.Generator) -> list[tuple[Array, Array]]:
        """Return the initial parameters of the network."""
        return initial_network(dim, self.hidden, dim * parameters_per_spline(self.bins), rng)

    def forward(self, params: Tree, z: Array) -> tuple[Array, Array]:
        """Return the images, and log |det ∂x/∂z| at each point."""
        x, log_slopes = spline(z, self._numbers(params, z), self.bins, self.bound)
        return x, np.sum(log_slopes, axis=1)

    def inverse(self, params: Tree, x: Array) -> tuple[Array, Array]:
        """Return the preimages of points, and log |det ∂z/∂x| at each."""
        dim = x.shape[1]
        z = np.zeros_like(x)
        # Pass k computes coordinate k from the coordinates before it.
        for k in range(dim):
            found, log_slopes = spline(x, self._numbers(params, z), self.bins, self.bound, inverse=True)
            z = concatenate([found[:, : k + 1], np.zeros_like(found[:, k + 1 :])], axis=1)
        return z, np.sum(log_slopes, axis=1)

    def _numbers(self, params: Tree, z: Array) -> Array:
        dim = z.shape[1]
        masks = masked_network(dim, self.hidden, parameters_per_spline(self.bins))
        return np.reshape(evaluated(params, z, masks), (len(z), dim, -1))


class _Bin(NamedTuple):
    x: Array  # left end
    width: Array
    y: Array  # value at the left end
    height: Array
    left: Array  # slope at the left end
    right: Array  # slope at the right end
    inside: Array  # whether the point lies in any bin


def parameters_per_spline(bins: int) -> int:
    """Return the number of unconstrained parameters of a spline."""
    return 3 * bins - 1


def spline(x: Array, numbers: Array, bins: int, bound: float, inverse: bool = False) -> tuple[Array, Array]:
    """Return splines at x, or the points at which they have the values x, and the logarithms of this map's slopes.

    The last axis of `numbers` contains `parameters_per_spline` raw parameters.
    """
    b = _bin_of(x, numbers, bins, bound, of_values=inverse)
    slope = b.height / b.width
    bend = b.left + b.right - 2 * slope
    # The formulas must also be finite outside of the bins, since 0 · NaN in the adjoint of `where` is NaN.
    if inverse:
        offset = np.where(b.inside, x - b.y, b.height / 2)
        a2 = b.height * (slope - b.left) + offset * bend
        a1 = b.height * b.left - offset * bend
        a0 = -slope * offset
        # The root between 0 and 1 of a quadratic equation, in the form without cancellation.
        fraction = 2 * a0 / (-a1 - np.sqrt(a1**2 - 4 * a2 * a0))
    else:
        fraction = np.where(b.inside, (x - b.x) / b.width, 0.5)
    complement = 1 - fraction
    denominator = slope + bend * fraction * complement
    numerator = b.right * fraction**2 + 2 * slope * fraction * complement + b.left * complement**2
    log_slope = 2 * np.log(slope) + np.log(numerator) - 2 * np.log(denominator)
    if inverse:
        y, log_slope = b.x + fraction * b.width, -log_slope
    else:
        y = b.y + b.height * fraction * (slope * fraction + b.left * complement) / denominator
    return np.where(b.inside, y, x), np.where(b.inside, log_slope, 0.0)


def _bin_of(x: Array, numbers: Array, bins: int, bound: float, of_values: bool) -> _Bin:
    widths = _bin_lengths(numbers[..., :bins], bound)
    heights = _bin_lengths(numbers[..., bins : 2 * bins], bound)
    inner = _MIN_SLOPE + np.logaddexp(0.0, numbers[..., 2 * bins :] + _SLOPE_OFFSET)
    ends = np.ones_like(inner[..., :1])
    slopes = concatenate([ends, inner, ends], axis=-1)
    lefts, bottoms = _starts(widths, bound), _starts(heights, bound)
    # Not traced, since the bin of a point is constant almost everywhere.
    starts = stop_gradient(bottoms if of_values else lefts)
    points = stop_gradient(x)
    # A point belongs to the last bin that starts at or before it; points below all bins belong to the first bin.
    reached = points[..., None] >= starts[..., 1:]
    first, none = numpy.ones_like(points[..., None], dtype=bool), numpy.zeros_like(points[..., None], dtype=bool)
    chosen = numpy.concatenate([first, reached], axis=-1) & ~numpy.concatenate([reached, none], axis=-1)
    found = [lefts, widths, bottoms, heights, slopes[..., :-1], slopes[..., 1:]]
    return _Bin._make([*[np.sum(values * chosen, axis=-1) for values in found], (points > -bound) & (points < bound)])


def _bin_lengths(numbers: Array, bound: float) -> Array:
    """Return positive lengths whose sum is 2·bound."""
    exponentials = np.exp(numbers - np.max(numbers, axis=-1, keepdims=True))
    shares = exponentials / np.sum(exponentials, axis=-1, keepdims=True)
    return 2 * bound * (_MIN_BIN + (1 - _MIN_BIN * numbers.shape[-1]) * shares)


def _starts(lengths: Array, bound: float) -> Array:
    return np.cumsum(lengths, axis=-1) - lengths - bound
