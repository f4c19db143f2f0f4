"""The part of the forward kernel's source that looks inside steps: states at any part of one, and events.

At the end of a step the conditions are computed in the loop over all lanes. Where one has changed its sign, the part of the
step at which it did is found by bisection as `EventWatch` finds it, in the same order of operations.
"""

from __future__ import annotations

from mpiad.compiling.source import indented, number
from mpiad.ensemble.compiled.lane_fields import Lanes
from mpiad.ensemble.events import BISECTIONS

__all__ = ["Locating"]


class Locating(Lanes):
    """Lines on what lies inside a lane's step."""

    # ---- states

    def step_lines(self) -> list[str]:
        """Return lines on the signed step `h` of a lane."""
        return [f"h = {self.at('sign')} * {self.at('size')}", *self.steps.rounded_step()]

    def weights(self) -> list[str]:
        """Return lines on the stages' weights at the part `x` of the step."""
        dense, lines = self.form.tableau.dense, []
        for i in self.used():
            text = number(dense[i][-1]) + " * x"
            for weight in dense[i][-2::-1]:
                text = f"({text} + {number(weight)}) * x"
            lines.append(f"w{i} = {self.steps.rounded(text)}")
        return lines

    def used(self) -> list[int]:
        """Return the stages that the interpolant is made of."""
        return [i for i, row in enumerate(self.form.tableau.dense) if row.any()]

    def stage(self, i: int, c: int) -> str:
        """Return the place of a stage's component, as source."""
        at, form = self.at, self.form
        return at("k", c) if i == 0 else at("last", c) if i == form.stages else at("inner", (i - 1) * form.d + c)

    def interpolated(self, c: int, target: str) -> list[str]:
        """Return lines that give a component of the state, with the weights known, to `target`."""
        lines = total_lines(self.used(), lambda i: self.stage(i, c))
        return [*lines, f"{target} = total * {self.steps.h} + {self.at('u', c)}"]

    # ---- events

    def condition(self, e: int, out: str, state: str, time: str) -> str:
        """Return a line that computes the condition of event e."""
        given = [*self.steps.state(state), *self.steps.parameters, self.steps.rounded(time)]
        return f"{out}, = condition{e}({', '.join(given)})"

    def conditions(self, target: str, state: str, time: str) -> list[str]:
        """Return lines that compute all conditions into fields of a lane."""
        lines = []
        for e in range(len(self.form.events)):
            lines += [self.condition(e, "value", state, time), f"{self.at(target, e)} = value"]
        return lines

    def crossed(self, e: int) -> list[str]:
        """Return a line that tells whether the condition of event e has changed its sign as asked: see `Event.crossed`."""
        before, after = self.at("condition", e), self.at("condition_new", e)
        up, down = f"(({before} < 0.0) & ({after} >= 0.0))", f"(({before} > 0.0) & ({after} <= 0.0))"
        direction = self.form.events[e][1]
        changed = up if direction > 0 else down if direction < 0 else f"({up} | {down})"
        return [f"crossed{e} = where({changed}, accepted, 0.0)", f"{self.at('crossed', e)} = crossed{e}"]

    def happened(self) -> list[str]:
        """Return lines that find a step's events, note them, and cut the step short at the first terminal one.

        They make `first` the part of the step that is gone there, where there is one.
        """
        at, form, part, count = self.at, self.form, self.fields.any("part", "e"), len(self.form.events)
        terminal = [f"e == {e}" for e, (ends, _) in enumerate(form.events) if ends]
        lines = [
            *self.step_lines(),
            *[f"p{j} = {at('p', j)}" for j in range(form.varying)],
            # One loop for all: each event's own lines would have to be compiled, too.
            f"for e in range({count}):",
            f"    {part} = np.inf",
            f"    if {self.fields.any('crossed', 'e')} > 0.0:",
            *indented(self._bisected(), 2),
            f"        {part} = high",
            *([f"        if ({' or '.join(terminal)}) and high < first:", "            first = high"] if terminal else []),
            f"for e in range({count}):",
            f"    if {part} < np.inf and {part} <= first:",
            *indented(self._noted(part), 2),
        ]
        return [*lines, "if first < np.inf:", *indented(self._cut())] if terminal else lines

    def _bisected(self) -> list[str]:
        at, form = self.at, self.form
        inner = ["x = 0.5 * (low + high)", "if x <= low or x >= high:", "    break", *self.weights()]
        for c in range(form.d):
            inner += self.interpolated(c, f"y_{c}")
        time = f"{at('sign')} * ({at('now')} + x * {at('size')})"
        for e in range(len(form.events)):
            inner += [f"{'el' if e else ''}if e == {e}:", f"    {self.condition(e, 'value', 'y', time)}"]
        inner += ["if (value > 0.0) if old > 0.0 else (value < 0.0):", "    low = x", "else:", "    high = x"]
        old = f"old = {self.fields.any('condition', 'e')}"
        # Down to the resolution of time.
        return [old, "low = 0.0", "high = 1.0", "value = 0.0", f"for halving in range({BISECTIONS}):", *indented(inner)]

    def _noted(self, part: str) -> list[str]:
        """Return lines that write a row: see `kernel_rows`."""
        at = self.at
        row = ["i", "e", at("number"), part, f"{at('sign')} * ({at('now')} + {part} * {at('size')})"]
        row += [f"{at('sign')} * {at('now')}", f"{at('sign')} * {at('size')}", *[at("u", c) for c in range(self.form.d)]]
        return [*[f"crossings[found, {k}] = {text}" for k, text in enumerate(row)], "found += 1"]

    def _cut(self) -> list[str]:
        """Return lines that end the step at `first`."""
        at, lines = self.at, ["x = first", *self.weights()]
        for c in range(self.form.d):
            lines += self.interpolated(c, at("new", c))
        return [*lines, f"tn = {at('now')} + x * {at('size')}", f"{at('tn')} = tn", "end_part[i] = x"]


def total_lines(used: list[int], stage) -> list[str]:
    """Return lines on the sum of stages by their weights."""
    first, *others = used
    return [f"total = w{first} * {stage(first)}", *[f"total = total + w{i} * {stage(i)}" for i in others]]
