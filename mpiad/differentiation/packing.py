"""Several arrays as one vector, and back: for operators that return, or are differentiated by, one array."""

from __future__ import annotations

from collections.abc import Sequence

import autograd.numpy as anp
import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array
from mpiad.device.assembly import concatenate
from mpiad.primitives.cotangents import conform
from mpiad.transport import Spec

__all__ = ["Packing"]


class Packing:
    """Arrays one behind the other, in the dtype that holds them all without loss.

    Parameters
    ----------
    specs : sequence of Spec
        Shapes and dtypes of the arrays.
    """

    def __init__(self, specs: Sequence[Spec]):
        self.specs = list(specs)
        self.dtype = np.result_type(*[spec.dtype for spec in specs]) if specs else np.dtype(float)
        self._cuts = np.cumsum([0] + [int(np.prod(spec.shape)) for spec in specs]).tolist()

    def vector(self, parts: Sequence[Array]) -> Array:
        """Return the vector of such arrays, traced or not."""
        flat = [anp.reshape(conform(part, spec.shape, self.dtype), (-1,)) for part, spec in zip(parts, self.specs)]
        if not flat:
            return np.zeros(0)
        if len(flat) == 1:
            return flat[0]
        return concatenate(flat) if any(map(isbox, flat)) else np.concatenate(flat)

    def parts(self, vector: Array) -> list[Array]:
        """Return the arrays of such a vector."""
        cuts = zip(self._cuts, self._cuts[1:], self.specs)
        return [conform(anp.reshape(vector[a:b], spec.shape), *spec) for a, b, spec in cuts]
