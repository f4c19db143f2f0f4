"""What a posterior must offer."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from mpiad._typing import Array, Tree

__all__ = ["Posterior", "checked_dimension"]


class Posterior(Protocol):
    """A family of distributions over parameters θ, given by variational parameters: any nest of arrays.

    Attributes
    ----------
    dim : int
        The number of entries of θ.
    """

    dim: int

    def initial(self, rng: np.random.Generator) -> Tree:
        """Return variational parameters to start from."""
        ...

    def draw(self, params: Tree, noise: Array) -> tuple[Array, Array]:
        """Return draws made of standard normal noise, both of shape (S, dim), and their log densities (S,)."""
        ...

    def log_prob(self, params: Tree, theta: Array) -> Array:
        """Return the log densities of points of shape (S, dim)."""
        ...


def checked_dimension(dim: object, name: str) -> int:
    """Return the number of parameters; raise a ValueError where it is no positive integer."""
    if isinstance(dim, bool) or not isinstance(dim, (int, np.integer)) or dim < 1:
        raise ValueError(f"{name}: dim must be an integer above zero, but got {dim!r}.")
    return int(dim)
