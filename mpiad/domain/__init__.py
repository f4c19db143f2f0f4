"""Grids that are divided among the ranks: blocks, halo exchange, scatter and gather."""

from mpiad.domain.domain import Domain

__all__ = ["Domain"]
__dir__ = __all__.copy
