"""The source of the CPU's reverse kernel: the adjoint of the accepted steps of several trajectories at a time.

Lanes and turns are as in `forward_kernel`. In each turn every lane goes back one step: the stages are recomputed from the
state before the step, and cotangents are propagated through them. First the cotangents of states saved inside the step are
summed lane by lane (`value`), and so are their contributions to the cotangents of stages, called arrivals. Trajectories are
processed from the last to the first, since the end of the record is still in the caches.

In a Runge-Kutta step, y_i = u + h Σ_{j<i} a_ij k_j and k_i = f(y_i). The formula for y_i also defines the new state, y_s.
The cotangent λ of the new state is propagated from the last stage to the first (k̄ and ȳ are the cotangents of k and y):

    k̄_j = Σ_{i>j} a_ij h ȳ_i,    ȳ_s = λ,    ȳ_j = f'(y_j)ᵀ k̄_j,    ū = λ + Σ_j ȳ_j.

In a Rosenbrock step W k_i = r_i, with r_i = f(y_i) + Σ C_ij k_j + d_i h T (see `tableaus`). The cotangent of stage i is
propagated to r_i by the transposed matrix, r̄_i = W⁻ᵀ k̄_i, and from r_i to the argument, as above, and to the earlier
stages. The remaining terms, from the dependence of W and T on the state, the parameters and time, are the gradient of

    φ = Σ r̄_i · h (J k_i + d_i T),

with r̄ and k held fixed. φ is a sum of directional derivatives of r̄_i · f along (h k_i, h d_i), so its gradient consists of
products with second derivatives of f, whose matrices are never formed.

The parts of the kernel for one trajectory are also printed for GPUs: see `cuda_kernels`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from mpiad.compiling.program import Program
from mpiad.compiling.source import are_simple, indented, number, numbered
from mpiad.ensemble.compiled.jump_text import jumps_back
from mpiad.ensemble.compiled.kernel_spec import Fields, KernelSpec, filled
from mpiad.ensemble.compiled.rosenbrock_text import layout_of
from mpiad.ensemble.compiled.step_text import Steps

_KERNEL = """
def reverse(
    b: {real}[::1], exact: float64[::1], ids: int64[::1], row: int64[::1], step: int64[::1], time_index: int64[::1],
    state: int64[::1], p: {real}[:, ::1], s: {real}[::1], times: float64[:, ::1], rows: float64[:, ::1],
    previous: int64[::1], last: int64[::1], naccept: int64[::1], t_reached: float64[::1], alive: boolean[::1],
    end_bar: {real}[:, ::1], saved_bar: {real}[:, :, ::1], save_step: int32[:, ::1], u0_bar: {real}[:, ::1],
    p_bar: float64[:, ::1], s_bar: float64[::1], start_bar: float64[::1], stop_bar: float64[::1],
    when jumping:
        jump: int64[::1], jump_first: int64[::1], jump_number: int64[::1], jump_kind: int64[::1], jump_time: float64[::1],
        jump_state: {real}[:, ::1], jump_time_bar: float64[::1],
    when events: event: int64[::1], event_first: int64[::1], crossings: float64[:, ::1],
):
    aligned_stack()
    when wide: wide_vectors()
    n_saved = save_step.shape[1]
    by_row = times.shape[0] > 1
    first = state[0]
    next_id = state[1]
    vacant_lanes = state[2]
    turns = state[3]
    each s: s{s} = s[{s}]
    while True:
        if vacant_lanes > 0 and next_id >= first:
            for l in range({lanes}):
                while next_id >= first and (not alive[next_id] or last[next_id] < 0):
                    next_id -= 1
                if ids[l] < 0 and next_id >= first:
                    i = next_id
                    next_id -= 1
                    vacant_lanes -= 1
                    @enter
        if vacant_lanes == {lanes} or turns == 0:
            break
        turns -= 1
        for l in range({lanes}):
            if ids[l] >= 0:
                @fetch
        for l in {lane_range}({lanes}):
            @back
        for l in range({lanes}):
            if ids[l] >= 0 and row[l] < 0:
                @leave
    state[1] = next_id
    state[2] = vacant_lanes
    state[3] = turns
    when wanted_s:
        for l in range({lanes} if vacant_lanes == {lanes} else 0):
            for n in range({wanted_shared}):
                s_bar[n] += $s_bar[n]
"""

_ENTER = """
ids[l] = i
row[l] = last[i]
step[l] = naccept[i] - 1
time_index[l] = n_saved - 1
# Skip final states, whose cotangents are in `end_bar`, and states that weren't reached; both come last.
while time_index[l] >= 0 and save_step[i, time_index[l]] < -1:
    time_index[l] -= 1
@start
when jumping:
    jump[l] = jump_first[i + 1] - 1
    {last_jump} = -1
    {next_jump}
when events: event[l] = event_first[i + 1] - 1
"""

# Starts the backward sweep of trajectory i.
_START = """
each c: $cotangent[{c}] = end_bar[{c}, i]
each p: $p{p} = p[{p}, i]
each wanted_p: $p_bar[{wanted_p}] = 0.0
when timed:
    $t_bar = 0.0
    $h_bar = 0.0
$tn = t_reached[i]
$t = t_reached[i]
$live = 1.0
when timed: $size_moves = 1.0
when inside: $has_arrivals = 1.0
"""

# Loads the next step of the backward sweep, and the cotangents of states saved in this step.
_FETCH = """
i = ids[l]
now = row[l]
$tn = $t
$t = rows[now, 0]
$h = rows[now, 1]
each c: $u[{c}] = {rounded}(rows[now, {c+2}])
when inside:
    # Clear the arrivals, unless the lane had none in the previous turn.
    if $has_arrivals > 0.0:
        each c: $value[{c}] = 0.0
        each arriving: each i: each c: ${arriving}[{i}, {c}] = 0.0
    $has_arrivals = 0.0
when jumping: @jump_back
when events: @crossed
while time_index[l] >= 0 and save_step[i, time_index[l]] == step[l]:
    @saved
row[l] = previous[now]
# Prefetch the previous step, whose row may begin in one cache line and end in the next.
fetched(rows, row[l])
fetched(rows, row[l] + 1)
fetched(previous, row[l])
step[l] -= 1
"""

# Adds the cotangent of a saved state.
_SAVED = """
when inside:
    $has_arrivals = 1.0
    save_time = times[i if by_row else 0, time_index[l]]
    if save_time == $tn{constant_end}:
        each c: $cotangent[{c}] += saved_bar[i, time_index[l], {c}]
    when jumping:
        # If an event acts at a saved time, the state after the event is saved, which is the state before this step.
        elif save_time == $t:
            each c: $value[{c}] += saved_bar[i, time_index[l], {c}]
    else:
        x = (save_time - $t) / $h
        @weights
        each c:
            value = saved_bar[i, time_index[l], {c}]
            $value[{c}] += value
            each used:
                $arrival[{used}, {c}] += w{used} * value
                when timed:
                    $rate[{used}, {c}] += r{used} * value
                    $rate_x[{used}, {c}] += x * r{used} * value
when not inside: each c: $cotangent[{c}] += saved_bar[i, time_index[l], {c}]
time_index[l] -= 1
"""

_LEAVE = """
i = ids[l]
while time_index[l] >= 0:
    each c: $cotangent[{c}] += saved_bar[i, time_index[l], {c}]
    time_index[l] -= 1
each c: u0_bar[{c}, i] = $cotangent[{c}]
each wanted_p: p_bar[{wanted_p}, i] = $p_bar[{wanted_p}]
when timed:
    # A shift of the start or end of tspan changes the size of the last step only, which ends at the end of tspan.
    when jumping: @add_size_cotangent
    when not jumping: stop_bar[i] = $h_bar
    start_bar[i] = $t_bar - $h_bar
ids[l] = -1
vacant_lanes += 1
$live = 0.0
"""

# Recomputes the stages of a step. The stages of a step that an event has cut short extend to the end of the full step.
_STEP_AGAIN = """
each c: y0_{c} = $u[{c}]
each p: p{p} = $p{p}
when jumping: t = $begin_time
when not jumping: t = $t
h = $h
tn = {step_end}
@rounded_step
@again
"""

_BACK = """
@step_again
live = $live
when timed:
    t_bar = 0.0
    h_bar = 0.0
when not by_lanes: @crossed
# The last stage is f at the new state, so its contribution is added to the cotangent of that state first.
each c: total_{c} = $cotangent[{c}]
@pulled_last
when timed: each c: h_bar = fma(total_{c}, m{last}_{c}, h_bar)
each c: z{last}_{c} = total_{c}
@pulled
# A state saved inside the step is u + h Σ w k, so its cotangent is also added to that of u. The results of a lane without a
# trajectory, which may be NaN, are set to zero.
when inside: each c: $cotangent[{c}] = where(live > 0.0, total_{c} + $value[{c}], {zero})
when not inside: each c: $cotangent[{c}] = where(live > 0.0, total_{c}, {zero})
when timed:
    when inside:
        # At a fixed time, x = (time - t) / h depends on t and h.
        each moving: each c:
            t_bar = t_bar - $rate[{moving}, {c}] * k{moving}_{c}
            h_bar = h_bar + ($arrival[{moving}, {c}] - $rate_x[{moving}, {c}]) * k{moving}_{c}
    $t_bar += t_bar
    $h_bar = where($size_moves > 0.0, h_bar, $h_bar)
    $size_moves = 0.0
"""

_PULLED = """
@stage
when not accumulated:
    each wanted_p: $p_bar[{wanted_p}] += e{wanted_p}
    each wanted_s: $s_bar[{wanted_s}] += where(live > 0.0, e{wanted_varying+wanted_s}, 0.0)
when timed:
    t_bar = t_bar + te
    when later: h_bar = fma({time}, te, h_bar)
    # The argument of the last stage is the new state: `_BACK` adds its contribution, when its cotangent is complete.
    when between: each c: h_bar = fma(z{i}_{c}, m{i}_{c}, h_bar)
"""

# Processes the events of a step, with the stages of the step. By the implicit function theorem, the cotangent of an event's
# time gives cotangents of the state at the event, which is treated like a saved state, of the parameters and of time.
_CROSSED = """
while {in_step}:
    $has_arrivals = 1.0
    when by_lanes:
        # A root of a condition of p and t lies at the end of a step: see `jumps.beside`.
        bound = $t + $h
        if crossings[{event_row}, 3] == 1.0:
            at = {at_event}
            bound = at - {gap} * (1.0 if $h > 0.0 else -1.0)
    @state
    @rates
    @events
    {next_event}
"""

# A step that an event has cut short is differentiated as a full step, in which the fraction of the event moves. On GPUs: if
# two terminal events coincide, only the last has ended the trajectory; and if the time of a nonterminal event isn't
# differentiated, its condition may have slope zero.
_EVENT = """
if crossings[{event_row}, 1] == {e}{differentiated}:
    @gradient
    slope = {slope}
    factor = -({fraction_bar}) / slope
    when stops:
        when by_lanes: $tn = bound
        when not by_lanes: ends = False
        when timed:
            $t_bar = {time_bar} + {double}(by_time) * factor
            $size_moves = 0.0
        each c: bar_{c} = {rounded}({double}($cotangent[{c}]) + factor * {double}(g_{c}))
        each c: $cotangent[{c}] = {zero}
    when not stops: each c: bar_{c} = {rounded}(factor * {double}(g_{c}))
    each wanted_p: $p_bar[{wanted_p}] += factor * {double}(by{wanted_p})
    each wanted_s: $s_bar[{wanted_s}] += factor * {double}(by{wanted_varying+wanted_s})
    each c:
        $value[{c}] += bar_{c}
        each used:
            $arrival[{used}, {c}] += w{used} * bar_{c}
            when timed_value:
                $rate[{used}, {c}] += r{used} * bar_{c}
                $rate_x[{used}, {c}] += x * r{used} * bar_{c}
"""

FIELDS = """
cotangent[{d}] u[{d}]
each p: p{p}
exact t tn h live
when jumping: exact begin_time
# On CPUs, sums over many steps, or over trajectories, are double.
when by_lanes: exact p_bar[{wanted_varying}] s_bar[{wanted_shared}]
when not by_lanes: p_bar[{wanted_varying}] s_bar[{wanted_shared}]
# `size_moves`: 1 if the step ends at the end of tspan or at a given time of an event, which determines its size; else 0.
when timed: exact t_bar h_bar size_moves
when inside:
    exact has_arrivals
    value[{d}] arrival[{last+1}, {d}]
    when timed: exact rate[{last+1}, {d}] rate_x[{last+1}, {d}]
"""


@lru_cache(64)
def fields_of(spec: KernelSpec) -> Fields:
    """Return the layout of the kernel's buffers."""
    return layout_of(spec, FIELDS)[0]


def reverse_source(spec: KernelSpec, programs: Iterable[Program]) -> str:
    """Return the source of `reverse`, which calls `f` and its adjoint `g`."""
    fields, steps, names = layout_of(spec, FIELDS)
    names["wide"] = are_simple(programs)
    names["arriving"] = ["arrival", *(["rate", "rate_x"] if spec.timed else [])]
    names |= {"event_row": "event[l]", "next_event": "event[l] -= 1", "differentiated": ""}
    names["in_step"] = "event[l] >= event_first[i] and np.int64(crossings[event[l], 2]) == step[l]"
    # The step that ends at an event also ends there for the variable $t_bar, the cotangent of the time after the step.
    bar = f"({'$t_bar + ' if spec.timed else ''}crossings[event[l], 5])"
    names |= jumps_back(spec, steps, names)
    names |= parts_of(spec, steps, names, {True: bar, False: "crossings[event[l], 5]"})
    names |= {"enter": filled(_ENTER, names), "fetch": filled(_FETCH, names), "leave": filled(_LEAVE, names)}
    return fields.resolved(steps.with_arrays(filled(_KERNEL, names)))


def parts_of(spec: KernelSpec, steps: Steps, names: dict[str, Any], time_bars: dict[bool, str]) -> dict[str, list[str]]:
    """Return the lines for the start of a trajectory, a saved state, events and a step; `names`: values of placeholders."""
    # `time_bars`: the cotangents of the times of events that end steps (True), and of other events.
    names = names | {"moving": steps.moving_stages, "zero": steps.number(0.0), "weights": steps.weights(rates=spec.timed)}
    pulled = {}
    for i in steps.pulled_stages:
        time = spec.tableau.c[i]
        stage = {"stage": steps.pulled(i, f"$arrival[{i}, {{c}}]"), "later": time, "time": number(time), "i": i}
        stage |= {"accumulated": bool(steps.bars), "between": 0 < i < spec.stages}
        pulled[i] = filled(_PULLED, names | stage)
    pulled_last = pulled.pop(spec.stages, [])
    if pulled_last and not names["by_lanes"]:
        # The last stage contributes only to states inside the step.
        pulled_last = ["if $has_arrivals > 0.0:", *indented(pulled_last)]
    names |= {"rounded_step": steps.rounded_step(), "again": steps.again(), "pulled_last": pulled_last}
    names["pulled"] = [line for i in reversed(pulled) for line in pulled[i]]
    names["step_again"] = filled(_STEP_AGAIN, names | {"step_end": "$tn"})
    names["crossed"] = _crossed(spec, steps, names, time_bars) if spec.events else []
    # Saved times are constant, while the ends of steps move with their starts, except at the end of tspan.
    names["constant_end"] = " and $size_moves > 0.0" if spec.timed else ""
    parts = {"start": filled(_START, names), "saved": filled(_SAVED, names), "back": filled(_BACK, names)}
    return parts | {"crossed": names["crossed"]}


def _crossed(spec: KernelSpec, steps: Steps, names: dict[str, Any], time_bars: dict[bool, str]) -> list[str]:
    """Return the lines for the events of a step."""
    # The fraction of the step and the derivatives of a root are double, also if states are float32.
    doubled, last, row = steps.doubled, spec.stages, names["event_row"]
    state = filled(_STEP_AGAIN, names | {"step_end": "bound"}) if names["by_lanes"] else []
    state += [f"x = crossings[{row}, 3]"]
    if last in steps.used():
        state.append(steps.call(f"k{last}", f"y{last}", last))
    state += [*steps.weights(rates=True), *steps.interpolated("at_{c}", "k{i}_{c}", "y0_{c}")]
    rate = " + ".join(f"r{i} * {doubled(f'k{i}_{{c}}')}" for i in steps.used())
    outputs = [*steps.state("g"), *numbered("by", spec.wanted_varying + spec.wanted_shared), "by_time"]
    names = names | {"at_event": doubled(steps.rounded(f"crossings[{row}, 4]"))}
    names |= {"slope": f"slope + {doubled('by_time')} * h", "events": []}
    names |= {"state": state, "rates": steps.each(f"rate_{{c}} = ({rate}) * h")}
    for e, (stops, _) in enumerate(spec.events):
        event = {"e": e, "stops": stops, "timed_value": spec.timed and not stops, "time_bar": time_bars[stops]}
        time = steps.rounded(f"crossings[{row}, 4]")
        gradient = [steps.called(outputs, f"slopes{e}", "at", time, [steps.number(1.0)])]
        gradient += steps.summed("slope", f"{doubled('g_{c}')} * rate_{{c}}")
        gradient += steps.summed("state_bar", f"{doubled('$cotangent[{c}]')} * rate_{{c}}") if stops else []
        event["gradient"] = gradient
        event["fraction_bar"] = f"{'state_bar + ' if stops else ''}{time_bars[stops]} * h"
        if not names["by_lanes"]:
            event["differentiated"] = " and ends" if stops else f" and {time_bars[False]} != 0.0"
        names["events"] += filled(_EVENT, names | event)
    return filled(_CROSSED, names)
