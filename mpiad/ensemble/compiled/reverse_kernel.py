"""The source of the reverse kernel: the adjoint of the accepted steps, in lanes of trajectories that go back together.

Each turn takes one step back in all lanes: its stages are computed again from the state before it, and cotangents go back
through them as `transposed_step` says. What is saved inside of a step adds to the cotangents of its stages, "arrivals",
which are summed up before, lane by lane. A lane that is at the start takes the next trajectory: from the last to the first,
so that the record is read from its end, which the caches still hold. After so many turns the kernel leaves off, and goes on
from there when it is called again: `state` says where.
"""

from __future__ import annotations

from copy import copy
from functools import lru_cache

from mpiad.compiling.source import indented, number
from mpiad.ensemble.compiled.jump_text import jump_back, left, next_back, stop_back
from mpiad.ensemble.compiled.kernel_form import Fields, Form
from mpiad.ensemble.compiled.rosenbrock_text import steps_of

# Further arguments of a kernel that goes back over events that acted.
_JUMPS = """jump,
            jump_first, jump_number, jump_kind, jump_time, jump_state, jump_due,
            stop_first, stop_number, stop_row, stop_bar_, stop_moved"""


@lru_cache(64)
def fields_of(form: Form) -> Fields:
    """Return where the kernel's lanes keep their numbers."""
    return ReverseOutput(form).fields


def reverse_source(form: Form, wide: bool) -> str:
    """Return the source of `reverse`, which calls `f`, its adjoint `g`, and `fma`."""
    return ReverseOutput(form).source(wide)


class ReverseOutput:
    """The fields of the kernel's buffer, and its lines."""

    def __init__(self, form: Form):
        self.form = form
        self.fields = fields = Fields(form)
        self.steps = steps_of(form, fields)
        fields.add("cotangent", form.d)
        fields.add("u", form.d)
        fields.add("p", form.varying)
        for name in ("t", "tn", "h", "live"):
            fields.add(name, exact=True)
        # Sums over many steps, and over trajectories.
        fields.add("own", form.wanted_varying, exact=True)
        fields.add("common", form.wanted_shared, exact=True)
        if form.timed:
            for name in ("t_bar", "h_bar", "fresh"):
                fields.add(name, exact=True)
        if form.inside:
            fields.add("touched", exact=True)
            fields.add("value", form.d)
            fields.add("arrival", form.d * (form.stages + 1))
            if form.timed:
                fields.add("rate", form.d * (form.stages + 1), exact=True)
                fields.add("rate_x", form.d * (form.stages + 1), exact=True)

    def at(self, name: str, i: int = 0) -> str:
        """Return the place of a lane's field, as source."""
        return self.fields.at(name, i)

    def source(self, wide: bool) -> str:
        """Return the text of the function."""
        form, lanes = self.form, self.form.lanes
        lines = [
            "def reverse(b, exact, ids, row, step, place, state, p, s, times, rows, before_rows, last, naccept,",
            "            t_reached, alive, end_bar, saved_bar, save_step, u0_bar, p_bar, s_bar, start_bar, stop_bar"
            + ("):" if form.jumps is None else f", {_JUMPS}):"),
            "    # Fields of b: " + ", ".join(self.fields),
            "    aligned_stack()",
            *(["    wide_vectors()"] if wide else []),
            "    n_saved = save_step.shape[1]",
            "    by_row = times.shape[0] > 1",
            "    first = state[0]",
            "    waiting = state[1]",
            "    vacant = state[2]",
            "    turns = state[3]",
            *[f"    s{j} = s[{j}]" for j in range(form.shared)],
            "    while True:",
            "        if vacant > 0 and waiting >= first:",
            f"            for l in range({lanes}):",
            "                while waiting >= first and (not alive[waiting] or last[waiting] < 0):",
            "                    waiting -= 1",
            "                if ids[l] < 0 and waiting >= first:",
            *indented(self._enter(), 5),
            f"        if vacant == {lanes} or turns == 0:",
            "            break",
            "        turns -= 1",
            *(["        quiet = True"] if self._has_quiet_turns else []),
            f"        for l in range({lanes}):",
            "            if ids[l] >= 0:",
            *indented(self._fetch(), 4),
            *self._all_back(),
            f"        for l in range({lanes}):",
            "            if ids[l] >= 0 and row[l] < 0:",
            *indented(self._leave(), 4),
            "    state[1] = waiting",
            "    state[2] = vacant",
            "    state[3] = turns",
            *(self._summed() if form.wanted_shared else []),
        ]
        return "\n".join(lines) + "\n"

    @property
    def _has_quiet_turns(self) -> bool:
        """Whether steps of turns in which no lane has anything inside are taken back by fewer operations."""
        return self.form.stops and not self.form.tableau.implicit

    def _all_back(self) -> list[str]:
        """Return lines that take the step of all lanes back.

        Few steps have an event inside, where others of lanes have saved times in most turns: those without need less.
        """
        loop, form = f"for l in range({self.form.lanes}):", self.form
        if not self._has_quiet_turns:
            return indented([loop, *indented(self._back())], 2)
        plain = copy(self)
        plain.form = form._replace(inside=False)
        plain.steps = steps_of(plain.form)
        bodies = [
            ["if quiet:", *indented([loop, *indented(plain._back())])],
            ["else:", *indented([loop, *indented(self._back())])],
        ]
        return indented([line for body in bodies for line in body], 2)

    def _summed(self) -> list[str]:
        """Return lines that sum over the lanes, when all have ended."""
        form = self.form
        return [
            f"    for l in range({form.lanes} if vacant == {form.lanes} else 0):",
            *[f"        s_bar[{j}] += {self.at('common', j)}" for j in range(form.wanted_shared)],
        ]

    # ---- lanes, one by one

    def _enter(self) -> list[str]:
        at, form = self.at, self.form
        zeros = [at("own", j) for j in range(form.wanted_varying)]
        zeros += [at("t_bar"), at("h_bar")] if form.timed else []
        return [
            "i = waiting",
            "waiting -= 1",
            "vacant -= 1",
            "ids[l] = i",
            "row[l] = last[i]",
            "step[l] = naccept[i] - 1",
            "place[l] = n_saved - 1",
            # Where every step is saved, some trajectories have fewer.
            "while place[l] >= 0 and save_step[i, place[l]] < -1:",
            "    place[l] -= 1",
            *[f"{at('cotangent', c)} = end_bar[{c}, i]" for c in range(form.d)],
            *[f"{at('p', j)} = p[{j}, i]" for j in range(form.varying)],
            *[f"{zero} = 0.0" for zero in zeros],
            f"{at('tn')} = t_reached[i]",
            f"{at('t')} = t_reached[i]",
            f"{at('live')} = 1.0",
            *([f"{at('fresh')} = 1.0"] if form.timed else []),
            *([f"{at('touched')} = 1.0"] if form.inside else []),
            *(
                ["jump[l] = jump_first[i + 1] - 1", f"jump[{form.lanes} + l] = -1", *next_back(form)]
                if form.jumps is not None
                else []
            ),
            *([f"jump[{2 * form.lanes} + l] = stop_first[i + 1] - 1", *next_back(form, stop=True)] if form.stops else []),
        ]

    def _fetch(self) -> list[str]:
        """Return lines that take up the step before, and the cotangents of what is saved in it."""
        at, form, d = self.at, self.form, self.form.d
        cleared = [(name, i) for name in ("arrival", "rate", "rate_x") for i in range(d * (form.stages + 1))]
        cleared = cleared if form.timed else cleared[: d * (form.stages + 1)]
        cleared = [("value", c) for c in range(d)] + cleared if form.inside else []
        return [
            "i = ids[l]",
            "now = row[l]",
            f"{at('tn')} = {at('t')}",
            f"{at('t')} = rows[now, 0]",
            f"{at('h')} = rows[now, 1]",
            *[f"{at('u', c)} = {self.steps.rounded(f'rows[now, {c + 2}]')}" for c in range(d)],
            # Most steps have nothing inside, and so nothing is left of them.
            *(
                [f"if {at('touched')} > 0.0:", *indented([f"{at(name, i)} = 0.0" for name, i in cleared])]
                if cleared
                else []
            ),
            *([f"{at('touched')} = 0.0"] if cleared else []),
            *(jump_back(self) if form.jumps is not None else []),
            *(stop_back(self) if form.stops else []),
            "while place[l] >= 0 and save_step[i, place[l]] == step[l]:",
            *indented(self._met()),
            "    place[l] -= 1",
            *([f"quiet = quiet and {at('touched')} == 0.0"] if self._has_quiet_turns else []),
            "row[l] = before_rows[now]",
            # While this step is taken back memory brings the one before, which isn't always its neighbour.
            "fetched(rows, row[l])",
            "fetched(rows, row[l] + 1)",  # for a row that begins in one line of the cache and ends in another
            "fetched(before_rows, row[l])",
            "step[l] -= 1",
        ]

    def _met(self) -> list[str]:
        at, form, d = self.at, self.form, self.form.d
        at_end = [f"{at('cotangent', c)} += saved_bar[i, place[l], {c}]" for c in range(d)]
        if not form.inside:
            return at_end
        inner = [f"x = (due - {at('t')}) / {at('h')}", *self.steps.weights(rates=form.timed)]
        for c in range(d):
            inner += [f"value = saved_bar[i, place[l], {c}]", f"{at('value', c)} += value"]
            for i in self.steps.used():
                inner.append(f"{at('arrival', i * d + c)} += w{i} * value")
                if form.timed:
                    inner.append(f"{at('rate', i * d + c)} += r{i} * value")
                    inner.append(f"{at('rate_x', i * d + c)} += x * r{i} * value")
        return [
            f"{at('touched')} = 1.0",
            "due = times[i if by_row else 0, place[l]]",
            f"if due == {at('tn')}:",
            *indented(at_end),
            # What is saved where an event acts is the state after it, whenever that is.
            *([f"elif due == {at('t')}:", *[f"    {at('value', c)} += saved_bar[i, place[l], {c}]" for c in range(d)]]
              if form.jumps is not None else []),
            "else:",
            *indented(inner),
        ]  # fmt: skip

    def _leave(self) -> list[str]:
        at, form, d = self.at, self.form, self.form.d
        lines = [
            "i = ids[l]",
            "while place[l] >= 0:",
            *[f"    {at('cotangent', c)} += saved_bar[i, place[l], {c}]" for c in range(d)],
            "    place[l] -= 1",
            *[f"u0_bar[{c}, i] = {at('cotangent', c)}" for c in range(d)],
            *[f"p_bar[{j}, i] = {at('own', j)}" for j in range(form.wanted_varying)],
        ]
        if form.timed:
            # All steps but the last keep their sizes; the last one ends where tspan does.
            lines += left(form, self.fields) if form.jumps is not None else [f"stop_bar[i] = {at('h_bar')}"]
            lines += [f"start_bar[i] = {at('t_bar')} - {at('h_bar')}"]
        return [*lines, "ids[l] = -1", "vacant += 1", f"{at('live')} = 0.0"]

    # ---- a step back

    def _back(self) -> list[str]:
        at, form, steps, d = self.at, self.form, self.steps, self.form.d
        lines = [f"y0_{c} = {at('u', c)}" for c in range(d)]
        lines += [f"p{j} = {at('p', j)}" for j in range(form.varying)]
        lines += [f"t = {at('t')}", f"h = {at('h')}", f"tn = {at('tn')}", f"live = {at('live')}"]
        lines += steps.rounded_step()
        if form.timed:
            lines += ["t_bar = 0.0", "h_bar = 0.0"]
        # Stages aren't recorded but computed again from the state before the step.
        lines += steps.again()
        # The last stage is f at the new state, so what it hands back belongs to that state, before the other stages.
        lines += [f"total_{c} = {at('cotangent', c)}" for c in range(d)]
        if form.stages in steps.pulled_stages:
            lines += self._pulled(form.stages)
        if form.timed:
            lines += [f"h_bar = fma(total_{c}, m{form.stages}_{c}, h_bar)" for c in range(d)]
        lines += [f"z{form.stages}_{c} = total_{c}" for c in range(d)]
        for i in reversed(steps.pulled_stages):
            lines += self._pulled(i) if i < form.stages else []
        # What is saved inside the step is u + h Σ w k: its cotangent goes to u as it is, to the stages by `arrival`.
        value = [f" + {at('value', c)}" if form.inside else "" for c in range(d)]
        # A lane without a trajectory is set to zero, since what it computes may be NaN.
        lines += [f"{at('cotangent', c)} = where(live > 0.0, total_{c}{value[c]}, {steps.number(0.0)})" for c in range(d)]
        if form.timed:
            lines += self._times()
        return lines

    def _pulled(self, i: int) -> list[str]:
        """Return lines that pull the cotangent of stage i back to its argument."""
        at, form, d = self.at, self.form, self.form.d
        lines = self.steps.pulled(i, lambda c: at("arrival", i * d + c))
        lines += [f"{at('own', j)} += e{j}" for j in range(form.wanted_varying)]
        first = form.wanted_varying
        lines += [f"{at('common', j)} += where(live > 0.0, e{first + j}, 0.0)" for j in range(form.wanted_shared)]
        if form.timed:
            lines.append("t_bar = t_bar + te")
            if form.tableau.c[i]:
                lines.append(f"h_bar = fma({number(form.tableau.c[i])}, te, h_bar)")
            # The last one's argument is the new state, whose cotangent counts when it is whole.
            lines += [f"h_bar = fma(z{i}_{c}, m{i}_{c}, h_bar)" for c in range(d) if 0 < i < form.stages]
        return lines

    def _times(self) -> list[str]:
        """Return lines on how states at fixed times inside the step move with its time and size, and on the sums."""
        at, form, d = self.at, self.form, self.form.d
        lines = []
        # At a fixed time x = (time - t) / h, which moves with both: see `StepCotangents.note_saved`.
        for i in self.steps.moving_stages if form.inside else ():
            for c in range(d):
                lines += [
                    f"t_bar = t_bar - {at('rate', i * d + c)} * k{i}_{c}",
                    f"h_bar = h_bar + ({at('arrival', i * d + c)} - {at('rate_x', i * d + c)}) * k{i}_{c}",
                ]
        return [
            *lines,
            f"{at('t_bar')} += t_bar",
            f"{at('h_bar')} = where({at('fresh')} > 0.0, h_bar, {at('h_bar')})",
            f"{at('fresh')} = 0.0",
        ]
