"""Gradients that are too long, shortened."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.transport.device_arrays import arrays_of

__all__ = ["clipped"]


def clipped(arrays: list[Array], longest: float | None) -> list[Array]:
    """Return arrays scaled, together, to a 2-norm of at most `longest` (Pascanu et al., 2013); in place.

    A norm that isn't finite is left as it is: the user sees NaN in the parameters, not a gradient that looks harmless.
    """
    if longest is None:
        return arrays
    norm = math.hypot(*_norms(arrays))  # which doesn't overflow where a sum of squares would
    # One that isn't finite stays as it is: scaled down it would look like a gradient.
    if longest < norm < math.inf:
        for array in arrays:
            array *= longest / norm
    return arrays


def _norms(arrays: list[Array]) -> list[float]:
    homes = [arrays_of(array) for array in arrays]
    norms = [_norm(array) for array, home in zip(arrays, homes) if home is None]
    # One copy from each device, since each copy makes the host wait.
    for home in set(homes) - {None}:
        norms += _norms_on(home, [array for array, own in zip(arrays, homes) if own == home])
    return norms


def _norms_on(home: Any, arrays: list[Array]) -> list[float]:
    """Return the norms of arrays on one device, by one copy of as many numbers."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = home.to_host(np.stack([np.vdot(array, array).real.astype(float) for array in arrays]))
        if np.isfinite(squares).all():
            return np.sqrt(squares).tolist()
        largest = home.to_host(np.stack([np.max(np.abs(array)).astype(float) for array in arrays]))
        if not np.isfinite(largest).all():
            return largest.tolist()
        # The squares are too large, not yet the gradient itself.
        # The least divisor is for gradients of zeros, which must not become NaN.
        scaled = [np.abs(array).astype(float) / size for array, size in zip(arrays, np.maximum(largest, 1e-300).tolist())]
        return (largest * np.sqrt(home.to_host(np.stack([np.sum(array * array) for array in scaled])))).tolist()


def _norm(array: Array) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        square = float(np.vdot(array, array).real)
    if square < math.inf:
        return math.sqrt(square)
    # The squares are too large, not yet the gradient itself.
    largest = float(np.max(np.abs(array)))
    return largest * math.sqrt(float(np.sum(np.abs(array / largest) ** 2))) if largest < math.inf else largest
