"""Gradients that are too long, shortened."""

from __future__ import annotations

import math

import numpy as np

from mpiad._typing import Array

__all__ = ["clipped"]


def clipped(arrays: list[Array], longest: float | None) -> list[Array]:
    """Return arrays scaled, together, to a 2-norm of at most `longest` (Pascanu et al., 2013); in place.

    A norm that isn't finite is left as it is: the user sees NaN in the parameters, not a gradient that looks harmless.
    """
    if longest is None:
        return arrays
    norm = math.hypot(*[_norm(array) for array in arrays])
    if longest < norm < math.inf:
        for array in arrays:
            array *= longest / norm
    return arrays


def _norm(array: Array) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        square = float(np.vdot(array, array).real)
    if square < math.inf:
        return math.sqrt(square)
    # The squares are too large, not yet the gradient itself.
    largest = float(np.max(np.abs(array)))
    return largest * math.sqrt(float(np.sum(np.abs(array / largest) ** 2))) if largest < math.inf else largest
