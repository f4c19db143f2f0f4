"""Events in forward kernels: the location of roots of conditions, the table of events, and the affects of events that act.

The vectorized counterparts are `EventWatch` and `ActingEvents`, whose constants are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.folding import expression, inlined, static
from mpiad.compiling.kernel_language import Row, bits_of, fma, number_of, total, vector, where
from mpiad.ensemble import jumps
from mpiad.ensemble.compiled.kernel_fields import ForwardLane, TangentLane
from mpiad.ensemble.compiled.kernel_spec import EVENT_COLUMNS, KernelSpec
from mpiad.ensemble.compiled.step_kernel import (
    Kernel,
    Step,
    Vector,
    condition,
    copy,
    dense_rates,
    dense_weights,
    doubled,
    inside,
    parameters_of,
    rounded,
    state,
    weighted,
)
from mpiad.ensemble.controller import LEAST_ERROR
from mpiad.ensemble.events import EVALUATIONS, RESOLUTION, TRUNCATION
from mpiad.ensemble.jumps import LEAST
from mpiad.ensemble.outcome import ReturnCode


def stops(spec: KernelSpec) -> bool:
    """Return whether any event ends steps."""
    return any(stops for stops, _ in spec.events)


@inlined
def evaluate_conditions(kernel: Kernel, target: Vector, u: Vector, parameters: Sequence[float], t: float) -> None:
    """Store the values of all conditions in a field."""
    for e in static(range(len(kernel.spec.events))):
        target[e] = condition(kernel, e, u, parameters, t)


def has_changed(spec: KernelSpec, lane: ForwardLane, e: int, n: int, before: float, after: float) -> bool:
    """Return whether the condition of event e has changed its sign in the direction of the event; n: the same index."""
    up, down = (before < 0.0) & (after >= 0.0), (before > 0.0) & (after <= 0.0)
    if n in spec.sided:
        # A sign change counts only if it starts on the side to which the condition left its last root.
        up, down = up & (lane.side[e] <= 0.0), down & (lane.side[e] >= 0.0)
    direction = spec.events[n][1]
    return up if direction > 0 else down if direction < 0 else up | down


@inlined
def is_near_root(lane: ForwardLane, e: int, size: float) -> bool:
    """Return whether rounding may determine the sign of a condition, after a very short step near its root."""
    return (abs(lane.condition[e]) <= LEAST) & (size <= lane.unresolved)


@inlined
def screened(kernel: Kernel, lane: ForwardLane, step: Step, live: float, accepted: float) -> Vector:
    """Return for each event whether its condition may have changed its sign, from values at points, as `EventWatch`."""
    spec, count = kernel.spec, len(kernel.spec.events)
    low, high, crossed = vector(count), vector(count), vector(count)
    for e in static(range(count)):
        before = lane.condition[e]
        after = lane.condition_new[e]
        low[e] = where(before < after, before, after)
        high[e] = where(before < after, after, before)
    for j in static(range(1, spec.points + 1)):
        x, y = j / (spec.points + 1), state(spec)
        weights = [sum(w * x ** (power + 1) for power, w in enumerate(row)) for row in spec.tableau.dense.tolist()]
        for c in static(spec.reads):
            y[c] = fma(weighted(spec, weights, step.k, c, True), step.size, step.u[c])
        for e in static(range(count)):
            value = doubled(spec, condition(kernel, e, read_state(spec, y, step.u), step.parameters, x * step.h + step.t))
            low[e] = where(value < low[e], value, low[e])
            high[e] = where(value > high[e], value, high[e])
    margin = float((spec.points + 2) ** 2)
    for e in static(range(count)):
        tried = live if e in spec.clocks else accepted
        crossed[e] = where((margin * low[e] > high[e]) | (margin * high[e] < low[e]), 0.0, tried)
        if spec.affected:
            crossed[e] = where(is_near_root(lane, e, lane.size), 0.0, crossed[e])
        lane.crossed[e] = crossed[e]
    return crossed


def read_state(spec: KernelSpec, y: Vector, u: Vector) -> Vector:
    """Return a state for conditions, given the components that they read."""
    return y if spec.rolled else [y[c] if c in spec.reads else u[c] for c in range(spec.d)]


# ---- roots


class Search(NamedTuple):
    """The search for the roots of the condition of event e, which is one of `events`."""

    kernel: Kernel
    lane: ForwardLane
    events: Sequence[int]
    e: int
    parameters: Sequence[float]


@inlined
def value_inside(search: Search, x: float) -> float:
    """Return the condition at the fraction x of the step."""
    spec, lane, y = search.kernel.spec, search.lane, state(search.kernel.spec)
    if spec.reads:
        size, w = rounded(spec, lane.sign * lane.size), dense_weights(spec, x)
        for c in static(spec.reads):
            y[c] = inside(spec, w, [lane.k[i, c] for i in spec.interpolating], lane.u[c], size)
    return value_of(search, read_state(spec, y, lane.u), lane.sign * (lane.now + x * lane.size))


@inlined
def value_of(search: Search, u: Vector, t: float) -> float:
    """Return the condition for a state at a time."""
    kernel, parameters = search.kernel, search.parameters
    value = for_event(search, lambda e: condition(kernel, e, u, parameters, t))
    return doubled(kernel.spec, value)


@inlined
def for_event(search: Search, value_for: Callable[[int], float]) -> float:
    """Return the value for the event."""
    if len(search.events) == 1:
        return value_for(search.events[0])
    value = 0.0
    for e in static(search.events):
        if search.e == e:
            value = value_for(e)
    return value


@inlined
def is_positive_as(value: float, other: float) -> bool:
    """Return whether a value has the sign of another one."""
    return (value > 0.0) if other > 0.0 else (value < 0.0)


@inlined
def first_time(search: Search, left: float, middle: float, before: float) -> float:
    """Return the first time after a sign change of a condition of p and t, between two fractions of the step."""
    spec, lane = search.kernel.spec, search.lane
    u = state(spec) if spec.rolled else [lane.u[c] for c in range(spec.d)]  # the condition doesn't read it
    low = lane.now + left * lane.size
    high = lane.now + middle * lane.size if middle < 1.0 else lane.ahead
    x = 0.5 * (low + high)
    while low < x and x < high:
        if is_positive_as(value_of(search, u, lane.sign * x), before):
            low = x
        else:
            high = x
        x = 0.5 * (low + high)
    return high


@inlined
def fraction_of_root(search: Search, left: float, middle: float, before: float, after: float) -> float:
    """Return the fraction of the step at or after a sign change between two fractions, by the ITP method."""
    low, high, value_low, value_high = left, middle, before, after
    radius = high - low
    for _ in range(EVALUATIONS):
        width = high - low
        if width <= RESOLUTION:
            break
        between = 0.5 * (low + high)
        # The root of the secant is moved towards the middle of the bracket, and its distance from the middle is limited so
        # that the search takes at most one more evaluation than bisection.
        x = (value_high * low - value_low * high) / (value_high - value_low)
        offset = between - x
        shift = max(TRUNCATION * width * width, 0.5 * RESOLUTION)
        allowed = radius - 0.5 * width
        x = between if abs(offset) <= shift else (x + shift if offset > 0.0 else x - shift)
        x = x if abs(x - between) <= allowed else (between - allowed if offset > 0.0 else between + allowed)
        radius = 0.5 * radius
        value = value_inside(search, x)
        if is_positive_as(value, before):
            low = x
            value_low = value
        else:
            high = x
            value_high = value
    return high


@inlined
def locate(search: Search, i: int, first: float, tn: float) -> float:
    """Find the roots of a condition, or the first root if its event ends the step, as `EventWatch`; return `first`.

    Roots lie between the points `left` and `middle`, of which the second may have moved to the vertex of a parabola. If the
    last part of the step has a root, the field `crossed` becomes the value before it, otherwise 0.
    """
    spec, lane, e, event = search.kernel.spec, search.lane, search.e, search.events[0]
    stopping = spec.events[event][0]
    lane.fraction[e] = np.inf
    if lane.crossed[e] > 0.0:
        lane.crossed[e] = 0.0
        bound = 1.0 if stopping else min(first, 1.0)
        left = 0.0
        middle = 0.0
        right = 0.0
        value_left = lane.condition[e]
        value_middle = value_left
        value_right = value_left
        for part in range(spec.points + 2):
            left = middle
            value_left = value_middle
            middle = right
            value_middle = value_right
            if right < bound:
                right = (part + 1.0) * (1 / (spec.points + 1))
                right = right if right < bound and part < spec.points else bound
                value_right = lane.condition_new[e]
                if right < bound:
                    value_right = value_inside(search, right)
                if left < middle and value_left * value_middle > 0.0 and value_right * value_middle > 0.0:
                    slope = (value_middle - value_left) / (middle - left)
                    curvature = ((value_right - value_middle) / (right - middle) - slope) / (right - left)
                    slope = slope + curvature * (middle - left)
                    x = middle - 0.5 * slope / curvature
                    depth = slope * slope - 4.0 * curvature * value_middle
                    if curvature * value_middle > 0.0 and depth >= 0.0 and x > left and x < right:
                        value = value_inside(search, x)
                        if value * value_middle < 0.0:
                            middle = x
                            value_middle = value
            if left < middle and sign_changes(search, value_left, value_middle) > 0.0:
                if event in spec.clocks:
                    high = first_time(search, left, middle, value_left)
                else:
                    high = fraction_of_root(search, left, middle, value_left, value_middle)
                lane.fraction[e] = high
                if stopping:
                    lane.crossed[e] = value_left
                    first = high if high < first else first
                    break
                lane.crossed[e] = value_left if middle >= bound else 0.0
                store_root(search.kernel, lane, i, e, first, tn, search.events)
    return first


@inlined
def sign_changes(search: Search, before: float, after: float) -> float:
    """Return 1 if the condition has changed its sign in the direction of the event, otherwise 0."""
    spec, lane, e = search.kernel.spec, search.lane, search.e
    return for_event(search, lambda n: 1.0 if has_changed(spec, lane, e, n, before, after) else 0.0)


def is_one_of(events: Sequence[int], e: int) -> bool:
    """Return whether e is one of several events."""
    result = e == events[0]
    for n in events[1:]:
        result = result | (e == n)
    return result


@inlined
def locate_all(
    kernel: Kernel, lane: ForwardLane, i: int, events: Sequence[int], parameters: Sequence[float], first: float, tn: float
) -> float:
    """Locate the roots of several conditions, and return the first fraction at which the step ends."""
    # A loop over the events, since a copy of these statements for each event would take longer to compile.
    together = len(events) > 1 and not kernel.spec.on_gpu
    for e in range(len(kernel.spec.events)) if together else static(events):
        if not together or is_one_of(events, e):
            first = locate(Search(kernel, lane, events if together else [e], e, parameters), i, first, tn)
    return first


def events_of(spec: KernelSpec, stopping: bool, is_clock: bool = False) -> list[int]:
    """Return the events that end steps, or don't, and whose conditions read only p and t, or the state, too."""
    return [e for e, (stops, _) in enumerate(spec.events) if stops == stopping and (e in spec.clocks) == is_clock]


@inlined
def store_root(kernel: Kernel, lane: ForwardLane, i: int, e: int, first: float, tn: float, events: Sequence[int]) -> None:
    """Write a row of the table of events, of which e is one: see `kernel_spec` for CPU kernels, and `cuda_kernels`."""
    arrays, on_gpu = kernel.arrays, kernel.spec.on_gpu
    if lane.fraction[e] < np.inf and lane.fraction[e] <= first and (not on_gpu or arrays.u_end):
        row = expression("NEXT", arrays.event_count) if on_gpu else arrays.state[3]
        arrays.crossings[row, 0] = i
        arrays.crossings[row, 1] = e
        arrays.crossings[row, 2] = lane.number
        arrays.crossings[row, 3] = lane.fraction[e]
        time = min(lane.now + lane.fraction[e] * lane.size, tn) if lane.fraction[e] < 1.0 else tn
        arrays.crossings[row, 4] = lane.sign * time
        if on_gpu:
            arrays.crossings[row, 5] = arrays.heads[i]
            arrays.heads[i] = row
        else:
            for j in static(range(len(kernel.spec.directions))):
                push_root(kernel, lane, events, e, row, j)
            arrays.state[3] = row + 1


@inlined
def push_root(kernel: Kernel, lane: ForwardLane, events: Sequence[int], e: int, row: Array, j: int) -> None:
    """Write the tangent of an event's time in direction j, and set that of the new state if the event ends the step."""
    spec, crossings, du, parameters = kernel.spec, kernel.arrays.crossings, state(kernel.spec), parameters_of(kernel, lane)
    x, size = lane.fraction[e], rounded(spec, lane.sign * lane.size)
    w = dense_weights(spec, x)
    for c in spec.components:
        du[c] = inside(spec, w, [lane.dk[j, n, c] for n in spec.interpolating], lane.du[j, c], size, True)
    more = du, *seeds_of(kernel, lane, j)
    late, rate = shift_of_root(kernel, lane, events, e, x, w, size, parameters, crossings[row, 4], more)
    crossings[row, EVENT_COLUMNS + j] = late
    if spec.events[events[0]][0]:
        for c in spec.components:
            lane.dnew[j, c] = du[c] + rounded(spec, late * rate[c])


@inlined
def shift_of_root(
    kernel: Kernel,
    lane: ForwardLane | TangentLane,
    events: Sequence[int],
    e: int,
    x: float,
    w: Vector,
    size: float,
    parameters: Sequence[float],
    time: float,
    more: Sequence[Array],
) -> tuple[float, Vector]:
    """Return the tangent of the time of a root by the implicit function theorem, and the derivative of the state there.

    `w`: the weights of stages at the fraction x of the step. `more`: the tangents that `dcondition` takes.
    """
    spec, at, rate, value, slope = kernel.spec, state(kernel.spec), state(kernel.spec), vector(1), vector(1)
    r = dense_rates(spec, x)
    for c in spec.components:
        at[c] = inside(spec, w, [lane.k[n, c] for n in spec.interpolating], lane.u[c], size)
        rate[c] = rounded(spec, total(r[n] * lane.k[n, c] for n in spec.interpolating))
    for n in static(events):
        if e == n:
            inputs = at, parameters, rounded(spec, time)
            kernel.call(f"dcondition{n}", (value,), *inputs, *more)
            kernel.call(f"rate{n}", (slope,), *inputs, rate, spec.real(1.0))
    return -value[0] / slope[0], rate


@inlined
def store_stops(kernel: Kernel, lane: ForwardLane, i: int, events: Sequence[int], first: float, tn: float) -> None:
    """Write the rows of events that end the step."""
    together = len(events) > 1 and not kernel.spec.on_gpu
    for e in range(len(kernel.spec.events)) if together else static(events):
        if not together or is_one_of(events, e):
            store_root(kernel, lane, i, e, first, tn, events)


@inlined
def locate_events(kernel: Kernel, lane: ForwardLane, i: int) -> tuple[float, float, int]:
    """Locate the events of a step and store them in a table; return the first fraction, time and row of those that end it.

    The first event that is terminal or acts ends the step at the fraction `first` of the step. `screened` has selected the
    conditions that may have changed their signs.
    """
    spec, parameters = kernel.spec, parameters_of(kernel, lane)
    first = np.inf
    tn = lane.ahead
    row = 0
    first = locate_all(kernel, lane, i, events_of(spec, True), parameters, first, tn)
    for e in static(spec.clocks):
        if lane.fraction[e] < np.inf:
            lane.fraction[e] = 1.0
            first = min(first, 1.0)
    if stops(spec):
        if first < np.inf:
            tn = cut(kernel, lane, first, parameters)
            if spec.acts:
                row = kernel.arrays.state[3]
            for clocks in static((True, False)):
                store_stops(kernel, lane, i, events_of(spec, True, clocks), first, tn)
    locate_all(kernel, lane, i, events_of(spec, False), parameters, first, tn)
    return first, tn, row


@inlined
def cut(kernel: Kernel, lane: ForwardLane, first: float, parameters: Sequence[float]) -> float:
    """End the step at the fraction `first`, and return its end."""
    spec, y = kernel.spec, state(kernel.spec)
    size, w = rounded(spec, lane.sign * lane.size), dense_weights(spec, first)
    for c in spec.components:
        lane.new[c] = inside(spec, w, [lane.k[i, c] for i in spec.interpolating], lane.u[c], size)
    tn = min(lane.now + first * lane.size, lane.ahead) if first < 1.0 else lane.ahead
    lane.ahead = tn
    copy(spec, y, lane.new)
    evaluate_conditions(kernel, lane.condition_new, y, parameters, lane.sign * tn)
    if spec.affected:
        # If another condition has also changed its sign at or before `first`, its event is assigned the fraction `first`:
        # the next step wouldn't detect the sign change (see `ActingEvents`).
        for e in static([e for e, (stops, _) in enumerate(spec.events) if stops]):
            changed = has_changed(spec, lane, e, e, lane.condition[e], lane.condition_new[e])
            if lane.fraction[e] > first and changed and not is_near_root(lane, e, tn - lane.now):
                lane.fraction[e] = first
                lane.crossed[e] = lane.condition[e]
    return tn


@inlined
def retake(kernel: Kernel, lane: ForwardLane) -> None:
    """Reject a step that contains a root of a condition of p and t; the next step ends there."""
    spec, arrays = kernel.spec, kernel.arrays
    first = np.inf
    parameters = parameters_of(kernel, lane)
    first = locate_all(kernel, lane, 0, events_of(spec, True, True), parameters, first, 0.0)
    if first <= lane.ahead and first != lane.clock:
        lane.clock = first
        lane.goal = first
        lane.end_time = beside(spec, first, -1.0)
        if spec.adaptive:  # fixed steps keep their size
            lane.next = lane.size
        lane.accepted = 0.0
        lane.event = 1.0 if lane.tries >= arrays.max_steps else 0.0


# ---- affects


def rounded_time(spec: KernelSpec, t: float) -> float:
    """Return a time in the precision of states, as a double."""
    return doubled(spec, rounded(spec, t))


def gap(spec: KernelSpec, t: float) -> float:
    """Return the distance from a time to the next times in the precision of states: see `jumps.beside`."""
    return abs(t) * (0.505 * float(np.finfo(spec.dtype).eps)) + float(np.finfo(spec.dtype).tiny)


@inlined
def beside(spec: KernelSpec, time: float, direction: float) -> float:
    """Return the time of f before (`direction` -1) or after (1) the time of an event: see `jumps.beside`."""
    at = rounded_time(spec, time)
    return at + gap(spec, at) * direction


@inlined
def set_least(lane: ForwardLane, t: float, goal: float) -> None:
    """Set an upper bound on the smallest allowed step; only steps below it are compared with the exact smallest step."""
    most = max(abs(t), abs(goal))
    lane.least = 10.0 * (number_of(bits_of(most) + 1) - most)


@inlined
def set_end_time(kernel: Kernel, lane: ForwardLane, i: int) -> None:
    """Set the time of f at the end of a step that ends at the goal: see `jumps.beside`."""
    arrays = kernel.arrays
    lane.end_time = lane.goal
    if arrays.given_times[arrays.slots[i], 0 if kernel.one_column else i] == lane.sign * lane.goal:
        lane.end_time = beside(kernel.spec, lane.goal, -1.0)


@inlined
def next_goal(kernel: Kernel, sign: float, i: int) -> float:
    """Return the end of tspan, or an earlier given time of an event."""
    arrays = kernel.arrays
    goal = arrays.end[0 if kernel.one_span else i]
    time = arrays.given_times[arrays.slots[i], 0 if kernel.one_column else i]
    return time if sign * time <= sign * goal else goal


@inlined
def apply_events(
    kernel: Kernel, lane: ForwardLane, i: int, was_accepted: bool, first: float, tn: float, row: int
) -> tuple[int, bool]:
    """Apply the affects of events at the end of a step, and set the next goal, the time at which steps must end.

    Return the code if the trajectory ends there, otherwise -1, and whether an event acted. `row`: the first row of the
    events of this step in the table.
    """
    spec, arrays, u, left = kernel.spec, kernel.arrays, state(kernel.spec), vector(len(kernel.spec.events))
    code = -1
    acted = False
    t = lane.sign * tn
    for e in static(spec.sided):
        left[e] = 0.0
    if spec.acts:
        if first < np.inf:
            acted = True
            code = act_at_roots(kernel, lane, i, u, first, tn, row, left)
    elif stops(spec):
        if first < np.inf:
            code = ReturnCode.Terminated.code
    if code <= ReturnCode.Terminated.code and was_accepted and tn == lane.goal:
        if arrays.given_times[arrays.slots[i], 0 if kernel.one_column else i] == t:
            acted = True
            code = act_at_times(kernel, lane, i, u, t, code)
    if acted:
        lane.goal = lane.sign * next_goal(kernel, lane.sign, i)
        set_end_time(kernel, lane, i)
        set_least(lane, t, lane.goal)
        lane.begun = tn
        lane.begin_time = beside(spec, tn, 1.0)
    if acted and code < 0 and tn != lane.goal:
        arrays.resumed[i] += 1
        resume(kernel, lane, first, tn, left)
    return code, acted


def seeds_of(kernel: Kernel, lane: ForwardLane, j: int) -> Sequence[float]:
    """Return the tangents of the parameters in direction j, a "seed"."""
    spec = kernel.spec
    shared = [kernel.arrays.s[spec.shared + j * spec.wanted_shared + n] for n in range(spec.wanted_shared)]
    return [*(lane.dp[j, n] for n in range(spec.wanted_varying)), *shared]


@inlined
def load_end(kernel: Kernel, lane: ForwardLane, u: Vector) -> Sequence[float]:
    """Set u to the state after the step, or after the last event, and return the parameters."""
    copy(kernel.spec, u, lane.new)
    return parameters_of(kernel, lane)


@inlined
def apply_affect(kernel: Kernel, lane: ForwardLane, e: int, u: Vector, parameters: Sequence[float], t: float) -> bool:
    """Make the result of an affect the current state, and return whether it is finite."""
    spec, w = kernel.spec, state(kernel.spec)
    kernel.call(f"affect{e}", (w,), u, parameters, rounded(spec, t))
    finite = True
    for c in spec.components:
        finite = finite and np.isfinite(w[c])
    if finite:
        copy(spec, u, w)
        copy(spec, lane.new, w)
    return finite


@inlined
def push_affect(
    kernel: Kernel, lane: ForwardLane, e: int, u: Vector, parameters: Sequence[float], t: float, j: int
) -> None:
    """Propagate the tangent in direction j through an affect at a constant time, given the state before it."""
    spec, du, out = kernel.spec, state(kernel.spec), state(kernel.spec)
    copy(spec, du, Row(lane.dnew, j))
    is_seed = spec.directions[j][0] == "seed"
    name, seeds = (f"daffect{e}", seeds_of(kernel, lane, j)) if is_seed else (f"df{j}_affect{e}", [])
    kernel.call(name, (out,), u, parameters, rounded(spec, t), du, *seeds)
    copy(spec, Row(lane.dnew, j), out)


@inlined
def act_at_roots(
    kernel: Kernel, lane: ForwardLane, i: int, u: Vector, first: float, tn: float, row: int, left: Vector
) -> int:
    """Apply the events at roots of conditions, and return the code if the trajectory ends there, otherwise -1."""
    spec, arrays, t = kernel.spec, kernel.arrays, lane.sign * tn
    span = abs(arrays.end[0 if kernel.one_span else i] - arrays.start[0 if kernel.one_span else i])
    parameters = load_end(kernel, lane, u)
    code = -1
    stopped = False
    for e in static([e for e, (stops, _) in enumerate(spec.events) if stops]):
        if lane.fraction[e] <= first:
            if spec.acting[e] >= 0:
                if code < 0:
                    value = condition(kernel, e, u, parameters, t)
                    if spec.record:
                        for c in spec.components:
                            arrays.crossings[row, EVENT_COLUMNS + c] = u[c]
                    if apply_affect(kernel, lane, spec.acting[e], u, parameters, t):
                        if departs_at_once(kernel, lane, e, u, parameters, value, span, tn, left):
                            code = ReturnCode.Zeno.code
                    else:
                        code = ReturnCode.Unstable.code
            if spec.acting[e] in spec.ending or spec.acting[e] < 0:
                stopped = True
            row += 1
    lane.short_count = lane.short_count + 1.0 if abs(tn - lane.last_root) <= jumps.SHORT * span else 0.0
    lane.last_root = tn
    if code < 0 and lane.short_count >= float(jumps.MANY_SHORT):
        code = ReturnCode.Zeno.code
    if code < 0 and stopped:
        code = ReturnCode.Terminated.code
    return code


@inlined
def act_at_times(kernel: Kernel, lane: ForwardLane, i: int, u: Vector, t: float, code: int) -> int:
    """Apply the events at a given time, one after the other, and return the code."""
    spec, arrays = kernel.spec, kernel.arrays
    parameters = load_end(kernel, lane, u)
    slot = arrays.slots[i]
    column = 0 if kernel.one_column else i
    while code <= ReturnCode.Terminated.code and arrays.given_times[slot, column] == t:
        kind = arrays.kinds[slot, column]
        if spec.record:
            arrays.jump_number[i, slot] = np.int64(lane.number) + 1
            copy(spec, Row(arrays.jump_before, i, slot), u)
        finite = True
        for e in static(spec.affects or ()):
            if kind == e:
                for j in static(range(len(spec.directions))):
                    push_affect(kernel, lane, e, u, parameters, t, j)
                finite = apply_affect(kernel, lane, e, u, parameters, t)
                if finite and e in spec.ending:
                    code = ReturnCode.Terminated.code
        if finite:
            slot += 1
        else:
            code = ReturnCode.Unstable.code
    arrays.slots[i] = slot
    return code


@inlined
def resume(kernel: Kernel, lane: ForwardLane, first: float, tn: float, left: Vector) -> None:
    """Evaluate f and the conditions after affects."""
    spec, u, k0 = kernel.spec, state(kernel.spec), state(kernel.spec)
    parameters = load_end(kernel, lane, u)
    kernel.call("f", (k0,), u, parameters, rounded(spec, lane.sign * lane.begin_time))
    copy(spec, Row(lane.k, spec.stages), k0)
    if spec.remembers:
        lane.q2_before = LEAST_ERROR
    for e in static(range(len(spec.events))):
        resume_condition(kernel, lane, e, condition(kernel, e, u, parameters, lane.sign * tn), first, tn, left)
    if spec.acts:
        if lane.limit > tn:
            lane.next = min(lane.next, lane.limit - tn)


@inlined
def resume_condition(
    kernel: Kernel, lane: ForwardLane, e: int, value: float, first: float, tn: float, left: Vector
) -> None:
    """Store the value of a condition after affects.

    If they haven't changed it, and it may be so near zero that rounding determines its sign, the sign is set: after the
    condition's event to the opposite of the earlier sign, after a very short step to the earlier sign.
    """
    earlier, is_sided = lane.condition[e], e in kernel.spec.sided
    if is_sided:
        side = sign_of(value)
    if value == lane.condition_new[e]:
        if lane.fraction[e] < np.inf and lane.fraction[e] <= first and lane.crossed[e] != 0.0:
            value = -LEAST if lane.crossed[e] > 0.0 else LEAST
            if is_sided:
                side = -1.0 if lane.crossed[e] > 0.0 else 1.0
        elif tn - lane.now <= lane.unresolved and (abs(earlier) <= LEAST or value * earlier <= 0.0):
            value = LEAST if earlier > 0.0 else (-LEAST if earlier < 0.0 else 0.0)
            if is_sided:
                side = lane.side[e]
    lane.condition_new[e] = value
    lane.condition[e] = value
    if is_sided:
        lane.side[e] = left[e] if left[e] != 0.0 else side


@inlined
def sign_of(x: float) -> float:
    """Return the sign of a number, 0 for 0 and NaN."""
    return 1.0 if x > 0.0 else (-1.0 if x < 0.0 else 0.0)


@inlined
def departs_at_once(
    kernel: Kernel,
    lane: ForwardLane,
    e: int,
    u: Vector,
    parameters: Sequence[float],
    value: float,
    span: float,
    tn: float,
    left: Vector,
) -> bool:
    """Determine the departure of a condition from its root after an affect, as `jumps.departure`.

    Set the sign with which the condition leaves the root; shorten the next step if the condition will soon vanish again,
    and return whether its roots would accumulate. `value`: the condition before the affect.
    """
    spec, k0, k1, y = kernel.spec, state(kernel.spec), state(kernel.spec), state(kernel.spec)
    t = lane.sign * tn
    elapsed = tn - lane.last_acted[e]
    lane.last_acted[e] = tn
    # As in `jumps.distance_ahead`.
    ahead = jumps.LEAST_AHEAD * span
    if elapsed > lane.unresolved:
        ahead = min(jumps.AHEAD_OF_SHORT * elapsed, max(jumps.AHEAD * elapsed, ahead))
    kernel.call("f", (k0,), u, parameters, t)
    now = condition(kernel, e, u, parameters, t)
    later = t + lane.sign * ahead
    for c in spec.components:
        k0[c] = lane.sign * k0[c]
    for c in spec.components:
        y[c] = u[c] + ahead * k0[c]
    euler = condition(kernel, e, y, parameters, later)
    kernel.call("f", (k1,), y, parameters, later)
    for c in spec.components:
        y[c] = u[c] + 0.5 * ahead * (k0[c] + lane.sign * k1[c])
    second = condition(kernel, e, y, parameters, later) - euler
    linear = euler - now
    endless = False
    direction = float(spec.events[e][1])
    if abs(now) <= max(jumps.AT_ROOT * abs(value), jumps.OF_WAY * abs(linear * elapsed / ahead)):
        side = sign_of(linear) if linear != 0.0 else -sign_of(second)
        if e in spec.sided:
            left[e] = side
        if side * second < 0.0 and (direction == 0.0 or side * direction < 0.0):
            time_to_return = -ahead * linear / second
            if spec.adaptive:  # fixed steps aren't shortened
                lane.limit = min(lane.limit if lane.limit > tn else np.inf, tn + 0.25 * time_to_return)
            if time_to_return <= jumps.AT_ONCE * span and (linear == 0.0 or elapsed <= jumps.SHORT_PIECE * span):
                endless = True
    return endless
