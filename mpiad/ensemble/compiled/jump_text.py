"""Kernel lines for events that change the state, by their affects `affect0`, ..., with the adjoints `back0`, ..."""

from __future__ import annotations

from typing import Any

from mpiad.compiling.source import numbered
from mpiad.ensemble import jumps
from mpiad.ensemble.compiled.kernel_spec import EVENT_COLUMNS, KernelSpec, filled
from mpiad.ensemble.compiled.step_text import Steps

# Applies the affects of events at the end of a step, and sets the next goal, the time at which steps must end. `code` is
# the return code if the trajectory ends there, otherwise -1. The vectorized counterpart is `ActingEvents`.
_JUMP = """
code = -1
time_column = 0 if one_column else i
sign = $sign
t = sign * tn
when acts:
    each sided: left{sided} = 0.0
    if first < np.inf:
        acted = True
        @state
        span = abs(end[0 if one_span else i] - start[0 if one_span else i])
        stopped = False
        @at_conditions
        $short_count = $short_count + 1.0 if abs(tn - $last_root) <= {SHORT} * span else 0.0
        $last_root = tn
        if code < 0 and $short_count >= {MANY_SHORT}.0:
            code = {Zeno}
        if code < 0 and stopped:
            code = {Terminated}
when not acts:
    when stops:
        if first < np.inf:
            code = {Terminated}
if code <= {Terminated} and was_accepted and tn == $goal and given_times[slots[i], time_column] == t:
    acted = True
    @state
    slot = slots[i]
    # Events at the same time act one after the other.
    while code <= {Terminated} and given_times[slot, time_column] == t:
        kind = kinds[slot, time_column]
        when record:
            jump_number[i, slot] = np.int64($number) + 1
            each c: jump_before[i, slot, {c}] = u_{c}
        @affects
        @adopt
    slots[i] = slot
if acted:
    goal = end[0 if one_span else i]
    slot = slots[i]
    goal = given_times[slot, time_column] if sign * given_times[slot, time_column] <= sign * goal else goal
    $goal = sign * goal
    @end_time
    @least
    $begun = tn
    at = {at_end}
    $begin_time = at + {gap}
if acted and code < 0 and tn != $goal:
    resumed[i] += 1
    @state
    t = sign * $begin_time
    {rate}
    t = sign * tn
    each c: $k{last}[{c}] = k0_{c}
    when remembers: $q2_before = {least_error}
    @conditions_after
    when acts:
        if $limit > tn:
            $next = min($next, $limit - tn)
"""

# The value of a condition after affects. If they haven't changed it, and it may be so near zero that rounding determines
# its sign, the sign is set: after the condition's event to the opposite of the earlier sign, after a very short step to the
# earlier sign.
_RESUME = """
{value}
value_before = $condition[{e}]
when both_directions: side = 1.0 if value > 0.0 else (-1.0 if value < 0.0 else 0.0)
if value == $condition_new[{e}]:
    if $fraction[{e}] < np.inf and $fraction[{e}] <= first and $crossed[{e}] != 0.0:
        value = -{least_value} if $crossed[{e}] > 0.0 else {least_value}
        when both_directions: side = -1.0 if $crossed[{e}] > 0.0 else 1.0
    elif tn - $now <= $unresolved and (abs(value_before) <= {least_value} or value * value_before <= 0.0):
        value = {least_value} if value_before > 0.0 else (-{least_value} if value_before < 0.0 else 0.0)
        when both_directions: side = $side[{e}]
$condition_new[{e}] = value
$condition[{e}] = value
when both_directions: $side[{e}] = left{e} if left{e} != 0.0 else side
"""

# The state after the step, or after the last event, and the parameters.
_STATE = """
each c: u_{c} = $new[{c}]
each p: p{p} = $p{p}
"""

# Makes the result w of an affect the current state; ends the trajectory if w isn't finite.
_ADOPT = """
@finite
if finite:
    each c: u_{c} = w_{c}
    each c: $new[{c}] = w_{c}
    @following
else:
    code = {Unstable}
"""

_AT_CONDITION = """
if $fraction[{e}] <= first:
    when acting:
        if code < 0:
            {condition_before}
            when record: each c: crossings[event_row, {state_column+c}] = u_{c}
            {affect}
            @adopt
    when ends: stopped = True
    event_row += 1
"""

# The departure of a condition from its root after an affect, as in `jumps.departure`. `condition_before`: its value before
# the affect. These lines set `left`, the sign with which the condition leaves the root; they shorten the next step if the
# condition will soon vanish again, and set `code` if its roots would accumulate. `linear`, `second`: terms of its change.
_DEPARTURE = """
elapsed = tn - $last_acted[{e}]
$last_acted[{e}] = tn
# As in `jumps.distance_ahead`.
ahead = {LEAST_AHEAD} * span
if elapsed > $unresolved:
    ahead = min({AHEAD_OF_SHORT} * elapsed, max({AHEAD} * elapsed, ahead))
{rate_now}
later = t + sign * ahead
each c: k0_{c} = sign * k0_{c}
each c: y_{c} = u_{c} + ahead * k0_{c}
{now}
{euler}
{rate_later}
each c: y_{c} = u_{c} + 0.5 * ahead * (k0_{c} + sign * k1_{c})
{heun}
linear = euler - value_now
second = heun - euler
if abs(value_now) <= max({AT_ROOT} * abs(condition_before), {OF_WAY} * abs(linear * elapsed / ahead)):
    side = 1.0 if linear > 0.0 else (-1.0 if linear < 0.0 else (-1.0 if second > 0.0 else (1.0 if second < 0.0 else 0.0)))
    when both_directions: left{e} = side
    if side * second < 0.0{directed}:
        time_to_return = -ahead * linear / second
        # Fixed steps aren't shortened.
        when adaptive: $limit = min($limit if $limit > tn else np.inf, tn + 0.25 * time_to_return)
        if time_to_return <= {AT_ONCE} * span and (linear == 0.0 or elapsed <= {SHORT_PIECE} * span):
            code = {Zeno}
"""


def jump_lines(spec: KernelSpec, steps: Steps, names: dict[str, Any]) -> list[str]:
    """Return lines of the forward kernel; `names`: the values of the placeholders."""
    finite = ["finite = True", *steps.each("finite = finite and np.isfinite(w_{c})")]
    names = names | {"at_end": steps.doubled(steps.rounded("tn"))}
    names = vars(jumps) | names | {"state": filled(_STATE, names), "state_column": EVENT_COLUMNS, "finite": finite}
    names["conditions_after"], at_conditions, affects = [], [], []
    for e in range(len(spec.events)):
        event = {"e": e, "value": steps.condition(e, "value", "u", "t"), "both_directions": e in spec.sided}
        names["conditions_after"] += filled(_RESUME, names | event)
    for e, acts in enumerate(spec.acting):
        event = {"e": e, "acting": acts >= 0, "ends": acts in spec.ending if acts >= 0 else spec.events[e][0]}
        if acts >= 0:
            adopted = filled(_ADOPT, names | {"following": _departure(spec, steps, e, names)})
            before = steps.condition(e, "condition_before", "u", "t")
            event |= {"adopt": adopted, "condition_before": before, "affect": _affect(steps, acts)}
        at_conditions += filled(_AT_CONDITION, names | event) if spec.events[e][0] else []
    given = spec.affects or ()
    for k, e in enumerate(given):
        affects += [f"{'el' if k else ''}if kind == {e}:", f"    {_affect(steps, e)}"]
    following, ending = ["slot += 1"], [f"kind == {e}" for e in spec.ending if e in given]
    if ending:
        following += [f"if {' or '.join(ending)}:", f"    code = {names['Terminated']}"]
    adopted = filled(_ADOPT, names | {"following": following})
    return filled(_JUMP, names | {"at_conditions": at_conditions, "affects": affects, "adopt": adopted})


def _affect(steps: Steps, e: int) -> str:
    """Return a line that applies the affect of event e to the state u, with the result w."""
    return steps.called(steps.state("w"), f"affect{e}", "u", steps.rounded("t"))


def _departure(spec: KernelSpec, steps: Steps, e: int, names: dict[str, Any]) -> list[str]:
    direction = spec.events[e][1]
    directed = f" and side * {direction}.0 < 0.0" if direction else ""
    names = names | {"e": e, "both_directions": e in spec.sided, "directed": directed}
    names |= {"rate_now": steps.called(steps.state("k0"), "f", "u", "t"), "now": steps.condition(e, "value_now", "u", "t")}
    names |= {x: steps.condition(e, x, "y", "later") for x in ("euler", "heun")}
    return filled(_DEPARTURE, names | {"rate_later": steps.called(steps.state("k1"), "f", "y", "later")})


# Propagates cotangents through the jumps (events that acted) after the step that comes next in the backward sweep.
# `jump[l]` is the index of the next jump in the backward sweep, `last_jump` the index of the last processed jump.
_JUMP_BACK = """
if {jump_step} == step[l] + 1:
    each p: p{p} = $p{p}
    while jump[l] >= jump_first[i] and jump_number[jump[l]] == step[l] + 1:
        j = jump[l]
        each c: z_{c} = $cotangent[{c}]
        each c: u_{c} = jump_state[j, {c}]
        @affects
        each c: $cotangent[{c}] = y_{c}
        each wanted_p: $p_bar[{wanted_p}] += e{wanted_p}
        each wanted_s: $s_bar[{wanted_s}] += e{wanted_varying+wanted_s}
        when timed:
            time_bar = $t_bar - $h_bar + te
            drift = 0.0
            # If no step lies between the previous jump and this one, a shift of this jump's time moves the state along f.
            if at_given_time > 0.0 and j > jump_first[i] and jump_number[j - 1] == jump_number[j]:
                {rate}
                @drift
            @add_size_cotangent
            # The size of a step that ended at a root has no cotangent.
            jump_time_bar[j] += at_given_time * (time_bar + drift)
            $t_bar = -drift if at_given_time > 0.0 else time_bar
            $h_bar = 0.0
            $size_moves = at_given_time
            {last_jump} = j
        # The time of f at the end of the step: see `jumps.beside`.
        if at_given_time > 0.0:
            at = {at_jump}
            $tn = at - {gap} * (1.0 if $h > 0.0 else -1.0)
        jump[l] -= 1
        # Prefetch the state before the previous jump.
        fetched(jump_state, jump[l])
    {next_jump}
$begin_time = $t
if step[l] > 0 and {jump_step} == step[l]:
    j = jump[l]
    at = {at_jump}
    $begin_time = at + {gap} * (1.0 if $h > 0.0 else -1.0)
"""

# `h_bar` belongs to the step that ends at the jump `last_jump`, or, if that is -1, at the end of tspan. The cotangent of
# the size of this step is a cotangent of the time at which it ends.
_SIZE_COTANGENT = """
if {last_jump} < 0:
    stop_bar[i] += $h_bar
else:
    jump_time_bar[{last_jump}] += $h_bar
"""


def jumps_back(spec: KernelSpec, steps: Steps, names: dict[str, Any]) -> dict[str, Any]:
    """Return the placeholders of the reverse kernel for events that acted; `names`: the other placeholders."""
    # The rows of `jump`, with an entry per lane: next jump of the backward sweep, last processed jump, and number of steps
    # before the next jump; -1 if none exists.
    last_jump, jump_step = (f"jump[{row * spec.lanes} + l]" for row in (1, 2))
    names = names | {"jump_step": jump_step}
    names["next_jump"] = f"{jump_step} = jump_number[jump[l]] if jump[l] >= jump_first[i] else -1"
    names |= {"last_jump": last_jump, "add_size_cotangent": filled(_SIZE_COTANGENT, {"last_jump": last_jump})}
    time, affects = steps.rounded("jump_time[j]"), []
    back = [*steps.state("y"), *numbered("e", spec.wanted_varying + spec.wanted_shared), *(["te"] if spec.timed else [])]
    for k, (e, given) in enumerate(spec.jumps or ()):
        call = steps.called(back, f"back{e}", "u", time, steps.state("z"))
        affects += [f"{'el' if k else ''}if jump_kind[j] == {e}:", f"    {call}", f"    at_given_time = {float(given)}"]
    drift = steps.summed("drift", "k0_{c} * $cotangent[{c}]")
    names = names | {"at_jump": steps.doubled(time)}
    jump = {"affects": affects, "rate": steps.called(steps.state("k0"), "f", "u", time), "drift": drift}
    return names | {"jump_back": filled(_JUMP_BACK, names | jump)}
