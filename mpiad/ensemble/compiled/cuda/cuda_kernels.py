"""The CUDA sources of the forward and the reverse kernel: each thread processes one trajectory, with state in registers.

A thread performs the parts of CPU kernels, which `forward_kernel` and `reverse_kernel` contain, one after the other for one
trajectory; the fields of a lane are its variables. The text is translated to C++ (see `mpiad.compiling.c_translation`). All
threads write events to one table, and the reverse kernel reads it.
"""

from __future__ import annotations

from functools import partial

from mpiad.ensemble.compiled import forward_kernel, reverse_kernel
from mpiad.ensemble.compiled.kernel_spec import KernelSpec, Registers, filled
from mpiad.ensemble.compiled.rosenbrock_text import layout_of

# Definitions for both kernels. NVRTC has no standard headers. For CPUs, on which tests run, `EACH` is a plain loop.
PRELUDE = """
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define KERNEL extern "C" __global__ void
#define INLINE static __device__ __forceinline__
#define NEXT(count) ((long long)atomicAdd((unsigned long long*)(count), 1ULL))
// Without the comparison, the atomic operations of all threads on one address would take as long as the solve.
#define LARGEST(most, value) \\
    (value > *(volatile long long*)(most) ? atomicMax((unsigned long long*)(most), (unsigned long long)value) : 0)
#define EACH(i, n) \\
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x)
#ifndef INFINITY
#define INFINITY __longlong_as_double(0x7ff0000000000000LL)
#endif
#ifndef NAN
#define NAN __longlong_as_double(0x7ff8000000000000LL)
#endif
#else
#include <math.h>
#define KERNEL extern "C" void
#define INLINE static inline
#define NEXT(count) ((*(count))++)
#define LARGEST(most, value) (value > *(most) ? (*(most) = value) : 0)
#define EACH(i, n) for (long long i = 0; i < n; ++i)
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
typedef {real} real;

// Elements of arrays with several axes.
#define p(j, i) p[(j) * n + (i)]
#define times(i, k) times[(i) * n_saved + (k)]
"""

_KERNEL = """
// Solves the trajectories first, ..., first + count - 1 of n. saved: shape (n_saved, d, n); steps_u, steps_t: (capacity, d,
// count), (capacity, 2, count); rows, the table of events: (6, event_capacity); dsaved: (tangents, n_saved, d, n). For p to
// u0 and atol see `Inputs`; other arrays: (..., n). summary: the number of failed trajectories, and the largest number of
// steps. If u_end is null, only the steps are written.
KERNEL forward(
    const long long n, const long long first, const long long count, const real* p, const real* s, const double* start,
    const double* end, const long long by_span, const double* times, const long long n_saved, const long long by_row,
    const real* u0, const long long u0_row, const long long u0_column, const real* atol, const real rtol, const double dt,
    const double dtmax, const long long max_steps, real* u_end, real* saved, double* t_reached, int* codes, int* naccept,
    int* nreject, real* du_end, real* dsaved, long long* summary, real* steps_u, double* steps_t, const long long capacity
    when events: , double* rows, const long long event_capacity, long long* event_count, long long* heads
) {
    #define u0(c, i) u0[(c) * u0_row + (i)]
    #define u_end(i, c) u_end[(c) * n + (i)]
    #define saved(i, k, c) saved[((k) * {d} + (c)) * n + (i)]
    #define du_end(j, c, i) du_end[((j) * {d} + (c)) * n + (i)]
    #define dsaved(j, i, k, c) dsaved[(((j) * n_saved + (k)) * {d} + (c)) * n + (i)]
    // Events beyond the capacity are only counted: the solve is repeated.
    #define crossings(row, k) rows[(k) * event_capacity + (row < event_capacity ? row : event_capacity - 1)]
    EACH(column, count) {
        const long long i = first + column;
        const bool one_span = !by_span, one_start = !u0_column;
        each s: const real s{s} = s[{s}];
        each tolerance: const real atol{tolerance} = atol[{tolerance}];
        when single: const real rtol_ = rtol;
        when lu_length: real lu[{lu_length}];
        @thread
    }
}
"""

# The solution of one trajectory, in the kernel language.
_THREAD = """
@declarations
h = 0.0
tn = 0.0
was_accepted = False
when events: head = np.int64(-1)
@enter
@first_tangents
code = {Success} if now == goal else -1
while code < 0:
    @begin_step
    @stages
    @decide
    when clocks: @retake
    was_accepted = $accepted > 0.0
    tn = $ahead
    # C's INFINITY is a float.
    when events: first = np.float64(np.inf)
    if was_accepted:
        @tangents
        when record:
            # Beyond the capacity, steps are only counted.
            step = np.int64($number)
            if step < capacity:
                each c: steps_u[(step * {d} + {c}) * count + column] = $u[{c}]
                steps_t[2 * step * count + column] = $sign * $now
                steps_t[(2 * step + 1) * count + column] = $sign * $size
        @output
        @advance
        each j: each c: $l{j}_0[{c}] = $l{j}_{last}[{c}]
    if $event > 0.0:
        @end
    # The trajectory has moved to the end of the step.
    $accepted = 0.0
    was_accepted = False
if u_end:
    @results
    when events: heads[i] = head
    while time_index[l] < n_saved:
        each c: saved[i, time_index[l], {c}] = np.nan
        each j: each c: dsaved[{j}, i, time_index[l], {c}] = 0.0
        time_index[l] += 1
    if code != {Success} and code != {Terminated}:
        others = NEXT(summary)
    most = LARGEST(summary + 1, steps)
"""


def cuda_forward_text(spec: KernelSpec) -> str:
    """Return the source of `forward`, which calls `f` and its tangents `df0`, `df1`, ..."""
    registers = Registers(spec)
    _, steps, names = layout_of(spec, forward_kernel.FIELDS, registers)
    names |= {"row": "event_column", "stored": " and u_end", "declarations": registers.declarations}
    # Tangents are computed for accepted steps.
    tangents = [line for j in names["j"] for line in steps.tangents(j, 1, spec.stages)]
    first_tangents = [steps.call(f"l{j}_0", "u", 0, f"df{j}", steps.state(f"du{j}")) for j in names["j"]]
    names |= forward_kernel.parts_of(spec, steps, names, partial(_power, spec))
    names |= {"stages": [*steps.stages(), *steps.error()], "tangents": tangents, "first_tangents": first_tangents}
    return "\n".join(filled(_KERNEL, names | {"thread": registers.translated(filled(_THREAD, names))}))


def _power(spec: KernelSpec, x: str, exponent: str, out: str) -> list[str]:
    if x == "q2" and not spec.remembers:
        return [f"{out} = inverse_root(q2, {spec.tableau.error_order})"]
    # These two calls take half as many instructions as `pow`, with an error of a few ulp.
    return [f"{out} = np.exp2({exponent} * np.log2({x}))"]


# The propagation of cotangents through events.
#
# All threads write events to one table, in arbitrary order. The events of a trajectory form a linked list: each refers to
# the previous event, and `heads` to the last. In the reverse sweep a thread follows the list of its trajectory.

# The rows of the table: the trajectory, the event, the step (from 0), the fraction of the step at which the event lies, its
# time, and the column of the trajectory's previous event.
ROWS = 6

# The reverse kernel: each thread computes the adjoint of one trajectory's accepted steps, as in `reverse_kernel`. Each
# trajectory writes its cotangents of shared parameters to a separate column, so the order of the sum is fixed.

_REVERSE = """
// Trajectories and steps as in forward. saved_bar: (n_saved, d, n); s_bar: (rows, count); other cotangents: (rows, n).
KERNEL reverse(
    const long long n, const long long first, const long long count, const real* p, const real* s, const double* start,
    const double* end, const long long by_span, const double* times, const long long n_saved, const long long by_row,
    const real* steps_u, const double* steps_t, const int* naccept, const double* t_reached, const int* codes,
    const real* end_bar, const real* saved_bar, real* u0_bar, real* p_bar, real* s_bar
    when events: , const double* rows, const long long event_capacity, const long long* heads
    when events: , const double* reached_bar, const double* times_bar
) {
    #define end_bar(c, i) end_bar[(c) * n + (i)]
    #define saved_bar(i, k, c) saved_bar[((k) * {d} + (c)) * n + (i)]
    #define crossings(row, k) rows[(k) * event_capacity + (row)]
    EACH(column, count) {
        const long long i = first + column;
        const bool one_span = !by_span;
        each s: const real s{s} = s[{s}];
        when lu_length: real lu[{lu_length}];
        @thread
        each c: u0_bar[{c} * n + i] = cotangent_{c};
        each wanted_p: p_bar[{wanted_p} * n + i] = p_bar_{wanted_p};
        each wanted_s: s_bar[{wanted_s} * count + column] = s_bar_{wanted_s};
    }
}
"""

# The adjoint of one trajectory, in the kernel language. Cotangents of failed trajectories, which may be NaN, are ignored.
_REVERSE_THREAD = """
@declarations
sign = -1.0 if end[0 if one_span else i] < start[0 if one_span else i] else 1.0
code = codes[i]
if code == {Success}{or_terminated}:
    @start
    when events:
        event_column = heads[i]
        ends = code == {Terminated}
    time_index[l] = n_saved - 1
    while time_index[l] >= 0 and sign * times[i if by_row else 0, time_index[l]] > sign * $t:
        time_index[l] -= 1
    step = np.int64(naccept[i]) - 1
    while step >= 0:
        $tn = $t
        $t = steps_t[2 * step * count + column]
        $h = steps_t[(2 * step + 1) * count + column]
        each c: $u[{c}] = steps_u[(step * {d} + {c}) * count + column]
        when inside:
            $has_arrivals = 0.0
            each c: $value[{c}] = 0.0
            each i: each c: $arrival[{i}, {c}] = 0.0
        while time_index[l] >= 0 and sign * times[i if by_row else 0, time_index[l]] > sign * $t:
            @saved
        when events:
            # The stages of a step that a terminal event has cut short extend to the end of the full step.
            if ends:
                $tn = $t + $h
                # See `jumps.beside`.
                at = {at_end}
                if abs($tn - at) <= {gap} + {gap}:
                    $tn = at - {gap} * (1.0 if $h > 0.0 else -1.0)
        @back
        step -= 1
    while time_index[l] >= 0:
        each c: $cotangent[{c}] += saved_bar[i, time_index[l], {c}]
        time_index[l] -= 1
"""


def cuda_reverse_text(spec: KernelSpec) -> str:
    """Return the source of `reverse`, which calls `f` and its adjoint `g`."""
    registers = Registers(spec)
    _, steps, names = layout_of(spec, reverse_kernel.FIELDS, registers)
    names |= {"or_terminated": f" or code == {names['Terminated']}" if spec.events else ""}
    names |= {"declarations": registers.declarations, "event_row": "event_column"}
    names["at_end"] = steps.doubled(steps.rounded("t_reached[i]"))
    names["in_step"] = "event_column >= 0 and crossings[event_column, 2] == step"
    names["next_event"] = "event_column = np.int64(crossings[event_column, 5])"
    names |= reverse_kernel.parts_of(spec, steps, names, {True: "reached_bar[i]", False: "times_bar[event_column]"})
    return "\n".join(filled(_REVERSE, names | {"thread": registers.translated(filled(_REVERSE_THREAD, names))}))
