"""Neural spline layers (Durkan et al., 2019): each coordinate goes through a monotone spline that the others choose."""

from __future__ import annotations

import autograd.numpy as np
import numpy

from mpiad._typing import Array, Tree
from mpiad.device.numpy import concatenate
from mpiad.vi.flows.coupling import evaluated, initial_network, joined, length_of, masked_network, parted
from mpiad.vi.flows.rational_quadratic import numbers_per_spline, spline, spline_inverse

__all__ = ["SplineAutoregressive", "SplineCoupling"]


class SplineCoupling:
    """Half of the coordinates goes through rational-quadratic splines whose knots the other half chooses.

    Parameters
    ----------
    bins : int
    bound : float
        Splines cover [-bound, bound]; beyond, the map is the identity.
    swap : bool
        Whether the first half is changed instead of the second.
    hidden : int
        Units in each of the network's two hidden layers.

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

    def initial(self, dim: int, rng: numpy.random.Generator) -> list[tuple[Array, Array]]:
        """Return the network at the start."""
        kept, changed = parted(dim, self.swap)
        return initial_network(length_of(kept), self.hidden, length_of(changed) * numbers_per_spline(self.bins), rng)

    def forward(self, params: Tree, z: Array) -> tuple[Array, Array]:
        """Return the images, and log |det ∂x/∂z| at each point."""
        return self._through(spline, params, z)

    def inverse(self, params: Tree, x: Array) -> tuple[Array, Array]:
        """Return the points whose images these are, and log |det ∂z/∂x| at each."""
        return self._through(spline_inverse, params, x)

    def _through(self, fun: object, params: Tree, x: Array) -> tuple[Array, Array]:
        kept, changed = parted(x.shape[1], self.swap)
        knots = np.reshape(evaluated(params, x[:, kept]), (len(x), length_of(changed), -1))
        y, change = fun(x[:, changed], knots, self.bins, self.bound)  # type: ignore[operator]
        return joined(x[:, kept], y, self.swap), np.sum(change, axis=1)


class SplineAutoregressive:
    """Each coordinate goes through a rational-quadratic spline whose knots the coordinates before it choose.

    Draws take one pass; the inverse, which `log_prob` of given points needs, one for each coordinate.

    Parameters
    ----------
    bins : int
    bound : float
    hidden : int
        All as for `SplineCoupling`.

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
        """Return the network at the start."""
        return initial_network(dim, self.hidden, dim * numbers_per_spline(self.bins), rng)

    def forward(self, params: Tree, z: Array) -> tuple[Array, Array]:
        """Return the images, and log |det ∂x/∂z| at each point."""
        x, change = spline(z, self._knots(params, z), self.bins, self.bound)
        return x, np.sum(change, axis=1)

    def inverse(self, params: Tree, x: Array) -> tuple[Array, Array]:
        """Return the points whose images these are, and log |det ∂z/∂x| at each."""
        dim = x.shape[1]
        z = np.zeros_like(x)
        # Coordinate k needs those before it, which the passes before have found.
        for k in range(dim):
            found, change = spline_inverse(x, self._knots(params, z), self.bins, self.bound)
            z = concatenate([found[:, : k + 1], np.zeros_like(found[:, k + 1 :])], axis=1)
        return z, np.sum(change, axis=1)

    def _knots(self, params: Tree, z: Array) -> Array:
        dim = z.shape[1]
        masks = masked_network(dim, self.hidden, numbers_per_spline(self.bins))
        return np.reshape(evaluated(params, z, masks), (len(z), dim, -1))
