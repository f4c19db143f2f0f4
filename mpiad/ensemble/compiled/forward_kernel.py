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

import math
from functools import lru_cache

from mpiad.compiling.source import indented
from mpiad.ensemble.compiled.jump_text import first_goal, least_of, sides
from mpiad.ensemble.compiled.kernel_form import Fields, Form
from mpiad.ensemble.compiled.lane_output import LaneOutput
from mpiad.ensemble.controller import LEAST_ERROR

# Of a step: what is left to the end, where steps are fixed.
_ROUNDING = 1e-9


@lru_cache(64)
def fields_of(form: Form) -> Fields:
    """Return where the kernel's lanes keep their numbers."""
    return _Forward(form).fields


def forward_source(form: Form, wide: bool) -> str:
    """Return the source of `forward`, which calls `f`, along directions `df0`, `df1`, ..., and `fma`."""
    return _Forward(form).source(wide)


class _Forward(LaneOutput):
    def source(self, wide: bool) -> str:
        """Return the text of the function."""
        form = self.form
        lines = [
            "def forward(b, exact, ids, place, state, taken, u0, p, s, start, end, times, rtol, atol, dt, dtmax,",
            "            max_steps, u_end, t_reached, codes, naccept, nreject, saved, save_step, du_end, dsaved, last,",
            "            rows, before"
            + ("" if form.affects is None else ", given, kinds, slots, resumed, jump_number, jump_before")
            + (",\n            end_part, crossings):" if form.events else "):"),
            "    # Fields of b: " + ", ".join(self.fields),
            "    aligned_stack()",
            *(["    wide_vectors()"] if wide else []),
            "    n_saved = times.shape[1]",
            "    by_row = times.shape[0] > 1",
            "    one_span = start.shape[0] == 1",
            "    one_start = u0.shape[1] == 1",
            *(["    one_given = given.shape[1] == 1"] if form.affects is not None else []),
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
            *indented(self._entering(), 2),
            f"        if vacant == {form.lanes} or turns == 0{self._full()}:",
            "            break",
            "        turns -= 1",
            f"        for l in range({form.lanes}):",
            *indented([*self._taking(), *self._stages(), *self._decision()], 3),
            *indented(self.recorded() if form.record else [], 2),
            f"        for l in range({form.lanes}):",
            f"            if {self.at('event')} > 0.0:",
            *indented(self.put_out(), 4),
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

    # ---- trajectories that enter

    def _entering(self) -> list[str]:
        """Return lines that fill vacant lanes."""
        lanes = self.form.lanes
        return [
            "while vacant > 0 and (waiting < stop or more):",
            "    if waiting == stop:",
            "        # The next ones that no other thread has taken.",
            "        next = claimed(taken, taken[2])",
            "        more = next < taken[1]",
            "        if more:",
            "            waiting = next",
            "            stop = min(next + taken[2], taken[1])",
            f"    for l in range({lanes}):",
            "        while waiting < stop and start[0 if one_span else waiting] == end[0 if one_span else waiting]:",
            "            waiting += 1",
            "        if ids[l] < 0 and waiting < stop:",
            *indented(self._enter(), 3),
        ]

    def _enter(self) -> list[str]:
        at, form, d = self.at, self.form, self.form.d
        steps = self.steps
        lines = [
            "i = waiting",
            "waiting += 1",
            "vacant -= 1",
            "ids[l] = i",
            "t = start[0 if one_span else i]",
            "goal = end[0 if one_span else i]",
            "sign = -1.0 if goal < t else 1.0",
            *(first_goal() if form.affects is not None else []),
            "column = 0 if one_start else i",
            *[f"u_{c} = u0[{c}, column]" for c in range(d)],
            *[f"p{j} = p[{j}, i]" for j in range(form.varying)],
            steps.call("k0", "u", 0),
            "now = sign * t",
            "span = sign * goal - now",
            *steps.first_step(),
            "h = h if h < dtmax else dtmax",
            # `least_step`: the next double has the next bits, away from zero. Adding 0.0 takes the sign from -0.0.
            "least = 10.0 * (number_of(bits_of(now + 0.0) + (1 if now >= 0.0 else -1)) - now)",
            "h = h if h > least else least",
            *[f"{at('u', c)} = u_{c}" for c in range(d)],
            *[f"{at('k', c)} = k0_{c}" for c in range(d)],
            *[f"{at('p', j)} = p{j}" for j in range(form.varying)],
            *self._unit_tangents(),
            f"{at('sign')} = sign",
            f"{at('end')} = sign * goal",
            *least_of("t", "goal"),
            # Where a step is shorter than this, it is looked at more closely.
            f"{at('least')} = most",
            f"{at('live')} = 1.0",
            *[f"{at(name)} = 0.0" for name in ("rejected", "tries", "number")],
            *([f"{at('q2_before')} = {LEAST_ERROR!r}"] if self.beta is not None else []),
            f"{at('next')} = h",
            "place[l] = -1",
            *self.next_due(),
            f"while {at('due')} == now:",
            *indented([f"saved[i, place[l], {c}] = u_{c}" for c in range(d)]),
            *indented([
                f"dsaved[{j // d}, i, place[l], {j % d}] = {at('du', j)}"
                for j in range(d * len(form.directions)) if form.inside
            ]),
            "    if save_step.shape[0] > 0:",
            "        save_step[i, place[l]] = -1",
            *indented(self.next_due()),
            f"{at('now')} = now",
            f"{at('accepted')} = 0.0",
            *self.conditions("condition", "u", "t"),
            *([f"{at('begun')} = now", f"{at('met')} = now", f"{at('short')} = 0.0"] if self.acts else []),
            *sides(self, "condition", left=False),
        ]  # fmt: skip
        return lines

    def _unit_tangents(self) -> list[str]:
        return [
            f"{self.at('du', j * self.form.d + c)} = {1.0 if kind == 'u' and place == c else 0.0}"
            for j, (kind, place) in enumerate(self.form.directions) for c in range(self.form.d)
        ]  # fmt: skip

    # ---- a step

    def _stages(self) -> list[str]:
        form, steps, at, d = self.form, self.steps, self.at, self.form.d
        lines = [f"p{j} = {at('p', j)}" for j in range(form.varying)]
        lines += steps.stages(kept=bool(form.directions))
        for j in range(len(form.directions)):
            lines += self._tangent(j)
        lines += steps.error()
        lines += [f"{at('q2')} = q2"] if self.error is not None else []
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
            lines.append(steps.call(f"l{i}", steps.argument_of(i), i, f"df{j}", steps.state(along)))
        if not form.inside:
            lines += steps.argument("w", form.stages, "l", "v", fused=True)
        lines += [f"{self.at('dnew', j * d + c)} = w_{c}" for c in range(d)]
        if form.inside:
            lines += [
                f"{self.at('dk', (j * (form.stages + 1) + i) * d + c)} = l{i}_{c}"
                for i in range(form.stages + 1) for c in range(d)
            ]  # fmt: skip
        return lines

    def _decision(self) -> list[str]:
        """Return lines that accept the step or not, and choose the size of the next."""
        at = self.at
        lines = [f"live = {at('live')}"]
        if self.error is not None:
            q2_before = at("q2_before") if self.beta is not None else ""
            lines += [
                "accepted = where(q2 < 1.0, live, 0.0)",
                *self.steps.factor(power_lines, q2_before, at("rejected")),
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


# Powers without a call, so that a loop over lanes becomes vector instructions.
# For x = m 2^n with m near 1: log2 m = r q(r²), r = (m - 1) / (m + 1), and 2^f, for |f| <= 1/2, by their series.
_LOG2 = [2 / math.log(2) / (2 * k + 1) for k in range(11)]
_EXP2 = [math.log(2) ** k / math.factorial(k) for k in range(14)]
_ROOT_HALF = 0x3FE6A09E667F3BCD  # the bits of √½: m lies between it and √2


def power_lines(x: str, exponent: str, out: str) -> list[str]:
    """Return lines for out = x ** exponent, without a call: to a few units of the last place, for |exponent| <= 0.5.

    Outside of 1e-30 to 1e30, x is taken for these; NaN for the second.
    """
    return [
        f"x = where({x} < 1e30, {x}, 1e30)",
        "x = where(x > 1e-30, x, 1e-30)",
        f"i = bits_of(x) - {_ROOT_HALF}",
        # The exponent, by a double's bits: no vector unit before AVX-512 converts integers of 64 bits.
        # 0x433 is the exponent of 2^52, from which on doubles are the integers: the bits of n + 1024 become a number.
        "n = number_of(((i + 0x4000000000000000) >> 52) | 0x4330000000000000) - 4503599627371520.0",
        f"m = number_of((i & 0xFFFFFFFFFFFFF) + {_ROOT_HALF})",
        "r = (m - 1.0) / (m + 1.0)",
        "r2 = r * r",
        f"y = {exponent} * fma({_series('r2', _LOG2)}, r, n)",
        "w = y + 6755399441055744.0",  # 1.5 · 2^52: what is added to it is rounded to an integer
        "r = y - (w - 6755399441055744.0)",
        f"{out} = number_of(bits_of({_series('r', _EXP2)}) + (bits_of(w) << 52))",
    ]


def _series(x: str, terms: list[float]) -> str:
    text = repr(terms[-1])
    for term in terms[-2::-1]:
        text = f"fma({text}, {x}, {term!r})"
    return text
