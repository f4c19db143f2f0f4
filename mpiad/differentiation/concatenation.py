"""Concatenation of several arrays to one vector, for messages, and for operations that take or return only one array."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import autograd.numpy as anp
import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array
from mpiad.device.assembly import concatenate
from mpiad.device.transfer import array_to_device, array_to_host
from mpiad.primitives.cotangents import conform
from mpiad.transport import Spec


class Concatenation:
    """The layout of a vector of flattened arrays: a dtype that represents all exactly; on a device if any array is."""

    def __init__(self, specs: Sequence[Spec]):
        self.specs = list(specs)
        self.dtype = np.result_type(*[spec.dtype for spec in specs]) if specs else np.dtype(float)
        self._device = next((spec.arrays for spec in specs if spec.arrays is not None), None)
        self._offsets = list(accumulate([math.prod(spec.shape) for spec in specs], initial=0))

    def vector(self, parts: Sequence[Array]) -> Array:
        """Return the vector of the given arrays, which may be traced."""
        flat = []
        for part, spec in zip(parts, self.specs):
            part = conform(part, spec.shape, self.dtype, spec.arrays)
            flat.append(anp.reshape(part if spec.arrays == self._device else array_to_device(part, self._device), (-1,)))
        if not flat:
            return np.zeros(0)
        if len(flat) == 1:
            return flat[0]
        return concatenate(flat) if any(map(isbox, flat)) else np.concatenate(flat)

    def rows(self, parts: Sequence[Array]) -> Array:
        """Return several vectors, shape (m, n), from host arrays that have an additional first axis."""
        return np.concatenate([np.reshape(part, (len(part), -1)) for part in parts], axis=1, dtype=self.dtype)

    def parts_of_rows(self, rows: Array) -> list[Array]:
        """Return the arrays contained in several vectors of host arrays, with an additional first axis."""
        places = zip(self._offsets, self._offsets[1:], self.specs)
        parts = [(rows[:, a:b].reshape(len(rows), *shape), dtype) for a, b, (shape, dtype, _) in places]
        return [(part if dtype.kind == "c" else part.real).astype(dtype, copy=False) for part, dtype in parts]

    def zeros(self) -> Array:
        """Return a vector of zeros."""
        return Spec((self._offsets[-1],), self.dtype, self._device).zeros()

    def parts(self, vector: Array) -> list[Array]:
        """Return the arrays contained in a vector."""
        return [self.part(vector, k) for k in range(len(self.specs))]

    def part(self, vector: Array, k: int) -> Array:
        """Return the array number k contained in a vector."""
        a, b, spec = *self._offsets[k : k + 2], self.specs[k]
        if a == b:
            return spec.zeros()
        if spec.shape:
            # Slicing the whole vector is avoided, since the adjoint would allocate an array.
            part = anp.reshape(vector if b - a == self._offsets[-1] else vector[a:b], spec.shape)
        else:
            part = vector[a]  # a number, as NumPy's functions return
        return conform(part if spec.arrays == self._device else array_to_host(part), *spec)
