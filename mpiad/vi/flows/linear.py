"""Linear layers whose inverse and determinant are cheap."""

from __future__ import annotations

from typing import Any

import autograd.numpy as np
import numpy

from mpiad._typing import Array, Tree

__all__ = ["LULinear"]


class LULinear:
    """x = P L U z + b, with a fixed permutation P, unit lower triangular L and upper triangular U (Oliva et al., 2018).

    Parameters
    ----------
    permute : bool
        Whether P is drawn at the start; otherwise it is the identity.

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

    def initial(self, dim: int, rng: numpy.random.Generator) -> dict[str, Any]:
        """Return parameters to start from; the permutation, integers, isn't fitted."""
        order = rng.permutation(dim) if self.permute else numpy.arange(dim)
        zeros = {name: numpy.zeros((dim, dim)) for name in ("lower", "upper")}
        return {**zeros, "log_diagonal": numpy.zeros(dim), "b": numpy.zeros(dim), "order": order}

    def forward(self, params: Tree, z: Array) -> tuple[Array, Array]:
        """Return the images, and log |det ∂x/∂z| at each point."""
        lower, upper = _factors(params)
        x = (z @ upper.T @ lower.T)[:, params["order"]] + params["b"]
        # P and L have determinants of size one, so U's diagonal is all; once for each point.
        return x, np.sum(params["log_diagonal"]) + np.zeros_like(z[:, 0])

    def inverse(self, params: Tree, x: Array) -> tuple[Array, Array]:
        """Return the points whose images these are, and log |det ∂z/∂x| at each."""
        lower, upper = _factors(params)
        back = numpy.argsort(params["order"])
        y = (x - params["b"])[:, back].T
        z = np.linalg.solve(upper, np.linalg.solve(lower, y)).T
        return z, -np.sum(params["log_diagonal"]) + np.zeros_like(x[:, 0])


def _factors(params: Tree) -> tuple[Array, Array]:
    lower = np.tril(params["lower"], -1) + np.diag(np.ones_like(params["b"]))
    return lower, np.triu(params["upper"], 1) + np.diag(np.exp(params["log_diagonal"]))
