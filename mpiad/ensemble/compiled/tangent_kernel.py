"""The CPU's tangent kernel: tangents of the accepted steps of several trajectories, in any number of directions.

Lanes and turns are as in `forward_kernel`, and the steps of a trajectory are those of the record, as in `reverse_kernel`.
In each turn every lane computes the stages of its next step again, once for all directions. Then, for one direction after
the other, the lanes compute the tangents of the stages and of the new state, and those with output write the tangents of
saved states, of events and of final states. A direction has tangents of the initial state, of parameters and of times. The
number of directions is the length of an axis of the arguments, so one kernel serves any number.

The tangents of a Runge-Kutta step are ẏ_i = u̇ + h Σ a_ij k̇_j + ḣ Σ a_ij k_j and k̇_i = f'(y_i) ẏ_i, and the last ẏ is the
tangent of the new state. In a Rosenbrock step W k_i = r_i, so W k̇_i = ṙ_i - Ẇ k_i, where Ẇ is minus the tangent of h J.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from mpiad.compiling.folding import inlined, static
from mpiad.compiling.kernel_language import Row, lanes, total, where
from mpiad.ensemble.compiled.event_kernel import beside, shift_of_root
from mpiad.ensemble.compiled.kernel_fields import (
    Booleans,
    DirectionLane,
    Doubles,
    Doubles2,
    Doubles3,
    Integers,
    Layout,
    Reals,
    Reals2,
    Reals3,
    Reals4,
    TangentLane,
    Words2,
)
from mpiad.ensemble.compiled.kernel_spec import KernelSpec
from mpiad.ensemble.compiled.reverse_kernel import Visits, kernel_of, step_again, visit_steps
from mpiad.ensemble.compiled.rosenbrock_kernel import (
    Matrix,
    UnrolledLU,
    is_looped,
    lu_of,
    reserved_of,
    rosenbrock_tangents,
)
from mpiad.ensemble.compiled.step_kernel import (
    Kernel,
    Seeds,
    Step,
    Vector,
    copy,
    dense_rates,
    dense_weights,
    inside,
    parameters_of,
    rounded,
    stage_time,
    state,
    tangents,
)


class TangentArrays(NamedTuple):
    """The arguments of the kernel."""

    b: Reals
    exact: Doubles
    ids: Integers
    places: Integers
    state: Integers
    rows: Doubles2
    previous: Integers
    along: Reals
    along_exact: Doubles
    following: Integers
    p: Reals2
    s: Reals
    times: Doubles2
    last: Integers
    t_reached: Doubles
    alive: Booleans
    save_step: Words2
    # Tangents of the inputs, with the directions along the first axis: of initial states, parameters per trajectory and
    # shared parameters (a vector of all directions), start and end of tspan, and given times of events.
    du0: Reals3
    dp: Reals3
    ds: Reals
    dstart: Doubles2
    dend: Doubles2
    ddue: Doubles3
    # Tangents of the results: final states, saved states, final times of trajectories that end at events, times of events.
    du_end: Reals3
    dsaved: Reals4
    dreached: Doubles2
    dcrossed: Doubles2
    # The shifts of the times at which the last steps end.
    dt_end: Doubles2
    # Events that acted, and the table of events.
    jump_first: Integers
    jump_number: Integers
    jump_kind: Integers
    jump_slot: Integers
    jump_time: Doubles
    jump_state: Reals2
    event_first: Integers
    crossings: Doubles2


# The columns of `crossings`, after those of the table of events: the index of the event's time among the results, or -1,
# and whether the event ends the step.
CROSSED, STOPS = 5, 6
# Values of `TangentLane.goal`: the size of a step is constant, or the step ends at the end of tspan. Other values are
# indices of given times.
CONSTANT, END = -2, -1


class Layouts(NamedTuple):
    """The layouts of what all directions share, and of one direction."""

    lane: Layout
    direction: Layout


@lru_cache(64)
def layout_of(spec: KernelSpec) -> Layouts:
    """Return the layouts of the kernel's buffers."""
    lu = lu_of(spec) if spec.tableau.implicit else None
    unrolled = isinstance(lu, UnrolledLU)
    sizes = {"factors": len(entries_of(lu)) if unrolled else 0, "swaps": len(swaps_of(lu)) if unrolled else 0}
    return Layouts(Layout(spec, TangentLane, reserved_of(spec), sizes), Layout(spec, DirectionLane))


@inlined
def tangent(spec: KernelSpec, call: Callable[..., None], layout: Layouts, arrays: TangentArrays, is_wide: bool) -> None:
    """Propagate tangents through the steps of trajectories; `is_wide`: whether the kernel profits from wide vectors."""
    kernel = kernel_of(spec, call, arrays, layout.lane)._replace(along_of=partial(layout.direction.lane, arrays))
    visit_steps(kernel, is_wide, Visits(enter, fetch, push_one_by_one if is_looped(spec) else push_lanes, move_on))


@inlined
def push_lanes(kernel: Kernel) -> None:
    """Propagate the tangents of all lanes through one step of each."""
    spec, arrays = kernel.spec, kernel.arrays
    for l in lanes(spec.lanes) if spec.vectorized else range(spec.lanes):
        recompute(kernel, kernel.lane_of(l))
    for j in range(arrays.du0.shape[0]):
        if spec.timed:
            for l in range(spec.lanes):
                if arrays.ids[l] >= 0:
                    set_size_tangent(kernel, kernel.lane_of(l), kernel.along_of(l, j), arrays.ids[l], j)
        for l in lanes(spec.lanes) if spec.vectorized else range(spec.lanes):
            lane = kernel.lane_of(l)
            push(kernel, lane, kernel.along_of(l, j), j, stored_matrix(spec, lane))
        for l in range(spec.lanes):
            if arrays.ids[l] >= 0:
                lane = kernel.lane_of(l)
                if lane.has_output > 0.0:
                    write_output(kernel, lane, kernel.along_of(l, j), arrays.ids[l], j)


@inlined
def push_one_by_one(kernel: Kernel) -> None:
    """Do the same for one lane after the other, since they use the same array for a factorization."""
    arrays = kernel.arrays
    for l in range(kernel.spec.lanes):
        if arrays.ids[l] >= 0:
            lane = kernel.lane_of(l)
            matrix = recompute(kernel, lane)
            for j in range(arrays.du0.shape[0]):
                along = kernel.along_of(l, j)
                set_size_tangent(kernel, lane, along, arrays.ids[l], j)
                push(kernel, lane, along, j, matrix)
                write_output(kernel, lane, along, arrays.ids[l], j)


# ---- the sequence of steps


@inlined
def enter(kernel: Kernel, lane: TangentLane, i: int) -> None:
    """Start trajectory i."""
    spec, arrays = kernel.spec, kernel.arrays
    # The record links each step to the previous one.
    row = arrays.last[i]
    following = -1
    while row >= 0:
        arrays.following[row] = following
        following = row
        row = arrays.previous[row]
    lane.row = following
    lane.step = 0
    lane.time_index = 0
    while lane.time_index < kernel.n_saved and arrays.save_step[i, lane.time_index] == -1:
        lane.time_index += 1  # initial states
    for j in spec.varying_indices:
        lane.p[j] = arrays.p[j, i]
    if spec.jumps is not None:
        lane.jump = arrays.jump_first[i]
        while lane.jump < arrays.jump_first[i + 1] and arrays.jump_number[lane.jump] == 0:
            lane.jump += 1  # events at the start
    if spec.events:
        lane.event = arrays.event_first[i]
    for j in range(arrays.du0.shape[0]):
        start(kernel, kernel.along_of(lane.index, j), i, j)


@inlined
def start(kernel: Kernel, along: DirectionLane, i: int, j: int) -> None:
    """Set the tangents of trajectory i at its start."""
    spec, arrays = kernel.spec, kernel.arrays
    for c in spec.components:
        along.du[c] = arrays.du0[j, c, i]
    for n in range(spec.wanted_varying):
        along.dp[n] = arrays.dp[j, n, i]
    if spec.timed:
        along.dt = arrays.dstart[j, i]


@inlined
def fetch(kernel: Kernel, lane: TangentLane, i: int) -> None:
    """Load the next step."""
    spec, arrays = kernel.spec, kernel.arrays
    row = lane.row
    following = arrays.following[row]
    lane.t = arrays.rows[row, 0]
    lane.h = arrays.rows[row, 1]
    for c in spec.components:
        lane.u[c] = rounded(spec, arrays.rows[row, c + 2])
    lane.has_output = 0.0
    lane.goal = CONSTANT
    if following >= 0:
        lane.tn = arrays.rows[following, 0]
    else:
        lane.tn = arrays.t_reached[i]
        lane.has_output = 1.0
        lane.goal = END
    if lane.time_index < kernel.n_saved:
        if arrays.save_step[i, lane.time_index] == lane.step:
            lane.has_output = 1.0
    if spec.jumps is not None:
        fetch_jumps(kernel, lane, i)
    if spec.events:
        n = lane.event
        while n < arrays.event_first[i + 1] and np.int64(arrays.crossings[n, 2]) == lane.step:
            lane.has_output = 1.0
            if arrays.crossings[n, STOPS] > 0.0:
                lane.goal = CONSTANT
                lane.tn = lane.t + lane.h
                # A root of a condition of p and t lies at the end of a step: see `jumps.beside`.
                if arrays.crossings[n, 3] == 1.0:
                    lane.tn = beside(spec, arrays.crossings[n, 4], where(lane.h > 0.0, -1.0, 1.0))
            n += 1


@inlined
def fetch_jumps(kernel: Kernel, lane: TangentLane, i: int) -> None:
    """Set the times of f at the ends of a step that begins or ends at an event that acted."""
    spec, arrays = kernel.spec, kernel.arrays
    lane.begin_time = lane.t
    if lane.step > 0 and lane.jump > arrays.jump_first[i]:
        if arrays.jump_number[lane.jump - 1] == lane.step:
            lane.begin_time = beside(spec, arrays.jump_time[lane.jump - 1], where(lane.h > 0.0, 1.0, -1.0))
    if lane.jump < arrays.jump_first[i + 1]:
        if arrays.jump_number[lane.jump] == lane.step + 1:
            lane.has_output = 1.0
            if arrays.jump_slot[lane.jump] >= 0:
                lane.goal = arrays.jump_slot[lane.jump]
                lane.tn = beside(spec, arrays.jump_time[lane.jump], where(lane.h > 0.0, -1.0, 1.0))


@inlined
def move_on(kernel: Kernel, lane: TangentLane, i: int) -> None:
    """Go on to the next step."""
    spec, arrays = kernel.spec, kernel.arrays
    while lane.time_index < kernel.n_saved and arrays.save_step[i, lane.time_index] == lane.step:
        lane.time_index += 1
    if spec.events:
        while lane.event < arrays.event_first[i + 1] and np.int64(arrays.crossings[lane.event, 2]) == lane.step:
            lane.event += 1
    if spec.jumps is not None:
        while lane.jump < arrays.jump_first[i + 1] and arrays.jump_number[lane.jump] == lane.step + 1:
            lane.jump += 1
    lane.step += 1
    lane.row = arrays.following[lane.row]


# ---- steps


def entries_of(lu: UnrolledLU) -> dict[tuple[int, int], int]:
    """Return the places of the entries of a factorization in the field `factors`."""
    return {(i, k): n for n, (i, k) in enumerate((i, k) for i, row in enumerate(lu.rows) for k in sorted(row))}


def swaps_of(lu: UnrolledLU) -> dict[tuple[int, int], int]:
    """Return the places of the exchanges of rows in the field `swaps`."""
    return {(k, i): n for n, (k, i) in enumerate((pivot.k, i) for pivot in lu.pivots for i, _ in pivot.below)}


class StoredEntries:
    """The entries of a factorization in a field."""

    def __init__(self, field: Vector, places: dict[tuple[int, int], int]):
        self._field, self._places = field, places

    def __getitem__(self, index: tuple[int, int]) -> float:
        return self._field[self._places[index]]


class StoredSwaps(StoredEntries):
    """The exchanges of rows in a field."""

    def __getitem__(self, index: tuple[int, int]) -> float:
        return super().__getitem__(index) > 0.0


@inlined
def recompute(kernel: Kernel, lane: TangentLane) -> Matrix | None:
    """Compute the stages of the step again, and store what the tangents need; return the matrix of a Rosenbrock method."""
    spec, last = kernel.spec, kernel.spec.stages
    recomputed = step_again(kernel, lane, lane.tn)
    step, matrix = recomputed.step, recomputed.matrix
    explicit = not spec.tableau.implicit
    for n in static(range(last + (spec.inside and spec.timed)) if explicit else range(1, last)):
        copy(spec, Row(lane.k, n), step.k[n])
    for n in static(range(1, last + (explicit and (spec.inside or spec.timed)))):
        copy(spec, Row(lane.y, n), step.y[n])
    if spec.timed:
        for n in static(range(1, last + 1)):
            copy(spec, Row(lane.slopes, n), step.slopes[n])
    if matrix is not None:
        if spec.timed:
            for n in static(range(len(spec.jacobian) + len(spec.slopes))):
                lane.jacobian[n] = matrix.jacobian[n]
        if isinstance(matrix.lu, UnrolledLU):
            for index, n in static(entries_of(matrix.lu).items()):
                lane.factors[n] = matrix.w[index]
            for index, n in static(swaps_of(matrix.lu).items()):
                lane.swaps[n] = where(matrix.swaps[index], spec.real(1.0), spec.real(0.0))
    return matrix


def stored_matrix(spec: KernelSpec, lane: TangentLane) -> Matrix | None:
    """Return the matrix that `recompute` has stored."""
    if not spec.tableau.implicit:
        return None
    lu = lu_of(spec)
    w, swaps = StoredEntries(lane.factors, entries_of(lu)), StoredSwaps(lane.swaps, swaps_of(lu))  # type: ignore[arg-type]
    return Matrix(lu, w, swaps, lane.jacobian, ())


@inlined
def set_size_tangent(kernel: Kernel, lane: TangentLane, along: DirectionLane, i: int, j: int) -> None:
    """Set the tangent of the step's size, which isn't zero if the step ends at the end of tspan or at a given time."""
    if kernel.spec.timed:
        lane.dh = 0.0
        if lane.goal == END:
            lane.dh = kernel.arrays.dend[j, i] - along.dt
        elif lane.goal >= 0:
            lane.dh = kernel.arrays.ddue[j, lane.goal, i] - along.dt


@inlined
def loaded(spec: KernelSpec, values: Vector, n: int) -> Vector:
    """Return a state in a field as an argument of functions: a copy if states are arrays."""
    if not spec.rolled:
        return Row(values, n, count=spec.d)
    result = state(spec)
    copy(spec, result, Row(values, n))
    return result


@inlined
def step_of(kernel: Kernel, lane: TangentLane) -> Step:
    """Return the stored step."""
    spec, stages = kernel.spec, range(1, kernel.spec.stages + 1)
    u = state(spec)
    copy(spec, u, lane.u)
    t = lane.t if spec.jumps is None else lane.begin_time
    y, slopes = [loaded(spec, lane.y, n) for n in stages], [Row(lane.slopes, n) for n in (0, *stages)]
    k = [Row(lane.k, n) for n in (0, *stages)]
    return Step(t, lane.tn, lane.h, rounded(spec, lane.h), u, y[-1], k, [u, *y], parameters_of(kernel, lane), slopes)


def seeds_of(kernel: Kernel, lane: TangentLane, along: DirectionLane, j: int) -> Seeds:
    """Return the tangents of the parameters, of the time before the step, and of its size, in direction j."""
    spec, first, ds = kernel.spec, j * kernel.spec.wanted_shared, kernel.arrays.ds
    dt, dh = (rounded(spec, along.dt), rounded(spec, lane.dh)) if spec.timed else (None, None)
    varying = [along.dp[n] for n in range(spec.wanted_varying)]
    if spec.seeds_array:
        return Seeds([*varying, ds], dt, dh, [first])
    return Seeds([*varying, *(ds[first + n] for n in range(spec.wanted_shared))], dt, dh)


@inlined
def push(kernel: Kernel, lane: TangentLane, along: DirectionLane, j: int, matrix: Matrix | None) -> None:
    """Propagate the tangents in direction j through the step."""
    spec, step, seeds = kernel.spec, step_of(kernel, lane), seeds_of(kernel, lane, along, j)
    du, dnew, last = state(spec), state(spec), spec.stages - (not spec.inside)
    dk = [state(spec) for _ in range(spec.stages + 1)]
    copy(spec, du, along.du)
    if matrix is not None:
        rosenbrock_tangents(kernel, step, matrix, seeds, du, dnew, dk)
    else:
        tangents(kernel, step, "df", du, dnew, dk, 0, last, seeds)
    if spec.inside or spec.jumps is not None:
        copy(spec, lane.before, du)
    if spec.inside:
        for n in static(spec.interpolating):
            copy(spec, Row(lane.dk, n), dk[n])
    copy(spec, along.du, dnew)
    if spec.timed:
        lane.before_time = along.dt
        along.dt = along.dt + lane.dh


# ---- output


@inlined
def write_output(kernel: Kernel, lane: TangentLane, along: DirectionLane, i: int, j: int) -> None:
    """Write the tangents of saved states and events in direction j, and apply the affects of events that act."""
    spec, arrays = kernel.spec, kernel.arrays
    if spec.events:
        n = lane.event
        while n < arrays.event_first[i + 1] and np.int64(arrays.crossings[n, 2]) == lane.step:
            push_root(kernel, lane, along, i, j, n)
            n += 1
    place = lane.time_index
    while place < kernel.n_saved and arrays.save_step[i, place] == lane.step:
        push_saved(kernel, lane, along, i, j, place)
        place += 1
    if spec.jumps is not None:
        m = lane.jump
        while m < arrays.jump_first[i + 1] and arrays.jump_number[m] == lane.step + 1:
            push_jump(kernel, lane, along, i, j, m)
            m += 1
    if arrays.following[lane.row] < 0:
        for c in spec.components:
            arrays.du_end[j, c, i] = along.du[c]
        if spec.timed:
            arrays.dt_end[j, i] = along.dt


@inlined
def push_saved(kernel: Kernel, lane: TangentLane, along: DirectionLane, i: int, j: int, place: int) -> None:
    """Write the tangent of a saved state."""
    spec, arrays, out = kernel.spec, kernel.arrays, Row(kernel.arrays.dsaved, j, i, place)
    if not spec.inside or arrays.times.shape[1] == 0:  # without times every step is saved
        copy(spec, out, along.du)
    else:
        time = arrays.times[i if kernel.by_row else 0, place]
        # Saved times are constant, while the ends of steps move with their starts, except at the end of tspan.
        if time == lane.tn and (not spec.timed or lane.goal != CONSTANT):
            copy(spec, out, along.du)
        elif spec.jumps is not None and time == lane.t:
            # If an event acts at a saved time, the state after the event is saved, which is the state before this step.
            copy(spec, out, lane.before)
        else:
            x = (time - lane.t) / lane.h
            set_inside(kernel, lane, dense_weights(spec, x), out)
            if spec.timed:
                r, moved = dense_rates(spec, x), -(lane.before_time + x * lane.dh)
                for c in spec.components:
                    out[c] = rounded(spec, out[c] + total(r[n] * lane.k[n, c] for n in spec.interpolating) * moved)


@inlined
def set_inside(kernel: Kernel, lane: TangentLane, w: Vector, out: Vector) -> None:
    """Compute the tangent of the state at a constant fraction of the step, with the weights w."""
    spec, size = kernel.spec, rounded(kernel.spec, lane.h)
    for c in spec.components:
        out[c] = inside(spec, w, [lane.dk[n, c] for n in spec.interpolating], lane.before[c], size, True)
        if spec.timed:
            out[c] = rounded(spec, out[c] + total(w[n] * lane.k[n, c] for n in spec.interpolating) * lane.dh)


@inlined
def push_root(kernel: Kernel, lane: TangentLane, along: DirectionLane, i: int, j: int, n: int) -> None:
    """Write the tangent of the time of an event.

    A step that the event has cut short is differentiated as a full step, in which the fraction of the event moves.
    """
    spec, arrays, last = kernel.spec, kernel.arrays, kernel.spec.stages
    step, seeds = step_of(kernel, lane), seeds_of(kernel, lane, along, j)
    if last in spec.interpolating and not spec.timed:
        end = state(spec)
        kernel.call("f", (end,), step.y[last], step.parameters, stage_time(spec, last, step))
        copy(spec, Row(lane.k, last), end)
    x = arrays.crossings[n, 3]
    w, du, events = dense_weights(spec, x), state(spec), range(len(spec.events))
    set_inside(kernel, lane, w, du)
    moved = lane.before_time + x * lane.dh if spec.timed else 0.0
    more = (du, *seeds.at_time(rounded(spec, moved)), *seeds.index)
    inputs = w, step.size, step.parameters, arrays.crossings[n, 4], more
    late, rate = shift_of_root(kernel, lane, events, arrays.crossings[n, 1], x, *inputs)
    dtime = moved + late
    if arrays.crossings[n, CROSSED] >= 0.0:
        arrays.dcrossed[j, np.int64(arrays.crossings[n, CROSSED])] = dtime
    if arrays.crossings[n, STOPS] > 0.0:
        for c in spec.components:
            along.du[c] = du[c] + rounded(spec, late * rate[c])
        arrays.dreached[j, i] = dtime
        if spec.timed:
            along.dt = dtime


@inlined
def push_jump(kernel: Kernel, lane: TangentLane, along: DirectionLane, i: int, j: int, m: int) -> None:
    """Propagate the tangent through an event that acted."""
    spec, arrays, parameters = kernel.spec, kernel.arrays, parameters_of(kernel, lane)
    u, du, out, seeds = state(spec), state(spec), state(spec), seeds_of(kernel, lane, along, j)
    time = rounded(spec, arrays.jump_time[m])
    copy(spec, u, Row(arrays.jump_state, m))
    copy(spec, du, along.du)
    if spec.timed:
        if arrays.jump_slot[m] >= 0:
            due = arrays.ddue[j, arrays.jump_slot[m], i]
            # If no step lies between the previous jump and this one, a shift of this jump's time moves the state along f.
            if m > arrays.jump_first[i] and arrays.jump_number[m - 1] == arrays.jump_number[m]:
                rate = state(spec)
                kernel.call("f", (rate,), u, parameters, time)
                for c in spec.components:
                    du[c] = du[c] + rounded(spec, rate[c] * (due - along.dt))
            along.dt = due
            arrays.dreached[j, i] = due
    more = (*seeds.at_time(rounded(spec, along.dt) if spec.timed else spec.real(0.0)), *seeds.index)
    for event in static(spec.jumps or ()):
        if arrays.jump_kind[m] == event:
            kernel.call(f"daffect{event}", (out,), u, parameters, time, du, *more)
    copy(spec, along.du, out)
