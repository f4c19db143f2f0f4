"""The lines of CUDA kernels that look for events, and those that go back through them.

A thread finds its trajectory's events as lanes do (`step_text`), and writes each into one table for all, in whatever order
threads come. There a trajectory's events are a chain: each says which was before it, and `heads` which was the last. On the
way back a thread follows its chain, and gives what the results gain with an event's time to the state there and to the
parameters, as `crossing` does.
"""

from __future__ import annotations

from mpiad.compiling.c_translation import c_lines
from mpiad.compiling.source import indented, numbered
from mpiad.ensemble.compiled.kernel_form import Form
from mpiad.ensemble.compiled.step_text import Steps
from mpiad.ensemble.outcome import ReturnCode

# Of the table: the trajectory, which event, in which of its steps (from 0), the part of the step that is gone there, and
# when; then the row of the event before.
ROWS = 6
_BEFORE = 5


def came_through(form: Form) -> str:
    """Return the condition on `code` that a trajectory didn't fail."""
    codes = [ReturnCode.Success.code, *([ReturnCode.Terminated.code] if form.events else [])]
    return " || ".join(f"code == {code}" for code in codes)


class EventSearch:
    """Lines of the forward kernel."""

    def __init__(self, form: Form, steps: Steps):
        self._form, self._steps, self._events = form, steps, range(len(form.events))

    def declared(self) -> str:
        """Return the kernel's further parameters."""
        return ", double* rows, const long long room, long long* happened, long long* heads" if self._events else ""

    def begun(self) -> list[str]:
        """Return lines on the conditions at the start."""
        lines = [self._steps.condition(e, f"before{e}", "u", "sign * now") for e in self._events]
        return ["long long head = -1;", *c_lines(lines)] if lines else []

    def looked(self) -> list[str]:
        """Return lines that find the events of a step, and cut it short at the first terminal one."""
        if not self._events:
            return []
        made, found = ["bool ended = false;"], []
        for e, (terminal, _) in enumerate(self._form.events):
            made += c_lines([self._steps.condition(e, f"after{e}", "new", "tn")])
            made.append(f"const bool crossed{e} = {self._steps.changed(e, f'before{e}', f'after{e}')};")
            found += [f"double part{e} = INFINITY;", f"if (crossed{e}) {{", *indented(self._located(e, terminal)), "}"]
        inner = ["double cut = INFINITY;", *found, *[line for e in self._events for line in self._noted(e)]]
        if any(terminal for terminal, _ in self._form.events):
            inner += ["if (cut < INFINITY) {", *indented(self._cut()), "}"]
        return [*made, f"if ({' || '.join(f'crossed{e}' for e in self._events)}) {{", *indented(inner), "}"]

    def _located(self, e: int, terminal: bool) -> list[str]:
        steps = self._steps
        value = [steps.condition(e, "value", "y", "sign * (now + x * size)")]
        ends = [f"old = {steps.doubled(f'before{e}')}", f"late = {steps.doubled(f'after{e}')}"]
        lines = [*ends, *steps.located(lambda i, c: f"k{i}_{c}", lambda c: f"u_{c}", value)]
        # What the condition gives its value to is of the states' precision.
        found = ["real value;", *c_lines(lines, ["value"]), f"part{e} = high;"]
        return [*found, *(["if (high < cut) cut = high;"] if terminal else [])]

    def _noted(self, e: int) -> list[str]:
        row = ["(double)i", f"{e}", "(double)taken", f"part{e}", f"sign * (now + part{e} * size)", "(double)head"]
        return [
            # On the second run, for the way back, all has been noted.
            f"if (u_end && part{e} < INFINITY && part{e} <= cut) {{",
            "    const long long row = NEXT(happened);",
            "    if (row < room) {",
            *[f"        rows[{k} * room + row] = {text};" for k, text in enumerate(row)],
            "    }",
            "    head = row;",
            "}",
        ]

    def _cut(self) -> list[str]:
        steps, lines = self._steps, ["x = cut", *self._steps.weights()]
        for c in range(self._form.d):
            lines += steps.interpolated(f"new_{c}", lambda i, c=c: f"k{i}_{c}", f"u_{c}")
        return [*c_lines(lines, steps.state("new")), "ahead = now + x * size;", "ended = true;"]

    def advanced(self) -> list[str]:
        """Return lines that take the conditions' values after the step for those before the next."""
        return [f"before{e} = after{e};" for e in self._events]


class Crossings:
    """Lines of the reverse kernel."""

    def __init__(self, form: Form, steps: Steps):
        self._form, self._steps, self._last = form, steps, form.stages
        self._sums = numbered("own", form.wanted_varying) + numbered("common", form.wanted_shared)

    def declared(self) -> str:
        """Return the kernel's further parameters."""
        names = "const double* rows, const long long room, const long long* heads, const double* reached_bar"
        return f", {names}, const double* times_bar" if self._form.events else ""

    def begun(self) -> list[str]:
        """Return lines before the last step."""
        if not self._form.events:
            return []
        return ["long long row = heads[i];", f"bool ends = code == {ReturnCode.Terminated.code};"]

    def step_end(self) -> list[str]:
        """Return lines that give back the step's own end where an event has cut it short."""
        return ["ahead = ends ? now + size : ahead;"] if self._form.events else []

    def pulled(self) -> list[str]:
        """Return lines on the events of a step, between its stages and the way back through them."""
        form, steps = self._form, self._steps
        if not form.events:
            return []
        last, lines = [], ["x = rows[3 * room + row]"]
        if self._last in steps.used():
            last = steps.state(f"k{self._last}")
            lines.append(steps.call(f"k{self._last}", f"y{self._last}", self._last))
        lines += steps.weights(rates=True)
        for c in range(form.d):
            lines += steps.interpolated(f"at_{c}", lambda i, c=c: f"k{i}_{c}", f"y0_{c}")
        inner = ["met = true;", *c_lines(lines, last)]
        for c in range(form.d):
            rates = " + ".join(f"(real)r{i} * k{i}_{c}" for i in steps.used())
            inner.append(f"const real rate_{c} = ({rates}) * {steps.h};")
        inner += ["const int event = (int)rows[room + row];"]
        for e, (terminal, _) in enumerate(form.events):
            body = self._terminal(e) if terminal else self._passing(e)
            inner += [f"if (event == {e}) {{", *indented(body), "}"]
        inner.append(f"row = (long long)rows[{_BEFORE} * room + row];")
        return [
            *([f"real {', '.join(last)};"] if last else []),
            "while (row >= 0 && (long long)rows[2 * room + row] == step) {", *indented(inner), "}",
        ]  # fmt: skip

    def _slopes(self, e: int) -> list[str]:
        """Return lines on the condition's derivatives, and on how fast it changes with the part of the step."""
        steps, d = self._steps, self._form.d
        made = [*steps.state("g"), *numbered("by", len(self._sums)), "by_time"]
        given = [*steps.state("at"), *steps.parameters, "(real)rows[4 * room + row]", "1", *made]
        return [
            f"real {', '.join(made)};",
            f"slopes{e}({', '.join(given)});",
            f"const real fall = {' + '.join(f'g_{c} * rate_{c}' for c in range(d))} + by_time * {steps.h};",
        ]

    def _terminal(self, e: int) -> list[str]:
        d, h = self._form.d, self._steps.h
        gained = " + ".join(f"total_{c} * rate_{c}" for c in range(d))
        # Of two at once the last one ended it.
        inner = [
            *self._slopes(e), "ends = false;", f"const real move = -({gained} + (real)reached_bar[i] * {h}) / fall;",
            *[f"const real bar_{c} = total_{c} + move * g_{c};" for c in range(d)],
            *[f"total_{c} = 0;" for c in range(d)], *self._given(),
        ]  # fmt: skip
        return ["if (ends) {", *indented(inner), "}"]

    def _passing(self, e: int) -> list[str]:
        bars = [f"const real bar_{c} = move * g_{c};" for c in range(self._form.d)]
        move = f"const real move = -(real)times_bar[row] * {self._steps.h} / fall;"
        # A time that nobody asked for may be one at which the condition has no slope.
        return ["if (times_bar[row] != 0) {", *indented([*self._slopes(e), move, *bars, *self._given()]), "}"]

    def _given(self) -> list[str]:
        """Return lines that hand cotangents to the state there, as if it had been saved, and to the parameters."""
        made = [f"{name} += move * by{j};" for j, name in enumerate(self._sums)]
        for c in range(self._form.d):
            made.append(f"mid_{c} += bar_{c};")
            made += [f"arrival{i}_{c} += w{i} * bar_{c};" for i in self._steps.used()]
        return made
