"""Random arrays in the shape and dtype of others."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.primitives.cotangents import spec_like

__all__ = ["noise_like"]


def noise_like(leaf: Array, rng: np.random.Generator) -> Any:
    """Return normally distributed numbers in the shape and dtype of an array or a number."""
    spec = spec_like(leaf)
    noise = rng.standard_normal(spec.shape)
    if spec.dtype.kind == "c":
        noise = noise + 1j * rng.standard_normal(spec.shape)
    noise = np.asarray(noise, dtype=spec.dtype)
    return noise[()] if spec.arrays is None else spec.arrays.to_device(noise)
