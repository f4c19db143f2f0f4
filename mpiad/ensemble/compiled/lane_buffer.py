"""The buffer in which lanes of kernels keep their numbers: fields of one number for each lane."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.arguments import aligned
from mpiad.ensemble.compiled.kernel_form import Form

__all__ = ["Fields"]


class Fields:
    """Places in a flat buffer: each field is one number for each lane.

    With constant distances between fields in one buffer, the compiler can prove that they don't overlap. Of states in
    single precision, times have a buffer of their own.
    """

    def __init__(self, form: Form):
        self._lanes, self._apart = form.lanes, form.single
        self._places: dict[str, tuple[str, int, int]] = {}
        self.counts = {"b": 0, "exact": 0}

    def add(self, name: str, count: int = 1, exact: bool = False) -> None:
        """Make room for `count` fields of a name, which are double in any case where they are `exact`."""
        buffer = "exact" if exact and self._apart else "b"
        self._places[name] = buffer, self.counts[buffer], count
        self.counts[buffer] += count

    def part(self, name: str, size: int) -> int:
        """Make room for `size` numbers that lanes have one after the other, and return where it begins."""
        self.add(name, -(-size // self._lanes))
        return self._places[name][1] * self._lanes

    def room(self, dtype: np.dtype) -> tuple[Array, Array]:
        """Return the buffers: b, of the states' dtype, and `exact`."""
        b, exact = (self.counts[buffer] * self._lanes for buffer in ("b", "exact"))
        return aligned(b, dtype), aligned(exact, np.dtype(float))

    def at(self, name: str, i: int = 0) -> str:
        """Return the place of a lane's field, as source."""
        buffer, first, _ = self._places[name]
        offset = (first + i) * self._lanes
        return f"{buffer}[{offset} + l]" if offset else f"{buffer}[l]"

    def any(self, name: str, index: str) -> str:
        """Return the place of that field of a name whose number a local integer holds, as source."""
        buffer, first, _ = self._places[name]
        return f"{buffer}[({first} + {index}) * {self._lanes} + l]"

    def __iter__(self) -> Iterator[str]:
        """Return one line on each name."""
        for name, (buffer, first, size) in self._places.items():
            place = f"{first}" if size == 1 else f"{first}-{first + size - 1}"
            yield f"{place}: {name}" if buffer == "b" else f"{buffer} {place}: {name}"
