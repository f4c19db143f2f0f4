"""Lines of kernels on events that act: a lane goes on with its next step from the state after, and back from that before.

On the way back affects are matrices, which `linear_jumps` has made of them, in the order in which trajectories met them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpiad.compiling.source import indented
from mpiad.ensemble.controller import LEAST_ERROR
from mpiad.ensemble.outcome import ReturnCode

if TYPE_CHECKING:
    from mpiad.ensemble.compiled.kernel_form import Fields, Form
    from mpiad.ensemble.compiled.lane_output import LaneOutput
    from mpiad.ensemble.compiled.reverse_kernel import ReverseOutput

__all__ = ["first_goal", "jump", "jump_back", "least_of", "left", "stop_back"]


def least_of(t: str, goal: str) -> list[str]:
    """Return lines for `most`: 10 times what time can resolve between t and a goal, below which a step is looked at."""
    return [
        f"most = max(abs({t}), abs({goal}))",
        "most = 10.0 * (number_of(bits_of(most + 0.0) + (1 if most >= 0.0 else -1)) - most)",
    ]


def first_goal() -> list[str]:
    """Return lines that make the first given time the `goal` of a trajectory that enters, where it comes before the end."""
    return [
        "naccept[i] = 0",
        "nreject[i] = 0",
        "own = 0 if one_given else i",
        "goal = given[slot[0, i], own] if sign * given[slot[0, i], own] <= sign * goal else goal",
    ]


def jump(output: LaneOutput) -> list[str]:
    """Return lines on a lane whose step may have ended at a given time: they let events act, and set its next goal.

    `code` is what ends the trajectory there, or -1.
    """
    at, form, steps = output.at, output.form, output.steps
    state, components = steps.state("u"), range(form.d)
    call = ", ".join([*state, *steps.parameters, steps.rounded("t")])
    acting = ["kind = kinds[turn, own]"]
    if form.record:
        acting += ["jump_number[i, turn] = naccept[i]", *[f"jump_before[i, turn, {c}] = u_{c}" for c in components]]
    for e in range(form.affects):
        acting += [f"{'el' if e else ''}if kind == {e}:", f"    {', '.join(steps.state('w'))}, = affect{e}({call})"]
    finite = " and ".join(f"np.isfinite(w_{c})" for c in components)
    acting += [
        f"if {finite}:",
        *[f"    u_{c} = w_{c}" for c in components],
        "    turn += 1",
        "else:",
        f"    code = {ReturnCode.Unstable.code}",
    ]
    went_on = [
        "slot[1, i] += 1",
        steps.call("k0", "u", 0),
        *[f"{at('last', c)} = k0_{c}" for c in components],
        f"{at('end')} = sign * goal",
        *least_of("t", "goal"),
        f"{at('least')} = most",
        *([f"{at('q2_before')} = {LEAST_ERROR!r}"] if output.beta is not None else []),
    ]
    lines = [
        # Counted over all pieces, and looked at between them.
        f"number = np.int64({at('number')} + {at('accepted')})",
        "naccept[i] += number",
        f"nreject[i] += np.int64({at('tries')}) - number",
        f"{at('number')} = -{at('accepted')}",
        f"{at('tries')} = 0.0",
        "turn = slot[0, i]",
        "if naccept[i] + nreject[i] >= max_steps:",
        f"    code = {ReturnCode.MaxIters.code}",
        *[f"u_{c} = {at('new', c)}" for c in components],
        *[f"p{j} = {at('p', j)}" for j in range(form.varying)],
        "t = sign * tn",
        "while code < 0 and given[turn, own] == t:",
        *indented(acting),
        "slot[0, i] = turn",
        *[f"{at('new', c)} = u_{c}" for c in components],
        "goal = end[0 if one_span else i]",
        "goal = given[turn, own] if sign * given[turn, own] <= sign * goal else goal",
        "if code < 0 and goal != t:",
        *indented(went_on),
    ]
    return [
        "code = -1",
        "own = 0 if one_given else i",
        f"sign = {at('sign')}",
        f"if took and tn == {at('end')} and given[slot[0, i], own] == sign * tn:",
        *indented(lines),
    ]


def jump_back(form: Form, fields: Fields) -> list[str]:
    """Return lines of the reverse kernel on a lane whose next step back events have followed.

    The last one's number is `jump[l]`; that at which the steps ended which have been gone back over is kept behind.
    """
    at, d, ended, entries = fields.at, form.d, f"jump[{form.lanes} + l]", form.jumps or ()
    lines = [f"z_{c} = {at('cotangent', c)}" for c in range(d)]
    lines += [f"jump_after[j, {c}] = z_{c}" for c in range(d)]
    for c in range(d):
        terms = [f"jump_map[j, {k}] * z_{after}" for k, (before, after) in enumerate(entries) if before == c]
        lines.append(f"{at('cotangent', c)} = {' + '.join(terms) or '0.0'}")
    if form.timed:
        first = len(entries)
        by_time = [f"jump_map[j, {first + c}] * z_{c}" for c in range(d)]
        lines += [
            f"since = {at('t_bar')} - {at('h_bar')} + {' + '.join(by_time)}",
            "drift = " + " + ".join(f"jump_map[j, {first + d + c}] * {at('cotangent', c)}" for c in range(d)),
            *left(form, fields),
            # A step keeps its size that a condition has ended.
            f"given = jump_map[j, {first + 2 * d}]",
            "jump_due[j] += given * (since + drift)",
            f"{at('t_bar')} = -drift if given > 0.0 else since",
            f"{at('h_bar')} = 0.0",
            f"{at('fresh')} = given",
            f"{ended} = j",
        ]
    return [
        "while jump[l] >= jump_first[i] and jump_number[jump[l]] == step[l] + 1:",
        "    j = jump[l]",
        *indented(lines),
        "    jump[l] -= 1",
        # While steps are taken back memory brings the one before.
        "    fetched(jump_map, jump[l])",
        "    fetched(jump_after, jump[l])",
    ]


def left(form: Form, fields: Fields) -> list[str]:
    """Return lines that give what the last step's size gains to the time at which it ends."""
    ended, gained = f"jump[{form.lanes} + l]", fields.at("h_bar")
    return [f"if {ended} < 0:", f"    stop_bar[i] += {gained}", "else:", f"    jump_due[{ended}] += {gained}"]


def stop_back(output: ReverseOutput) -> list[str]:
    """Return lines of the reverse kernel on a lane whose next step back was cut short where a condition vanished.

    The state there is one inside the step, whose part moves as `KernelStops` says.
    """
    at, d, stop = output.at, output.form.d, f"jump[{2 * output.form.lanes} + l]"
    lines = [
        f"stop = {stop}",
        f"since = {at('t_bar')} + stop_bar_[stop]",
        "moved = -("
        + " + ".join(["stop_row[stop, 1] * since", *[f"stop_row[stop, {3 + c}] * {at('cotangent', c)}" for c in range(d)]])
        + ")",
        "stop_moved[stop] = moved",
        f"{at('t_bar')} = since + stop_row[stop, 2] * moved",
        f"{at('fresh')} = 0.0",
        f"{at('tn')} = {at('t')} + {at('h')}",
        f"{at('touched')} = 1.0",
        "x = stop_row[stop, 0]",
        *output.steps.weights(),
    ]
    for c in range(d):
        lines += [f"value = {at('cotangent', c)} + stop_row[stop, {3 + d + c}] * moved", f"{at('cotangent', c)} = 0.0"]
        lines += [
            f"{at('value', c)} += value",
            *[f"{at('arrival', i * d + c)} += w{i} * value" for i in output.steps.used()],
        ]
    return [
        f"if {stop} >= stop_first[i] and stop_number[{stop}] == step[l]:",
        *indented(lines),
        f"    {stop} -= 1",
    ]
