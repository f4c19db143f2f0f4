"""Where a lane of a CPU kernel keeps its trajectory: fields of one buffer.

The step itself is that of `step_text`, whose scalars a lane loads from its fields and stores there.
"""

from __future__ import annotations

from mpiad.ensemble.compiled.kernel_form import Form
from mpiad.ensemble.compiled.lane_buffer import Fields
from mpiad.ensemble.compiled.rosenbrock_text import steps_of
from mpiad.ensemble.controller import PIController

__all__ = ["Lanes"]


class Lanes:
    """The fields of the forward kernel's buffer."""

    def __init__(self, form: Form):
        self.form = form
        self.error = form.tableau.error
        controller = form.controller
        # Of a controller that remembers the error before.
        self.beta = controller.beta if isinstance(controller, PIController) else None
        d, m = form.d, len(form.directions)
        self.fields = fields = Fields(form)
        self.steps = steps_of(form, fields)
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
