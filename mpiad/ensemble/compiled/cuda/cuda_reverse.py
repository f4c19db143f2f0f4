"""The text of the reverse kernel: in each thread the adjoint of one trajectory's accepted steps.

See `transposed_step`: the stages are computed again from the state before the step, and cotangents go back through them.
What all trajectories share gets a column of its own from each, so that the sum doesn't depend on who comes first.
"""

from __future__ import annotations

from mpiad.compiling.c_translation import c_lines
from mpiad.compiling.source import indented, numbered
from mpiad.ensemble.compiled.cuda.cuda_events import Crossings, came_through
from mpiad.ensemble.compiled.cuda.cuda_skeleton import block, loaded_parameters, own_memory, rounded_step
from mpiad.ensemble.compiled.kernel_form import Form
from mpiad.ensemble.compiled.rosenbrock_text import steps_of

_KERNEL = """
// The trajectories and their steps as in forward. end_bar, u0_bar: (d, n); saved_bar: (n_saved, d, n); p_bar: (rows, n);
// s_bar: (rows, count).
KERNEL reverse(
    const long long n, const long long first, const long long count, const real* p, const real* s, const double* start,
    const double* stop, const double* times, const long long n_saved, const long long by_row, const real* steps_u,
    const double* steps_t, const int* naccept, const double* t_reached, const int* codes, const real* end_bar,
    const real* saved_bar, real* u0_bar, real* p_bar, real* s_bar#declared
) {
    EACH(column, count) {
        const long long i = first + column;
        const int code = codes[i];
        const bool alive = #came_through;
        const double sign = stop[i] < start[i] ? -1.0 : 1.0;
        const double begun = sign * start[i];
        double ahead = sign * t_reached[i];
        @load
        if (alive) {
            long long place = n_saved - 1;
            @events
            while (place >= 0 && due_at(times, n_saved, by_row, i, place, sign) > ahead) --place;
            for (long long step = naccept[i] - 1; step >= 0; --step) {
                const double t = steps_t[2 * step * count + column], h = steps_t[(2 * step + 1) * count + column];
                const double now = sign * t, size = sign * h;
                @before
                while (place >= 0 && due_at(times, n_saved, by_row, i, place, sign) > now) {
                    @met
                    --place;
                }
                @whole
                const double tn = sign * ahead;
                @stages
                @crossed
                @back
                ahead = now;
            }
            while (place >= 0 && due_at(times, n_saved, by_row, i, place, sign) == begun) {
                @start
                --place;
            }
        }
        @leave
    }
}
"""


def cuda_reverse_text(form: Form) -> str:
    """Return the text of `reverse`, which calls `f` and its adjoint `g`."""
    return _Reverse(form).text()


class _Reverse:
    def __init__(self, form: Form):
        self.form, self.d, self.steps = form, form.d, steps_of(form, fused=False)
        self.crossings = Crossings(form, self.steps)
        # What the body of the loop over steps declares.
        self.scope = {*self.steps.state(f"z{form.stages}"), *self.steps.state("total")}
        self.sums = numbered("own", form.wanted_varying) + numbered("common", form.wanted_shared)

    def text(self) -> str:
        made = block(
            _KERNEL, load=self._load(), before=self._before(), met=self._met(), start=self._at_end(), leave=self._leave(),
            stages=c_lines(self.steps.again(), self.scope), back=self._back(), events=self.crossings.begun(),
            whole=self.crossings.step_end(), crossed=self.crossings.pulled(),
        )  # fmt: skip
        return made.replace("#declared", self.crossings.declared()).replace("#came_through", came_through(self.form))

    def _load(self) -> list[str]:
        made = loaded_parameters(self.form) + own_memory(self.steps)
        # Whatever the cotangent of one that failed is, NaN included, it isn't looked at.
        made += [f"real total_{c} = alive ? end_bar[{c} * n + i] : 0;" for c in range(self.d)]
        return made + [f"real {name} = 0;" for name in self.sums]

    def _before(self) -> list[str]:
        made = rounded_step(self.form)
        made += [f"const real y0_{c} = steps_u[(step * {self.d} + {c}) * count + column];" for c in range(self.d)]
        if self.form.inside:
            made += [f"real mid_{c} = 0;" for c in range(self.d)]
            made += [f"real arrival{i}_{c} = 0;" for i in range(self.form.stages + 1) for c in range(self.d)]
            made.append("bool met = false;")
        return made

    def _at_end(self) -> list[str]:
        return [f"total_{c} += saved_bar[(place * {self.d} + {c}) * n + i];" for c in range(self.d)]

    def _met(self) -> list[str]:
        """Return what a saved state's cotangent adds to those of the stages, for a time inside of the step."""
        if not self.form.inside:
            return self._at_end()
        inside = ["met = true;", *c_lines(["x = (due - now) / size", *self.steps.weights()])]
        for c in range(self.d):
            inside.append(f"const real bar_{c} = saved_bar[(place * {self.d} + {c}) * n + i];")
            inside.append(f"mid_{c} += bar_{c};")
            inside += [f"arrival{i}_{c} += w{i} * bar_{c};" for i in self.steps.used()]
        return [
            "const double due = due_at(times, n_saved, by_row, i, place, sign);",
            "if (due < ahead) {", *indented(inside), "} else {", *indented(self._at_end()), "}",
        ]  # fmt: skip

    def _back(self) -> list[str]:
        last, pulled, new = self.form.stages, self.steps.pulled_stages, self.steps.state(f"z{self.form.stages}")
        made = [f"real {', '.join(new)};"]
        if last in pulled:
            # The stage at the new state counts only where a state inside of this step was saved.
            made += ["if (met) {", *indented(self._pulled(last, set(self.scope))), "}"]
        # From here on the new state's cotangent is complete.
        made += [f"{z} = total_{c};" for c, z in enumerate(new)]
        for i in reversed(pulled):
            made += self._pulled(i, self.scope) if i < last else []
        if self.form.inside:
            made += [f"total_{c} += mid_{c};" for c in range(self.d)]
        return made

    def _pulled(self, i: int, scope: set[str]) -> list[str]:
        """Return how the cotangent of stage i goes back to its argument, and to the parameters."""
        made = c_lines(self.steps.pulled(i, lambda c: f"arrival{i}_{c}"), scope)
        return made + [f"{name} += e{j};" for j, name in enumerate(self.sums)]

    def _leave(self) -> list[str]:
        made = [f"u0_bar[{c} * n + i] = total_{c};" for c in range(self.d)]
        made += [f"p_bar[{j} * n + i] = own{j};" for j in range(self.form.wanted_varying)]
        return made + [f"s_bar[{j} * count + column] = common{j};" for j in range(self.form.wanted_shared)]
