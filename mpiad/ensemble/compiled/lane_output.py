"""Where a lane of the forward kernel keeps its trajectory, and what visits lanes one by one: records, events, ends.

The step itself is that of `step_text`, whose scalars a lane loads from its fields of one buffer and stores there.

At the end of a step the events' conditions are computed in the loop over all lanes. Where one has changed its sign, the
part of the step at which it did is found.
"""

from __future__ import annotations

from functools import partial

from mpiad.compiling.source import indented
from mpiad.ensemble.compiled.jump_text import jump
from mpiad.ensemble.compiled.kernel_form import Fields, Form
from mpiad.ensemble.compiled.rosenbrock_text import steps_of
from mpiad.ensemble.controller import PIController
from mpiad.ensemble.outcome import ReturnCode

_STUCK = ReturnCode.DtLessThanMin.code


class LaneOutput:
    """The fields of the forward kernel's buffer, and lines on lanes of which something is kept."""

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
        # Errors, too, in double precision: their root decides the next step, which is a time.
        for name in ("q2", "accepted", "next", "event"):
            fields.add(name, exact=True)
        if self.beta is not None:
            fields.add("q2_before", exact=True)
        fields.add("new", d)
        # The last stage has a place of its own: of first-same-as-last pairs it is the next step's first.
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
        self.acts = any(acts >= 0 for acts in form.acting)
        if self.acts:  # when a trajectory went on after an event, when the last one was, and how many were short before
            for name in ("begun", "met", "short"):
                fields.add(name, exact=True)
            fields.add("side", len(form.events), exact=True)

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

    def put_out(self) -> list[str]:
        """Return lines on a lane where a state is to be saved, or where the trajectory ends."""
        at, form, d = self.at, self.form, self.form.d
        lines = ["i = ids[l]", f"took = {at('accepted')} > 0.0", f"tn = {at('tn')}"]
        if form.events:
            lines += ["first = np.inf", "if took:", *indented(self._events())]
        if form.affects is not None:  # what is saved at an event is what is after it
            lines += ["acted = False", f"while took and {at('due')} < tn:", *indented(self._saving()), *jump(self)]
        lines += [f"while took and {at('due')} <= tn:", *indented(self._saving())]
        lines += [
            *(["code = -1", *self.terminated()] if form.affects is None else []),
            f"if code < 0 and took and tn == {at('end')}:",
            f"    code = {ReturnCode.Success.code}",
            *self._failing(),
            f"if code < 0 and {at('tries')} >= max_steps:",
            f"    code = {ReturnCode.MaxIters.code}",
            "if code >= 0:",
            *indented([
                f"number = np.int64({at('number')} + {at('accepted')})",
                "codes[i] = code",
                "naccept[i] = number",
                f"nreject[i] = np.int64({at('tries')}) - number",
                f"t_reached[i] = {at('sign')} * (tn if took else {at('now')})",
                *[f"u_end[i, {c}] = {at('new', c)} if took else {at('u', c)}" for c in range(d)],
                *[
                    f"du_end[{j // d}, {j % d}, i] = {at('dnew', j)} if took else {at('du', j)}"
                    for j in range(d * len(form.directions))
                ],
                "ids[l] = -1",
                "vacant += 1",
                # Until another trajectory comes the lane takes steps of length zero.
                f"{at('live')} = 0.0",
                f"{at('end')} = tn",
                f"{at('next')} = 0.0",
            ]),
        ]  # fmt: skip
        return lines

    def terminated(self) -> list[str]:
        """Return lines on what ends a trajectory at an event."""
        if not any(terminal for terminal, _ in self.form.events):
            return []
        return ["if first < np.inf:", f"    code = {ReturnCode.Terminated.code}"]

    def _failing(self) -> list[str]:
        at = self.at
        if self.error is None:
            return ["elif not took:", f"    code = {ReturnCode.Unstable.code}"]
        return [
            f"elif {at('next')} < {at('least')}:",
            f"    now = tn if took else {at('now')}",
            "    least = 10.0 * (number_of(bits_of(now + 0.0) + (1 if now >= 0.0 else -1)) - now)",
            f"    if {at('next')} < least:",
            "        if took:",
            f"            {at('next')} = least",
            "        else:",
            f"            code = {_STUCK} if np.isfinite({at('q2')}) else {ReturnCode.Unstable.code}",
        ]

    def recorded(self) -> list[str]:
        """Return lines that write down the steps that were accepted."""
        at, form = self.at, self.form
        return [
            f"for l in range({form.lanes}):",
            f"    if {at('accepted')} > 0.0:",
            f"        rows[row, 0] = {at('sign')} * {at('now')}",
            f"        rows[row, 1] = {at('sign')} * {at('size')}",
            *[f"        rows[row, {c + 2}] = {at('u', c)}" for c in range(form.d)],
            "        before[row] = last[ids[l]]",
            "        last[ids[l]] = row",
            "        row += 1",
        ]

    def _saving(self) -> list[str]:
        at, form, d = self.at, self.form, self.form.d
        m = len(form.directions)
        at_end = [f"saved[i, place[l], {c}] = {at('new', c)}" for c in range(d)]
        at_end += [f"dsaved[{j // d}, i, place[l], {j % d}] = {at('dnew', j)}" for j in range(d * m) if form.inside]
        lines = []
        if form.inside:
            lines += [f"if {at('due')} < tn:", *indented(self._inside()), "else:", *indented(at_end)]
        else:
            lines += at_end
        # After an event it is that of the next step.
        number = f"np.int32({at('number')}{' + (1.0 if acted else 0.0)' if form.affects is not None else ''})"
        return [
            *lines,
            "if save_step.shape[0] > 0:",
            f"    save_step[i, place[l]] = {number}",
            *self.next_due(),
        ]

    def _inside(self) -> list[str]:
        """Return lines that interpolate."""
        at, form, steps, d = self.at, self.form, self.steps, self.form.d
        lines = [*self._signed_step(), f"x = ({at('due')} - {at('now')}) / {at('size')}", *steps.weights()]
        for c in range(d):
            lines += steps.interpolated(f"saved[i, place[l], {c}]", partial(self._stage, c=c), at("u", c))
        for j in range(len(form.directions)):
            for c in range(d):
                stage = lambda i, c=c, j=j: at("dk", (j * (form.stages + 1) + i) * d + c)  # noqa: E731
                lines += steps.interpolated(f"dsaved[{j}, i, place[l], {c}]", stage, at("du", j * d + c), fused=True)
        return lines

    def _signed_step(self) -> list[str]:
        return [f"h = {self.at('sign')} * {self.at('size')}", *self.steps.rounded_step()]

    def _stage(self, i: int, c: int) -> str:
        """Return the place of a stage's component, as source."""
        at, form = self.at, self.form
        return at("k", c) if i == 0 else at("last", c) if i == form.stages else at("inner", (i - 1) * form.d + c)

    # ---- events

    def conditions(self, target: str, state: str, time: str) -> list[str]:
        """Return lines that compute all conditions into fields of a lane."""
        lines = []
        for e in range(len(self.form.events)):
            lines += [self.steps.condition(e, "value", state, time), f"{self.at(target, e)} = value"]
        return lines

    def crossed(self, e: int) -> list[str]:
        """Return lines that tell whether the condition of event e has changed its sign as asked."""
        values = self.at("condition", e), self.at("condition_new", e)
        changed = self.steps.changed(e, *values)
        if e in self.form.sided:  # what leaves on one side comes back from there
            up, down = (self.steps.changed(e, *values, way) for way in (1, -1))
            side = self.at("side", e)
            changed = f"(({up} & ({side} <= 0.0)) | ({down} & ({side} >= 0.0)))"
        return [f"crossed{e} = where({changed}, accepted, 0.0)", f"{self.at('crossed', e)} = crossed{e}"]

    def _events(self) -> list[str]:
        """Return lines that find a step's events, note them, and cut the step short at the first terminal one.

        They make `first` the part of the step that is gone there, where there is one.
        """
        at, form, part, count = self.at, self.form, self.fields.any("part", "e"), len(self.form.events)
        terminal = [f"e == {e}" for e, (ends, _) in enumerate(form.events) if ends]
        lines = [
            *self._signed_step(),
            *[f"p{j} = {at('p', j)}" for j in range(form.varying)],
            # One loop for all: each event's own lines would have to be compiled, too.
            f"for e in range({count}):",
            f"    {part} = np.inf",
            f"    if {self.fields.any('crossed', 'e')} > 0.0:",
            *indented(self._located(), 2),
            f"        {part} = high",
            *([f"        if ({' or '.join(terminal)}) and high < first:", "            first = high"] if terminal else []),
            *(["noted = found"] if self.acts else []),
            f"for e in range({count}):",
            f"    if {part} < np.inf and {part} <= first:",
            *indented(self._noted(part), 2),
        ]
        return [*lines, "if first < np.inf:", *indented(self._cut())] if terminal else lines

    def _located(self) -> list[str]:
        at, value = self.at, []
        time = f"{at('sign')} * ({at('now')} + x * {at('size')})"
        for e in range(len(self.form.events)):
            value += [f"{'el' if e else ''}if e == {e}:", f"    {self.steps.condition(e, 'value', 'y', time)}"]
        ends = [
            f"{name} = {self.fields.any(field, 'e')}" for name, field in (("old", "condition"), ("late", "condition_new"))
        ]
        return [*ends, *self.steps.located(self._stage, partial(at, "u"), value)]

    def _noted(self, part: str) -> list[str]:
        """Return lines that write a row: see `kernel_rows`."""
        at = self.at
        row = ["i", "e", at("number"), part, f"{at('sign')} * min({at('now')} + {part} * {at('size')}, tn)"]
        row += [f"{at('sign')} * {at('now')}", f"{at('sign')} * {at('size')}", *[at("u", c) for c in range(self.form.d)]]
        return [*[f"crossings[found, {k}] = {text}" for k, text in enumerate(row)], "found += 1"]

    def _cut(self) -> list[str]:
        """Return lines that end the step at `first`."""
        at, lines = self.at, ["x = first", *self.steps.weights()]
        for c in range(self.form.d):
            lines += self.steps.interpolated(at("new", c), partial(self._stage, c=c), at("u", c))
        return [*lines, f"tn = min({at('now')} + x * {at('size')}, tn)", f"{at('tn')} = tn", "end_part[i] = x"]
