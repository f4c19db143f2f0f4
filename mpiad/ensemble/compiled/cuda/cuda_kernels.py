"""The forward and the reverse kernel in CUDA C: each thread processes one trajectory, with state in registers.

A thread performs the steps of CPU kernels, which `forward_kernel` and `reverse_kernel` contain, one after the other for one
trajectory; the fields of a lane are its variables. The statements are translated to C++ (see
`mpiad.compiling.c_translation`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.c_translation import PRELUDE, c_statements
from mpiad.compiling.folding import (
    Expression,
    Variables,
    assign,
    expression,
    folded,
    inlined,
    static,
    variable,
    variable_named,
)
from mpiad.compiling.kernel_language import Row, Vector, call_function
from mpiad.ensemble.compiled.event_kernel import gap, retake, rounded_time
from mpiad.ensemble.compiled.forward_kernel import (
    advance,
    begin_step,
    compute_stages,
    decide,
    enter,
    write_output,
    write_results,
)
from mpiad.ensemble.compiled.kernel_fields import FieldKind, ForwardLane, Lane, ReverseLane, sizes_of
from mpiad.ensemble.compiled.kernel_spec import KernelSpec
from mpiad.ensemble.compiled.reverse_kernel import add_initial_states, back, clear_arrivals, pull_saved, start
from mpiad.ensemble.compiled.rosenbrock_kernel import is_looped, reserved_of
from mpiad.ensemble.compiled.step_kernel import (
    Kernel,
    argument_vectors,
    copy,
    parameters_of,
    rounded,
    squared_error,
    state,
    tangents,
)
from mpiad.ensemble.outcome import ReturnCode

# Definitions for both kernels, after those for all kernels.
_DEFINITIONS = """
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define NEXT(count) ((long long)atomicAdd((unsigned long long*)(count), 1ULL))
// Without the comparison, the atomic operations of all threads on one address would take as long as the solve.
#define LARGEST(most, value) \\
    (value > *(volatile long long*)(most) ? atomicMax((unsigned long long*)(most), (unsigned long long)value) : 0)
#else
#define NEXT(count) ((*(count))++)
#define LARGEST(most, value) (value > *(most) ? (*(most) = value) : 0)
#endif

// NaN if either argument is NaN.
INLINE double larger(double a, double b) { return a > b || a != a ? a : b; }
INLINE double smaller(double a, double b) { return a < b || a != a ? a : b; }
INLINE bool finite_number(double a) { return a - a == 0; }
INLINE long long bits_of(double x) { union { double x; long long bits; } both = { x }; return both.bits; }
INLINE double number_of(long long bits) { union { long long bits; double x; } both = { bits }; return both.x; }
// x^(-1/2n): an approximation in single precision, then two steps of Newton's method for y^-2n = x. `pow` in double
// precision would take a third of a step's time. Beyond 1e-36 and 1e36 the step size is limited anyway.
INLINE double inverse_root(double x, const int n) {
    x = x < 1e-36 ? 1e-36 : x > 1e36 ? 1e36 : x;
    double y = exp2f(log2f((float)x) * (-0.5f / n));
    for (int k = 0; k < 2; ++k) {
        double power = y * y;
        for (int j = 1; j < n; ++j) power *= y * y;
        y += y * (1 - x * power) * (0.5 / n);
    }
    return y;
}
"""
# Elements of arrays with several axes.
_ELEMENTS = """
#define p(j, i) p[(j) * n + (i)]
#define times(i, k) times[(i) * n_saved + (k)]
"""


def prelude(spec: KernelSpec) -> str:
    """Return the definitions before the functions of the problem and the kernel."""
    return f"{PRELUDE}{_DEFINITIONS}typedef {'float' if spec.single else 'double'} real;\n{_ELEMENTS}"


# The arguments of both kernels, up to those of the forward kernel for the start.
_INPUTS = """
    const long long n, const long long first, const long long count, const real* p, const real* s, const double* start,
    const double* end, const long long by_span, const double* times, const long long n_saved, const long long by_row,"""

# Solves the trajectories first, ..., first + count - 1 of n. saved: shape (n_saved, d, n); steps_u, steps_t: (capacity, d,
# count), (capacity, 2, count); rows, the table of events: (6, event_capacity); dsaved: (tangents, n_saved, d, n). For p to
# u0 and atol see `Inputs`; other arrays: (..., n). summary: the number of failed trajectories, and the largest number of
# steps. If u_end is null, only the steps are written. Events beyond the capacity are only counted: the solve is repeated.
_FORWARD = """
    const real* u0, const long long u0_row, const long long u0_column, const real* atol, const real rtol, const double dt,
    const double dtmax, const long long max_steps, real* u_end, real* saved, double* t_reached, int* codes, int* naccept,
    int* nreject, real* du_end, real* dsaved, long long* summary, real* steps_u, double* steps_t,
    const long long capacity"""
_FORWARD_EVENTS = ", double* rows, const long long event_capacity, long long* event_count, long long* heads"
_FORWARD_ELEMENTS = """
    #define u0(c, i) u0[(c) * u0_row + (i)]
    #define u_end(i, c) u_end[(c) * n + (i)]
    #define saved(i, k, c) saved[((k) * components + (c)) * n + (i)]
    #define du_end(j, c, i) du_end[((j) * components + (c)) * n + (i)]
    #define dsaved(j, i, k, c) dsaved[(((j) * n_saved + (k)) * components + (c)) * n + (i)]
    #define crossings(row, k) rows[(k) * event_capacity + (row < event_capacity ? row : event_capacity - 1)]"""

# The reverse kernel: each thread computes the adjoint of one trajectory's accepted steps, as in `reverse_kernel`. Each
# trajectory writes its cotangents of shared parameters to a separate column, so the order of the sum is fixed.
# Trajectories and steps as in forward. saved_bar: (n_saved, d, n); s_bar: (rows, count); other cotangents: (rows, n).
_REVERSE = """
    const real* steps_u, const double* steps_t, const int* naccept, const double* t_reached, const int* codes,
    const real* end_bar, const real* saved_bar, real* u0_bar, real* p_bar, real* s_bar"""
_REVERSE_EVENTS = """,
    const double* rows, const long long event_capacity, const long long* heads, const double* reached_bar,
    const double* times_bar"""
_REVERSE_ELEMENTS = """
    #define end_bar(c, i) end_bar[(c) * n + (i)]
    #define saved_bar(i, k, c) saved_bar[((k) * components + (c)) * n + (i)]
    #define crossings(row, k) rows[(k) * event_capacity + (row)]"""

# The rows of the table of events: the trajectory, the event, the step (from 0), the fraction of the step at which the event
# lies, its time, and the column of the trajectory's previous event. All threads write events to one table, in arbitrary
# order. The events of a trajectory form a linked list: each refers to the previous event, and `heads` to the last. In the
# reverse sweep a thread follows the list of its trajectory.
ROWS = 6


class Arguments:
    """The arguments of a kernel, by name."""

    def __getattr__(self, name: str) -> Expression:
        return variable_named(name)


class _Number:
    """A variable that is a field without axes."""

    def __init__(self, name: str):
        self._variable = variable_named(name)

    def __getitem__(self, _: tuple[()]) -> Expression:
        return self._variable

    def __setitem__(self, _: tuple[()], value: float) -> None:
        assign(self._variable, value)


def registers(spec: KernelSpec, lane: type[Lane], further: Sequence[str]) -> Array:
    """Return a lane whose fields are variables, which are declared; the `further` ones are declared by an assignment."""
    fields, numbers, sizes = dict[str, Variables](), {name: _Number(name) for name in further}, sizes_of(spec)
    for name, kind in vars(lane).items():
        if isinstance(kind, FieldKind):
            shape = tuple(sizes[axis] for axis in kind.axes)
            of_kind = "int" if kind.integer else "double" if kind.exact and not kind.is_sum else "real"
            for index in np.ndindex(*shape):
                assign(variable_named("_".join([name, *map(str, index)])), expression(of_kind, 0))
            if not shape:
                numbers[name] = _Number(name)
            else:
                fields[name] = Vector(name, shape[0]) if len(shape) == 1 else Variables(name)
    return lane(fields, numbers, [variable_named("i"), variable_named("n")])


def _kernel_text(
    name: str, kernel: Kernel, arguments: str, elements: str, thread: Callable[..., None], lines: Sequence[str]
) -> str:
    """Return the text of a kernel, given the function of a thread; `lines`: declarations at its beginning."""
    spec, scalars = kernel.spec, [f"s{j}" for j in kernel.spec.loaded("s")]
    lines = [*lines, *(f"const real {scalar} = s[{scalar[1:]}];" for scalar in scalars)]
    if is_looped(spec):
        lines.append(f"real lu[{reserved_of(spec)}];")
    head = "\n".join([_INPUTS, arguments, elements, *lines])
    for sign in "(),*;=[]{}":
        head = head.replace(sign, " ")
    reserved = {*head.split(), *vars(ForwardLane), *vars(ReverseLane), *"column i one_span real f g jacobian".split()}
    body = c_statements(folded(thread, kernel, variable_named("i"), reserved=reserved).statements)
    lines = ["const long long i = first + column;", "const bool one_span = !by_span;", *lines, *body]
    opening = f"KERNEL {name}({_INPUTS}{arguments}\n) {{\n    const int components = {spec.d};{elements}"
    return "\n".join([opening, "    EACH(column, count) {", *(f"        {line}" for line in lines), "    }", "}"])


def _kernel(spec: KernelSpec, atol: Sequence[Expression] = (), **flags: Expression) -> Kernel:
    name, shared = variable_named, [variable_named(f"s{j}") for j in spec.loaded("s")]
    return Kernel(
        spec, call_function, Arguments(), power, (name("lu"), 0), shared, one_span=name("one_span"), by_row=name("by_row"),
        n_saved=name("n_saved"), rtol=name("rtol"), atol=atol, **flags,
    )  # fmt: skip


def power(spec: KernelSpec, x: Expression, exponent: float) -> Expression:
    """Return x ** exponent for step sizes."""
    if not spec.remembers:
        return expression("inverse_root", x, spec.tableau.error_order)
    # These two calls take half as many instructions as `pow`, with an error of a few ulp.
    return expression("np.exp2", exponent * expression("np.log2", x))


def cuda_forward_text(spec: KernelSpec) -> str:
    """Return the source of `forward`, which calls `f` and its tangents `df0`, `df1`, ..."""
    count = len(spec.entries) * (1 + spec.relative) if spec.tolerances else 1
    lines = ["const bool one_start = !u0_column;", *(f"const real atol{n} = atol[{n}];" for n in range(count))]
    kernel = _kernel(spec, [variable_named(f"atol{n}") for n in range(count)], one_start=variable_named("one_start"))
    arguments = _FORWARD + _FORWARD_EVENTS * bool(spec.events)
    return _kernel_text("forward", kernel, arguments, _FORWARD_ELEMENTS, forward, lines)


@inlined
def forward(kernel: Kernel, i: int) -> None:
    """Solve trajectory i."""
    spec, arrays, directions = kernel.spec, kernel.arrays, range(len(kernel.spec.directions))
    lane = registers(spec, ForwardLane, ["time_index"])
    k = [Row(lane.k, n, count=spec.d) for n in range(spec.stages + 1)]
    dk = [[Row(lane.dk, j, n, count=spec.d) for n in range(spec.stages + 1)] for j in directions]
    du = [Row(lane.du, j, count=spec.d) for j in directions]
    y = argument_vectors(spec, lane.u, lane.new)
    enter(kernel, lane, i)
    for j in static(directions):
        inputs = (lane.u, parameters_of(kernel, lane), rounded(spec, lane.sign * lane.now), du[j])
        kernel.call(f"df{j}", (dk[j][0],), *inputs)
    code = -1
    if lane.now == lane.goal:
        code = ReturnCode.Success.code
    while code < 0:
        step = begin_step(kernel, lane, lane.now, lane.u, lane.new, k, y)
        compute_stages(kernel, step)
        q2 = squared_error(kernel, step)
        lane.q2 = q2
        decide(kernel, lane, step, q2)
        if spec.clocks:
            retake(kernel, lane)
        if lane.accepted > 0.0:
            # Tangents are computed for accepted steps.
            for j in static(directions):
                tangents(kernel, step, f"df{j}", du[j], Row(lane.dnew, j, count=spec.d), dk[j], 1, spec.stages)
            if spec.record:
                record(kernel, lane)
        if lane.event > 0.0:
            code, _ = write_output(kernel, lane, i, lane.accepted > 0.0)
        if lane.accepted > 0.0:
            _, _, now = advance(spec, lane, state(spec))
            lane.now = now
            for j in static(directions):
                copy(spec, dk[j][0], dk[j][spec.stages])
        # The trajectory has moved to the end of the step.
        lane.accepted = 0.0
    if arrays.u_end:
        write_results(kernel, lane, i, False, 0.0, code)
        finish(kernel, lane, i, code)


@inlined
def record(kernel: Kernel, lane: ForwardLane) -> None:
    """Write an accepted step; beyond the capacity, steps are only counted."""
    arrays, d = kernel.arrays, kernel.spec.d
    step = np.int64(lane.number)
    if step < arrays.capacity:
        for c in kernel.spec.components:
            arrays.steps_u[(step * d + c) * arrays.count + arrays.column] = lane.u[c]
        arrays.steps_t[2 * step * arrays.count + arrays.column] = lane.sign * lane.now
        arrays.steps_t[(2 * step + 1) * arrays.count + arrays.column] = lane.sign * lane.size


@inlined
def finish(kernel: Kernel, lane: ForwardLane, i: int, code: int) -> None:
    """Fill saved states that weren't reached, and count failed trajectories."""
    spec, arrays = kernel.spec, kernel.arrays
    while lane.time_index < kernel.n_saved:
        for c in spec.components:
            arrays.saved[i, lane.time_index, c] = np.nan
        for j in static(range(len(spec.directions))):
            for c in spec.components:
                arrays.dsaved[j, i, lane.time_index, c] = 0.0
        lane.time_index += 1
    if code != ReturnCode.Success.code and code != ReturnCode.Terminated.code:
        variable(expression("NEXT", arrays.summary), "others")
    variable(expression("LARGEST", arrays.summary + 1, np.int64(lane.number)), "most")


def cuda_reverse_text(spec: KernelSpec) -> str:
    """Return the source of `reverse`, which calls `f` and its adjoint `g`."""
    arguments = _REVERSE + _REVERSE_EVENTS * bool(spec.events)
    return _kernel_text("reverse", _kernel(spec), arguments, _REVERSE_ELEMENTS, reverse, [])


@inlined
def reverse(kernel: Kernel, i: int) -> None:
    """Propagate cotangents through the steps of trajectory i; cotangents of failed ones, which may be NaN, are ignored."""
    spec, arrays = kernel.spec, kernel.arrays
    lane = registers(spec, ReverseLane, ["time_index", "step", "event", "ends"])
    row, span = i if kernel.by_row else 0, 0 if kernel.one_span else i
    sign = -1.0 if arrays.end[span] < arrays.start[span] else 1.0
    code = arrays.codes[i]
    if code == ReturnCode.Success.code or (spec.events and code == ReturnCode.Terminated.code):
        start(kernel, lane, i)
        if spec.events:
            lane.event = arrays.heads[i]
            lane.ends = code == ReturnCode.Terminated.code
        lane.time_index = kernel.n_saved - 1
        while lane.time_index >= 0 and sign * arrays.times[row, lane.time_index] > sign * lane.t:
            lane.time_index -= 1
        lane.step = np.int64(arrays.naccept[i]) - 1
        while lane.step >= 0:
            load(kernel, lane)
            clear_arrivals(spec, lane)
            while lane.time_index >= 0 and sign * arrays.times[row, lane.time_index] > sign * lane.t:
                pull_saved(kernel, lane, i)
            if spec.events:
                extend_last(kernel, lane, i)
            back(kernel, lane, i)
            lane.step -= 1
        add_initial_states(kernel, lane, i)
    for c in spec.components:
        arrays.u0_bar[c * arrays.n + i] = lane.cotangent[c]
    for j in static(range(spec.wanted_varying)):
        arrays.p_bar[j * arrays.n + i] = lane.p_bar[j]
    for j in static(range(spec.wanted_shared)):
        arrays.s_bar[j * arrays.count + arrays.column] = lane.s_bar[j]


@inlined
def load(kernel: Kernel, lane: ReverseLane) -> None:
    """Load the next step of the backward sweep."""
    arrays, d = kernel.arrays, kernel.spec.d
    lane.tn = lane.t
    lane.t = arrays.steps_t[2 * lane.step * arrays.count + arrays.column]
    lane.h = arrays.steps_t[(2 * lane.step + 1) * arrays.count + arrays.column]
    for c in kernel.spec.components:
        lane.u[c] = arrays.steps_u[(lane.step * d + c) * arrays.count + arrays.column]


@inlined
def extend_last(kernel: Kernel, lane: ReverseLane, i: int) -> None:
    """Extend the stages of a step that a terminal event has cut short to the end of the full step."""
    spec = kernel.spec
    if lane.ends:
        lane.tn = lane.t + lane.h
        # See `jumps.beside`.
        at = rounded_time(spec, kernel.arrays.t_reached[i])
        if abs(lane.tn - at) <= gap(spec, at) + gap(spec, at):
            lane.tn = at - gap(spec, at) * (1.0 if lane.h > 0.0 else -1.0)
