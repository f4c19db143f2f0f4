"""Gradients that are too long, shortened."""

from __future__ import annotations

import math

import numpy as np

from mpiad._typing import Array
from mpiad.transport.device_arrays import ArrayModule, arrays_of


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
    groups = [(home, [array for array, own in zip(arrays, homes) if own == home and array.size]) for home in set(homes)]
    return [norm for home, group in groups if group for norm in _norms_in(home, group)]


def _norms_in(home: ArrayModule | None, arrays: list[Array]) -> list[float]:
    """Return the norms of arrays in one place; of those on a device by one copy, since each makes the host wait."""

    def gathered(values: list[Array]) -> np.ndarray:
        return np.array(values, float) if home is None else home.to_host(np.stack([x.astype(float) for x in values]))

    with np.errstate(over="ignore", invalid="ignore"):
        squares = gathered([np.vdot(array, array).real for array in arrays])
        if np.isfinite(squares).all():
            return np.sqrt(squares).tolist()
        largest = gathered([np.max(np.abs(array)) for array in arrays])
        if not np.isfinite(largest).all():
            return largest.tolist()
        # The squares are too large, not yet the gradient itself.
        # The least divisor is for gradients of zeros, which must not become NaN.
        scaled = [np.abs(array).astype(float) / size for array, size in zip(arrays, np.maximum(largest, 1e-300).tolist())]
        return (largest * np.sqrt(gathered([np.sum(array * array) for array in scaled]))).tolist()
