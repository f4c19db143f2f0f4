"""Planar layers: a bend along one direction."""

from __future__ import annotations

from typing import Any

import autograd.numpy as np
import numpy

from mpiad._typing import Array, Tree
from mpiad.primitives import stop

__all__ = ["Planar"]

_BISECTIONS, _NEWTON_STEPS = 60, 2  # halves of the bracket down to rounding; what Newton adds is below


class Planar:
    """x = z + û tanh(wᵀz + b), with û so that it is invertible (Rezende and Mohamed, 2015, and its appendix).

    The inverse finds wᵀz as the root of a monotone function of one variable.

    Examples
    --------
    >>> from mpiad.vi import Planar
    >>> layer, z = Planar(), np.random.default_rng(1).standard_normal((5, 2))
    >>> params = layer.initial(2, np.random.default_rng(0))
    >>> print(np.allclose(layer.inverse(params, layer.forward(params, z)[0])[0], z))
    True
    """

    def initial(self, dim: int, rng: numpy.random.Generator) -> dict[str, Any]:
        """Return parameters to start from."""
        return {"u": 0.01 * rng.normal(size=dim), "w": rng.normal(size=dim) / dim**0.5, "b": np.zeros(())}

    def forward(self, params: Tree, z: Array) -> tuple[Array, Array]:
        """Return the images, and log |det ∂x/∂z| at each point."""
        u, along = _invertible(params)
        bend = np.tanh(z @ params["w"] + params["b"])
        # By the lemma of the determinant: I + û hwᵀ has 1 + h wᵀû, above zero since wᵀû is above -1; so without its size.
        return z + bend[:, None] * u, np.log1p(along * (1 - bend**2))

    def inverse(self, params: Tree, x: Array) -> tuple[Array, Array]:
        """Return the points whose images these are, and log |det ∂z/∂x| at each."""
        u, along = _invertible(params)
        w, b = params["w"], params["b"]
        target = x @ w
        a = _root(stop(target), stop(along), stop(b))
        for _ in range(_NEWTON_STEPS):  # for the last digits, and for the derivative of the root
            bend = np.tanh(a + b)
            a = a - (a + along * bend - target) / (1 + along * (1 - bend**2))
        bend = np.tanh(a + b)
        return x - bend[:, None] * u, -np.log1p(along * (1 - bend**2))


def _invertible(params: Tree) -> tuple[Array, Array]:
    """Return û and wᵀû, above -1."""
    w = params["w"]
    found = np.sum(w * params["u"])
    # The paper's appendix A.1: wᵀû = m(wᵀu) with m(a) = log(1 + eᵃ) - 1. A w of zero must not divide by zero.
    along = np.logaddexp(0.0, found) - 1
    return params["u"] + (along - found) * w / (np.sum(w**2) + 1e-30), along


def _root(target: Array, along: Array, b: Array) -> Array:
    """Return a with a + along·tanh(a + b) = target, which grows with a, by bisection."""
    # tanh is at most one in size, so the root is no further from the target than |along|.
    low, high = target - abs(along) - 1e-9, target + abs(along) + 1e-9
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        above = middle + along * numpy.tanh(middle + b) > target
        low, high = numpy.where(above, low, middle), numpy.where(above, middle, high)
    return (low + high) / 2
