"""The lines of CUDA kernels that look for events, and those that go back through them.

A thread finds its trajectory's events as `EventWatch` does, by bisection on the step's interpolant, and writes each into
one table for all, in whatever order threads come. There a trajectory's events are a chain: each says which was before it,
and `heads` which was the last. On the way back a thread follows its chain, and gives what the results gain with an event's
time to the state there and to the parameters, as `crossing` does.
"""

from __future__ import annotations

import numpy as np

from mpiad.compiling.derivatives import vjp
from mpiad.ensemble.compiled.cuda.cuda_pieces import Pieces, block, dense_weights, numbered
from mpiad.ensemble.compiled.cuda.cuda_plan import Plan
from mpiad.ensemble.events import BISECTIONS
from mpiad.ensemble.retcodes import ReturnCode

__all__ = ["ROWS", "Crossings", "Watch", "condition_texts", "came_through"]

# Of the table: the trajectory, which event, in which of its steps (from 0), the part of the step that is gone there, and
# when; then the row of the event before.
ROWS = 6
_BEFORE = 5


def came_through(plan: Plan) -> str:
    """Return the condition on `code` that a trajectory didn't fail."""
    codes = [ReturnCode.Success.code, *([ReturnCode.Terminated.code] if plan.events else [])]
    return " || ".join(f"code == {code}" for code in codes)


def condition_texts(plan: Plan, pieces: Pieces, kernel: str) -> list[str]:
    """Return the conditions as functions: for "forward" their values, for "reverse" their derivatives."""
    made, wanted = [], [*plan.wanted_varying, *plan.wanted_shared]
    for e, (program, *_) in enumerate(plan.events):
        if kernel != "reverse":
            made.append(pieces.function(f"condition{e}", program, 0, 1))
        if kernel != "forward":
            slopes = vjp(program, {"state": None, "parameter": wanted, "time": None})
            made.append(pieces.function(f"slopes{e}", slopes, 1, plan.d + len(wanted) + 1))
    return made


class Watch:
    """Lines of the forward kernel.

    Parameters
    ----------
    plan : Plan
    """

    def __init__(self, plan: Plan):
        self._plan, self._pieces, self._events = plan, Pieces(plan), range(len(plan.events))

    def declared(self) -> str:
        """Return the kernel's further parameters."""
        return ", double* rows, const long long room, long long* happened, long long* heads" if self._events else ""

    def begun(self) -> list[str]:
        """Return lines on the conditions at the start."""
        made = ["long long head = -1;"] if self._events else []
        for e in self._events:
            made += [f"real before{e};", self._condition(e, "u", "(real)(sign * now)", f"before{e}")]
        return made

    def looked(self) -> list[str]:
        """Return lines that find the events of a step, and cut it short at the first terminal one."""
        if not self._events:
            return []
        plan, made, found = self._plan, ["bool ended = false;"], []
        for e, (_, terminal, direction) in enumerate(plan.events):
            made += [f"real after{e};", self._condition(e, "next", "(real)(sign * ahead)", f"after{e}")]
            up, down = f"(before{e} < 0 && after{e} >= 0)", f"(before{e} > 0 && after{e} <= 0)"
            changed = up if direction > 0 else down if direction < 0 else f"({up} || {down})"
            made.append(f"const bool crossed{e} = {changed};")
            found += [f"double part{e} = INFINITY;", f"if (crossed{e}) {{", *_deeper(self._bisected(e, terminal)), "}"]
        noted = [line for e in self._events for line in self._noted(e)]
        inner = ["double cut = INFINITY;", *found, *noted]
        if any(terminal for _, terminal, _ in plan.events):
            inner += ["if (cut < INFINITY) {", *_deeper(self._cut()), "}"]
        changed = " || ".join(f"crossed{e}" for e in self._events)
        return [*made, f"if ({changed}) {{", *_deeper(inner), "}"]

    def _condition(self, e: int, state: str, time: str, out: str) -> str:
        return self._pieces.call(f"condition{e}", state, time, [out])

    def _states(self, name: str, declare: bool) -> list[str]:
        """Return lines on the states at the part `x` of the step."""
        made, kind = dense_weights(self._pieces), "const real " if declare else ""
        for c in range(self._plan.d):
            total = " + ".join(f"weight{i} * k{i}_{c}" for i in used_stages(self._plan))
            made.append(f"{kind}{name}_{c} = ({total}) * h + u_{c};")
        return made

    def _bisected(self, e: int, terminal: bool) -> list[str]:
        halving = block(
            """
            double low = 0, high = 1;
            for (int halving = 0; halving < @most; ++halving) {
                const double x = 0.5 * (low + high);
                if (x <= low || x >= high) break;
                @states
                real value;
                @condition
                if (before@e > 0 ? value > 0 : value < 0) low = x; else high = x;
            }
            part@e = high;
            """.replace("@most", str(BISECTIONS)).replace("@e", str(e)),
            states=self._states("mid", True),
            condition=self._condition(e, "mid", "(real)(sign * (now + x * size))", "value"),
        )  # fmt: skip
        return [*halving.splitlines(), *(["if (high < cut) cut = high;"] if terminal else [])]

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
        return ["const double x = cut;", *self._states("next", False), "ahead = now + x * size;", "ended = true;"]

    def advanced(self) -> list[str]:
        """Return lines that take the conditions' values after the step for those before the next."""
        return [f"before{e} = after{e};" for e in self._events]


class Crossings:
    """Lines of the reverse kernel.

    Parameters
    ----------
    plan : Plan
    """

    def __init__(self, plan: Plan):
        self._plan, self._pieces = plan, Pieces(plan)
        self._wanted = [*plan.wanted_varying, *plan.wanted_shared]

    def declared(self) -> str:
        """Return the kernel's further parameters."""
        names = "const double* rows, const long long room, const long long* heads, const double* reached_bar"
        return f", {names}, const double* times_bar" if self._plan.events else ""

    def begun(self) -> list[str]:
        """Return lines before the last step."""
        if not self._plan.events:
            return []
        return ["long long row = heads[i];", f"bool ends = code == {ReturnCode.Terminated.code};"]

    def step_end(self) -> list[str]:
        """Return lines that give back the step's own end where an event has cut it short."""
        return ["ahead = ends ? now + size : ahead;"] if self._plan.events else []

    def pulled(self) -> list[str]:
        """Return lines on the events of a step, between its stages and the way back through them."""
        plan, d, last = self._plan, self._plan.d, self._plan.last
        if not plan.events:
            return []
        inner = [
            "met = true;",
            self._pieces.call("f", "next", "(real)(sign * ahead)", numbered(f"k{last}", d)),
            "const double x = rows[3 * room + row];",
            *dense_weights(self._pieces), *self._rates(),
        ]  # fmt: skip
        for c in range(d):
            stages = used_stages(plan)
            inner.append(f"const real at_{c} = ({' + '.join(f'weight{i} * k{i}_{c}' for i in stages)}) * h + u_{c};")
            inner.append(f"const real rate_{c} = ({' + '.join(f'slope{i} * k{i}_{c}' for i in stages)}) * h;")
        inner += ["const int event = (int)rows[room + row];"]
        for e, (_, terminal, _) in enumerate(plan.events):
            body = self._terminal(e) if terminal else self._passing(e)
            inner += [f"if (event == {e}) {{", *_deeper(body), "}"]
        inner.append(f"row = (long long)rows[{_BEFORE} * room + row];")
        return [
            self._pieces.declared(numbered(f"k{last}", d)),
            "while (row >= 0 && (long long)rows[2 * room + row] == step) {", *_deeper(inner), "}",
        ]  # fmt: skip

    def _rates(self) -> list[str]:
        """Return declarations of the derivatives of the stages' weights by the part of the step."""
        made = []
        for i in used_stages(self._plan):
            row = self._plan.tableau.dense[i]
            text = repr(float(len(row) * row[-1]))
            for power in range(len(row) - 1, 0, -1):
                text = f"({text} * x + {float(power * row[power - 1])!r})"
            made.append(f"const real slope{i} = {text};")
        return made

    def _slopes(self, e: int) -> list[str]:
        """Return lines on the condition's derivatives, and on how fast it changes with the part of the step."""
        d = self._plan.d
        outputs = [*numbered("g", d), *[f"by{j}" for j in self._wanted], "by_time"]
        return [
            self._pieces.declared(outputs),
            self._pieces.call(f"slopes{e}", "at", "(real)rows[4 * room + row]", outputs, ["1"]),
            f"const real fall = {' + '.join(f'g_{c} * rate_{c}' for c in range(d))} + by_time * h;",
        ]

    def _terminal(self, e: int) -> list[str]:
        d = self._plan.d
        gained = " + ".join(f"total_{c} * rate_{c}" for c in range(d))
        # Of two at once the last one ended it.
        inner = [
            *self._slopes(e), "ends = false;", f"const real move = -({gained} + (real)reached_bar[i] * h) / fall;",
            *[f"const real bar_{c} = total_{c} + move * g_{c};" for c in range(d)],
            *[f"total_{c} = 0;" for c in range(d)], *self._given(),
        ]  # fmt: skip
        return ["if (ends) {", *_deeper(inner), "}"]

    def _passing(self, e: int) -> list[str]:
        bars = [f"const real bar_{c} = move * g_{c};" for c in range(self._plan.d)]
        inner = [*self._slopes(e), "const real move = -(real)times_bar[row] * h / fall;", *bars, *self._given()]
        # A time that nobody asked for may be one at which the condition has no slope.
        return ["if (times_bar[row] != 0) {", *_deeper(inner), "}"]

    def _given(self) -> list[str]:
        """Return lines that hand cotangents to the state there, as if it had been saved, and to the parameters."""
        made = [f"sum_{j} += move * by{j};" for j in self._wanted]
        for c in range(self._plan.d):
            made.append(f"mid_{c} += bar_{c};")
            made += [f"arrival{i}_{c} += weight{i} * bar_{c};" for i in used_stages(self._plan)]
        return made


def used_stages(plan: Plan) -> list[int]:
    """Return the stages that the interpolant is made of."""
    return [int(i) for i in np.flatnonzero(plan.tableau.dense.any(axis=1))]


def _deeper(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]
