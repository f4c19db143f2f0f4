"""The CUDA source of the forward kernel: each thread solves one trajectory, with the state in registers.

The lines of a step are those of `step_text`, translated to C++. The times `now` and `ahead` and the step size `size` are
multiplied by the sign of the direction of integration.
"""

from __future__ import annotations

from mpiad.compiling.c_translation import c_lines
from mpiad.ensemble.compiled.cuda.cuda_events import search_names
from mpiad.ensemble.compiled.kernel_spec import KernelSpec, filled
from mpiad.ensemble.compiled.rosenbrock_text import placeholders_of, steps_of
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
// Ten times the distance from t to the next larger number; `nextafter` takes ten times as many instructions.
INLINE double least_step(double t) {
    union { double x; long long bits; } next;
    next.x = t + 0.0;
    next.bits += next.bits < 0 ? -1 : 1;
    return 10 * (next.x - t);
}
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

// The time of a trajectory's next saved state.
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
// count), (capacity, 2, count); rows, the table of events: (6, event_capacity); other arrays: (rows, n). failed: the number
// of failed trajectories. If u_end is null, only the steps are written.
KERNEL forward(
    const long long n, const long long first, const long long count, const real* p, const real* s, const double* start,
    const double* stop, const long long by_span, const double* times, const long long n_saved, const long long by_row,
    const real* u0, const long long u0_row, const long long u0_column, const real* atol, const real rtol, const double dt,
    const double dtmax, const long long max_steps, real* u_end, real* saved, double* t_reached, int* codes, int* naccept,
    int* nreject, real* du_end, real* dsaved, long long* failed, real* steps_u, double* steps_t,
    const long long capacity{declared}
) {
    EACH(column, count) {
        const long long i = first + column;
        const double t0 = start[i * by_span], end = stop[i * by_span], sign = end < t0 ? -1.0 : 1.0;
        const double goal = sign * end;
        double now = sign * t0;
        each c: real u_{c} = u0[{c} * u0_row + i * u0_column];
        each p: const real p{p} = p[{p} * n + i];
        each s: const real s{s} = s[{s}];
        each tolerance: const real atol{tolerance} = atol[{tolerance}];
        when single: const real rtol_ = rtol;
        when lu_length: real lu[{lu_length}];
        real {k0};
        @unit_tangents
        long long time_index = 0;
        double save_time = save_time_at(times, n_saved, by_row, i, time_index, sign);
        while (save_time == now) {
            each c: saved[(time_index * {d} + {c}) * n + i] = u_{c};
            each j: each c: dsaved[(({j} * n_saved + time_index) * {d} + {c}) * n + i] = du{j}_{c};
            save_time = save_time_at(times, n_saved, by_row, i, ++time_index, sign);
        }
        int code = now == goal ? {Success} : -1;
        long long step_count = 0, tries = 0;
        double following = 1;
        bool rejected = false;
        when remembers: double before = {least_error};
        when events: long long head = -1;
        @conditions
        if (code < 0) {
            const double t = sign * now, span = goal - now;
            double h;
            @first_step
            following = larger(smaller(h, dtmax), least_step(now));
        }
        while (code < 0) {
            double ahead = now + following;
            // A remainder of the size of rounding is added to the last step.
            when not adaptive: if (ahead > goal - 1e-9 * following) ahead = goal;
            ahead = smaller(ahead, goal);
            const double size = ahead - now, h = sign * size, t = sign * now, tn = sign * ahead;
            when single: const real h_ = (real)h;
            @stages
            ++tries;
            @error
            when adaptive:
                const bool accepted = q2 < 1;
                @factor
                following = smaller(size * factor, dtmax);
                rejected = !accepted;
            when not adaptive: const bool accepted = q2 == 0;
            if (accepted) {
                @tangents
                when record:
                    // Beyond the capacity, steps are only counted.
                    if (step_count < capacity) {
                        each c: steps_u[(step_count * {d} + {c}) * count + column] = u_{c};
                        steps_t[(2 * step_count + 0) * count + column] = t;
                        steps_t[(2 * step_count + 1) * count + column] = h;
                    }
                @locate_events
                while (save_time <= ahead) {
                    when inside:
                        if (save_time < ahead) {
                            @interpolated
                            each c: saved[(time_index * {d} + {c}) * n + i] = mid_{c};
                            each j: each c: dsaved[(({j} * n_saved + time_index) * {d} + {c}) * n + i] = dmid{j}_{c};
                        } else
                    {
                        each c: saved[(time_index * {d} + {c}) * n + i] = new_{c};
                        each j: each c: dsaved[(({j} * n_saved + time_index) * {d} + {c}) * n + i] = dnew{j}_{c};
                    }
                    save_time = save_time_at(times, n_saved, by_row, i, ++time_index, sign);
                }
                // The last stage and its tangent are the first of the next step.
                each c:
                    u_{c} = new_{c};
                    k0_{c} = k{last}_{c};
                    each j:
                        du{j}_{c} = dnew{j}_{c};
                        l{j}_0_{c} = l{j}_{last}_{c};
                each e: before{e} = after{e};
                now = ahead;
                ++step_count;
                when events: if (ended) code = {Terminated}; else if (now == goal) code = {Success};
                when not events: if (now == goal) code = {Success};
            }
            when adaptive:
                if (code < 0 && following < least_step(now)) {
                    if (accepted) following = least_step(now);
                    else code = finite_number(q2) ? {DtLessThanMin} : {Unstable};
                }
            when not adaptive: if (!accepted) code = {Unstable};
            if (code < 0 && tries >= max_steps) code = {MaxIters};
        }
        if (u_end) {
            for (; time_index < n_saved; ++time_index) {
                each c: saved[(time_index * {d} + {c}) * n + i] = NAN;
                each j: each c: dsaved[(({j} * n_saved + time_index) * {d} + {c}) * n + i] = 0;
            }
            each c: u_end[{c} * n + i] = u_{c};
            each j: each c: du_end[({j} * {d} + {c}) * n + i] = du{j}_{c};
            when events: heads[i] = head;
            t_reached[i] = sign * now;
            codes[i] = code;
            naccept[i] = (int)step_count;
            nreject[i] = (int)(tries - step_count);
            if (code != {Success} && code != {Terminated}) NEXT(failed);
        }
    }
}
"""


def cuda_forward_text(spec: KernelSpec) -> str:
    """Return the source of `forward`, which calls `f` and its tangents `df0`, `df1`, ..."""
    steps = steps_of(spec, fused=False)
    scope: set[str] = set()  # variables declared in the body of the loop over steps
    names = placeholders_of(spec, steps) | search_names(spec, steps) | {"k0": ", ".join(steps.state("k0"))}
    names |= {"unit_tangents": _unit_tangents(spec, steps), "first_step": _first_step(spec, steps)}
    names |= {"stages": c_lines(steps.stages(), scope), "error": c_lines(steps.error(), scope)}
    names |= {"tangents": _tangents(spec, steps), "interpolated": _interpolated(spec, steps)}
    names["factor"] = c_lines(_factor(spec, steps), ["before"]) if spec.tableau.error else []
    return "\n".join(filled(_KERNEL, names))


def _factor(spec: KernelSpec, steps: Steps) -> list[str]:
    def power(x: str, exponent: str, out: str) -> list[str]:
        if x == "q2" and not spec.remembers:
            return [f"{out} = inverse_root(q2, {spec.tableau.error_order})"]
        # These two calls take half as many instructions as `pow`, with an error of a few ulp.
        return [f"{out} = np.exp2({exponent} * np.log2({x}))"]

    return steps.factor(power, "before", "rejected")


def _unit_tangents(spec: KernelSpec, steps: Steps) -> list[str]:
    lines = []
    for j, (kind, i) in enumerate(spec.directions):
        lines.append(f"real {', '.join(steps.state(f'l{j}_0'))};")
        lines += [f"real {x} = {int(kind == 'u' and i == c)};" for c, x in enumerate(steps.state(f"du{j}"))]
    return lines


def _first_step(spec: KernelSpec, steps: Steps) -> list[str]:
    lines, scope = [steps.call("k0", "u", 0)], {*steps.state("k0"), "h"}
    for j in range(len(spec.directions)):
        lines.append(steps.call(f"l{j}_0", "u", 0, f"df{j}", steps.state(f"du{j}")))
        scope.update(steps.state(f"l{j}_0"))
    return c_lines([*lines, *steps.first_step()], scope)


def _tangents(spec: KernelSpec, steps: Steps) -> list[str]:
    """Return lines for the tangents of all stages, which are computed for accepted steps."""
    lines = []
    for j in range(len(spec.directions)):
        for i in range(1, spec.stages + 1):
            out = f"dnew{j}" if i == spec.stages else f"z{j}_{i}"
            lines += steps.argument(out, i, f"l{j}_", f"du{j}", fused=True)
            lines.append(steps.call(f"l{j}_{i}", steps.argument_of(i), i, f"df{j}", steps.state(out)))
    return c_lines(lines)


def _interpolated(spec: KernelSpec, steps: Steps) -> list[str]:
    lines = ["x = (save_time - now) / size", *steps.weights()]
    for c in range(spec.d):
        lines += steps.interpolated(f"mid_{c}", lambda i, c=c: f"k{i}_{c}", f"u_{c}")
        for j in range(len(spec.directions)):
            stage = lambda i, c=c, j=j: f"l{j}_{i}_{c}"  # noqa: E731
            lines += steps.interpolated(f"dmid{j}_{c}", stage, f"du{j}_{c}", fused=True)
    return c_lines(lines)
