"""The text of the reverse kernel: in each thread the adjoint of one trajectory's accepted steps.

See `transposed_step`: the stages are computed again from the state before the step, and cotangents go back through them.
What all trajectories share gets a column of its own from each, so that the sum doesn't depend on who comes first.
"""

from __future__ import annotations

from mpiad.ensemble.compiled.cuda.cuda_events import Crossings, came_through
from mpiad.ensemble.compiled.cuda.cuda_pieces import Pieces, block, dense_weights, numbered
from mpiad.ensemble.compiled.cuda.cuda_plan import Plan

__all__ = ["reverse_text"]

_KERNEL = """
// The trajectories and their steps as in forward. end_bar, u0_bar: (d, n); saved_bar: (n_saved, d, n); p_bar: (rows, n);
// s_bar: (rows, count).
KERNEL reverse(
    const long long n, const long long first, const long long count, const real* p, const real* s, const double* start,
    const double* stop, const double* times, const long long n_saved, const long long by_row, const real* steps_u,
    const double* steps_t, const int* naccept, const double* t_reached, const int* codes, const real* end_bar,
    const real* saved_bar, real* u0_bar, real* p_bar, real* s_bar@declared
) {
    EACH(column, count) {
        const long long i = first + column;
        const int code = codes[i];
        const bool alive = @came_through;
        const double sign = stop[i] < start[i] ? -1.0 : 1.0;
        const double begun = sign * start[i];
        double ahead = sign * t_reached[i];
        @load
        if (alive) {
            long long place = n_saved - 1;
            @events
            while (place >= 0 && due_at(times, n_saved, by_row, i, place, sign) > ahead) --place;
            for (long long step = naccept[i] - 1; step >= 0; --step) {
                const double now = sign * steps_t[2 * step * count + column];
                const double size = sign * steps_t[(2 * step + 1) * count + column];
                const real h = (real)(sign * size);
                @before
                while (place >= 0 && due_at(times, n_saved, by_row, i, place, sign) > now) {
                    @met
                    --place;
                }
                @whole
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


def reverse_text(plan: Plan) -> str:
    """Return the text of `reverse`, which calls `f` and its adjoint `g`."""
    return _Reverse(plan).text()


class _Reverse:
    def __init__(self, plan: Plan):
        self.plan, self.d, self.pieces = plan, plan.d, Pieces(plan)
        self.crossings = Crossings(plan)
        self.wanted = [*plan.wanted_varying, *plan.wanted_shared]

    def text(self) -> str:
        return block(
            _KERNEL, load=self._load(), before=self._before(), met=self._met(), stages=self._stages(), back=self._back(),
            start=self._at_end(), leave=self._leave(), events=self.crossings.begun(), whole=self.crossings.step_end(),
            crossed=self.crossings.pulled(),
        ).replace("@declared", self.crossings.declared()).replace("@came_through", came_through(self.plan))  # fmt: skip

    def _time(self, i: int) -> str:
        c = self.plan.tableau.c[i]
        return "(real)(sign * ahead)" if c == 1 else f"(real)(sign * (size * {c!r} + now))"

    def _load(self) -> list[str]:
        made = self.pieces.loaded_parameters()
        # Whatever the cotangent of one that failed is, NaN included, it isn't looked at.
        made += [f"real total_{c} = alive ? end_bar[{c} * n + i] : 0;" for c in range(self.d)]
        return made + [f"real sum_{j} = 0;" for j in self.wanted]

    def _before(self) -> list[str]:
        made = [f"const real u_{c} = steps_u[(step * {self.d} + {c}) * count + column];" for c in range(self.d)]
        if self.plan.inside:
            made += [f"real mid_{c} = 0;" for c in range(self.d)]
            made += [f"real arrival{i}_{c} = 0;" for i in range(self.plan.last + 1) for c in range(self.d)]
            made.append("bool met = false;")
        return made

    def _at_end(self) -> list[str]:
        return [f"total_{c} += saved_bar[(place * {self.d} + {c}) * n + i];" for c in range(self.d)]

    def _met(self) -> list[str]:
        """Return what a saved state's cotangent adds to those of the stages, for a time inside of the step."""
        if not self.plan.inside:
            return self._at_end()
        used = [i for i, row in enumerate(self.plan.tableau.dense) if row.any()]
        inside = ["met = true;", "const double x = (due - now) / size;", *dense_weights(self.pieces)]
        for c in range(self.d):
            inside.append(f"const real bar_{c} = saved_bar[(place * {self.d} + {c}) * n + i];")
            inside.append(f"mid_{c} += bar_{c};")
            inside += [f"arrival{i}_{c} += weight{i} * bar_{c};" for i in used]
        return [
            "const double due = due_at(times, n_saved, by_row, i, place, sign);",
            "if (due < ahead) {", *("    " + line for line in inside), "} else {",
            *("    " + line for line in self._at_end()), "}",
        ]  # fmt: skip

    def _stages(self) -> list[str]:
        pieces, last = self.pieces, self.plan.last
        made = [pieces.declared(numbered("k0", self.d)), pieces.call("f", "u", self._time(0), numbered("k0", self.d))]
        made += pieces.stages(self._time, last - 1)
        return made + (pieces.argument("next", last) if self.plan.inside else [])

    def _back(self) -> list[str]:
        last, made = self.plan.last, []
        if self.plan.inside:
            # The stage at the new state counts only where a state inside of this step was saved.
            made += [f"real z{last}_{c} = 0;" for c in range(self.d)]
            pulled = self._pulled(last, declare=False)
            made += ["if (met) {", *("    " + line for line in pulled), "}"]
        # From here on the new state's cotangent is complete.
        made += [f"const real c{last}_{c} = total_{c};" for c in range(self.d)]
        for i in range(last - 1, -1, -1):
            made += self._pulled(i)
        if self.plan.inside:
            made += [f"total_{c} += mid_{c};" for c in range(self.d)]
        return made

    def _pulled(self, i: int, declare: bool = True) -> list[str]:
        """Return how the cotangent of stage i goes back to its argument, and to the parameters."""
        pieces, last, table = self.pieces, self.plan.last, ((), *self.plan.tableau.a)
        bars, gains = numbered(f"bar{i}", self.d), [f"gain{i}_{j}" for j in self.wanted]
        made = []
        for c in range(self.d):
            weights = [(j, table[j][i]) for j in range(last, i, -1) if table[j][i]]
            terms = [f"{pieces.number(w)} * {'c' if j == last else 'z'}{j}_{c}" for j, w in weights]
            terms += [f"arrival{i}_{c}"] if self.plan.inside else []
            made.append(f"const real {bars[c]} = ({' + '.join(terms) or '0'}) * h;")
        back = numbered(f"z{i}", self.d)
        made += [pieces.declared(back)] if declare else []
        made += [pieces.declared(gains)] if gains else []
        made.append(pieces.call("g", pieces.state_of(i), self._time(i), [*back, *gains], bars))
        made += [f"total_{c} += z{i}_{c};" for c in range(self.d)]
        return made + [f"sum_{j} += gain{i}_{j};" for j in self.wanted]

    def _leave(self) -> list[str]:
        made = [f"u0_bar[{c} * n + i] = total_{c};" for c in range(self.d)]
        made += [f"p_bar[{row} * n + i] = sum_{j};" for row, j in enumerate(self.plan.wanted_varying)]
        return made + [f"s_bar[{row} * count + column] = sum_{j};" for row, j in enumerate(self.plan.wanted_shared)]
