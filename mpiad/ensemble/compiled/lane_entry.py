"""The part of the forward kernel's source by which trajectories enter lanes: the first derivative and the first step."""

from __future__ import annotations

from mpiad.compiling.source import indented
from mpiad.ensemble.compiled.event_location import Locating
from mpiad.ensemble.controller import LEAST_ERROR

__all__ = ["Entering"]


class Entering(Locating):
    """Lines on lanes that take the next trajectory."""

    def entering(self) -> list[str]:
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
            "column = 0 if one_start else i",
            *[f"u_{c} = u0[{c}, column]" for c in range(d)],
            *[f"p{j} = p[{j}, i]" for j in range(form.varying)],
            steps.call("k0", "u", 0),
            "now = sign * t",
            "span = sign * goal - now",
            *self._first_step(),
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
            "most = max(abs(t), abs(goal))",
            # Where a step is shorter than this, it is looked at more closely.
            f"{at('least')} = 10.0 * (number_of(bits_of(most + 0.0) + (1 if most >= 0.0 else -1)) - most)",
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
        ]  # fmt: skip
        return lines

    def _unit_tangents(self) -> list[str]:
        return [
            f"{self.at('du', j * self.form.d + c)} = {1.0 if kind == 'u' and place == c else 0.0}"
            for j, (kind, place) in enumerate(self.form.directions) for c in range(self.form.d)
        ]  # fmt: skip

    def _first_step(self) -> list[str]:
        """Return lines on the first step, as `starting.first_step` chooses it."""
        form, d, steps = self.form, self.form.d, self.steps
        lines = []
        for n, parts in enumerate(form.numbers):
            modulus = f"math.hypot({', '.join(f'u_{c}' for c in parts)})" if len(parts) > 1 else f"abs(u_{n})"
            lines.append(f"w_{n} = {steps.rtol} * {modulus} + {self.atol(n)}")
        for out, top in (("d0", "u_{}"), ("d1", "k0_{}")):
            lines += self._norm(out, top)
        lines += [
            "h0 = 1e-6 if d0 < 1e-5 or d1 < 1e-5 else 0.01 * d0 / d1",
            "h0 = h0 if h0 < span else span",
            "h = sign * h0",
            *steps.rounded_step(),
            *[f"y_{c} = {steps.h} * k0_{c} + u_{c}" for c in range(d)],
            "tn = t + h",
            steps.call("k1", "y", form.stages),
            *self._norm("d2", "(k1_{0} - k0_{0})"),
            "d2 = d2 / h0",
            "steepest = d1 if d1 > d2 else d2",
            "if d1 <= 1e-15 and d2 <= 1e-15:",
            "    h = max(1e-6, h0 * 1e-3)",
            "else:",
            f"    h = (0.01 / steepest) ** {1 / form.tableau.error_order!r}",
            "h = min(min(100.0 * h0, h), span)",
            "if not np.isfinite(h):",
            "    h = span",
        ]
        return ["if dt > 0.0:", "    h = dt", "else:", *indented(lines)]

    def _norm(self, out: str, top: str) -> list[str]:
        lines = []
        for n, parts in enumerate(self.form.numbers):
            lines += [f"e{c} = {top.format(c)} / w_{n}" for c in parts]
            square = " + ".join(f"e{c} * e{c}" for c in parts)
            lines.append(f"norm = norm + ({square})" if n else f"norm = {square}")
        return [*lines, f"{out} = np.sqrt({self.steps.doubled('norm')} / {len(self.form.numbers)}.0)"]
