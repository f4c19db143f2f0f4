"""Where a lane of a CPU kernel keeps its trajectory: fields of one buffer.

The step itself is that of `step_text`, whose scalars a lane loads from its fields and stores there.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.arguments import aligned
from mpiad.ensemble.compiled.kernel_form import Form
from mpiad.ensemble.compiled.step_text import Steps
from mpiad.ensemble.controller import PIController

__all__ = ["Fields", "Lanes"]


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


class Lanes:
    """The fields of the forward kernel's buffer."""

    def __init__(self, form: Form):
        self.form, self.steps = form, Steps(form)
        self.error = form.tableau.error
        controller = form.controller
        # Of a controller that remembers the error before.
        self.beta = controller.beta if isinstance(controller, PIController) else None
        d, m = form.d, len(form.directions)
        self.fields = fields = Fields(form)
        fields.add("u", d)
        fields.add("k", d)
        fields.add("p", form.varying)
        for name in ("now", "tn", "sign", "size", "end", "due", "least", "live", "rejected", "tries", "number"):
            fields.add(name, exact=True)
        for name in ("q2", "accepted", "next", "event"):
            fields.add(name, exact=True)
        if self.beta is not None:
            fields.add("q2_before", exact=True)
        fields.add("new", d)
        fields.add("last", d)
        if form.inside:
            fields.add("inner", d * (form.stages - 1))
        fields.add("du", d * m)
        fields.add("dnew", d * m)
        if form.inside:
            fields.add("dk", d * m * (form.stages + 1))
        if form.events:
            for name in ("condition", "condition_new", "crossed", "part"):
                fields.add(name, len(form.events), exact=True)

    def at(self, name: str, i: int = 0) -> str:
        """Return the place of a lane's field, as source."""
        return self.fields.at(name, i)

    def next_due(self) -> list[str]:
        """Return lines that go on to a lane's next saved time."""
        at = self.at
        return [
            "place[l] += 1",
            f"{at('due')} = np.inf",
            "if place[l] < n_saved:",
            f"    {at('due')} = {at('sign')} * times[i if by_row else 0, place[l]]",
        ]
