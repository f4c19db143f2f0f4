"""The CUDA sources of the forward and the reverse kernel: each thread processes one trajectory, with state in registers.

The lines of a step are those of `step_text`, translated to C++. The times `now` and `ahead` and the step size `size` are
multiplied by the sign of the direction of integration. Events are written to one table, and the reverse kernel reads it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from mpiad.compiling.c_translation import c_lines
from mpiad.compiling.source import indented, numbered
from mpiad.ensemble.compiled.forward_kernel import FIELDS, parts_of
from mpiad.ensemble.compiled.kernel_spec import KernelSpec, Registers, filled
from mpiad.ensemble.compiled.rosenbrock_text import layout_of, placeholders_of, steps_of
from mpiad.ensemble.compiled.step_text import Steps

# Definitions for both kernels. NVRTC has no standard headers. For CPUs, on which tests run, `EACH` is a plain loop.
_PRELUDE = """
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define KERNEL extern "C" __global__ void
#define INLINE static __device__ __forceinline__
#define NEXT(count) ((long long)atomicAdd((unsigned long long*)(count), 1ULL))
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

// The time with this index at which trajectory i is saved, multiplied by `sign`; infinity after the last one.
INLINE double save_time_at(
    const double* times, long long n_saved, long long by_row, long long i, long long time_index, double sign
) {
    if (time_index >= n_saved) return INFINITY;
    return sign * times[by_row ? i * n_saved + time_index : time_index];
}
"""


def prelude(spec: KernelSpec) -> str:
    """Return the definitions at the beginning of a source."""
    return "\n".join(filled(_PRELUDE, {"real": "float" if spec.single else "double"}))


_KERNEL = """
// Solves the trajectories first, ..., first + count - 1 of n. saved: shape (n_saved, d, n); steps_u, steps_t: (capacity, d,
// count), (capacity, 2, count); rows, the table of events: (6, event_capacity); dsaved: (tangents, n_saved, d, n). For p to
// u0 and atol see `Inputs`; other arrays: (..., n). failed: the number of failed trajectories. If u_end is null, only the
// steps are written.
KERNEL forward(
    const long long n, const long long first, const long long count, const real* p, const real* s, const double* start,
    const double* end, const long long by_span, const double* times, const long long n_saved, const long long by_row,
    const real* u0, const long long u0_row, const long long u0_column, const real* atol, const real rtol, const double dt,
    const double dtmax, const long long max_steps, real* u_end, real* saved, double* t_reached, int* codes, int* naccept,
    int* nreject, real* du_end, real* dsaved, long long* failed, real* steps_u, double* steps_t, const long long capacity
    when events: , double* rows, const long long event_capacity, long long* event_count, long long* heads
) {
    #define p(j, i) p[(j) * n + (i)]
    #define u0(c, i) u0[(c) * u0_row + (i)]
    #define times(i, k) times[(i) * n_saved + (k)]
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
        @declarations
        @thread
    }
}
"""

# The solution of one trajectory, in the kernel language.
_THREAD = """
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
        others = NEXT(failed)
"""


def cuda_forward_text(spec: KernelSpec) -> str:
    """Return the source of `forward`, which calls `f` and its tangents `df0`, `df1`, ..."""
    registers = Registers(spec)
    _, steps, names = layout_of(spec, FIELDS, registers)
    names |= {"row": "event_column", "stored": " and u_end"}
    stages = [*steps.stages(), *steps.error()]
    # Tangents are computed for accepted steps.
    tangents = [line for j in names["j"] for line in steps.tangents(j, 1, spec.stages)]
    first_tangents = [steps.call(f"l{j}_0", "u", 0, f"df{j}", steps.state(f"du{j}")) for j in names["j"]]
    names |= parts_of(spec, steps, names, partial(_power, spec))
    names |= {"stages": stages, "tangents": tangents, "first_tangents": first_tangents}
    names |= {"declarations": registers.declarations, "thread": registers.translated(filled(_THREAD, names))}
    return "\n".join(filled(_KERNEL, names))


def _power(spec: KernelSpec, x: str, exponent: str, out: str) -> list[str]:
    if x == "q2" and not spec.remembers:
        return [f"{out} = inverse_root(q2, {spec.tableau.error_order})"]
    # These two calls take half as many instructions as `pow`, with an error of a few ulp.
    return [f"{out} = np.exp2({exponent} * np.log2({x}))"]


# The propagation of cotangents through events.
#
# All threads write events to one table, in arbitrary order. The events of a trajectory form a linked list: each refers to
# the previous event, and `heads` to the last. In the reverse sweep a thread follows the list of its trajectory, and
# propagates the cotangent of an event's time to the state at the event and the parameters, like `adjoint.pull_event`.

# The rows of the table: the trajectory, the event, the step (from 0), the fraction of the step at which the event lies, its
# time, and the column of the trajectory's previous event.
ROWS = 6

# Processes the events of a step, after the stages of the step have been recomputed.
_CROSSED = """
when uses_last: real {last_stage};
while (event_column >= 0 && (long long)rows[2 * event_capacity + event_column] == step) {
    has_arrivals = true;
    @states
    @rates
    const int event = (int)rows[event_capacity + event_column];
    @bodies
    event_column = (long long)rows[5 * event_capacity + event_column];
}
"""

_BODY = """
if (event == {e}) {
    // If two terminal events coincide, only the last has ended the trajectory. If the time of a nonterminal event isn't
    // differentiated, its condition may have slope zero.
    if ({differentiated}) {
        real {derivatives};
        slopes{e}({given});
        const real slope = {slope};
        when terminal: ends = false;
        const real factor = -{fraction_bar} / slope;
        when terminal:
            each c: const real bar_{c} = total_{c} + factor * g_{c};
            each c: total_{c} = 0;
        when not terminal: each c: const real bar_{c} = factor * g_{c};
        // The cotangent of the state at the event is treated like that of a saved state.
        @sums
        each c:
            mid_bar_{c} += bar_{c};
            each used: arrival{used}_{c} += w{used} * bar_{c};
    }
}
"""


def crossing_names(spec: KernelSpec, steps: Steps) -> dict[str, Any]:
    """Return the placeholders of the reverse kernel for events."""
    if not spec.events:
        return {"declared": "", "crossed": []}
    d, h, last, lines = spec.d, steps.h, [], ["x = rows[3 * event_capacity + event_column]"]
    if spec.stages in steps.used():
        last = steps.state(f"k{spec.stages}")
        lines.append(steps.call(f"k{spec.stages}", f"y{spec.stages}", spec.stages))
    lines += [*steps.weights(rates=True), *steps.interpolated("at_{c}", "k{i}_{c}", "y0_{c}")]
    slopes = [" + ".join(f"(real)r{i} * k{i}_{c}" for i in steps.used()) for c in range(d)]
    sums = numbered("p_bar", spec.wanted_varying) + numbered("s_bar", spec.wanted_shared)
    outputs = [*steps.state("g"), *numbered("by", len(sums)), "by_time"]
    given = [*steps.state("at"), *steps.parameters, "(real)rows[4 * event_capacity + event_column]", "1", *outputs]
    names = {"c": range(d), "used": steps.used(), "derivatives": ", ".join(outputs), "given": ", ".join(given)}
    names["slope"] = f"{' + '.join(f'g_{c} * rate_{c}' for c in range(d))} + by_time * {h}"
    names["sums"] = [f"{name} += factor * by{j};" for j, name in enumerate(sums)]
    end_fraction_bar = f"({' + '.join(f'total_{c} * rate_{c}' for c in range(d))} + (real)reached_bar[i] * {h})"
    bodies = []
    for e, (terminal, _) in enumerate(spec.events):
        names |= {"e": e, "terminal": terminal, "differentiated": "ends" if terminal else "times_bar[event_column] != 0"}
        names["fraction_bar"] = end_fraction_bar if terminal else f"(real)times_bar[event_column] * {h}"
        bodies += filled(_BODY, names)
    crossed = {"uses_last": bool(last), "last_stage": ", ".join(last), "states": c_lines(lines, last), "bodies": bodies}
    crossed["rates"] = [f"const real rate_{c} = ({slope}) * {h};" for c, slope in enumerate(slopes)]
    return {
        "declared": ", const double* rows, const long long event_capacity, const long long* heads, "
        "const double* reached_bar, const double* times_bar",
        "crossed": filled(_CROSSED, crossed),
    }


# The reverse kernel: each thread computes the adjoint of one trajectory's accepted steps.
#
# The stages are recomputed from the state before the step, and cotangents are propagated as in `reverse_kernel`. Each
# trajectory writes its cotangents of shared parameters to a separate column, so the order of the sum is fixed.

_REVERSE = """
// Trajectories and steps as in forward. saved_bar: (n_saved, d, n); s_bar: (rows, count); other cotangents: (rows, n).
KERNEL reverse(
    const long long n, const long long first, const long long count, const real* p, const real* s, const double* start,
    const double* stop, const long long by_span, const double* times, const long long n_saved, const long long by_row,
    const real* steps_u, const double* steps_t, const int* naccept, const double* t_reached, const int* codes,
    const real* end_bar, const real* saved_bar, real* u0_bar, real* p_bar, real* s_bar{declared}
) {
    EACH(column, count) {
        const long long i = first + column;
        const int code = codes[i];
        when events: const bool alive = code == {Success} || code == {Terminated};
        when not events: const bool alive = code == {Success};
        const double t0 = start[i * by_span], sign = stop[i * by_span] < t0 ? -1.0 : 1.0;
        const double start_time = sign * t0;
        double ahead = sign * t_reached[i];
        each p: const real p{p} = p[{p} * n + i];
        each s: const real s{s} = s[{s}];
        when lu_length: real lu[{lu_length}];
        // Cotangents of failed trajectories, which may be NaN, are ignored.
        each c: real total_{c} = alive ? end_bar[{c} * n + i] : 0;
        each wanted_p: real p_bar{wanted_p} = 0;
        each wanted_s: real s_bar{wanted_s} = 0;
        if (alive) {
            long long time_index = n_saved - 1;
            when events:
                long long event_column = heads[i];
                bool ends = code == {Terminated};
            while (time_index >= 0 && save_time_at(times, n_saved, by_row, i, time_index, sign) > ahead) --time_index;
            for (long long step = naccept[i] - 1; step >= 0; --step) {
                const double t = steps_t[2 * step * count + column], h = steps_t[(2 * step + 1) * count + column];
                const double now = sign * t, size = sign * h;
                when single: const real h_ = (real)h;
                each c: const real y0_{c} = steps_u[(step * {d} + {c}) * count + column];
                when inside:
                    each c: real mid_bar_{c} = 0;
                    each i: each c: real arrival{i}_{c} = 0;
                    bool has_arrivals = false;
                while (time_index >= 0 && save_time_at(times, n_saved, by_row, i, time_index, sign) > now) {
                    when inside:
                        const double save_time = save_time_at(times, n_saved, by_row, i, time_index, sign);
                        if (save_time < ahead) {
                            has_arrivals = true;
                            @weights
                            each c:
                                const real bar_{c} = saved_bar[(time_index * {d} + {c}) * n + i];
                                mid_bar_{c} += bar_{c};
                                each used: arrival{used}_{c} += w{used} * bar_{c};
                        } else {
                            each c: total_{c} += saved_bar[(time_index * {d} + {c}) * n + i];
                        }
                    when not inside: each c: total_{c} += saved_bar[(time_index * {d} + {c}) * n + i];
                    --time_index;
                }
                // The stages of a step that a terminal event has cut short extend to the end of the full step.
                when events: ahead = ends ? now + size : ahead;
                const double tn = sign * ahead;
                @stages
                @crossed
                real {new};
                @pulled_last
                // The cotangent of the new state is complete.
                each c: z{last}_{c} = total_{c};
                @pulled
                when inside: each c: total_{c} += mid_bar_{c};
                ahead = now;
            }
            while (time_index >= 0 && save_time_at(times, n_saved, by_row, i, time_index, sign) == start_time) {
                each c: total_{c} += saved_bar[(time_index * {d} + {c}) * n + i];
                --time_index;
            }
        }
        each c: u0_bar[{c} * n + i] = total_{c};
        each wanted_p: p_bar[{wanted_p} * n + i] = p_bar{wanted_p};
        each wanted_s: s_bar[{wanted_s} * count + column] = s_bar{wanted_s};
    }
}
"""


def cuda_reverse_text(spec: KernelSpec) -> str:
    """Return the source of `reverse`, which calls `f` and its adjoint `g`."""
    steps, last = steps_of(spec, fused=False), spec.stages
    new = steps.state(f"z{last}")
    scope = {*new, *steps.state("total")}  # variables that `_REVERSE` declares
    names = placeholders_of(spec, steps) | crossing_names(spec, steps) | {"new": ", ".join(new), "pulled_last": []}
    names["weights"] = c_lines(["x = (save_time - now) / size", *steps.weights()])
    names["stages"] = c_lines(steps.again(), scope)
    if last in steps.pulled_stages:
        # The last stage contributes only to states inside the step.
        names["pulled_last"] = ["if (has_arrivals) {", *indented(_pulled(spec, steps, last, set(scope))), "}"]
    names["pulled"] = [line for i in reversed(steps.pulled_stages) if i < last for line in _pulled(spec, steps, i, scope)]
    return "\n".join(filled(_REVERSE, names))


def _pulled(spec: KernelSpec, steps: Steps, i: int, scope: set[str]) -> list[str]:
    """Return lines that propagate the cotangent of stage i to its argument and the parameters."""
    lines = c_lines(steps.pulled(i, lambda c: f"arrival{i}_{c}"), scope)
    sums = numbered("p_bar", spec.wanted_varying) + numbered("s_bar", spec.wanted_shared)
    return lines + [f"{name} += e{j};" for j, name in enumerate(sums)]
