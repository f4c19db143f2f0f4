"""One step of a method in kernels for CPUs and GPUs: stages, error, step sizes, and states inside the step.

The functions of this file and of the other files named `*_kernel` are compiled: `mpiad.compiling.folding` evaluates the
parts that depend on the spec only, and unrolls loops over components, stages and events. They also run as plain Python,
with NumPy arrays as buffers; tests compare the results. A `Vector` of components is a set of variables, or an array on
the stack if the spec is `rolled`. Times and sizes are double; `size` is the signed step size in the precision of states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.folding import inlined, static
from mpiad.compiling.kernel_language import attribute, double, fma, single, total, vector, where
from mpiad.ensemble.compiled.kernel_fields import ForwardLane, ReverseLane, TangentLane
from mpiad.ensemble.compiled.kernel_spec import KernelSpec
from mpiad.ensemble.controller import LEAST_ERROR

# Components of a state, or other numbers with an index.
Vector: TypeAlias = Array


class Kernel(NamedTuple):
    """What all functions of one kernel refer to."""

    spec: KernelSpec
    # ``call(name, outputs, *inputs)`` calls f or another function of the problem, which writes to the outputs.
    call: Callable[..., None]
    arrays: Array  # the arguments of the kernel
    power: Array = None  # ``power(spec, x, exponent)`` for step sizes
    lu: tuple[Array, int] = (None, 0)  # for looped factorizations: their array, and the place in it
    shared: Sequence[Array] = ()  # the shared parameters that are passed to f as numbers
    # Whether all trajectories have the same tspan, and the same initial state; whether each has its own saved times; and
    # whether all have the same given times of events.
    one_span: Array = False
    one_start: Array = False
    by_row: Array = False
    one_column: Array = False
    n_saved: Array = 0
    rtol: Array = 0.0
    atol: Vector = ()
    # In kernels that visit recorded steps: ``lane_of(l)`` returns lane l, ``along_of(l, j)`` its tangents in direction j.
    lane_of: Array = None
    along_of: Array = None


class Step(NamedTuple):
    """The quantities of one step."""

    t: float
    tn: float
    h: float
    size: float  # h in the precision of states
    u: Vector  # the state before the step
    new: Vector  # the state after the step
    k: Sequence[Vector]  # the stages; the last one is the first stage of the next step
    y: Sequence[Vector]  # their arguments
    parameters: Sequence[float]
    slopes: Sequence[Vector] = ()  # for derivatives with respect to h: the sums of the arguments, dy/dh
    jacobian: Vector = ()  # of f at the state before the step, for Rosenbrock methods


# ---- numbers


def rounded(spec: KernelSpec, x: float) -> float:
    """Return a double in the precision of states."""
    return single(x) if spec.single else x


def doubled(spec: KernelSpec, x: float) -> float:
    """Return a number in double precision."""
    return double(x) if spec.single else x


def state(spec: KernelSpec) -> Vector:
    """Return the variables of a state."""
    return vector(spec.d, spec.rolled, spec.dtype.name)


@inlined
def set_attributes(spec: KernelSpec, is_wide: bool) -> None:
    """Set the attributes of a kernel of steps; `is_wide`: whether it profits from the widest vectors."""
    attribute("aligned_stack")
    if is_wide:
        attribute("wide_vectors")
    if spec.has_long_loops:
        attribute("rolled_loops")


@inlined
def summed(spec: KernelSpec, term: Callable[[int], float]) -> float:
    """Return the sum of the terms of all components."""
    if not spec.rolled:
        return total(term(c) for c in static(range(spec.d)))
    sum_of_terms = term(0)
    for c in range(1, spec.d):
        sum_of_terms = sum_of_terms + term(c)
    return sum_of_terms


def weighted(spec: KernelSpec, weights: Sequence[float], k: Sequence[Vector], c: int, fused: bool = False) -> float:
    """Return the weighted sum of component c of the stages."""
    (weight, first), *others = ((spec.real(w), k[j][c]) for j, w in enumerate(weights) if w)
    value = weight * first
    for weight, stage in others:
        value = fma(weight, stage, value) if fused else value + weight * stage
    return value


def moved(sum_of_stages: float, size: float, u: float, fused: bool) -> float:
    """Return u + h Σ w k."""
    return fma(sum_of_stages, size, u) if fused else sum_of_stages * size + u


def stage_time(spec: KernelSpec, i: int, step: Step) -> float:
    """Return the time of stage i."""
    c = spec.tableau.c[i]
    return rounded(spec, step.t if c == 0 else step.tn if c == 1 else c * step.h + step.t)


@inlined
def parameters_of(kernel: Kernel, lane: ForwardLane | ReverseLane | TangentLane) -> Sequence[float]:
    """Return the arguments of f for parameters; entries of tables are read from arrays, at the lane's column."""
    spec = kernel.spec
    p = vector(spec.varying, spec.varying_array, spec.dtype.name)
    for j in spec.varying_indices:
        p[j] = lane.p[j]
    varying = [p] if spec.varying_array else [p[j] for j in spec.varying_indices]
    if spec.tables:
        return [*varying, *kernel.shared, kernel.arrays.p, kernel.arrays.s, *lane.column]
    return [*varying, *kernel.shared, *([kernel.arrays.s] if spec.shares_array else [])]


@inlined
def copy(spec: KernelSpec, target: Vector, source: Vector) -> None:
    """Copy the components of a state."""
    for c in spec.components:
        target[c] = source[c]


# ---- stages


@inlined
def argument(
    spec: KernelSpec,
    out: Vector,
    i: int,
    k: Sequence[Vector],
    u: Vector,
    size: float,
    slope: Vector = None,
    fused: bool = False,
) -> None:
    """Compute the argument of stage i, u + h Σ a_ij k_j, and also the sum if `slope` is given."""
    for c in spec.components:
        if slope is None:
            out[c] = moved(weighted(spec, spec.tableau.a[i - 1], k, c, fused), size, u[c], fused)
        else:
            slope[c] = weighted(spec, spec.tableau.a[i - 1], k, c, fused)
            out[c] = moved(slope[c], size, u[c], fused)


def argument_vectors(spec: KernelSpec, u: Vector, new: Vector) -> list[Vector]:
    """Return the arguments of the stages; without tangents, later arguments overwrite earlier ones."""
    y = state(spec)
    vectors = [u, *(state(spec) if spec.directions and i > 1 else y for i in range(1, spec.stages)), new]
    if spec.tableau.implicit and spec.rosenbrock.ends_at_new_state:
        vectors[-2] = new  # the argument of the last stage
    return vectors


@inlined
def explicit_stages(kernel: Kernel, step: Step) -> None:
    """Compute all stages but the first, and the new state."""
    spec = kernel.spec
    for i in static(range(1, spec.stages + 1)):
        argument(spec, step.y[i], i, step.k, step.u, step.size)
        kernel.call("f", (step.k[i],), step.y[i], step.parameters, stage_time(spec, i, step))


class Seeds(NamedTuple):
    """The tangents of parameters, of the time before a step and of its size, in one direction."""

    parameters: Sequence[Vector] = ()
    dt: float | None = None  # None, as `dh`, if times are constant
    dh: float | None = None
    index: Sequence[int] = ()  # if the tangents of parameters are an array: the place of the first one

    def at(self, spec: KernelSpec, i: int) -> list[Array]:
        """Return the tangents that the derivative of f takes after that of the state, for stage i."""
        if self.dt is None:
            return [*self.parameters]
        return self.at_time(fma(spec.real(spec.tableau.c[i]), self.dh, self.dt))  # type: ignore[arg-type]

    def at_time(self, dt: float) -> list[Array]:
        """Return the tangents that derivatives take after that of the state, for the tangent of a time."""
        return [*self.parameters, dt]


@inlined
def tangents(
    kernel: Kernel, step: Step, name: str, du: Vector, dnew: Vector, dk: Sequence[Vector], first: int, last: int,
    seeds: Seeds = Seeds(),  # noqa: B008 a constant
) -> None:  # fmt: skip
    """Compute the tangents `dk` of stages `first` to `last` in one direction, and that of the new state.

    `name`: the derivative of f, which takes the tangent of its argument and the `seeds`.
    """
    spec, w = kernel.spec, state(kernel.spec)
    for i in static(range(first, spec.stages + 1)):
        along = static(du if i == 0 else dnew if i == spec.stages else w)
        if i:
            tangent_argument(spec, along, i, dk, du, step, seeds)
        if i <= last:
            inputs = (step.y[i], step.parameters, stage_time(spec, i, step), along, *seeds.at(spec, i), *seeds.index)
            kernel.call(name, (dk[i],), *inputs)


@inlined
def tangent_argument(
    spec: KernelSpec, out: Vector, i: int, dk: Sequence[Vector], du: Vector, step: Step, seeds: Seeds
) -> None:
    """Compute the tangent of the argument of stage i."""
    argument(spec, out, i, dk, du, step.size, None, not spec.on_gpu)
    if seeds.dh is not None:
        for c in spec.components:
            out[c] = fma(seeds.dh, step.slopes[i][c], out[c])


# ---- errors and step sizes


def tolerance(kernel: Kernel, x: float, c: int) -> float:
    """Return the tolerance of an entry of a state, given its modulus x and its first component."""
    spec, n = kernel.spec, c // 2 if kernel.spec.in_pairs else c
    relative = kernel.atol[n + len(spec.entries)] if spec.relative else kernel.rtol
    return relative * x + kernel.atol[n if spec.tolerances else 0]


@inlined
def squared_error(kernel: Kernel, step: Step) -> float:
    """Return the mean square of error over tolerance; for fixed steps 0, NaN if the new state isn't finite."""
    spec, u, new = kernel.spec, step.u, step.new
    if not spec.adaptive:
        # x - x is zero if x is finite, otherwise NaN.
        return doubled(spec, summed(spec, lambda c: new[c] - new[c]))
    error = state(spec)
    for first in spec.entries:
        permitted = tolerance(kernel, larger_modulus(spec, u, new, spec.parts(first)), first)
        for c in static(spec.parts(first)):
            error[c] = ratio(spec, weighted(spec, spec.error, step.k, c) * step.size, permitted)
    square = doubled(spec, summed(spec, lambda c: error[c] * error[c]))
    return square * (1 / len(spec.entries)) if spec.on_gpu else square / float(len(spec.entries))


def ratio(spec: KernelSpec, x: float, y: float) -> float:
    """Return x / y; for GPUs the product with the reciprocal, which takes fewer instructions and registers."""
    return x * (spec.real(1.0) / y) if spec.on_gpu else x / y


@inlined
def larger_modulus(spec: KernelSpec, u: Vector, new: Vector, parts: Sequence[int]) -> float:
    """Return the larger of the moduli of a number before and after the step; `parts`: its components."""
    if len(parts) == 1:
        before, after = abs(u[parts[0]]), abs(new[parts[0]])
        return where(after > before, after, before)
    # Division by the largest part prevents overflow of squares. A call of hypot would prevent vectorization.
    largest = spec.real(float(np.finfo(spec.dtype).tiny))
    for x in static([*(u[c] for c in parts), *(new[c] for c in parts)]):
        largest = where(abs(x) > largest, abs(x), largest)
    scale, before, after = spec.real(1.0) / largest, vector(spec.d), vector(spec.d)
    for c in static(parts):
        before[c] = u[c] * scale
        after[c] = new[c] * scale
    low = total(before[c] * before[c] for c in parts)
    high = total(after[c] * after[c] for c in parts)
    return math.sqrt(where(high > low, high, low)) * largest


@inlined
def step_factor(kernel: Kernel, lane: ForwardLane, q2: float, accepted: float) -> float:
    """Return the ratio of the next step size to this one, as `PIController.factor`."""
    spec, controller, order = kernel.spec, kernel.spec.controller, kernel.spec.tableau.error_order
    plain = -0.5 / order
    if controller.remembers:
        exponent = where(q2 < 1.0, -0.5 * (1 - 0.75 * controller.beta) / order, plain)
        factor = controller.safety * kernel.power(spec, q2, exponent)
        factor = where(q2 < 1.0, factor * kernel.power(spec, lane.q2_before, 0.5 * controller.beta / order), factor)
        bounded = where(q2 > LEAST_ERROR, q2, LEAST_ERROR)
        lane.q2_before = where(accepted > 0.0, bounded, lane.q2_before)
    else:
        factor = controller.safety * kernel.power(spec, q2, plain)
    factor = where(factor > controller.least, factor, controller.least)
    most = where(lane.rejected > 0.0, 1.0, controller.most)
    return where(factor < most, factor, most)


@inlined
def first_size(
    kernel: Kernel, u: Vector, k0: Vector, parameters: Sequence[float], t: float, span: float, sign: float
) -> float:
    """Return the size of the first step in a tspan of length `span`, as `initialization.started`."""
    spec, h = kernel.spec, kernel.arrays.dt
    if not h > 0.0:
        scale, y, k1 = state(spec), state(spec), state(spec)
        for first in spec.entries:
            permitted = tolerance(kernel, math.hypot(u[first], u[first + 1]) if spec.in_pairs else abs(u[first]), first)
            for c in static(spec.parts(first)):
                scale[c] = permitted
        d0 = norm(spec, scale, lambda c: u[c])
        d1 = norm(spec, scale, lambda c: k0[c])
        # An Euler step of this size changes u by about one percent.
        h0 = 1e-6 if d0 < 1e-5 or d1 < 1e-5 else 0.01 * d0 / d1
        h0 = span if h0 > span else h0
        h = sign * h0
        size = rounded(spec, h)
        for c in spec.components:
            y[c] = size * k0[c] + u[c]
        kernel.call("f", (k1,), y, parameters, rounded(spec, t + h))
        d2 = norm(spec, scale, lambda c: k1[c] - k0[c]) / h0
        steepest = d1 if d1 > d2 else d2
        # The formula after `else` divides by `steepest`.
        if d1 <= 1e-15 and d2 <= 1e-15:
            h = max(1e-6, h0 * 1e-3)
        else:
            h = (0.01 / steepest) ** (1 / spec.tableau.error_order)
        h = min(min(100.0 * h0, h), span)
        if not np.isfinite(h):
            h = span
    return h


@inlined
def norm(spec: KernelSpec, scale: Vector, numerator: Callable[[int], float]) -> float:
    """Return the root mean square of a state over its scale."""
    error = state(spec)
    for c in spec.components:
        error[c] = numerator(c) / scale[c]
    if spec.in_pairs:  # the squares of both parts are added first
        square = total(total(error[c] * error[c] for c in spec.parts(first)) for first in spec.entries)
    else:
        square = summed(spec, lambda c: error[c] * error[c])
    return np.sqrt(doubled(spec, square) / float(len(spec.entries)))


# Powers by series, since a call in the loop over lanes would prevent its vectorization. For x = m 2^n with m near 1,
# log2 m = r q(r²) with r = (m - 1) / (m + 1) and the power series q, LOG2. EXP2 is the series of 2^f for |f| <= 1/2.
LOG2 = [2 / math.log(2) / (2 * k + 1) for k in range(11)]
EXP2 = [math.log(2) ** k / math.factorial(k) for k in range(14)]
ROOT_HALF = 0x3FE6A09E667F3BCD  # the bits of √½: m lies between it and √2


def series(x: float, terms: Sequence[float]) -> float:
    """Return the polynomial in x with these coefficients."""
    value = terms[-1]
    for term in terms[-2::-1]:
        value = fma(value, x, term)
    return value


# ---- states inside steps


def polynomial(x: float, weights: Sequence[float]) -> float:
    """Return the polynomial in x with these coefficients."""
    value = float(weights[-1])
    for weight in list(weights)[-2::-1]:
        value = value * x + float(weight)
    return value


@inlined
def dense_weights(spec: KernelSpec, x: float) -> Vector:
    """Return the weights of stages in the interpolant at the fraction x of a step."""
    w = vector(spec.stages + 1)
    for i in static(spec.interpolating):
        w[i] = rounded(spec, polynomial(x, spec.tableau.dense[i]) * x)
    return w


@inlined
def dense_rates(spec: KernelSpec, x: float) -> Vector:
    """Return the derivatives of the weights with respect to x."""
    r = vector(spec.stages + 1)
    for i in static(spec.interpolating):
        r[i] = polynomial(x, [(j + 1) * w for j, w in enumerate(spec.tableau.dense[i])])
    return r


def inside(spec: KernelSpec, w: Vector, k: Sequence[float], u: float, size: float, fused: bool = False) -> float:
    """Return a component of the state at the fraction of the step with the weights w; `k`: of the interpolating stages."""
    return moved(total(w[i] * stage for i, stage in zip(spec.interpolating, k)), size, u, fused)


# ---- events


@inlined
def condition(kernel: Kernel, e: int, u: Vector, parameters: Sequence[float], t: float) -> float:
    """Return the condition of event e; t is a double."""
    value = vector(1)
    kernel.call(f"condition{e}", (value,), u, parameters, rounded(kernel.spec, t))
    return value[0]
