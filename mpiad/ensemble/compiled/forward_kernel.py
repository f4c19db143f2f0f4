"""The source of the CPU's forward kernel, which solves several trajectories at a time by vector instructions.

A *lane* is the memory of one trajectory in the kernel. In each *turn* every lane attempts one step: it moves to the end of
its previous step if that step was accepted, computes the next step and its error, accepts or rejects it, and chooses the
size of the following step. This part is a loop over the lanes without branches or calls, so the compiler can vectorize it.
Then the lanes with output (a recorded step, a saved state, an event, the end of a trajectory) are processed one by one. A
lane whose trajectory has ended starts another trajectory. The kernel returns after a given number of turns, or if the
output arrays may be too small for another turn; the next call continues from `state`.

Several threads take trajectories from a shared counter, a few at a time, to finish at about the same time.

The parts of the kernel for one trajectory are also printed for GPUs: see `cuda_kernels`.

The kernel performs the same operations in the same order as the vectorized NumPy solver, except for the powers in the step
size control, functions such as sin, and complex products. The compiler doesn't reorder operations, so the results of a
trajectory don't depend on its lane or on other settings of the kernel. Only powers and tangents use `fma`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from mpiad.compiling.program import Program
from mpiad.compiling.source import are_simple, indented
from mpiad.ensemble import events as event_location
from mpiad.ensemble.compiled.jump_text import jump_lines
from mpiad.ensemble.compiled.kernel_spec import Fields, KernelSpec, filled
from mpiad.ensemble.compiled.rosenbrock_text import layout_of
from mpiad.ensemble.compiled.step_text import Power, Steps
from mpiad.ensemble.jumps import LEAST

# Finds events, and saves states.
_OUTPUT = """
when events:
    first = np.inf
    if was_accepted:
        @locate_events
when affected:
    # If a saved time is the time of an event, the state after the event is saved.
    acted = False
    while was_accepted and $save_time < tn:
        @saving
    @jump
while was_accepted and $save_time <= tn:
    @saving
"""

# Sets `code`: the return code if the trajectory ends, otherwise -1.
_END = """
when not affected:
    code = -1
    when stops:
        if first < np.inf:
            code = {Terminated}
if code < 0 and was_accepted and tn == $goal:
    code = {Success}
when not adaptive:
    elif not was_accepted and not $q2 == 0.0:
        code = {Unstable}
when adaptive:
    elif $next < $least:
        reached = tn if was_accepted else $now
        smallest = 10.0 * (number_of(bits_of(reached + 0.0) + (1 if reached >= 0.0 else -1)) - reached)
        if $next < smallest:
            if was_accepted:
                $next = smallest
            else:
                code = {DtLessThanMin} if np.isfinite($q2) else {Unstable}
if code < 0 and $tries >= max_steps:
    code = {MaxIters}
"""

# Writes the results of a trajectory that has ended.
_RESULTS = """
steps = np.int64($number + $accepted)
codes[i] = code
naccept[i] = steps
nreject[i] = np.int64($tries) - steps
t_reached[i] = $sign * (tn if was_accepted else $now)
each c: u_end[i, {c}] = $new[{c}] if was_accepted else $u[{c}]
each j: each c: du_end[{j}, {c}, i] = $dnew{j}[{c}] if was_accepted else $du{j}[{c}]
"""

_SAVING = """
when inside:
    if $save_time < tn:
        h = $sign * $size
        @rounded_step
        x = ($save_time - $now) / $size
        @weights
        @interpolated
    else:
        each c: saved[i, time_index[l], {c}] = $new[{c}]
        each j: each c: dsaved[{j}, i, time_index[l], {c}] = $dnew{j}[{c}]
when not inside:
    each c: saved[i, time_index[l], {c}] = $new[{c}]
    each j: each c: dsaved[{j}, i, time_index[l], {c}] = $dnew{j}[{c}]
when by_lanes:
    if save_step.shape[0] > 0:
        # A state after an event belongs to the next step.
        when affected: save_step[i, time_index[l]] = np.int32($number + (1.0 if acted else 0.0))
        when not affected: save_step[i, time_index[l]] = np.int32($number)
@next_save_time
"""

# Locates the events of a step and stores them in a table. The first event that is terminal or acts ends the step at the
# fraction `first` of the step. `@screened` has selected the conditions that may have changed their signs.
_EVENTS = """
h = $sign * $size
@rounded_step
each p: p{p} = $p{p}
@locate_stops
each clocks:
    if $fraction[{clocks}] < np.inf:
        $fraction[{clocks}] = 1.0
        first = min(first, 1.0)
when stops:
    if first < np.inf:
        x = first
        @weights
        @cut
        tn = min($now + x * $size, tn) if x < 1.0 else tn
        $ahead = tn
        each c: y_{c} = $new[{c}]
        @conditions_at_cut
        # If another condition has also changed its sign at or before `first`, its event is assigned the fraction `first`:
        # the next step wouldn't detect the sign change (see `ActingEvents`).
        when affected: @coinciding
    when acts: event_row = event_count
    @store
@locate_others
"""

# Rejects a step that contains a root of a condition of p and t; the next step ends there.
_RETAKE = """
first = np.float64(np.inf)
each p: p{p} = $p{p}
@locate_clocks
if first <= $ahead and $ahead != $clock:
    $clock = first
    $goal = first
    at = {rounded_goal}
    $end_time = at - {gap}
    $next = $size
    $accepted = 0.0
    $event = 1.0 if $tries >= max_steps else 0.0
"""

# Finds the roots of a condition, or the first root of one whose event ends the step, as in `EventWatch`, between the points
# `left` and `middle`, of which the second may have moved to the vertex of a parabola. If the last part of the step has a
# root, `crossed` is the value before it, otherwise 0.
_LOCATE = """
$fraction[{e}] = np.inf
if $crossed[{e}] > 0.0:
    $crossed[{e}] = 0.0
    bound = {bound}
    left = 0.0
    middle = 0.0
    right = 0.0
    value_left = $condition[{e}]
    value_middle = value_left
    value_right = value_left
    for part in range({points+2}):
        left = middle
        value_left = value_middle
        middle = right
        value_middle = value_right
        if right < bound:
            right = (part + 1.0) * {spacing}
            right = right if right < bound and part < {points} else bound
            value_right = $condition_new[{e}]
            if right < bound:
                x = right
                @value_at_x
                value_right = {doubled}
            if left < middle and value_left * value_middle > 0.0 and value_right * value_middle > 0.0:
                slope = (value_middle - value_left) / (middle - left)
                curvature = ((value_right - value_middle) / (right - middle) - slope) / (right - left)
                slope = slope + curvature * (middle - left)
                x = middle - 0.5 * slope / curvature
                depth = slope * slope - 4.0 * curvature * value_middle
                if curvature * value_middle > 0.0 and depth >= 0.0 and x > left and x < right:
                    @value_at_x
                    if {doubled} * value_middle < 0.0:
                        middle = x
                        value_middle = {doubled}
        @changed
        if left < middle and changed > 0.0:
            # `high` is at or after the sign change. For conditions of p and t it is the first number after it, a time.
            low = left
            high = middle
            when is_clock:
                low = $now + left * $size
                high = $now + middle * $size if middle < 1.0 else $ahead
                x = 0.5 * (low + high)
                while low < x and x < high:
                    @value
                    if (value > 0.0) if value_left > 0.0 else (value < 0.0):
                        low = x
                    else:
                        high = x
                    x = 0.5 * (low + high)
            when not is_clock:
                radius = high - low
                value_low = value_left
                value_high = value_middle
                for evaluation in range({EVALUATIONS}):
                    width = high - low
                    if width <= {RESOLUTION}:
                        break
                    between = 0.5 * (low + high)
                    # The ITP method: the root of the secant is moved towards the middle of the bracket, and its distance
                    # from the middle is limited so that the search takes at most one more evaluation than bisection.
                    x = (value_high * low - value_low * high) / (value_high - value_low)
                    offset = between - x
                    shift = max({TRUNCATION} * width * width, 0.5 * {RESOLUTION})
                    allowed = radius - 0.5 * width
                    x = between if abs(offset) <= shift else (x + shift if offset > 0.0 else x - shift)
                    x = x if abs(x - between) <= allowed else (between - allowed if offset > 0.0 else between + allowed)
                    radius = 0.5 * radius
                    @value_at_x
                    if (value > 0.0) if value_left > 0.0 else (value < 0.0):
                        low = x
                        value_low = {doubled}
                    else:
                        high = x
                        value_high = {doubled}
            $fraction[{e}] = high
            when stopping:
                $crossed[{e}] = value_left
                first = high if high < first else first
                break
            when not stopping:
                $crossed[{e}] = value_left if middle >= bound else 0.0
                @store_root
"""

# `row`: the next row of the table of events. See `kernel_spec` for the table of CPU kernels, and `cuda_kernels`.
_STORE = """
if $fraction[{e}] < np.inf and $fraction[{e}] <= first{stored}:
    when not by_lanes: {row} = NEXT(event_count)
    crossings[{row}, 0] = i
    crossings[{row}, 1] = {e}
    crossings[{row}, 2] = $number
    crossings[{row}, 3] = $fraction[{e}]
    crossings[{row}, 4] = $sign * (min($now + $fraction[{e}] * $size, tn) if $fraction[{e}] < 1.0 else tn)
    when by_lanes: {row} += 1
    when not by_lanes:
        crossings[{row}, 5] = head
        head = {row}
"""


def _output(spec: KernelSpec, steps: Steps, names: dict[str, Any]) -> dict[str, list[str]]:
    """Return the lines for output and for the end of a trajectory; `names`: the values of the placeholders."""
    saved, cut, coinciding = [], [], list[str]()
    names = names | {"stopping_events": [e for e, (stops, _) in enumerate(spec.events) if stops]}
    if spec.inside:
        saved += steps.interpolated("saved[i, time_index[l], {c}]", "$k{i}[{c}]", "$u[{c}]")
        cut += steps.interpolated("$new[{c}]", "$k{i}[{c}]", "$u[{c}]")
        for j in range(len(spec.directions)):
            target = f"dsaved[{j}, i, time_index[l], {{c}}]"
            saved += steps.interpolated(target, f"$l{j}_{{i}}[{{c}}]", f"$du{j}[{{c}}]", fused=True)
    for e in names["stopping_events"]:
        near_root = f"abs($condition[{e}]) <= {LEAST} and tn - $now <= $unresolved"
        changed = _changed(spec, e, f"$condition[{e}]", f"$condition_new[{e}]")
        coinciding += [
            f"if $fraction[{e}] > first and {changed} and not ({near_root}):",
            f"    $fraction[{e}] = first",
            f"    $crossed[{e}] = $condition[{e}]",
        ]
    names = names | {"coinciding": coinciding, "stops": bool(names["stopping_events"])}
    names |= {"cut": cut, "conditions_at_cut": steps.conditions("condition_new", "y", "$sign * tn")}
    names |= {"weights": steps.weights() if spec.inside else [], "interpolated": saved}
    names |= _event_lines(spec, steps, names) | {"saving": filled(_SAVING, names)}
    names |= {"locate_events": filled(_EVENTS, names), "retake": filled(_RETAKE, names) if spec.clocks else []}
    if spec.affects is not None:
        names["jump"] = jump_lines(spec, steps, names)
    return {"output": filled(_OUTPUT, names), "end": filled(_END, names), "retake": names["retake"]}


def _event_lines(spec: KernelSpec, steps: Steps, names: dict[str, Any]) -> dict[str, list[str]]:
    """Return the lines that locate and store events."""
    values = [steps.condition(e, "value", "y", "$sign * ($now + x * $size)", "$u[{c}]") for e in names["e"]]
    at_time = [steps.condition(e, "value", "y", "$sign * x", "$u[{c}]") for e in names["e"]]
    changed = [f"changed = 1.0 if {_changed(spec, e, 'value_left', 'value_middle')} else 0.0" for e in names["e"]]
    names = vars(event_location) | names | {"doubled": steps.doubled("value"), "spacing": repr(1 / (spec.points + 1))}
    at_x = [*steps.weights(), *steps.interpolated("y_{c}", "$k{i}[{c}]", "$u[{c}]", spec.reads)] if spec.reads else []
    result: dict[str, list[str]] = {"store": []}
    for name, stopping in (("locate_clocks", True), ("locate_stops", True), ("locate_others", False)):
        is_clock = name == "locate_clocks"
        chosen = [e for e in names["e"] if spec.events[e][0] == stopping and (e in spec.clocks) == is_clock]
        result[name] = []
        # A loop over the events, since a copy of these lines for each event would take longer to compile.
        looped = names["by_lanes"] and len(chosen) > 1
        groups: list[tuple[str | int, list[int]]] = [("e", chosen)] if looped else [(e, [e]) for e in chosen]
        for e, group in groups:
            own = names | {"e": e, "stopping": stopping, "bound": "1.0" if stopping else "min(first, 1.0)"}
            own |= {"value_at_x": at_x + _by_event(values, group), "changed": _by_event(changed, group)}
            own |= {"value": _by_event(at_time, group), "is_clock": is_clock}
            own["store_root"] = filled(_STORE, own)
            for key, lines in ((name, filled(_LOCATE, own)), ("store", own["store_root"] if stopping else [])):
                if looped and lines:
                    condition = " or ".join(f"e == {e}" for e in group)
                    lines = [f"for e in range({len(values)}):", f"    if {condition}:", *indented(indented(lines))]
                result[key] += lines
    return result


def _by_event(lines: list[str], group: list[int]) -> list[str]:
    """Return the line of the event `e` of a group."""
    if len(group) == 1:
        return [lines[group[0]]]
    return [line for i, e in enumerate(group) for line in (f"{'el' if i else ''}if e == {e}:", f"    {lines[e]}")]


def _screened(spec: KernelSpec, steps: Steps) -> list[str]:
    """Return lines that compute whether conditions may have changed signs, from their values at points, as `EventWatch`."""
    events, margin, lines = range(len(spec.events)), float((spec.points + 2) ** 2), []
    for e in events:
        before, after = f"$condition[{e}]", f"$condition_new[{e}]"
        lines += [f"low{e} = where({before} < {after}, {before}, {after})"]
        lines += [f"high{e} = where({before} < {after}, {after}, {before})"]
    for j in range(1, spec.points + 1):
        x = j / (spec.points + 1)
        weights = [sum(w * x ** (power + 1) for power, w in enumerate(row)) for row in spec.tableau.dense.tolist()]
        for c in spec.reads:
            total = steps.weighted(weights, "k", fused=True).format(c=c)
            lines += [f"total = {total}", f"y_{c} = fma(total, {steps.h}, u_{c})"]
        for e in events:
            lines += [steps.condition(e, "value", "y", f"{x!r} * h + t", "u_{c}"), f"value = {steps.doubled('value')}"]
            lines += [f"low{e} = where(value < low{e}, value, low{e})"]
            lines += [f"high{e} = where(value > high{e}, value, high{e})"]
    for e in events:
        tried = "live" if e in spec.clocks else "accepted"
        lines += [f"crossed{e} = where(({margin} * low{e} > high{e}) | ({margin} * high{e} < low{e}), 0.0, {tried})"]
        if spec.affects is not None:
            # After a very short step near a root, rounding may determine the sign, so a sign change isn't counted.
            near_root = f"(abs($condition[{e}]) <= {LEAST}) & ($size <= $unresolved)"
            lines += [f"crossed{e} = where({near_root}, 0.0, crossed{e})"]
        lines += [f"$crossed[{e}] = crossed{e}"]
    return lines


def _changed(spec: KernelSpec, e: int, before: str, after: str) -> str:
    """Return an expression for whether a condition has changed its sign in its event's direction, as in `Event.crossed`."""
    direction = spec.events[e][1]
    up, down = f"(({before} < 0.0) & ({after} >= 0.0))", f"(({before} > 0.0) & ({after} <= 0.0))"
    if e in spec.sided:
        # A sign change counts only if it starts on the side to which the condition left its last root.
        up, down = f"({up} & ($side[{e}] <= 0.0))", f"({down} & ($side[{e}] >= 0.0))"
    return up if direction > 0 else down if direction < 0 else f"({up} | {down})"


_KERNEL = """
def forward(
    b: {real}[::1], exact: float64[::1], ids: int64[::1], time_index: int64[::1], state: int64[::1], counter: int64[::1],
    u0: {real}[:, ::1], p: {real}[:, ::1], s: {real}[::1], start: float64[::1], end: float64[::1], times: float64[:, ::1],
    rtol: float64, atol: {real}[::1], dt: float64, dtmax: float64, max_steps: float64, u_end: {real}[:, ::1],
    t_reached: float64[::1], codes: int8[::1], naccept: int64[::1], nreject: int64[::1], saved: {real}[:, :, ::1],
    save_step: int32[:, ::1], du_end: {real}[:, :, ::1], dsaved: {real}[:, :, :, ::1], last_row: int64[::1],
    rows: float64[:, ::1], previous: int64[::1],
    when affected:
        given_times: float64[:, ::1], kinds: int64[:, ::1], slots: int64[::1], resumed: int64[::1],
        jump_number: int64[:, ::1], jump_before: {real}[:, :, ::1],
    when events: crossings: float64[:, ::1],
):
    aligned_stack()
    when wide: wide_vectors()
    n_saved = times.shape[1]
    by_row = times.shape[0] > 1
    one_span = start.shape[0] == 1
    one_start = u0.shape[1] == 1
    when affected: one_column = given_times.shape[1] == 1
    next_id = state[0]
    vacant_lanes = state[1]
    row = state[2]
    when events: event_count = state[3]
    stop = state[4]
    turns = state[5]
    more = True
    when single: rtol_ = np.float32(rtol)
    each s: s{s} = s[{s}]
    each tolerance: atol{tolerance} = atol[{tolerance}]
    while True:
        while vacant_lanes > 0 and (next_id < stop or more):
            if next_id == stop:
                # Take the next trajectories from the counter of all threads.
                next = claimed(counter, counter[2])
                more = next < counter[1]
                if more:
                    next_id = next
                    stop = min(next + counter[2], counter[1])
            for l in range({lanes}):
                while next_id < stop and start[0 if one_span else next_id] == end[0 if one_span else next_id]:
                    next_id += 1
                if ids[l] < 0 and next_id < stop:
                    i = next_id
                    next_id += 1
                    vacant_lanes -= 1
                    ids[l] = i
                    @enter
        # Return at the end, after the given number of turns, or if the output arrays may be too small for another turn.
        if vacant_lanes == {lanes} or turns == 0{full}:
            break
        turns -= 1
        for l in {lane_range}({lanes}):
            @advance
            @begin_step
            @stages
            @decide
        when clocks:
            for l in range({lanes}):
                if $live > 0.0:
                    @retake
        when record:
            for l in range({lanes}):
                if $accepted > 0.0:
                    rows[row, 0] = $sign * $now
                    rows[row, 1] = $sign * $size
                    each c: rows[row, {c+2}] = $u[{c}]
                    previous[row] = last_row[ids[l]]
                    last_row[ids[l]] = row
                    row += 1
        for l in range({lanes}):
            if $event > 0.0:
                i = ids[l]
                was_accepted = $accepted > 0.0
                tn = $ahead
                @output
                @end
                if code >= 0:
                    @results
                    ids[l] = -1
                    vacant_lanes += 1
                    # Until another trajectory starts in the lane, the lane's steps have size zero.
                    $live = 0.0
                    $goal = tn
                    $next = 0.0
    state[0] = next_id
    state[1] = vacant_lanes
    state[2] = row
    when events: state[3] = event_count
    state[4] = stop
    state[5] = turns
"""

# Starts trajectory i.
_ENTER = """
t = start[0 if one_span else i]
goal = end[0 if one_span else i]
sign = -1.0 if goal < t else 1.0
when affected:
    # The goal is the end of tspan, or an earlier given time of an event.
    time_column = 0 if one_column else i
    goal = given_times[slots[i], time_column] if sign * given_times[slots[i], time_column] <= sign * goal else goal
each c: u_{c} = u0[{c}, 0 if one_start else i]
each p: p{p} = p[{p}, i]
{rate}
now = sign * t
span = sign * goal - now
@first_step
h = h if h < dtmax else dtmax
# The smallest allowed step, as in `least_step`: ten times the distance to the next larger double, whose bits are those of
# `now` plus 1, or minus 1 if `now` is negative. Adding 0.0 turns -0.0 into 0.0.
smallest = 10.0 * (number_of(bits_of(now + 0.0) + (1 if now >= 0.0 else -1)) - now)
h = h if h > smallest else smallest
each c: $u[{c}] = u_{c}
each c: $k0[{c}] = k0_{c}
each p: $p{p} = p{p}
@unit_tangents
$sign = sign
$goal = sign * goal
@least
when affected:
    $begun = -np.inf
    @end_time
when clocks:
    when not affected: $end_time = $goal
    $clock = -np.inf
$live = 1.0
$rejected = 0.0
$tries = 0.0
$number = 0.0
when remembers: $q2_before = {least_error}
$next = h
time_index[l] = -1
@next_save_time
while $save_time == now:
    each c: saved[i, time_index[l], {c}] = u_{c}
    each j: each c: dsaved[{j}, i, time_index[l], {c}] = $du{j}[{c}]
    when by_lanes:
        if save_step.shape[0] > 0:
            save_step[i, time_index[l]] = -1
    @next_save_time
$now = now
$accepted = 0.0
when affected: $unresolved = {unresolved} * abs(end[0 if one_span else i] - t)
@conditions
when acts:
    each e: $last_acted[{e}] = now
    $last_root = now
    $limit = now
    $short_count = 0.0
each sided: $side[{sided}] = (1.0 if $condition[{sided}] > 0.0 else (-1.0 if $condition[{sided}] < 0.0 else 0.0))
"""

_NEXT_SAVE_TIME = """
time_index[l] += 1
$save_time = np.inf
if time_index[l] < n_saved:
    $save_time = $sign * times[i if by_row else 0, time_index[l]]
"""

# The time of f at the end of a step that ends at `goal`: see `jumps.beside`.
_END_TIME = """
$end_time = $goal
if given_times[slots[i], time_column] == sign * $goal:
    at = {goal}
    $end_time = at - {gap}
"""

# An upper bound on the smallest allowed step in tspan. Only steps below it are compared with the exact smallest step.
_LEAST = """
most = max(abs(t), abs(goal))
$least = 10.0 * (number_of(bits_of(most) + 1) - most)
"""

# Moves to the end of the previous step if it was accepted.
_ADVANCE = """
was_accepted = $accepted > 0.0
each c:
    u_{c} = where(was_accepted, $new[{c}], $u[{c}])
    $u[{c}] = u_{c}
each c:
    k0_{c} = where(was_accepted, $k{last}[{c}], $k0[{c}])
    $k0[{c}] = k0_{c}
each j: each c:
    du{j}_{c} = where(was_accepted, $dnew{j}[{c}], $du{j}[{c}])
    $du{j}[{c}] = du{j}_{c}
each e:
    c{e} = where(was_accepted, $condition_new[{e}], $condition[{e}])
    when affected: c{e} = where((abs($condition[{e}]) <= {least_value}) & ($size <= $unresolved), $condition[{e}], c{e})
    $condition[{e}] = c{e}
$number += $accepted
now = where(was_accepted, $ahead, $now)
"""

# Sets the start, the end and the size of the next step.
_BEGIN_STEP = """
goal = $goal
following = $next
ahead = now + following
# Equal steps don't sum up to tspan exactly: a remainder of the size of rounding is added to the last step.
when not adaptive: ahead = where(ahead > goal - 1e-9 * following, goal, ahead)
ahead = where(ahead < goal, ahead, goal)
size = ahead - now
sign = $sign
h = sign * size
@rounded_step
t = sign * now
tn = sign * ahead
when affected: t = sign * where(now == $begun, $begin_time, now)
when limited: tn = sign * where(ahead == goal, $end_time, ahead)
$now = now
$ahead = ahead
$size = size
each p: p{p} = $p{p}
"""

# Accepts or rejects the step, chooses the size of the next step, and decides whether the lane has output (`event`).
_DECIDE = """
live = $live
when adaptive:
    accepted = where(q2 < 1.0, live, 0.0)
    @factor
    following = size * factor
    following = where(following < dtmax, following, dtmax)
    $rejected = live - accepted
    small = where(following < $least, live, 0.0)
when not adaptive:
    accepted = where(q2 == 0.0, live, 0.0)
    small = live - accepted
when limited: tn = sign * ahead
@conditions_new
@screened
tries = $tries + live
$tries = tries
$accepted = accepted
$next = following
exhausted = where(tries >= max_steps, live, 0.0)
ended = where(ahead >= goal, accepted, 0.0)
saves = where($save_time <= ahead, accepted, 0.0)
$event = small + exhausted + ended + saves{changed}
"""

# The fields of a trajectory, in the form of `Fields.add`. Fields have the names of the local variables that they store.
FIELDS = """
u[{d}] k0[{d}]
each p: p{p}
exact now ahead sign size goal save_time least live rejected tries number
# Errors are double, like the step sizes that are computed from them.
exact q2 accepted next event
when remembers: exact q2_before
# The last stage is the first stage of the next step.
new[{d}] k{last}[{d}]
when inside: each inner: k{inner}[{d}]
each j: du{j}[{d}]
each j: dnew{j}[{d}]
each j: each i: l{j}_{i}[{d}]
when events: exact condition[{count}] condition_new[{count}] crossed[{count}] fraction[{count}]
# `last_acted`: per event, the time at which it last acted, or the start. `last_root`: the time of the last root of any
# condition. `short_count`: the number of successive short intervals between roots. `side`: per event that acts in both
# directions, the sign with which its condition left the root. `limit`: if in the future, a bound on the next step's end.
when acts: exact last_acted[{count}] last_root short_count side[{count}] limit
# In steps shorter than `unresolved`, rounding may determine the sign of a condition near its root. `begun`: the last given
# time at which an event acted; `begin_time`, `end_time`: the times of f after it, and at the end of a step to `goal`.
# `clock`: the root of a condition of p and t at which the step ends.
when affected: exact unresolved begun begin_time
when limited: exact end_time
when clocks: exact clock
"""


@lru_cache(64)
def fields_of(spec: KernelSpec) -> Fields:
    """Return the layout of the kernel's buffers."""
    return layout_of(spec, FIELDS)[0]


def forward_source(spec: KernelSpec, programs: Iterable[Program]) -> str:
    """Return the source of `forward`, which calls `f`, its tangents `df0`, `df1`, ..., and `fma`."""
    fields, steps, names = layout_of(spec, FIELDS)
    full = f" or row + {spec.lanes} > rows.shape[0]" if spec.record else ""
    full += (
        f" or event_count + {spec.lanes * len(spec.events) * (spec.points + 1)} > crossings.shape[0]" if spec.events else ""
    )
    names |= {"wide": are_simple(programs), "full": full, "stages": _stages(spec, steps)}
    names |= {"row": "event_count", "stored": ""}
    lines = filled(_KERNEL, names | parts_of(spec, steps, names, power_lines))
    return fields.resolved(steps.with_arrays(lines))


def parts_of(spec: KernelSpec, steps: Steps, names: dict[str, Any], power: Power) -> dict[str, list[str]]:
    """Return the parts of a kernel for CPUs or GPUs; `names`: the values of the placeholders."""
    names = names | {"rounded_goal": steps.doubled(steps.rounded("$goal"))}
    names |= {"sided": spec.sided, "changed": "".join(f" + crossed{e}" for e in names["e"])}
    names |= {"rate": steps.call("k0", "u", 0), "first_step": steps.first_step(), "rounded_step": steps.rounded_step()}
    names["unit_tangents"] = [line for j in names["j"] for line in steps.each(f"$du{j}[{{c}}] = 0.0")]
    names["unit_tangents"] += [f"$du{j}[{i}] = 1.0" for j, (kind, i) in enumerate(spec.directions) if kind == "u"]
    names |= {"screened": _screened(spec, steps), "conditions": steps.conditions("condition", "u", "t")}
    names["conditions_new"] = steps.conditions("condition_new", "new", "tn")
    names["factor"] = steps.factor(power, "$q2_before", "$rejected") if names["adaptive"] else []
    names["end_time"] = filled(_END_TIME, names | {"goal": names["rounded_goal"]})
    names |= {"next_save_time": filled(_NEXT_SAVE_TIME, {}), "least": filled(_LEAST, {})}
    parts = {"enter": _ENTER, "advance": _ADVANCE, "begin_step": _BEGIN_STEP, "decide": _DECIDE, "results": _RESULTS}
    return {name: filled(part, names) for name, part in parts.items()} | _output(spec, steps, names)


def _stages(spec: KernelSpec, steps: Steps) -> list[str]:
    lines = steps.stages(separate=bool(spec.directions))
    # In this step the last stage's tangent is needed only for states inside the step.
    last = spec.stages - (not spec.inside)
    for j in range(len(spec.directions)):
        lines += [*steps.tangents(j, 0, last), *steps.each(f"$dnew{j}[{{c}}] = dnew{j}_{{c}}")]
        inside = [f"$l{j}_{i}[{{c}}] = l{j}_{i}_{{c}}" for i in range(last + 1)]
        lines += steps.each(*inside) if spec.inside else []
    lines += steps.error()
    lines += ["$q2 = q2"] if spec.tableau.error is not None else []
    stored = [spec.stages, *(range(1, spec.stages) if spec.inside else ())]
    return lines + steps.each("$new[{c}] = new_{c}", *(f"$k{i}[{{c}}] = k{i}_{{c}}" for i in stored))


# Powers by series, since a call in the loop over lanes would prevent its vectorization. For x = m 2^n with m near 1,
# log2 m = r q(r²) with r = (m - 1) / (m + 1) and the power series q, _LOG2. _EXP2 is the series of 2^f for |f| <= 1/2.
_LOG2 = [2 / math.log(2) / (2 * k + 1) for k in range(11)]
_EXP2 = [math.log(2) ** k / math.factorial(k) for k in range(14)]
_ROOT_HALF = 0x3FE6A09E667F3BCD  # the bits of √½: m lies between it and √2


def power_lines(x: str, exponent: str, out: str) -> list[str]:
    """Return lines for out = x ** exponent, |exponent| <= 0.5, to a few ulp; x is clipped to [1e-30, 1e30], NaN to 1e30."""
    return [
        f"x = where({x} < 1e30, {x}, 1e30)",
        "x = where(x > 1e-30, x, 1e-30)",
        f"i = bits_of(x) - {_ROOT_HALF}",
        # Vector units before AVX-512 can't convert 64-bit integers to doubles. Instead, the integer n + 1024 is written to
        # the last bits of the double 2^52 (0x433 << 52), which gives 2^52 + n + 1024.
        "n = number_of(((i + 0x4000000000000000) >> 52) | 0x4330000000000000) - 4503599627371520.0",
        f"m = number_of((i & 0xFFFFFFFFFFFFF) + {_ROOT_HALF})",
        "r = (m - 1.0) / (m + 1.0)",
        "r2 = r * r",
        f"y = {exponent} * fma({_series('r2', _LOG2)}, r, n)",
        "w = y + 6755399441055744.0",  # adding 1.5 · 2^52 rounds to an integer
        "r = y - (w - 6755399441055744.0)",
        f"{out} = number_of(bits_of({_series('r', _EXP2)}) + (bits_of(w) << 52))",
    ]


def _series(x: str, terms: list[float]) -> str:
    text = repr(terms[-1])
    for term in terms[-2::-1]:
        text = f"fma({text}, {x}, {term!r})"
    return text
