"""Layers of flows that transform each coordinate with parameters that depend on other coordinates: affine or by splines.

Neural spline layers (Durkan et al., 2019) use rational-quadratic splines (Gregory and Delbourgo, 1982). The widths and
heights of the bins are softmaxes of unconstrained parameters, and the slopes at inner knots are softpluses. Outside of the
bins the spline is the identity, and the slopes at both ends are 1. If all parameters are zero, the spline is the identity
everywhere.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import autograd.numpy as np
import numpy

from mpiad._typing import Array, Tree
from mpiad.device.numpy import concatenate
from mpiad.device.transfer import Constants
from mpiad.primitives import stop_gradient


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
