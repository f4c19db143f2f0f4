"""What visits lanes of the forward kernel one by one: saved times, events, ends.

At the end of a step the events' conditions are computed in the loop over all lanes. Where one has changed its sign, the
part of the step at which it did is found.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from mpiad.ensemble.compiled.jump_text import jump_lines
from mpiad.ensemble.compiled.kernel_form import Form
from mpiad.ensemble.compiled.kernel_rows import U
from mpiad.ensemble.compiled.kernel_template import filled
from mpiad.ensemble.compiled.step_text import Steps
from mpiad.ensemble.root_departure import LEAST

# On a lane where a state is to be saved, or where the trajectory ends.
_PUT_OUT = """
i = ids[l]
took = $accepted > 0.0
tn = $tn
when events:
    first = np.inf
    if took:
        @found
when affected:
    # What is saved at an event is what is after it.
    acted = False
    while took and $due < tn:
        @saving
    @jump
while took and $due <= tn:
    @saving
when not affected:
    code = -1
    when terminal:
        if first < np.inf:
            code = {Terminated}
if code < 0 and took and tn == $end:
    code = {Success}
when not adaptive:
    elif not took:
        code = {Unstable}
when adaptive:
    elif $next < $least:
        now = tn if took else $now
        least = 10.0 * (number_of(bits_of(now + 0.0) + (1 if now >= 0.0 else -1)) - now)
        if $next < least:
            if took:
                $next = least
            else:
                code = {DtLessThanMin} if np.isfinite($q2) else {Unstable}
if code < 0 and $tries >= max_steps:
    code = {MaxIters}
if code >= 0:
    number = np.int64($number + $accepted)
    codes[i] = code
    naccept[i] = number
    nreject[i] = np.int64($tries) - number
    t_reached[i] = $sign * (tn if took else $now)
    each c: u_end[i, {c}] = $new[{c}] if took else $u[{c}]
    each j: each c: du_end[{j}, {c}, i] = $dnew[{j}, {c}] if took else $du[{j}, {c}]
    ids[l] = -1
    vacant += 1
    # Until another trajectory comes the lane takes steps of length zero.
    $live = 0.0
    $end = tn
    $next = 0.0
"""

_SAVING = """
when inside:
    if $due < tn:
        h = $sign * $size
        @rounded_step
        x = ($due - $now) / $size
        @weights
        @interpolated
    else:
        each c: saved[i, place[l], {c}] = $new[{c}]
        each j: each c: dsaved[{j}, i, place[l], {c}] = $dnew[{j}, {c}]
when not inside: each c: saved[i, place[l], {c}] = $new[{c}]
if save_step.shape[0] > 0:
    # After an event it is that of the next step.
    when affected: save_step[i, place[l]] = np.int32($number + (1.0 if acted else 0.0))
    when not affected: save_step[i, place[l]] = np.int32($number)
@next_due
"""

# A step's events are found and noted (see `kernel_rows`), and it is cut short at the first terminal one. `first` becomes
# the part of the step that is gone there, where there is one.
_EVENTS = """
h = $sign * $size
@rounded_step
each p: p{p} = $p[{p}]
# One loop for all: each event's own lines would have to be compiled, too.
for e in range({count}):
    $part[e] = np.inf
    if $crossed[e] > 0.0:
        old = $condition[e]
        late = $condition_new[e]
        @located
        $part[e] = high
        when terminal:
            if ({ending}) and high < first:
                first = high
when terminal:
    if first < np.inf:
        x = first
        @weights
        @cut
        tn = min($now + x * $size, tn)
        $tn = tn
        when affected:
            each c: y_{c} = $new[{c}]
            @conditions_at_cut
            # What has changed its sign there wouldn't be seen to do so afterwards: see `ActingEvents`.
            @late
when acts: noted = found
for e in range({count}):
    if $part[e] < np.inf and $part[e] <= first:
        crossings[found, 0] = i
        crossings[found, 1] = e
        crossings[found, 2] = $number
        crossings[found, 3] = $part[e]
        crossings[found, 4] = $sign * min($now + $part[e] * $size, tn)
        crossings[found, 5] = $sign * $now
        crossings[found, 6] = $sign * $size
        each c: crossings[found, {first+c}] = $u[{c}]
        found += 1
"""


def put_out(form: Form, steps: Steps, names: dict[str, Any]) -> list[str]:
    """Return lines on a lane that has something to tell, in a kernel whose templates have these names."""
    components, saved, cut, value, late = range(form.d), [], [], [], []
    for c in components if form.inside else ():
        saved += steps.interpolated(f"saved[i, place[l], {c}]", partial(_stage, form, c=c), f"$u[{c}]")
        cut += steps.interpolated(f"$new[{c}]", partial(_stage, form, c=c), f"$u[{c}]")
    for j in range(len(form.directions) if form.inside else 0):
        for c in components:
            stage = lambda i, c=c, j=j: f"$dk[{j}, {i}, {c}]"  # noqa: E731
            saved += steps.interpolated(f"dsaved[{j}, i, place[l], {c}]", stage, f"$du[{j}, {c}]", fused=True)
    for e in range(len(form.events)):
        value += [f"{'el' if e else ''}if e == {e}:"]
        value += [f"    {steps.condition(e, 'value', 'y', '$sign * ($now + x * $size)')}"]
        rests = f"abs($condition[{e}]) <= {LEAST} and tn - $now <= $unresolved"
        late += [f"if $part[{e}] > first and {_changed(form, steps, e)} and not ({rests}):", f"    $part[{e}] = first"]
    terminal = [f"e == {e}" for e, (ends, _) in enumerate(form.events) if ends]
    names = names | {
        "late": late, "conditions_at_cut": steps.conditions("condition_new", "y", "$sign * tn"),
        "terminal": bool(terminal), "ending": " or ".join(terminal), "first": U, "cut": cut,
        "weights": steps.weights() if form.inside else [], "interpolated": saved,
        "located": steps.located(partial(_stage, form), lambda c: f"$u[{c}]", value) if form.events else [],
    }  # fmt: skip
    names |= {"saving": filled(_SAVING, names), "found": filled(_EVENTS, names)}
    if form.affects is not None:
        names["jump"] = jump_lines(form, steps, names)
    return filled(_PUT_OUT, names)


def _stage(form: Form, i: int, c: int) -> str:
    return f"$k[{c}]" if i == 0 else f"$last[{c}]" if i == form.stages else f"$inner[{i - 1}, {c}]"


def crossed(form: Form, steps: Steps) -> list[str]:
    """Return lines that tell whether conditions have changed their signs as asked."""
    lines = []
    for e in range(len(form.events)):
        lines += [f"crossed{e} = where({_changed(form, steps, e)}, accepted, 0.0)"]
        if form.affects is not None:
            # Near its root it stays on its side: a step as short as this one doesn't tell.
            rests = f"(abs($condition[{e}]) <= {LEAST}) & ($size <= $unresolved)"
            lines += [f"crossed{e} = where({rests}, 0.0, crossed{e})"]
        lines += [f"$crossed[{e}] = crossed{e}"]
    return lines


def _changed(form: Form, steps: Steps, e: int) -> str:
    """Return whether a condition has changed its sign as asked for."""
    values = f"$condition[{e}]", f"$condition_new[{e}]"
    if e not in form.sided:
        return steps.changed(e, *values)
    # What leaves on one side comes back from there.
    up, down = (steps.changed(e, *values, way) for way in (1, -1))
    return f"(({up} & ($side[{e}] <= 0.0)) | ({down} & ($side[{e}] >= 0.0)))"
