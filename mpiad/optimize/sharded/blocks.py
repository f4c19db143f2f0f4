"""Blocks of a vector that stay in cache while several things are done with them."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["blocks"]

# With 23 rows of doubles, as many as ten pairs make, three quarters of a megabyte: a core's own cache.
_LENGTH = 4096


def blocks(size: int) -> Iterator[slice]:
    """Yield slices that cover a vector of this size."""
    for start in range(0, size, _LENGTH):
        yield slice(start, min(start + _LENGTH, size))
