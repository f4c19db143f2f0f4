"""The lines of CUDA kernels for events: their location, and the propagation of cotangents through them.

All threads write events to one table, in arbitrary order. The events of a trajectory form a linked list: each refers to the
previous event, and `heads` to the last. In the reverse sweep a thread follows the list of its trajectory, and propagates
the cotangent of an event's time to the state at the event and the parameters, like `adjoint.pull_event`.
"""

from __future__ import annotations

from typing import Any

from mpiad.compiling.c_translation import c_lines
from mpiad.compiling.source import numbered
from mpiad.ensemble.compiled.kernel_spec import KernelSpec, filled
from mpiad.ensemble.compiled.step_text import Steps

# The rows of the table: the trajectory, the event, the step (from 0), the fraction of the step at which the event lies, its
# time, and the column of the trajectory's previous event.
ROWS = 6

# Finds the events of a step, and cuts the step short at the first terminal event.
_SEARCH = """
bool ended = false;
@changed
if ({crossed}) {
    double cut = INFINITY;
    @located
    each e:
        // The second run, which records steps for the reverse kernel, writes no events.
        if (u_end && fraction{e} < INFINITY && fraction{e} <= cut) {
            const long long row = NEXT(event_count);
            if (row < event_capacity) {
                rows[0 * event_capacity + row] = (double)i;
                rows[1 * event_capacity + row] = {e};
                rows[2 * event_capacity + row] = (double)step_count;
                rows[3 * event_capacity + row] = fraction{e};
                rows[4 * event_capacity + row] = sign * (now + fraction{e} * size);
                rows[5 * event_capacity + row] = (double)head;
            }
            head = row;
        }
    when terminal:
        if (cut < INFINITY) {
            @cut
            ahead = now + x * size;
            ended = true;
        }
}
"""

_LOCATED = """
double fraction{e} = INFINITY;
if (crossed{e}) {
    // The condition's result has the precision of states.
    real value;
    @search
    fraction{e} = high;
    when terminal: if (high < cut) cut = high;
}
"""

# Processes the events of a step, after the stages of the step have been recomputed.
_CROSSED = """
when uses_last: real {last_stage};
while (row >= 0 && (long long)rows[2 * event_capacity + row] == step) {
    has_arrivals = true;
    @states
    @rates
    const int event = (int)rows[event_capacity + row];
    @bodies
    row = (long long)rows[5 * event_capacity + row];
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
            mid_{c} += bar_{c};
            each used: arrival{used}_{c} += w{used} * bar_{c};
    }
}
"""


def search_names(spec: KernelSpec, steps: Steps) -> dict[str, Any]:
    """Return the placeholders of the forward kernel for events."""
    events, terminal = range(len(spec.events)), [ends for ends, _ in spec.events]
    names: dict[str, Any] = {"declared": "", "locate_events": [], "conditions": []}
    if not events:
        return names
    changed, located = [], []
    for e in events:
        changed += c_lines([steps.condition(e, f"after{e}", "new", "tn")])
        changed.append(f"const bool crossed{e} = {steps.changed(e, f'before{e}', f'after{e}')};")
        value = [steps.condition(e, "value", "y", "sign * (now + x * size)")]
        ends = [f"value_before = {steps.doubled(f'before{e}')}", f"value_after = {steps.doubled(f'after{e}')}"]
        lines = [*ends, *steps.located(lambda i, c: f"k{i}_{c}", lambda c: f"u_{c}", value)]
        located += filled(_LOCATED, {"e": e, "search": c_lines(lines, ["value"]), "terminal": terminal[e]})
    cut = ["x = cut", *steps.weights()]
    for c in range(spec.d):
        cut += steps.interpolated(f"new_{c}", lambda i, c=c: f"k{i}_{c}", f"u_{c}")
    search: dict[str, Any] = {"e": events, "changed": changed, "located": located, "terminal": any(terminal)}
    search |= {"crossed": " || ".join(f"crossed{e}" for e in events), "cut": c_lines(cut, steps.state("new"))}
    names["locate_events"] = filled(_SEARCH, search)
    names["declared"] = ", double* rows, const long long event_capacity, long long* event_count, long long* heads"
    names["conditions"] = c_lines([steps.condition(e, f"before{e}", "u", "sign * now") for e in events])
    return names


def crossing_names(spec: KernelSpec, steps: Steps) -> dict[str, Any]:
    """Return the placeholders of the reverse kernel for events."""
    if not spec.events:
        return {"declared": "", "crossed": []}
    d, h, last, lines = spec.d, steps.h, [], ["x = rows[3 * event_capacity + row]"]
    if spec.stages in steps.used():
        last = steps.state(f"k{spec.stages}")
        lines.append(steps.call(f"k{spec.stages}", f"y{spec.stages}", spec.stages))
    lines += steps.weights(rates=True)
    for c in range(d):
        lines += steps.interpolated(f"at_{c}", lambda i, c=c: f"k{i}_{c}", f"y0_{c}")
    slopes = [" + ".join(f"(real)r{i} * k{i}_{c}" for i in steps.used()) for c in range(d)]
    sums = numbered("p_bar", spec.wanted_varying) + numbered("s_bar", spec.wanted_shared)
    outputs = [*steps.state("g"), *numbered("by", len(sums)), "by_time"]
    given = [*steps.state("at"), *steps.parameters, "(real)rows[4 * event_capacity + row]", "1", *outputs]
    names = {"c": range(d), "used": steps.used(), "derivatives": ", ".join(outputs), "given": ", ".join(given)}
    names["slope"] = f"{' + '.join(f'g_{c} * rate_{c}' for c in range(d))} + by_time * {h}"
    names["sums"] = [f"{name} += factor * by{j};" for j, name in enumerate(sums)]
    at_end = f"({' + '.join(f'total_{c} * rate_{c}' for c in range(d))} + (real)reached_bar[i] * {h})"
    bodies = []
    for e, (terminal, _) in enumerate(spec.events):
        names |= {"e": e, "terminal": terminal, "differentiated": "ends" if terminal else "times_bar[row] != 0"}
        names["fraction_bar"] = at_end if terminal else f"(real)times_bar[row] * {h}"
        bodies += filled(_BODY, names)
    crossed = {"uses_last": bool(last), "last_stage": ", ".join(last), "states": c_lines(lines, last), "bodies": bodies}
    crossed["rates"] = [f"const real rate_{c} = ({slope}) * {h};" for c, slope in enumerate(slopes)]
    return {
        "declared": ", const double* rows, const long long event_capacity, const long long* heads, "
        "const double* reached_bar, const double* times_bar",
        "crossed": filled(_CROSSED, crossed),
    }
