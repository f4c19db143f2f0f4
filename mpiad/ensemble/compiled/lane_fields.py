"""What the parts of the forward kernel's source share: the fields of a lane, and the saved times."""

from __future__ import annotations

from mpiad.ensemble.compiled.kernel_form import Fields, Form
from mpiad.ensemble.compiled.step_text import Steps
from mpiad.ensemble.controller import PIController

__all__ = ["Lanes"]


class Lanes:
    """The fields of the forward kernel's buffer.

    Parameters
    ----------
    form : Form
    """

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

    def atol(self, c: int) -> str:
        """Return the absolute tolerance of a state's number, as source."""
        return f"atol{c}" if self.form.tolerances else "atol0"

    def tangents(self) -> list[tuple[int, int, int]]:
        """Return the tangents' fields: direction, component, and the number of both."""
        d = self.form.d
        return [(j // d, j % d, j) for j in range(d * len(self.form.directions))]

    def next_due(self) -> list[str]:
        """Return lines that go on to a lane's next saved time."""
        at = self.at
        return [
            "place[l] += 1",
            f"{at('due')} = np.inf",
            "if place[l] < n_saved:",
            f"    {at('due')} = {at('sign')} * times[i if by_row else 0, place[l]]",
        ]
