"""The CPU's forward kernel, which solves several trajectories at a time by vector instructions.

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

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mpiad.compiling.folding import inlined, static
from mpiad.compiling.kernel_language import (
    Row,
    bits_of,
    claimed,
    fma,
    lanes,
    number_of,
    total,
    vector,
    where,
)
from mpiad.ensemble.compiled.event_kernel import (
    apply_events,
    evaluate_conditions,
    is_near_root,
    locate_events,
    next_goal,
    retake,
    screened,
    seeds_of,
    set_end_time,
    set_least,
    sign_of,
    stops,
)
from mpiad.ensemble.compiled.kernel_fields import (
    Bytes,
    Doubles,
    Doubles2,
    ForwardLane,
    Integers,
    Integers2,
    Layout,
    Number,
    Reals,
    Reals2,
    Reals3,
    Reals4,
    Words2,
)
from mpiad.ensemble.compiled.kernel_spec import KernelSpec
from mpiad.ensemble.compiled.rosenbrock_kernel import (
    Matrix,
    is_looped,
    reserved_of,
    rosenbrock_stages,
    rosenbrock_tangents,
)
from mpiad.ensemble.compiled.step_kernel import (
    EXP2,
    LOG2,
    ROOT_HALF,
    Kernel,
    Seeds,
    Step,
    Vector,
    argument_vectors,
    copy,
    dense_weights,
    explicit_stages,
    first_size,
    inside,
    parameters_of,
    rounded,
    series,
    set_attributes,
    squared_error,
    state,
    step_factor,
    tangents,
)
from mpiad.ensemble.controller import LEAST_ERROR
from mpiad.ensemble.jumps import UNRESOLVED
from mpiad.ensemble.outcome import ReturnCode


class ForwardArrays(NamedTuple):
    """The arguments of the kernel."""

    b: Reals
    exact: Doubles
    ids: Integers
    places: Integers
    state: Integers
    counter: Integers
    u0: Reals2
    p: Reals2
    s: Reals
    start: Doubles
    end: Doubles
    times: Doubles2
    rtol: Number
    atol: Reals
    dt: Number
    dtmax: Number
    max_steps: Number
    u_end: Reals2
    t_reached: Doubles
    codes: Bytes
    naccept: Integers
    nreject: Integers
    saved: Reals3
    save_step: Words2
    du_end: Reals3
    dsaved: Reals4
    last_row: Integers
    rows: Doubles2
    previous: Integers
    # For events at given times, and for the table of events.
    given_times: Doubles2
    kinds: Integers2
    slots: Integers
    resumed: Integers
    jump_number: Integers2
    jump_before: Reals3
    crossings: Doubles2


@lru_cache(64)
def layout_of(spec: KernelSpec) -> Layout:
    """Return the layout of the kernel's buffers."""
    return Layout(spec, ForwardLane, reserved_of(spec))


@inlined
def forward(spec: KernelSpec, call: Callable[..., None], layout: Layout, arrays: ForwardArrays, is_wide: bool) -> None:
    """Solve trajectories; `is_wide`: whether the kernel profits from the widest vectors."""
    set_attributes(spec, is_wide)
    kernel = kernel_of(spec, call, arrays, layout.reserved)
    next_id, vacant_lanes, stop, turns = arrays.state[0], arrays.state[1], arrays.state[4], arrays.state[5]
    row = arrays.state[2]
    more = True
    while True:
        while vacant_lanes > 0 and (next_id < stop or more):
            if next_id == stop:
                # Take the next trajectories from the counter of all threads.
                first = claimed(arrays.counter, arrays.counter[2])
                more = first < arrays.counter[1]
                if more:
                    next_id = first
                    stop = min(first + arrays.counter[2], arrays.counter[1])
            for l in range(spec.lanes):
                while next_id < stop and has_no_span(kernel, next_id):
                    next_id += 1
                if arrays.ids[l] < 0 and next_id < stop:
                    arrays.ids[l] = next_id
                    enter(kernel, layout.lane(arrays, l), next_id)
                    next_id += 1
                    vacant_lanes -= 1
        # Return at the end, after the given number of turns, or if the output arrays may be too small for another turn.
        if vacant_lanes == spec.lanes or turns == 0 or is_full(spec, arrays, row):
            break
        turns -= 1
        for l in lanes(spec.lanes) if spec.vectorized and not is_looped(spec) else range(spec.lanes):
            attempt_step(kernel, layout.lane(arrays, l))
        if spec.clocks:
            for l in range(spec.lanes):
                lane = layout.lane(arrays, l)
                if lane.live > 0.0:
                    retake(kernel, lane)
        if spec.record and arrays.rows.shape[0] > 0:
            for l in range(spec.lanes):
                lane = layout.lane(arrays, l)
                if lane.accepted > 0.0:
                    record(kernel, lane, arrays.ids[l], row)
                    row += 1
        for l in range(spec.lanes):
            lane = layout.lane(arrays, l)
            if lane.event > 0.0:
                code, tn = write_output(kernel, lane, arrays.ids[l], lane.accepted > 0.0)
                if code >= 0:
                    write_results(kernel, lane, arrays.ids[l], lane.accepted > 0.0, tn, code)
                    arrays.ids[l] = -1
                    vacant_lanes += 1
                    # Until another trajectory starts in the lane, the lane's steps have size zero.
                    lane.live = 0.0
                    lane.goal = tn
                    lane.next = 0.0
    arrays.state[0] = next_id
    arrays.state[1] = vacant_lanes
    arrays.state[2] = row
    arrays.state[4] = stop
    arrays.state[5] = turns


@inlined
def kernel_of(spec: KernelSpec, call: Callable[..., None], arrays: ForwardArrays, reserved: int) -> Kernel:
    """Load what all trajectories share."""
    shared, atol = vector(spec.shared), vector(2 * spec.d)
    for j in static(spec.scalars_shared):
        shared[j] = arrays.s[j]
    # States that are arrays have tolerances in an array, too.
    count = 0 if spec.tolerances and spec.rolled else len(spec.entries) * (1 + spec.relative) if spec.tolerances else 1
    for n in static(range(count)):
        atol[n] = arrays.atol[n]
    return Kernel(
        spec, call, arrays, power, (arrays.b, reserved), [shared[j] for j in spec.scalars_shared],
        one_span=arrays.start.shape[0] == 1, one_start=arrays.u0.shape[1] == 1, by_row=arrays.times.shape[0] > 1,
        one_column=arrays.given_times.shape[1] == 1, n_saved=arrays.times.shape[1], rtol=rounded(spec, arrays.rtol),
        atol=atol if count else arrays.atol,
    )  # fmt: skip


def is_full(spec: KernelSpec, arrays: ForwardArrays, row: int) -> bool:
    """Return whether the output arrays may be too small for another turn."""
    rows = arrays.rows.shape[0]
    full = (rows > 0) & (row + spec.lanes > rows) if spec.record else False
    if spec.events:
        events = arrays.state[3] + spec.lanes * len(spec.events) * (spec.points + 1) > arrays.crossings.shape[0]
        return events | full if spec.record else events
    return full


@inlined
def has_no_span(kernel: Kernel, i: int) -> bool:
    """Return whether a trajectory has an empty tspan."""
    return kernel.arrays.start[0 if kernel.one_span else i] == kernel.arrays.end[0 if kernel.one_span else i]


# ---- the start of a trajectory


@inlined
def enter(kernel: Kernel, lane: ForwardLane, i: int) -> None:
    """Start trajectory i."""
    spec, arrays, u, k0 = kernel.spec, kernel.arrays, state(kernel.spec), state(kernel.spec)
    t = arrays.start[0 if kernel.one_span else i]
    goal = arrays.end[0 if kernel.one_span else i]
    sign = -1.0 if goal < t else 1.0
    span = abs(goal - t)
    if spec.affected:
        goal = next_goal(kernel, sign, i)
    for c in spec.components:
        u[c] = arrays.u0[c, 0 if kernel.one_start else i]
    for j in spec.varying_indices:
        lane.p[j] = arrays.p[j, i]
    parameters = parameters_of(kernel, lane)
    kernel.call("f", (k0,), u, parameters, rounded(spec, t))
    now = sign * t
    h = first_size(kernel, u, k0, parameters, t, sign * goal - now, sign)
    h = h if h < arrays.dtmax else arrays.dtmax
    smallest = smallest_step(now)
    lane.next = h if h > smallest else smallest
    for c in spec.components:
        lane.u[c] = u[c]
        lane.k[0, c] = k0[c]
    set_first_tangents(kernel, lane, i)
    lane.sign = sign
    lane.goal = sign * goal
    set_least(lane, t, goal)
    if spec.affected:
        lane.begun = -np.inf
        lane.unresolved = UNRESOLVED * span
        set_end_time(kernel, lane, i)
    if spec.clocks:
        if not spec.affected:
            lane.end_time = lane.goal
        lane.clock = -np.inf
    lane.live = 1.0
    lane.rejected = 0.0
    lane.tries = 0.0
    lane.number = 0.0
    if spec.remembers:
        lane.q2_before = LEAST_ERROR
    lane.now = now
    lane.accepted = 0.0
    save_start(kernel, lane, i, u)
    evaluate_conditions(kernel, lane.condition, u, parameters, t)
    if spec.acts:
        for e in static(range(len(spec.events))):
            lane.last_acted[e] = now
        lane.last_root = now
        lane.limit = now
        lane.short_count = 0.0
    for e in static(spec.sided):
        lane.side[e] = sign_of(lane.condition[e])


@inlined
def smallest_step(now: float) -> float:
    """Return the smallest allowed step, as `least_step`: ten times the distance to the next larger double."""
    # Its bits are those of `now` plus 1, or minus 1 if `now` is negative. Adding 0.0 turns -0.0 into 0.0.
    return 10.0 * (number_of(bits_of(now + 0.0) + (1 if now >= 0.0 else -1)) - now)


@inlined
def set_first_tangents(kernel: Kernel, lane: ForwardLane, i: int) -> None:
    """Set the tangents at the start of trajectory i: unit vectors, or for "seed" those in the arrays, see `Solver`."""
    spec, arrays = kernel.spec, kernel.arrays
    for j, (kind, component) in static(enumerate(spec.directions)):
        for c in spec.components:
            lane.du[j, c] = arrays.du_end[j, c, i] if kind == "seed" else spec.real(0.0)
        if kind == "u":
            lane.du[j, component] = spec.real(1.0)
        if kind == "seed":
            for n in static(range(spec.wanted_varying)):
                lane.dp[j, n] = arrays.p[spec.varying + j * spec.wanted_varying + n, i]


@inlined
def save_start(kernel: Kernel, lane: ForwardLane, i: int, u: Vector) -> None:
    """Save the initial state at saved times that are the start."""
    spec, arrays = kernel.spec, kernel.arrays
    lane.time_index = -1
    set_next_save_time(kernel, lane, i)
    while lane.save_time == lane.now:
        write_saved(kernel, lane, i, u, lane.du)
        if not spec.on_gpu:
            if arrays.save_step.shape[0] > 0:
                arrays.save_step[i, lane.time_index] = -1
        set_next_save_time(kernel, lane, i)


@inlined
def set_next_save_time(kernel: Kernel, lane: ForwardLane, i: int) -> None:
    """Go on to the next saved time."""
    lane.time_index += 1
    lane.save_time = np.inf
    if lane.time_index < kernel.n_saved:
        lane.save_time = lane.sign * kernel.arrays.times[i if kernel.by_row else 0, lane.time_index]


# ---- steps


@inlined
def attempt_step(kernel: Kernel, lane: ForwardLane) -> None:
    """Attempt one step."""
    spec, k, new = kernel.spec, [state(kernel.spec) for _ in range(kernel.spec.stages + 1)], state(kernel.spec)
    u, du, now = advance(spec, lane, k[0])
    y = argument_vectors(spec, u, new)
    step = begin_step(kernel, lane, now, u, new, k, y)
    matrix = compute_stages(kernel, step)
    for j in static(range(len(spec.directions))):
        propagate(kernel, lane, step, matrix, j, du[j])
    q2 = squared_error(kernel, step)
    lane.q2 = q2
    for c in spec.components:
        lane.new[c] = new[c]
        lane.k[spec.stages, c] = k[spec.stages][c]
        if spec.inside:
            for i in static(range(1, spec.stages)):
                lane.k[i, c] = k[i][c]
    decide(kernel, lane, step, q2)


@inlined
def advance(spec: KernelSpec, lane: ForwardLane, k0: Vector) -> tuple[Vector, list[Vector], float]:
    """Move to the end of the previous step if it was accepted; return the state, its tangents and the time."""
    u, du, was_accepted = state(spec), [state(spec) for _ in spec.directions], lane.accepted > 0.0
    for c in spec.components:
        u[c] = where(was_accepted, lane.new[c], lane.u[c])
        lane.u[c] = u[c]
    for c in spec.components:
        k0[c] = where(was_accepted, lane.k[spec.stages, c], lane.k[0, c])
        lane.k[0, c] = k0[c]
    for j in static(range(len(spec.directions))):
        for c in spec.components:
            du[j][c] = where(was_accepted, lane.dnew[j, c], lane.du[j, c])
            lane.du[j, c] = du[j][c]
    for e in static(range(len(spec.events))):
        value = where(was_accepted, lane.condition_new[e], lane.condition[e])
        if spec.affected:
            value = where(is_near_root(lane, e, lane.size), lane.condition[e], value)
        lane.condition[e] = value
    lane.number += lane.accepted
    return u, du, where(was_accepted, lane.ahead, lane.now)


@inlined
def begin_step(
    kernel: Kernel, lane: ForwardLane, now: float, u: Vector, new: Vector, k: Sequence[Vector], y: Sequence[Vector]
) -> Step:
    """Set the start, the end and the size of the next step."""
    spec, goal, following, sign = kernel.spec, lane.goal, lane.next, lane.sign
    ahead = now + following
    # Equal steps don't sum up to tspan exactly: a remainder of the size of rounding is added to the last step.
    if not spec.adaptive:
        ahead = where(ahead > goal - 1e-9 * following, goal, ahead)
    ahead = where(ahead < goal, ahead, goal)
    length = ahead - now
    h = sign * length
    t = sign * now
    tn = sign * ahead
    if spec.affected:
        t = sign * where(now == lane.begun, lane.begin_time, now)
    if spec.limited:
        tn = sign * where(ahead == goal, lane.end_time, ahead)
    lane.now = now
    lane.ahead = ahead
    lane.size = length
    size = rounded(spec, h)
    return Step(t, tn, h, size, u, new, k, y, parameters_of(kernel, lane))


@inlined
def compute_stages(kernel: Kernel, step: Step) -> Matrix:
    """Compute all stages but the first, and the new state; return the matrix of a Rosenbrock method."""
    return (rosenbrock_stages if kernel.spec.tableau.implicit else explicit_stages)(kernel, step)  # type: ignore[return-value]


@inlined
def propagate(kernel: Kernel, lane: ForwardLane, step: Step, matrix: Matrix, j: int, du: Vector) -> None:
    """Propagate the tangent in direction j through the step."""
    spec, is_seed = kernel.spec, kernel.spec.directions[j][0] == "seed"
    # In this step the last stage's tangent is needed only for states inside the step.
    dnew, last = state(spec), spec.stages - (not spec.inside)
    dk = [state(spec) for _ in range(spec.stages + 1)]
    seeds = Seeds(seeds_of(kernel, lane, j)) if is_seed else Seeds()
    if spec.tableau.implicit:
        rosenbrock_tangents(kernel, step, matrix, seeds, du, dnew, dk)
    else:
        tangents(kernel, step, "df" if is_seed else f"df{j}", du, dnew, dk, 0, last, seeds)
    for c in spec.components:
        lane.dnew[j, c] = dnew[c]
        if spec.inside:
            for i in static(spec.interpolating):
                lane.dk[j, i, c] = dk[i][c]


@inlined
def decide(kernel: Kernel, lane: ForwardLane, step: Step, q2: float) -> None:
    """Accept or reject the step, choose the size of the next one, and decide whether the lane has output (`event`)."""
    spec, arrays, live = kernel.spec, kernel.arrays, lane.live
    if spec.adaptive:
        accepted = where(q2 < 1.0, live, 0.0)
        following = lane.size * step_factor(kernel, lane, q2, accepted)
        following = where(following < arrays.dtmax, following, arrays.dtmax)
        lane.rejected = live - accepted
        small = where(following < lane.least, live, 0.0)
        lane.next = following
    else:
        accepted = where(q2 == 0.0, live, 0.0)
        small = live - accepted
    evaluate_conditions(kernel, lane.condition_new, step.new, step.parameters, lane.sign * lane.ahead)
    crossed = screened(kernel, lane, step, live, accepted)
    tries = lane.tries + live
    lane.tries = tries
    lane.accepted = accepted
    exhausted = where(tries >= arrays.max_steps, live, 0.0)
    ended = where(lane.ahead >= lane.goal, accepted, 0.0)
    saves = where(lane.save_time <= lane.ahead, accepted, 0.0)
    lane.event = total([small + exhausted + ended + saves, *(crossed[e] for e in range(len(spec.events)))])


@inlined
def power(spec: KernelSpec, x: float, exponent: float) -> float:
    """Return x ** exponent, |exponent| <= 0.5, to a few ulp; x is clipped to [1e-30, 1e30], NaN to 1e30."""
    x = where(x < 1e30, x, 1e30)
    x = where(x > 1e-30, x, 1e-30)
    i = bits_of(x) - ROOT_HALF
    # Vector units before AVX-512 can't convert 64-bit integers to doubles. Instead, the integer n + 1024 is written to the
    # last bits of the double 2^52 (0x433 << 52), which gives 2^52 + n + 1024.
    n = number_of(((i + 0x4000000000000000) >> 52) | 0x4330000000000000) - 4503599627371520.0
    m = number_of((i & 0xFFFFFFFFFFFFF) + ROOT_HALF)
    r = (m - 1.0) / (m + 1.0)
    y = exponent * fma(series(r * r, LOG2), r, n)
    w = y + 6755399441055744.0  # adding 1.5 · 2^52 rounds to an integer
    return number_of(bits_of(series(y - (w - 6755399441055744.0), EXP2)) + (bits_of(w) << 52))


# ---- output


@inlined
def record(kernel: Kernel, lane: ForwardLane, i: int, row: int) -> None:
    """Write an accepted step to the record."""
    arrays = kernel.arrays
    arrays.rows[row, 0] = lane.sign * lane.now
    arrays.rows[row, 1] = lane.sign * lane.size
    for c in kernel.spec.components:
        arrays.rows[row, c + 2] = lane.u[c]
    arrays.previous[row] = arrays.last_row[i]
    arrays.last_row[i] = row


@inlined
def write_output(kernel: Kernel, lane: ForwardLane, i: int, was_accepted: bool) -> tuple[int, float]:
    """Find events and save states; return the code if the trajectory ends, otherwise -1, and the end of the step."""
    spec = kernel.spec
    tn = lane.ahead
    first = np.inf
    code = -1
    row = 0
    if spec.events:
        if was_accepted:
            first, tn, row = locate_events(kernel, lane, i)
    if spec.affected:
        # If a saved time is the time of an event, the state after the event is saved.
        while was_accepted and lane.save_time < tn:
            save(kernel, lane, i, tn, False)
        code, acted = apply_events(kernel, lane, i, was_accepted, first, tn, row)
        while was_accepted and lane.save_time <= tn:
            save(kernel, lane, i, tn, acted)
    else:
        while was_accepted and lane.save_time <= tn:
            save(kernel, lane, i, tn, False)
        if stops(spec):
            if first < np.inf:
                code = ReturnCode.Terminated.code
    return end_code(kernel, lane, was_accepted, tn, code), tn


@inlined
def end_code(kernel: Kernel, lane: ForwardLane, was_accepted: bool, tn: float, code: int) -> int:
    """Return the return code if the trajectory ends, otherwise -1."""
    if code < 0 and was_accepted and tn == lane.goal:
        code = ReturnCode.Success.code
    elif not kernel.spec.adaptive:
        if not was_accepted and not lane.q2 == 0.0:
            code = ReturnCode.Unstable.code
    elif lane.next < lane.least:
        smallest = smallest_step(tn if was_accepted else lane.now)
        if lane.next < smallest:
            if was_accepted:
                lane.next = smallest
            else:
                code = ReturnCode.DtLessThanMin.code if np.isfinite(lane.q2) else ReturnCode.Unstable.code
    if code < 0 and lane.tries >= kernel.arrays.max_steps:
        code = ReturnCode.MaxIters.code
    return code


@inlined
def save(kernel: Kernel, lane: ForwardLane, i: int, tn: float, acted: bool) -> None:
    """Save the state at a saved time; `acted`: whether an event has acted at the end of the step."""
    spec, arrays = kernel.spec, kernel.arrays
    if spec.inside:
        if lane.save_time < tn:
            save_inside(kernel, lane, i)
        else:
            write_saved(kernel, lane, i, lane.new, lane.dnew)
    else:
        write_saved(kernel, lane, i, lane.new, lane.dnew)
    if not spec.on_gpu:
        if arrays.save_step.shape[0] > 0:
            # A state after an event belongs to the next step.
            arrays.save_step[i, lane.time_index] = np.int32(lane.number + (1.0 if acted else 0.0))
    set_next_save_time(kernel, lane, i)


@inlined
def save_inside(kernel: Kernel, lane: ForwardLane, i: int) -> None:
    """Save the interpolated state and its tangents."""
    spec, arrays = kernel.spec, kernel.arrays
    size, fused = rounded(spec, lane.sign * lane.size), not spec.on_gpu
    w = dense_weights(spec, (lane.save_time - lane.now) / lane.size)
    for c in spec.components:
        arrays.saved[i, lane.time_index, c] = inside(spec, w, [lane.k[n, c] for n in spec.interpolating], lane.u[c], size)
    for j in static(range(len(spec.directions))):
        for c in spec.components:
            stages = [lane.dk[j, n, c] for n in spec.interpolating]
            arrays.dsaved[j, i, lane.time_index, c] = inside(spec, w, stages, lane.du[j, c], size, fused)


@inlined
def write_saved(kernel: Kernel, lane: ForwardLane, i: int, u: Vector, du: Vector) -> None:
    """Save a state and its tangents."""
    spec, arrays = kernel.spec, kernel.arrays
    copy(spec, Row(arrays.saved, i, lane.time_index), u)
    for j in static(range(len(spec.directions))):
        copy(spec, Row(arrays.dsaved, j, i, lane.time_index), Row(du, j))


@inlined
def write_results(kernel: Kernel, lane: ForwardLane, i: int, was_accepted: bool, tn: float, code: int) -> None:
    """Write the results of a trajectory that has ended."""
    spec, arrays = kernel.spec, kernel.arrays
    steps = np.int64(lane.number + lane.accepted)
    arrays.codes[i] = code
    arrays.naccept[i] = steps
    arrays.nreject[i] = np.int64(lane.tries) - steps
    arrays.t_reached[i] = lane.sign * (tn if was_accepted else lane.now)
    for c in spec.components:
        arrays.u_end[i, c] = lane.new[c] if was_accepted else lane.u[c]
    for j in static(range(len(spec.directions))):
        for c in spec.components:
            arrays.du_end[j, c, i] = lane.dnew[j, c] if was_accepted else lane.du[j, c]
