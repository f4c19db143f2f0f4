"""The part of the forward kernel's source that visits lanes one by one: records, saved states, ends."""

from __future__ import annotations

from mpiad.compiling.source import indented
from mpiad.ensemble.compiled.event_location import Locating, total_lines
from mpiad.ensemble.retcodes import ReturnCode

__all__ = ["Telling"]

_STUCK = ReturnCode.DtLessThanMin.code


class Telling(Locating):
    """Lines on lanes that have something to tell."""

    def told(self) -> list[str]:
        """Return lines on a lane where a state is to be saved, or where the trajectory ends."""
        at, form, d = self.at, self.form, self.form.d
        lines = ["i = ids[l]", f"took = {at('accepted')} > 0.0", f"tn = {at('tn')}"]
        if form.events:
            lines += ["first = np.inf", "if took:", *indented(self.happened())]
        lines += [f"while took and {at('due')} <= tn:", *indented(self._saving())]
        lines += [
            "code = -1",
            *self._terminated(),
            f"{'el' if self._terminated() else ''}if took and tn == {at('end')}:",
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

    def _terminated(self) -> list[str]:
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
        number = f"np.int32({at('number')})"
        return [
            *lines,
            "if save_step.shape[0] > 0:",
            f"    save_step[i, place[l]] = {number}",
            *self.next_due(),
        ]

    def _inside(self) -> list[str]:
        """Return lines that interpolate."""
        at, form, d = self.at, self.form, self.form.d
        stages = form.stages
        lines = [*self.step_lines(), f"x = ({at('due')} - {at('now')}) / {at('size')}", *self.weights()]
        for c in range(d):
            lines += self.interpolated(c, f"saved[i, place[l], {c}]")
        for j in range(len(form.directions)):
            for c in range(d):
                lines += total_lines(self.used(), lambda i, c=c, j=j: at("dk", (j * (stages + 1) + i) * d + c))
                lines.append(f"dsaved[{j}, i, place[l], {c}] = fma(total, {self.steps.h}, {at('du', j * d + c)})")
        return lines
