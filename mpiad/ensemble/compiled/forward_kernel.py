"""The source of the forward kernel: lanes of trajectories that advance together.

Each turn is one loop over the lanes without branches and calls, so that the compiler makes vector instructions of it. It
takes the step before where that was accepted, computes the next one and its error, accepts it or not, and chooses a size
for the one after. Then lanes that have something to tell are visited one by one: a step to record, a saved time, an end. A
lane that has ended takes the next trajectory. After so many turns, or where there is no room for what the next one may
write down, the kernel leaves off, and goes on from there when it is called again: `state` says where.

Several threads take their trajectories from one count, a few at a time, so that all end at about the same time.

The arithmetic is that of the vectorised path, operation by operation, and the compiler may not change it. So a trajectory's
numbers are the same in each lane and in all kernels that are generated from one f. Only tangents are left to `fma`.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.source import indented, number
from mpiad.compiling.vector_power import power_lines
from mpiad.ensemble.compiled.kernel_form import Fields, Form
from mpiad.ensemble.compiled.lane_entry import Entering
from mpiad.ensemble.compiled.lane_fields import Lanes
from mpiad.ensemble.compiled.lane_output import Telling
from mpiad.ensemble.controller import LEAST_ERROR

__all__ = ["forward_source", "lanes_of"]

# Of a step: what is left to the end, where steps are fixed.
_ROUNDING = 1e-9


def lanes_of(form: Form) -> tuple[Array, Array]:
    """Return the kernel's buffers."""
    return _fields(form).room(form.dtype)


@lru_cache(64)
def _fields(form: Form) -> Fields:
    return Lanes(form).fields


def forward_source(form: Form, wide: bool) -> str:
    """Return the source of `forward`, which calls `f`, along directions `df0`, `df1`, ..., and `fma`."""
    return _Forward(form).source(wide)


class _Forward(Telling, Entering):
    def source(self, wide: bool) -> str:
        """Return the text of the function."""
        form = self.form
        lines = [
            "def forward(b, exact, ids, place, state, taken, u0, p, s, start, end, times, rtol, atol, dt, dtmax,",
            "            max_steps, u_end, t_reached, codes, naccept, nreject, saved, save_step, du_end, dsaved, last,",
            "            rows, before"
            + (",\n            end_part, crossings):" if form.events else "):"),
            "    # Fields of b: " + ", ".join(self.fields),
            "    aligned_stack()",
            *(["    wide_vectors()"] if wide else []),
            "    n_saved = times.shape[1]",
            "    by_row = times.shape[0] > 1",
            "    one_span = start.shape[0] == 1",
            "    one_start = u0.shape[1] == 1",
            "    waiting = state[0]",
            "    vacant = state[1]",
            "    row = state[2]",
            *(["    found = state[3]"] if form.events else []),
            "    stop = state[4]",
            "    turns = state[5]",
            "    more = True",
            *(["    rtol_ = np.float32(rtol)"] if form.single else []),
            *[f"    s{j} = s[{j}]" for j in range(form.shared)],
            *[f"    atol{n} = atol[{n}]" for n in range(len(form.numbers) if form.tolerances else 1)],
            "    while True:",
            *indented(self.entering(), 2),
            f"        if vacant == {form.lanes} or turns == 0{self._full()}:",
            "            break",
            "        turns -= 1",
            f"        for l in range({form.lanes}):",
            *indented([*self._taking(), *self._stages(), *self._decision()], 3),
            *indented(self.recorded() if form.record else [], 2),
            f"        for l in range({form.lanes}):",
            f"            if {self.at('event')} > 0.0:",
            *indented(self.told(), 4),
            "    state[0] = waiting",
            "    state[1] = vacant",
            "    state[2] = row",
            *(["    state[3] = found"] if form.events else []),
            "    state[4] = stop",
            "    state[5] = turns",
        ]
        return "\n".join(lines) + "\n"

    def _full(self) -> str:
        """Return whether what a turn may write down has no room left, as source."""
        form = self.form
        steps = f" or row + {form.lanes} > rows.shape[0]" if form.record else ""
        return steps + (f" or found + {form.lanes * len(form.events)} > crossings.shape[0]" if form.events else "")

    # ---- a step

    def _loaded(self, what: str, name: str, width: int | None = None) -> list[str]:
        return [f"{name}_{c} = {self.at(what, c)}" for c in range(width or self.form.d)]

    def _stages(self) -> list[str]:
        form, steps, at, d = self.form, self.steps, self.at, self.form.d
        lines = [f"p{j} = {at('p', j)}" for j in range(form.varying)]
        for i in range(1, form.stages + 1):
            y = "new" if i == form.stages else "y"
            name = f"y{i}" if form.directions and i < form.stages else y
            lines += steps.argument(name, i, "k", "u")
            lines.append(steps.call(f"k{i}", name, i))
        for j in range(len(form.directions)):
            lines += self._tangent(j)
        lines += self._error()
        lines += [f"{at('new', c)} = new_{c}" for c in range(d)]
        lines += [f"{at('last', c)} = k{form.stages}_{c}" for c in range(d)]
        if form.inside:
            lines += [f"{at('inner', (i - 1) * d + c)} = k{i}_{c}" for i in range(1, form.stages) for c in range(d)]
        return lines

    def _tangent(self, j: int) -> list[str]:
        """Return lines that carry the tangent along direction j."""
        form, steps, d = self.form, self.steps, self.form.d
        lines = [f"v_{c} = v{j}_{c}" for c in range(d)]
        stages = form.stages + 1 if form.inside else form.stages
        for i in range(stages):
            along = "v" if i == 0 else "w"
            if i:
                lines += steps.argument("w", i, "l", "v", fused=True)
            y = "u" if i == 0 else "new" if i == form.stages else f"y{i}"
            lines.append(steps.call(f"l{i}", y, i, f"df{j}", steps.state(along)))
        if not form.inside:
            lines += steps.argument("w", form.stages, "l", "v", fused=True)
        lines += [f"{self.at('dnew', j * d + c)} = w_{c}" for c in range(d)]
        if form.inside:
            lines += [
                f"{self.at('dk', (j * (form.stages + 1) + i) * d + c)} = l{i}_{c}"
                for i in range(form.stages + 1) for c in range(d)
            ]  # fmt: skip
        return lines

    def _error(self) -> list[str]:
        d = self.form.d
        if self.error is None:
            # Whether all is finite: x - x is then zero.
            total = " + ".join(f"(new_{c} - new_{c})" for c in range(d))
            return [f"q2 = {self.steps.doubled(total)}"]
        lines = []
        for n, parts in enumerate(self.form.numbers):
            lines += self._modulus_lines(n, parts) if len(parts) > 1 else [
                f"low{n} = abs(u_{n})",
                f"high{n} = abs(new_{n})",
                f"largest{n} = where(high{n} > low{n}, high{n}, low{n})",
            ]
            lines.append(f"scale{n} = {self.steps.rtol} * largest{n} + {self.atol(n)}")
            lines += [f"e{c} = ({self.steps.weighted(self.error, 'k', c)}) * {self.steps.h} / scale{n}" for c in parts]
        total = " + ".join(f"e{c} * e{c}" for c in range(d))
        return [*lines, f"q2 = {self.steps.doubled(total)} / {len(self.form.numbers)}.0", f"{self.at('q2')} = q2"]

    def _modulus_lines(self, n: int, parts: tuple[int, ...]) -> list[str]:
        """Return lines on the larger modulus of a complex number before and after the step."""
        names = [f"{state}_{c}" for state in ("u", "new") for c in parts]
        # By the largest part, so that no square overflows; a call of hypot would keep the loop from being vectorised.
        lines = [f"top = {self.steps.number(float(np.finfo(self.form.dtype).tiny))}"]
        lines += [f"top = where(abs({name}) > top, abs({name}), top)" for name in names]
        lines.append(f"over = {self.steps.number(1.0)} / top")
        lines += [f"r_{name} = {name} * over" for name in names]
        low, high = (" + ".join(f"r_{state}_{c} * r_{state}_{c}" for c in parts) for state in ("u", "new"))
        return [*lines, f"low = {low}", f"high = {high}", f"largest{n} = math.sqrt(where(high > low, high, low)) * top"]

    def _decision(self) -> list[str]:
        """Return lines that accept the step or not, and choose the size of the next."""
        at = self.at
        lines = [f"live = {at('live')}"]
        if self.error is not None:
            lines += [
                "accepted = where(q2 < 1.0, live, 0.0)",
                *self._factor(),
                "following = size * factor",
                "following = where(following < dtmax, following, dtmax)",
                f"{at('rejected')} = live - accepted",
                f"small = where(following < {at('least')}, live, 0.0)",
            ]
        else:
            lines += ["accepted = where(q2 == 0.0, live, 0.0)", "small = live - accepted"]
        events = range(len(self.form.events))
        changed = "".join(f" + crossed{e}" for e in events)
        return [
            *lines,
            *self.conditions("condition_new", "new", "tn"),
            *[line for e in events for line in self.crossed(e)],
            f"tries = {at('tries')} + live",
            f"{at('tries')} = tries",
            f"{at('accepted')} = accepted",
            f"{at('next')} = following",
            "tired = where(tries >= max_steps, live, 0.0)",
            "told = where(ahead >= goal, accepted, 0.0)",
            f"due = where({at('due')} <= ahead, accepted, 0.0)",
            f"{at('event')} = small + tired + told + due{changed}",
        ]

    def _factor(self) -> list[str]:
        at, controller, order = self.at, self.form.controller, self.form.tableau.error_order
        plain = number(-0.5 / order)
        lines = [f"exponent = {plain}"]
        if self.beta is not None:
            beta = self.beta
            steady = number(-0.5 * (1 - 0.75 * beta) / order)
            lines = [f"exponent = where(q2 < 1.0, {steady}, {plain})"]
        lines += [*power_lines("q2", "exponent", "factor"), f"factor = {number(controller.safety)} * factor"]
        if self.beta is not None:
            lines += [
                *power_lines(at("q2_before"), number(0.5 * self.beta / order), "steady"),
                "factor = where(q2 < 1.0, factor * steady, factor)",
                f"kept = where(q2 > {LEAST_ERROR!r}, q2, {LEAST_ERROR!r})",
                f"{at('q2_before')} = where(accepted > 0.0, kept, {at('q2_before')})",
            ]
        return [
            *lines,
            f"factor = where(factor > {number(controller.least)}, factor, {number(controller.least)})",
            f"most = where({at('rejected')} > 0.0, 1.0, {number(controller.most)})",
            "factor = where(factor < most, factor, most)",
        ]

    def _taking(self) -> list[str]:
        """Return lines that take the step before where it was accepted, and propose the next."""
        at, d = self.at, self.form.d
        triples = [(f"u_{c}", at("u", c), at("new", c)) for c in range(d)]
        triples += [(f"k0_{c}", at("k", c), at("last", c)) for c in range(d)]
        triples += [
            (f"v{j}_{c}", at("du", j * d + c), at("dnew", j * d + c))
            for j in range(len(self.form.directions)) for c in range(d)
        ]  # fmt: skip
        triples += [(f"c{e}", at("condition", e), at("condition_new", e)) for e in range(len(self.form.events))]
        lines = [f"took = {at('accepted')} > 0.0"]
        for name, old, new in triples:
            lines += [f"{name} = where(took, {new}, {old})", f"{old} = {name}"]
        lines += [
            f"{at('number')} += {at('accepted')}",
            f"now = where(took, {at('tn')}, {at('now')})",
            f"goal = {at('end')}",
            f"following = {at('next')}",
            "ahead = now + following",
        ]
        if self.error is None:
            # Many equal steps don't sum up to the span; a last one of rounding's size is none.
            lines.append(f"ahead = where(ahead > goal - {_ROUNDING!r} * following, goal, ahead)")
        return [
            *lines,
            "ahead = where(ahead < goal, ahead, goal)",
            "size = ahead - now",
            f"sign = {at('sign')}",
            "h = sign * size",
            *self.steps.rounded_step(),
            "t = sign * now",
            "tn = sign * ahead",
            f"{at('now')} = now",
            f"{at('tn')} = ahead",
            f"{at('size')} = size",
        ]

