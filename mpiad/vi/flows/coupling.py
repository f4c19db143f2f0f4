"""Affine coupling layers: a small network of half of the coordinates scales and shifts the other half."""

from __future__ import annotations

import functools

import autograd.numpy as np
import numpy

from mpiad._typing import Array, Tree
from mpiad.device.numpy import concatenate
from mpiad.device.transfer import Constants


class AffineCoupling:
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

    def __init__(self, swap: bool = False, hidden: int = 32):
        self.swap, self.hidden = swap, hidden

    def initial(self, dim: int, rng: numpy.random.Generator) -> list[tuple[Array, Array]]:
        """Return the initial parameters of the network."""
        kept, changed = halves(dim, self.swap)
        return initial_network(length_of(kept), self.hidden, 2 * length_of(changed), rng)

    def forward(self, params: Tree, z: Array) -> tuple[Array, Array]:
        """Return the images, and log |det ∂x/∂z| at each point."""
        kept, changed = halves(z.shape[1], self.swap)
        scale, move = self._scale_and_shift(params, z[:, kept], length_of(changed))
        return joined(z[:, kept], z[:, changed] * np.exp(scale) + move, self.swap), np.sum(scale, axis=1)

    def inverse(self, params: Tree, x: Array) -> tuple[Array, Array]:
        """Return the preimages of points, and log |det ∂z/∂x| at each."""
        kept, changed = halves(x.shape[1], self.swap)
        scale, move = self._scale_and_shift(params, x[:, kept], length_of(changed))
        return joined(x[:, kept], (x[:, changed] - move) * np.exp(-scale), self.swap), -np.sum(scale, axis=1)

    def _scale_and_shift(self, params: Tree, kept: Array, count: int) -> tuple[Array, Array]:
        found = evaluated(params, kept)
        return 2 * np.tanh(found[:, :count] / 2), found[:, count:]  # limiting scales to e² keeps the fit stable


def halves(dim: int, swap: bool) -> tuple[slice, slice]:
    """Return the coordinates that a coupling layer keeps, and those that it changes; the latter are all if `dim` is one."""
    first, second = slice(0, dim // 2), slice(dim // 2, dim)
    return (second, first) if swap and dim > 1 else (first, second)


def length_of(part: slice) -> int:
    """Return the number of coordinates in a slice."""
    return part.stop - part.start


def joined(kept: Array, changed: Array, swap: bool) -> Array:
    """Concatenate the kept and the changed coordinates in their original order."""
    parts = (changed, kept) if swap and kept.shape[1] else (kept, changed)
    return concatenate(parts, axis=1)


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
