"""The CPU's reverse kernel: the adjoint of the accepted steps of several trajectories at a time.

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

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.folding import inlined, static
from mpiad.compiling.kernel_language import (
    Row,
    fetched,
    fma,
    lanes,
    total,
    vector,
    where,
)
from mpiad.ensemble.compiled.event_kernel import beside
from mpiad.ensemble.compiled.kernel_fields import (
    Booleans,
    Doubles,
    Doubles2,
    Integers,
    Layout,
    Reals,
    Reals2,
    Reals3,
    ReverseLane,
    TangentLane,
    Words2,
)
from mpiad.ensemble.compiled.kernel_spec import KernelSpec
from mpiad.ensemble.compiled.rosenbrock_kernel import (
    Matrix,
    factorized,
    is_looped,
    places_of,
    reserved_of,
    right_hand_side,
    solve,
)
from mpiad.ensemble.compiled.step_kernel import (
    Kernel,
    Step,
    Vector,
    argument,
    copy,
    dense_rates,
    dense_weights,
    doubled,
    inside,
    parameters_of,
    rounded,
    set_attributes,
    stage_time,
    state,
    summed,
)


class ReverseArrays(NamedTuple):
    """The arguments of the kernel."""

    b: Reals
    exact: Doubles
    ids: Integers
    places: Integers
    state: Integers
    rows: Doubles2
    previous: Integers
    p: Reals2
    s: Reals
    times: Doubles2
    last: Integers
    naccept: Integers
    t_reached: Doubles
    alive: Booleans
    end_bar: Reals2
    saved_bar: Reals3
    save_step: Words2
    u0_bar: Reals2
    p_bar: Doubles2
    s_bar: Doubles
    start_bar: Doubles
    stop_bar: Doubles
    # Events that acted, and the table of events.
    jump_first: Integers
    jump_number: Integers
    jump_kind: Integers
    jump_slot: Integers
    jump_time: Doubles
    jump_state: Reals2
    jump_time_bar: Doubles
    event_first: Integers
    crossings: Doubles2


@lru_cache(64)
def layout_of(spec: KernelSpec) -> Layout:
    """Return the layout of the kernel's buffers."""
    return Layout(spec, ReverseLane, reserved_of(spec))


@inlined
def reverse(spec: KernelSpec, call: Callable[..., None], layout: Layout, arrays: ReverseArrays, is_wide: bool) -> None:
    """Propagate cotangents through the steps of trajectories; `is_wide`: whether the kernel profits from wide vectors."""
    kernel = kernel_of(spec, call, arrays, layout)
    visit_steps(kernel, is_wide, Visits(enter, fetch, back_lanes, leave))
    if spec.wanted_shared:
        for l in range(spec.lanes if arrays.state[2] == spec.lanes else 0):
            lane = kernel.lane_of(l)
            for n in range(spec.wanted_shared):
                arrays.s_bar[n] += lane.s_bar[n]


class Visits(NamedTuple):
    """The functions of a kernel that visits recorded steps; all but `compute` take a lane and its trajectory."""

    enter: Callable[[Kernel, Array, int], None]  # starts a trajectory
    fetch: Callable[[Kernel, Array, int], None]  # loads the next step
    compute: Callable[[Kernel], None]  # processes one step of each lane
    leave: Callable[[Kernel, Array, int], None]  # ends a step, after which `row` is -1 if it was the last one


@inlined
def visit_steps(kernel: Kernel, is_wide: bool, visits: Visits) -> None:
    """Visit the recorded steps of all trajectories."""
    spec, arrays = kernel.spec, kernel.arrays
    set_attributes(spec, is_wide)
    first, next_id, vacant_lanes, turns = arrays.state[0], arrays.state[1], arrays.state[2], arrays.state[3]
    while True:
        if vacant_lanes > 0 and next_id >= first:
            for l in range(spec.lanes):
                while next_id >= first and (not arrays.alive[next_id] or arrays.last[next_id] < 0):
                    next_id -= 1
                if arrays.ids[l] < 0 and next_id >= first:
                    arrays.ids[l] = next_id
                    visits.enter(kernel, kernel.lane_of(l), next_id)
                    next_id -= 1
                    vacant_lanes -= 1
        if vacant_lanes == spec.lanes or turns == 0:
            break
        turns -= 1
        for l in range(spec.lanes):
            if arrays.ids[l] >= 0:
                visits.fetch(kernel, kernel.lane_of(l), arrays.ids[l])
        visits.compute(kernel)
        for l in range(spec.lanes):
            if arrays.ids[l] >= 0:
                lane = kernel.lane_of(l)
                visits.leave(kernel, lane, arrays.ids[l])
                if lane.row < 0:
                    arrays.ids[l] = -1
                    vacant_lanes += 1
    arrays.state[1] = next_id
    arrays.state[2] = vacant_lanes
    arrays.state[3] = turns


@inlined
def kernel_of(spec: KernelSpec, call: Callable[..., None], arrays: Array, layout: Layout) -> Kernel:
    """Load what all trajectories share."""
    shared = vector(spec.shared)
    for j in static(spec.scalars_shared):
        shared[j] = arrays.s[j]
    return Kernel(
        spec, call, arrays, lu=(arrays.b, layout.reserved), shared=[shared[j] for j in spec.scalars_shared],
        by_row=arrays.times.shape[0] > 1, n_saved=arrays.save_step.shape[1],
        lane_of=partial(layout.lane, arrays),
    )  # fmt: skip


@inlined
def back_lanes(kernel: Kernel) -> None:
    """Propagate the cotangents of all lanes through one step of each."""
    spec = kernel.spec
    for l in lanes(spec.lanes) if spec.vectorized and not is_looped(spec) else range(spec.lanes):
        back(kernel, kernel.lane_of(l), 0)


# ---- the ends of a trajectory


@inlined
def enter(kernel: Kernel, lane: ReverseLane, i: int) -> None:
    """Start the backward sweep of trajectory i."""
    spec, arrays = kernel.spec, kernel.arrays
    lane.row = arrays.last[i]
    lane.step = arrays.naccept[i] - 1
    lane.time_index = kernel.n_saved - 1
    # Skip final states, whose cotangents are in `end_bar`, and states that weren't reached; both come last.
    while lane.time_index >= 0 and arrays.save_step[i, lane.time_index] < -1:
        lane.time_index -= 1
    start(kernel, lane, i)
    if spec.jumps is not None:
        lane.jump = arrays.jump_first[i + 1] - 1
        lane.last_jump = -1
        find_next_jump(kernel, lane, i)
    if spec.events:
        lane.event = arrays.event_first[i + 1] - 1


@inlined
def start(kernel: Kernel, lane: ReverseLane, i: int) -> None:
    """Set the cotangents at the end of trajectory i."""
    spec, arrays = kernel.spec, kernel.arrays
    for c in spec.components:
        lane.cotangent[c] = arrays.end_bar[c, i]
    for j in spec.varying_indices:
        lane.p[j] = arrays.p[j, i]
    for j in static(range(spec.wanted_varying)):
        lane.p_bar[j] = 0.0
    lane.tn = arrays.t_reached[i]
    lane.t = arrays.t_reached[i]
    lane.live = 1.0
    if spec.timed:
        lane.t_bar = 0.0
        lane.h_bar = 0.0
        lane.size_moves = 1.0
    if spec.inside:
        lane.has_arrivals = 1.0


@inlined
def leave(kernel: Kernel, lane: ReverseLane, i: int) -> None:
    """Write the cotangents at the start of trajectory i, after its first step."""
    if lane.row < 0:
        write_cotangents(kernel, lane, i)


@inlined
def write_cotangents(kernel: Kernel, lane: ReverseLane, i: int) -> None:
    """Write the cotangents at the start of trajectory i."""
    spec, arrays = kernel.spec, kernel.arrays
    add_initial_states(kernel, lane, i)
    for c in spec.components:
        arrays.u0_bar[c, i] = lane.cotangent[c]
    for j in static(range(spec.wanted_varying)):
        arrays.p_bar[j, i] = lane.p_bar[j]
    if spec.timed:
        # A shift of the start or end of tspan changes the size of the last step only, which ends at the end of tspan.
        if spec.jumps is not None:
            add_size_cotangent(kernel, lane, i)
        else:
            arrays.stop_bar[i] = lane.h_bar
        arrays.start_bar[i] = lane.t_bar - lane.h_bar
    lane.live = 0.0


@inlined
def add_initial_states(kernel: Kernel, lane: ReverseLane, i: int) -> None:
    """Add the cotangents of saved states that are the initial state."""
    while lane.time_index >= 0:
        add(kernel.spec, lane.cotangent, Row(kernel.arrays.saved_bar, i, lane.time_index))
        lane.time_index -= 1


@inlined
def add(spec: KernelSpec, target: Vector, term: Vector) -> None:
    """Add to the components of a state."""
    for c in spec.components:
        target[c] += term[c]


# ---- saved states


@inlined
def fetch(kernel: Kernel, lane: ReverseLane, i: int) -> None:
    """Load the next step of the backward sweep, and the cotangents of states saved in this step."""
    spec, arrays = kernel.spec, kernel.arrays
    row = lane.row
    lane.tn = lane.t
    lane.t = arrays.rows[row, 0]
    lane.h = arrays.rows[row, 1]
    for c in spec.components:
        lane.u[c] = rounded(spec, arrays.rows[row, c + 2])
    clear_arrivals(spec, lane)
    if spec.jumps is not None:
        pull_jumps(kernel, lane, i)
    if spec.events:
        pull_events(kernel, lane, i)
    while lane.time_index >= 0 and arrays.save_step[i, lane.time_index] == lane.step:
        pull_saved(kernel, lane, i)
    lane.row = arrays.previous[row]
    # Prefetch the previous step, whose row may begin in one cache line and end in the next.
    fetched(arrays.rows, lane.row)
    fetched(arrays.rows, lane.row + 1)
    fetched(arrays.previous, lane.row)
    lane.step -= 1


@inlined
def clear_arrivals(spec: KernelSpec, lane: ReverseLane) -> None:
    """Clear the cotangents of states inside the step, unless the lane had none in the previous turn."""
    if spec.inside:
        if spec.on_gpu or lane.has_arrivals > 0.0:
            for c in spec.components:
                lane.value[c] = spec.real(0.0)
            for i in static(range(spec.stages + 1)):
                for c in spec.components:
                    lane.arrival[i, c] = spec.real(0.0)
                    if spec.timed:
                        lane.rate[i, c] = 0.0
                        lane.rate_x[i, c] = 0.0
        lane.has_arrivals = 0.0


@inlined
def pull_saved(kernel: Kernel, lane: ReverseLane, i: int) -> None:
    """Add the cotangent of a saved state."""
    spec, arrays = kernel.spec, kernel.arrays
    if spec.inside:
        lane.has_arrivals = 1.0
        time = arrays.times[i if kernel.by_row else 0, lane.time_index]
        # Saved times are constant, while the ends of steps move with their starts, except at the end of tspan.
        if time == lane.tn and (not spec.timed or lane.size_moves > 0.0):
            add(spec, lane.cotangent, Row(arrays.saved_bar, i, lane.time_index))
        elif spec.jumps is not None and time == lane.t:
            # If an event acts at a saved time, the state after the event is saved, which is the state before this step.
            add(spec, lane.value, Row(arrays.saved_bar, i, lane.time_index))
        else:
            x = (time - lane.t) / lane.h
            add_arrivals(spec, lane, x, lambda c: arrays.saved_bar[i, lane.time_index, c], spec.timed)
    else:
        add(spec, lane.cotangent, Row(arrays.saved_bar, i, lane.time_index))
    lane.time_index -= 1


@inlined
def add_arrivals(spec: KernelSpec, lane: ReverseLane, x: float, bar: Callable[[int], float], is_timed: bool) -> None:
    """Add the cotangent of a state at the fraction x of the step, u + h Σ w k, to those of u and of the stages."""
    w = dense_weights(spec, x)
    r = dense_rates(spec, x) if is_timed else w
    for c in spec.components:
        value = bar(c)
        lane.value[c] += value
        for n in static(spec.interpolating):
            lane.arrival[n, c] += w[n] * value
            if is_timed:
                lane.rate[n, c] += r[n] * value
                lane.rate_x[n, c] += x * r[n] * value


# ---- steps


class Recomputed(NamedTuple):
    """A step with its stages, computed again, and for Rosenbrock methods its matrix."""

    step: Step
    matrix: Matrix  # None for explicit methods


@inlined
def step_again(kernel: Kernel, lane: ReverseLane | TangentLane, tn: float) -> Recomputed:
    """Recompute the stages of a step up to `tn`; those of a step that an event has cut short extend to its full end."""
    spec, u = kernel.spec, state(kernel.spec)
    copy(spec, u, lane.u)
    parameters = parameters_of(kernel, lane)
    t = lane.t if spec.jumps is None else lane.begin_time
    h = lane.h
    size = rounded(spec, h)
    stages = range(spec.stages + 1)
    k, y, slopes = [state(spec) for _ in stages], [state(spec) for _ in stages], [state(spec) for _ in stages]
    step = Step(t, tn, h, size, u, y[-1], k, [u, *y[1:]], parameters, slopes)
    return Recomputed(step, (rosenbrock_again if spec.tableau.implicit else explicit_again)(kernel, step))  # type: ignore[arg-type]


@inlined
def explicit_again(kernel: Kernel, step: Step) -> None:
    """Recompute the stages and their arguments."""
    spec, fused = kernel.spec, not kernel.spec.on_gpu
    for i in static(range(spec.stages + 1 if spec.inside or spec.timed else spec.stages)):
        if i:
            argument(spec, step.y[i], i, step.k, step.u, step.size, step.slopes[i] if spec.timed else None, fused)
        if i < spec.stages or (spec.inside and spec.timed):
            kernel.call("f", (step.k[i],), step.y[i], step.parameters, stage_time(spec, i, step))


@inlined
def rosenbrock_again(kernel: Kernel, step: Step) -> Matrix:
    """Recompute the stages and their arguments, and with derivatives with respect to times the new state."""
    spec, fused = kernel.spec, not kernel.spec.on_gpu
    matrix = factorized(kernel, step)
    for i in static(range(1, spec.stages)):
        if i == 1:
            copy(spec, step.y[1], step.u)
            if spec.timed:
                for c in spec.components:
                    step.slopes[1][c] = spec.real(0.0)
        else:
            argument(spec, step.y[i], i, step.k, step.u, step.size, step.slopes[i] if spec.timed else None, fused)
        kernel.call("f", (step.k[i],), step.y[i], step.parameters, stage_time(spec, i, step))
        right_hand_side(spec, matrix, step.k, i)
        solve(kernel, matrix, step.k[i])
    if spec.timed:
        last = spec.stages
        argument(spec, step.y[last], last, step.k, step.u, step.size, step.slopes[last], fused)
    return matrix


class Pull(NamedTuple):
    """The cotangents of one step."""

    total: Vector  # of the state before the step
    z: Sequence[Vector]  # of the arguments of the stages
    q: Sequence[Vector]  # of the stages, times h; for Rosenbrock methods, of their right-hand sides
    r: Sequence[Vector]  # q times the transposed mass matrix
    times: Vector  # of t and h
    # Of the parameters and the time of one stage.
    e: Vector
    te: Vector
    # Arguments of derivatives that add the cotangents of parameters to fields.
    fields: Sequence[Vector]


def pulled_stages(spec: KernelSpec) -> range:
    """Return the stages whose cotangents are propagated: k0 and the last k of Rosenbrock methods are f at the ends."""
    # The last stage affects only states inside the step.
    return range(1, spec.stages) if spec.tableau.implicit else range(spec.stages + spec.inside)


@inlined
def back(kernel: Kernel, lane: ReverseLane, i: int) -> None:
    """Propagate the cotangents through one step of trajectory i."""
    spec, last = kernel.spec, kernel.spec.stages
    recomputed = step_again(kernel, lane, lane.tn)
    step = recomputed.step
    pull = pull_of(spec, lane)
    if spec.timed:
        pull.times[0] = 0.0
        pull.times[1] = 0.0
    if spec.on_gpu and spec.events:
        pull_events(kernel, lane, i, step)
    # The last stage is f at the new state, so its contribution is added to the cotangent of that state first.
    copy(spec, pull.total, lane.cotangent)
    if last in pulled_stages(spec):
        if not spec.on_gpu or lane.has_arrivals > 0.0:  # the last stage contributes only to states inside the step
            pull_stage(kernel, lane, recomputed, pull, last)
    if spec.timed:
        for c in spec.components:
            pull.times[1] = fma(pull.total[c], step.slopes[last][c], pull.times[1])
    copy(spec, pull.z[last], pull.total)
    for n in static(reversed([n for n in pulled_stages(spec) if n < last])):
        pull_stage(kernel, lane, recomputed, pull, n)
    # A state saved inside the step is u + h Σ w k, so its cotangent is also added to that of u. The results of a lane
    # without a trajectory, which may be NaN, are set to zero.
    for c in spec.components:
        cotangent = pull.total[c] + lane.value[c] if spec.inside else pull.total[c]
        lane.cotangent[c] = where(lane.live > 0.0, cotangent, spec.real(0.0))
    if spec.timed:
        pull_times(spec, lane, step, pull)


@inlined
def pull_of(spec: KernelSpec, lane: ReverseLane) -> Pull:
    """Return the variables of cotangents."""
    total, z, times = state(spec), [state(spec) for _ in range(spec.stages + 1)], vector(2)
    q = state(spec)
    several = [state(spec) if spec.tableau.implicit else q for _ in range(spec.stages)]
    r = [state(spec) for _ in range(spec.stages)] if spec.mass else several
    e, te = vector(0 if spec.accumulates else spec.wanted_varying + spec.wanted_shared), vector(int(spec.timed))
    return Pull(total, z, several, r, times, e, te, [lane.live, lane.p_bar.start, lane.index] if spec.accumulates else [])


@inlined
def pull_stage(kernel: Kernel, lane: ReverseLane, recomputed: Recomputed, pull: Pull, i: int) -> None:
    """Propagate the cotangent of stage i to its argument, to the state before the step, and to parameters and times."""
    spec, step, e = kernel.spec, recomputed.step, pull.e
    if spec.tableau.implicit:
        pull_rosenbrock(kernel, lane, recomputed, pull, i)
    else:
        pull_explicit(kernel, lane, step, pull, i)
    if not spec.accumulates:
        for j in static(range(spec.wanted_varying)):
            lane.p_bar[j] += e[j]
        for j in static(range(spec.wanted_shared)):
            lane.s_bar[j] += where(lane.live > 0.0, e[spec.wanted_varying + j], 0.0)
    if spec.timed:
        pull.times[0] = pull.times[0] + pull.te[0]
        if spec.tableau.c[i]:
            pull.times[1] = fma(spec.tableau.c[i], pull.te[0], pull.times[1])
        # The argument of the last stage is the new state: `back` adds its contribution, when its cotangent is complete.
        if 0 < i < spec.stages:
            for c in spec.components:
                pull.times[1] = fma(pull.z[i][c], step.slopes[i][c], pull.times[1])


@inlined
def pull_explicit(kernel: Kernel, lane: ReverseLane, step: Step, pull: Pull, i: int) -> None:
    """Propagate the cotangent of stage i of a Runge-Kutta method."""
    spec, table = kernel.spec, ((), *kernel.spec.tableau.a)
    # The term that was computed last is added last, so that the other additions needn't wait for it.
    weights = [(j, spec.real(table[j][i])) for j in range(spec.stages, i, -1) if table[j][i]]
    for c in spec.components:
        pull.q[0][c] = step.size * stage_cotangent(spec, lane, pull.z, weights, i, c)
    outputs = (pull.z[i], pull.e, pull.te)
    kernel.call("g", outputs, step.y[i], step.parameters, stage_time(spec, i, step), pull.q[0], *pull.fields)
    for c in spec.components:
        pull.total[c] = pull.total[c] + pull.z[i][c]


def stage_cotangent(
    spec: KernelSpec, lane: ReverseLane, z: Sequence[Vector], weights: Sequence[tuple[int, float]], i: int, c: int
) -> float:
    """Return a component of the cotangent of stage i over h, from states inside the step and from later arguments."""
    arrival = lane.arrival[i, c] if spec.inside else spec.real(0.0)
    if spec.on_gpu and not spec.tableau.implicit:
        return total([*(w * z[j][c] for j, w in weights), *([arrival] if spec.inside or not weights else [])])
    for j, w in weights:
        arrival = fma(w, z[j][c], arrival)
    return arrival


@inlined
def pull_rosenbrock(kernel: Kernel, lane: ReverseLane, recomputed: Recomputed, pull: Pull, i: int) -> None:
    """Propagate the cotangent of stage i of a Rosenbrock method."""
    spec, table, step, q = kernel.spec, kernel.spec.rosenbrock, recomputed.step, pull.q[i]
    weights = [(j, spec.real(row[i])) for j, row in enumerate(table.a, 1) if j > i and row[i]][::-1]
    coupled = [(j, spec.real(table.coupling[j - 1][i])) for j in range(spec.stages - 1, i, -1) if table.coupling[j - 1][i]]
    for c in spec.components:
        q[c] = step.size * stage_cotangent(spec, lane, pull.z, weights, i, c)
        for j, w in static(coupled):
            q[c] = fma(w, pull.r[j][c], q[c])
    solve(kernel, recomputed.matrix, q, True)
    if spec.mass:
        # The coupling terms are multiplied by the mass matrix, so the cotangents are multiplied by its transpose.
        for c in spec.components:
            pull.r[i][c] = spec.real(0.0)
        for row, c, value in static(spec.mass or ()):
            pull.r[i][c] = fma(spec.real(value), q[row], pull.r[i][c])
    outputs = (pull.z[i], pull.e, pull.te)
    kernel.call("g", outputs, step.y[i], step.parameters, stage_time(spec, i, step), q, *pull.fields)
    # The derivatives of W and ∂f/∂t contain second derivatives of f at the state before the step.
    direction, second, slope = state(spec), state(spec), spec.real(table.slopes[i - 1])
    more, tj = vector(0 if spec.accumulates else spec.wanted_varying + spec.wanted_shared), vector(int(spec.timed))
    for c in spec.components:
        direction[c] = step.size * step.k[i][c]
    inputs = (step.u, step.parameters, stage_time(spec, 0, step), q, direction, step.size * slope, *pull.fields)
    kernel.call("curvature", (second, more, tj), *inputs)
    if not spec.accumulates:
        for j in static(range(spec.wanted_varying + spec.wanted_shared)):
            pull.e[j] = pull.e[j] + more[j]
    for c in spec.components:
        pull.total[c] = pull.total[c] + (pull.z[i][c] + second[c])
    if spec.timed:
        pull.times[0] = pull.times[0] + tj[0]
        pull_matrix(spec, recomputed, pull, i, slope)


@inlined
def pull_matrix(spec: KernelSpec, recomputed: Recomputed, pull: Pull, i: int, slope: float) -> None:
    """Add the contributions of W and h ∂f/∂t to the cotangent of h."""
    q, k, jacobian, count = pull.q[i], recomputed.step.k[i], recomputed.matrix.jacobian, len(spec.jacobian)
    rows, columns = places_of(spec)
    for n in range(count) if spec.rolled and count else static(range(count)):
        pull.times[1] = fma(q[rows[n]] * jacobian[n], k[columns[n]], pull.times[1])
    for n, c in static(enumerate(spec.slopes, count)):
        pull.times[1] = fma(q[c] * jacobian[n], slope, pull.times[1])


@inlined
def pull_times(spec: KernelSpec, lane: ReverseLane, step: Step, pull: Pull) -> None:
    """Add the cotangents of the time and the size of the step."""
    if spec.inside:
        # At a fixed time, x = (time - t) / h depends on t and h.
        for n in static(range(1, spec.stages) if spec.tableau.implicit else range(spec.stages + 1)):
            for c in spec.components:
                pull.times[0] = pull.times[0] - lane.rate[n, c] * step.k[n][c]
                pull.times[1] = pull.times[1] + (lane.arrival[n, c] - lane.rate_x[n, c]) * step.k[n][c]
    lane.t_bar += pull.times[0]
    lane.h_bar = where(lane.size_moves > 0.0, pull.times[1], lane.h_bar)
    lane.size_moves = 0.0


# ---- events


@inlined
def pull_events(kernel: Kernel, lane: ReverseLane, i: int, step: Step | None = None) -> None:
    """Process the events of a step, with its stages, which on CPUs are computed again for each event.

    By the implicit function theorem, the cotangent of an event's time gives cotangents of the state at the event, which is
    treated like a saved state, of the parameters and of time. The fraction of the step and the derivatives of a root are
    double, also if states are float32.
    """
    spec, arrays = kernel.spec, kernel.arrays
    first = 0 if spec.on_gpu else arrays.event_first[i]
    while lane.event >= first and np.int64(arrays.crossings[lane.event, 2]) == lane.step:
        lane.has_arrivals = 1.0
        if spec.on_gpu:
            pull_event(kernel, lane, i, step, 0.0)  # type: ignore[arg-type]
            lane.event = np.int64(arrays.crossings[lane.event, 5])  # type: ignore[assignment]
        else:
            bound = lane.t + lane.h
            # A root of a condition of p and t lies at the end of a step: see `jumps.beside`.
            if arrays.crossings[lane.event, 3] == 1.0:
                bound = beside(spec, arrays.crossings[lane.event, 4], where(lane.h > 0.0, -1.0, 1.0))
            pull_event(kernel, lane, i, step_again(kernel, lane, bound).step, bound)
            lane.event -= 1


@inlined
def pull_event(kernel: Kernel, lane: ReverseLane, i: int, step: Step, bound: float) -> None:
    """Process one event; `bound`: the end of the step on CPUs."""
    spec, arrays, last = kernel.spec, kernel.arrays, kernel.spec.stages
    x = arrays.crossings[lane.event, 3]
    if last in spec.interpolating:
        kernel.call("f", (step.k[last],), step.y[last], step.parameters, stage_time(spec, last, step))
    w, r = dense_weights(spec, x), dense_rates(spec, x)
    at, rate = state(spec), vector(spec.d, spec.rolled)
    for c in spec.components:
        at[c] = inside(spec, w, [step.k[n][c] for n in spec.interpolating], step.u[c], step.size)
    for c in spec.components:
        rate[c] = total(r[n] * doubled(spec, step.k[n][c]) for n in spec.interpolating) * step.h
    for e, (stops, _) in static(enumerate(spec.events)):
        # If two terminal events coincide, only the last has ended the trajectory; and if the time of a nonterminal event
        # isn't differentiated, its condition may have slope zero. On CPUs the table has no such events.
        if arrays.crossings[lane.event, 1] == e and is_differentiated(kernel, lane, stops):
            pull_root(kernel, lane, i, step, e, at, rate, bound)


def is_differentiated(kernel: Kernel, lane: ReverseLane, stops: bool) -> bool:
    """Return whether an event has cotangents."""
    if not kernel.spec.on_gpu:
        return True
    return lane.ends if stops else kernel.arrays.times_bar[lane.event] != 0.0


def time_cotangent(kernel: Kernel, lane: ReverseLane, i: int, stops: bool) -> float:
    """Return the cotangent of the time of an event."""
    arrays = kernel.arrays
    if kernel.spec.on_gpu:
        return arrays.reached_bar[i] if stops else arrays.times_bar[lane.event]
    # The step that ends at an event also ends there for `t_bar`, the cotangent of the time after the step.
    bar = arrays.crossings[lane.event, 5]
    return lane.t_bar + bar if stops and kernel.spec.timed else bar


@inlined
def pull_root(
    kernel: Kernel, lane: ReverseLane, i: int, step: Step, e: int, at: Vector, rate: Vector, bound: float
) -> None:
    """Propagate the cotangent of the time of event e to the state `at` the event, whose derivative is `rate`.

    A step that an event has cut short is differentiated as a full step, in which the fraction of the event moves.
    """
    spec, arrays, stops = kernel.spec, kernel.arrays, kernel.spec.events[e][0]
    g, bars, time = state(spec), state(spec), rounded(spec, arrays.crossings[lane.event, 4])
    by, by_time = vector(spec.wanted_varying + spec.wanted_shared), vector(1)
    kernel.call(f"slopes{e}", (g, by, by_time), at, step.parameters, time, spec.real(1.0))
    slope = summed(spec, lambda c: doubled(spec, g[c]) * rate[c]) + doubled(spec, by_time[0]) * step.h
    time_bar = time_cotangent(kernel, lane, i, stops)
    fraction_bar = time_bar * step.h
    if stops:
        fraction_bar = summed(spec, lambda c: doubled(spec, lane.cotangent[c]) * rate[c]) + fraction_bar
    factor = -fraction_bar / slope
    if stops:
        if spec.on_gpu:
            lane.ends = False
        else:
            lane.tn = bound
        if spec.timed:
            lane.t_bar = time_bar + doubled(spec, by_time[0]) * factor
            lane.size_moves = 0.0
        for c in spec.components:
            bars[c] = rounded(spec, doubled(spec, lane.cotangent[c]) + factor * doubled(spec, g[c]))
            lane.cotangent[c] = spec.real(0.0)
    else:
        for c in spec.components:
            bars[c] = rounded(spec, factor * doubled(spec, g[c]))
    for j in static(range(spec.wanted_varying)):
        lane.p_bar[j] += factor * doubled(spec, by[j])
    for j in static(range(spec.wanted_shared)):
        lane.s_bar[j] += factor * doubled(spec, by[spec.wanted_varying + j])
    add_arrivals(spec, lane, arrays.crossings[lane.event, 3], lambda c: bars[c], spec.timed and not stops)


# ---- events that acted (jumps)


@inlined
def find_next_jump(kernel: Kernel, lane: ReverseLane, i: int) -> None:
    """Set the number of steps before the next jump."""
    arrays = kernel.arrays
    lane.jump_step = arrays.jump_number[lane.jump] if lane.jump >= arrays.jump_first[i] else -1


@inlined
def pull_jumps(kernel: Kernel, lane: ReverseLane, i: int) -> None:
    """Propagate cotangents through the jumps after the step that comes next in the backward sweep."""
    spec, arrays = kernel.spec, kernel.arrays
    if lane.jump_step == lane.step + 1:
        while lane.jump >= arrays.jump_first[i] and arrays.jump_number[lane.jump] == lane.step + 1:
            pull_jump(kernel, lane, i, lane.jump)
            lane.jump -= 1
            # Prefetch the state before the previous jump.
            fetched(arrays.jump_state, lane.jump)
        find_next_jump(kernel, lane, i)
    lane.begin_time = lane.t
    if lane.step > 0 and lane.jump_step == lane.step:
        lane.begin_time = beside(spec, arrays.jump_time[lane.jump], where(lane.h > 0.0, 1.0, -1.0))


@inlined
def pull_jump(kernel: Kernel, lane: ReverseLane, i: int, j: int) -> None:
    """Propagate cotangents through jump j."""
    spec, arrays, parameters = kernel.spec, kernel.arrays, parameters_of(kernel, lane)
    u, z, bars = state(spec), state(spec), state(spec)
    e, te = vector(spec.wanted_varying + spec.wanted_shared), vector(int(spec.timed))
    copy(spec, z, lane.cotangent)
    copy(spec, u, Row(arrays.jump_state, j))
    time = rounded(spec, arrays.jump_time[j])
    at_given_time = 1.0 if arrays.jump_slot[j] >= 0 else 0.0
    for event in static(spec.jumps or ()):
        if arrays.jump_kind[j] == event:
            kernel.call(f"back{event}", (bars, e, te), u, parameters, time, z)
    copy(spec, lane.cotangent, bars)
    for n in static(range(spec.wanted_varying)):
        lane.p_bar[n] += e[n]
    for n in static(range(spec.wanted_shared)):
        lane.s_bar[n] += e[spec.wanted_varying + n]
    if spec.timed:
        pull_jump_time(kernel, lane, i, j, u, parameters, te[0], at_given_time)
    # The time of f at the end of the step: see `jumps.beside`.
    if at_given_time > 0.0:
        lane.tn = beside(spec, arrays.jump_time[j], where(lane.h > 0.0, -1.0, 1.0))


@inlined
def pull_jump_time(
    kernel: Kernel,
    lane: ReverseLane,
    i: int,
    j: int,
    u: Vector,
    parameters: Sequence[float],
    te: float,
    at_given_time: float,
) -> None:
    """Propagate the cotangents of times through jump j; `te`: the cotangent of the time of its affect."""
    spec, arrays, k0 = kernel.spec, kernel.arrays, state(kernel.spec)
    time_bar = lane.t_bar - lane.h_bar + te
    drift = 0.0
    # If no step lies between the previous jump and this one, a shift of this jump's time moves the state along f.
    if at_given_time > 0.0 and j > arrays.jump_first[i] and arrays.jump_number[j - 1] == arrays.jump_number[j]:
        kernel.call("f", (k0,), u, parameters, rounded(spec, arrays.jump_time[j]))
        drift = summed(spec, lambda c: k0[c] * lane.cotangent[c])
    add_size_cotangent(kernel, lane, i)
    # The size of a step that ended at a root has no cotangent.
    arrays.jump_time_bar[j] += at_given_time * (time_bar + drift)
    lane.t_bar = -drift if at_given_time > 0.0 else time_bar
    lane.h_bar = 0.0
    lane.size_moves = at_given_time
    lane.last_jump = j


@inlined
def add_size_cotangent(kernel: Kernel, lane: ReverseLane, i: int) -> None:
    """Add the cotangent of the size of a step, which is a cotangent of the time at which the step ends."""
    # `h_bar` belongs to the step that ends at the jump `last_jump`, or, if that is -1, at the end of tspan.
    if lane.last_jump < 0:
        kernel.arrays.stop_bar[i] += lane.h_bar
    else:
        kernel.arrays.jump_time_bar[lane.last_jump] += lane.h_bar
