"""The CUDA source of the reverse kernel: each thread computes the adjoint of one trajectory's accepted steps.

The stages are recomputed from the state before the step, and cotangents are propagated as in `reverse_kernel`. Each
trajectory writes its cotangents of shared parameters to a separate column, so the order of the sum is fixed.
"""

from __future__ import annotations

from mpiad.compiling.c_translation import c_lines
from mpiad.compiling.source import indented, numbered
from mpiad.ensemble.compiled.cuda.cuda_events import crossing_names
from mpiad.ensemble.compiled.kernel_spec import KernelSpec, filled
from mpiad.ensemble.compiled.rosenbrock_text import placeholders_of, steps_of
from mpiad.ensemble.compiled.step_text import Steps

_KERNEL = """
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
    scope = {*new, *steps.state("total")}  # variables that `_KERNEL` declares
    names = placeholders_of(spec, steps) | crossing_names(spec, steps) | {"new": ", ".join(new), "pulled_last": []}
    names["weights"] = c_lines(["x = (save_time - now) / size", *steps.weights()])
    names["stages"] = c_lines(steps.again(), scope)
    if last in steps.pulled_stages:
        # The last stage contributes only to states inside the step.
        names["pulled_last"] = ["if (has_arrivals) {", *indented(_pulled(spec, steps, last, set(scope))), "}"]
    names["pulled"] = [line for i in reversed(steps.pulled_stages) if i < last for line in _pulled(spec, steps, i, scope)]
    return "\n".join(filled(_KERNEL, names))


def _pulled(spec: KernelSpec, steps: Steps, i: int, scope: set[str]) -> list[str]:
    """Return lines that propagate the cotangent of stage i to its argument and the parameters."""
    lines = c_lines(steps.pulled(i, lambda c: f"arrival{i}_{c}"), scope)
    sums = numbered("p_bar", spec.wanted_varying) + numbered("s_bar", spec.wanted_shared)
    return lines + [f"{name} += e{j};" for j, name in enumerate(sums)]
