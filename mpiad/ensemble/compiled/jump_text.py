"""Lines of kernels on events that act: a lane goes on with its next step from the state after, and back from that before.

What that takes of affects is theirs: `back0`, `back1`, ... are their adjoints, as `g` is that of f.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpiad.compiling.source import indented, numbered
from mpiad.ensemble.compiled.departure_text import departure, distance_ahead
from mpiad.ensemble.compiled.kernel_rows import U
from mpiad.ensemble.controller import LEAST_ERROR
from mpiad.ensemble.outcome import ReturnCode
from mpiad.ensemble.root_departure import MOST_SHORT, SHORT

if TYPE_CHECKING:
    from mpiad.ensemble.compiled.kernel_form import Fields, Form
    from mpiad.ensemble.compiled.lane_output import LaneOutput
    from mpiad.ensemble.compiled.reverse_kernel import ReverseOutput


def least_of(t: str, goal: str) -> list[str]:
    """Return lines for `most`: 10 times what time can resolve between t and a goal, below which a step is looked at."""
    return [
        f"most = max(abs({t}), abs({goal}))",
        "most = 10.0 * (number_of(bits_of(most + 0.0) + (1 if most >= 0.0 else -1)) - most)",
    ]


def first_goal() -> list[str]:
    """Return lines that make the first given time the `goal` of a trajectory that enters, where it comes before the end."""
    return [
        "own = 0 if one_given else i",
        "goal = given[slots[i], own] if sign * given[slots[i], own] <= sign * goal else goal",
    ]


def sides(output: LaneOutput, target: str, left: bool) -> list[str]:
    """Return lines on which side of its root each condition is that acts wherever it comes from, by its value in `target`.

    Where it was `left` at its root, that says on which.
    """
    at, lines = output.at, []
    for e in output.form.sided:
        value = at(target, e)
        side = f"(1.0 if {value} > 0.0 else (-1.0 if {value} < 0.0 else 0.0))"
        lines.append(f"{at('side', e)} = {f'left{e} if left{e} != 0.0 else ' if left else ''}{side}")
    return lines


def jump(output: LaneOutput) -> list[str]:
    """Return lines on a lane whose step may have ended at an event: they let events act, and set its next goal.

    `code` is what ends the trajectory there, or -1. All is as `ActingEvents` has it.
    """
    at, form, steps = output.at, output.form, output.steps
    state = _state(output)
    went_on = [
        "resumed[i] += 1",
        *state,
        steps.call("k0", "u", 0),
        *[f"{at('last', c)} = k0_{c}" for c in range(form.d)],
        *([f"{at('q2_before')} = {LEAST_ERROR!r}"] if output.beta is not None else []),
        *output.conditions("condition_new", "u", "t"),
        *([f"{at('begun')} = tn"] if output.acts else []),
        *sides(output, "condition_new", left=True),
    ]
    lines = ["code = -1", "own = 0 if one_given else i", f"sign = {at('sign')}", "t = sign * tn"]
    if output.acts:
        met = ["acted = True", *state, *_at_conditions(output)]
        met += ["if code < 0 and stopped:", f"    code = {ReturnCode.Terminated.code}"]
        lines += [*[f"left{e} = 0.0" for e in form.sided], "if first < np.inf:", *indented(met)]
    else:
        lines += output.terminated()
    return [
        *lines,
        f"if code < 0 and took and tn == {at('end')} and given[slots[i], own] == t:",
        *indented(["acted = True", *state, *_at_given_times(output)]),
        f"if acted and code < 0 and tn != {at('end')}:",
        *indented(went_on),
    ]


def _state(output: LaneOutput) -> list[str]:
    """Return lines that load the state after the step, or after the last event, and the parameters."""
    at, form = output.at, output.form
    return [*[f"u_{c} = {at('new', c)}" for c in range(form.d)], *[f"p{j} = {at('p', j)}" for j in range(form.varying)]]


def _affect(output: LaneOutput, e: int) -> str:
    """Return a line that lets event e of all act on the state u; what it makes of it, w, counts where it is finite."""
    steps = output.steps
    return steps.called(steps.state("w"), f"affect{e}", "u", steps.rounded("t"))


def _taken(output: LaneOutput, more: list[str]) -> list[str]:
    """Return lines that take the state w after an event, and `more`; where it isn't finite the trajectory ends."""
    components = range(output.form.d)
    return [
        f"if {' and '.join(f'np.isfinite(w_{c})' for c in components)}:",
        *[f"    u_{c} = w_{c}" for c in components],
        *[f"    {output.at('new', c)} = w_{c}" for c in components],
        *indented(more),
        "else:",
        f"    code = {ReturnCode.Unstable.code}",
    ]


def _at_given_times(output: LaneOutput) -> list[str]:
    """Return lines that let the events act whose time has come, those of one time one after the other."""
    at, form = output.at, output.form
    acting = ["kind = kinds[turn, own]"]
    if form.record:
        acting += [f"jump_number[i, turn] = np.int64({at('number')}) + 1"]
        acting += [f"jump_before[i, turn, {c}] = u_{c}" for c in range(form.d)]
    for k, e in enumerate(form.affects or ()):
        acting += [f"{'el' if k else ''}if kind == {e}:", f"    {_affect(output, e)}"]
    more = ["turn += 1"]
    ending = [f"kind == {e}" for e in form.ending if e in (form.affects or ())]
    if ending:
        more += [f"if {' or '.join(ending)}:", f"    code = {ReturnCode.Terminated.code}"]
    return [
        "turn = slots[i]",
        "while code < 0 and given[turn, own] == t:",
        *indented([*acting, *_taken(output, more)]),
        "slots[i] = turn",
        "goal = end[0 if one_span else i]",
        "goal = given[turn, own] if sign * given[turn, own] <= sign * goal else goal",
        f"{at('end')} = sign * goal",
        *least_of("t", "goal"),
        f"{at('least')} = most",
    ]


def _at_conditions(output: LaneOutput) -> list[str]:
    """Return lines that let the events act whose conditions have vanished at the part `first` of the step.

    `stopped` says whether another one ends the trajectory there.
    """
    at, form = output.at, output.form
    lines = [
        "span = abs(end[0 if one_span else i] - start[0 if one_span else i])",
        f"gone = abs(tn - {at('begun')})",
        *distance_ahead(),
        "stopped = False",
    ]
    for e, acts in enumerate(form.acting):
        if acts < 0:
            met = ["stopped = True"] if form.events[e][0] else []
        else:
            kept = [f"crossings[noted, {U + form.d + c}] = u_{c}" for c in range(form.d)] if form.record else []
            came = [output.steps.condition(e, "was", "u", "t"), *kept, _affect(output, acts)]
            met = ["if code < 0:", *indented([*came, *_taken(output, departure(output, e))])]
            met += ["stopped = True"] if acts in form.ending else []
        lines += [f"if {at('part', e)} <= first:", *indented([*met, "noted += 1"])]
    return [
        *lines,
        f"{at('short')} = {at('short')} + 1.0 if abs(tn - {at('met')}) <= {SHORT!r} * span else 0.0",
        f"{at('met')} = tn",
        f"if code < 0 and {at('short')} >= {MOST_SHORT}.0:",
        f"    code = {ReturnCode.Zeno.code}",
    ]


def jump_back(output: ReverseOutput) -> list[str]:
    """Return lines of the reverse kernel on a lane whose next step back events have followed.

    The last one's number is `jump[l]`; that at which the steps ended which have been gone back over is kept behind.
    """
    form, at, steps, d = output.form, output.at, output.steps, output.form.d
    components, ended, time = range(d), f"jump[{form.lanes} + l]", steps.rounded("jump_time[j]")
    back = [*steps.state("y"), *numbered("e", form.wanted_varying + form.wanted_shared), *(["te"] if form.timed else [])]
    lines = [f"z_{c} = {at('cotangent', c)}" for c in components]
    lines += [f"u_{c} = jump_state[j, {c}]" for c in components]
    for k, (e, given) in enumerate(form.jumps or ()):
        call = steps.called(back, f"back{e}", "u", time, steps.state("z"))
        lines += [f"{'el' if k else ''}if jump_kind[j] == {e}:", f"    {call}", f"    given = {float(given)}"]
    lines += [f"{at('cotangent', c)} = y_{c}" for c in components]
    lines += [f"{at('own', k)} += e{k}" for k in range(form.wanted_varying)]
    lines += [f"{at('common', k)} += e{form.wanted_varying + k}" for k in range(form.wanted_shared)]
    if form.timed:
        # Where no step lies between a given time and what was before it at the same time, the state would move by f.
        moving = "given > 0.0 and j > jump_first[i] and jump_number[j - 1] == jump_number[j]"
        drift = " + ".join(f"k0_{c} * {at('cotangent', c)}" for c in components)
        lines += [
            f"since = {at('t_bar')} - {at('h_bar')} + te",
            "drift = 0.0",
            f"if {moving}:",
            *indented([steps.called(steps.state("k0"), "f", "u", time), f"drift = {drift}"]),
            *left(form, output.fields),
            # A step keeps its size that a condition has ended.
            "jump_due[j] += given * (since + drift)",
            f"{at('t_bar')} = -drift if given > 0.0 else since",
            f"{at('h_bar')} = 0.0",
            f"{at('fresh')} = given",
            f"{ended} = j",
        ]
    return [
        f"if {_next(form, 3)} == step[l] + 1:",
        *[f"    p{k} = {at('p', k)}" for k in range(form.varying)],
        "    while jump[l] >= jump_first[i] and jump_number[jump[l]] == step[l] + 1:",
        "        j = jump[l]",
        *indented(lines, 2),
        "        jump[l] -= 1",
        # While steps are taken back memory brings the one before.
        "        fetched(jump_state, jump[l])",
        *indented(next_back(form)),
    ]


def _next(form: Form, row: int) -> str:
    """Return where a lane notes the step of the next jump back, in row 3, or of the next stop, in row 4."""
    return f"jump[{row * form.lanes} + l]"


def next_back(form: Form, stop: bool = False) -> list[str]:
    """Return lines that note the step that a lane's next jump back has followed, or its next stop has ended; -1: none."""
    if stop:
        at = f"jump[{2 * form.lanes} + l]"
        return [f"{_next(form, 4)} = stop_number[{at}] if {at} >= stop_first[i] else -1"]
    return [f"{_next(form, 3)} = jump_number[jump[l]] if jump[l] >= jump_first[i] else -1"]


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
        f"if {_next(output.form, 4)} == step[l]:",
        *indented([*lines, f"{stop} -= 1", *next_back(output.form, stop=True)]),
    ]
