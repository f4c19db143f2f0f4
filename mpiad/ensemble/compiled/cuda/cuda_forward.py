"""The text of the forward kernel: a whole adaptive solve in each thread, its state in registers.

The step is that of `step_text`, as C. `now`, `ahead` and `size` are in the direction of the solve.
"""

from __future__ import annotations

from mpiad.compiling.c_translation import c_lines
from mpiad.compiling.source import indented
from mpiad.ensemble.compiled.cuda.cuda_events import EventSearch
from mpiad.ensemble.compiled.cuda.cuda_skeleton import block, loaded_parameters, own_memory, rounded_step
from mpiad.ensemble.compiled.kernel_form import Form
from mpiad.ensemble.compiled.rosenbrock_text import steps_of
from mpiad.ensemble.controller import LEAST_ERROR, PIController
from mpiad.ensemble.outcome import ReturnCode

_KERNEL = """
// The trajectories first, ..., first + count - 1 of n. saved: (n_saved, d, n); the others: (rows, n). steps_u, steps_t:
// capacity rows of (d, count) and (2, count). Without u_end nothing is left but the steps. rows: (6, room).
KERNEL forward(
    const long long n, const long long first, const long long count, const real* u0, const real* p, const real* s,
    const double* start, const double* stop, const double* times, const long long n_saved, const long long by_row,
    const real rtol, const real* atol, const double dt, const double dtmax, const long long max_steps, real* u_end,
    real* saved, double* t_reached, int* codes, int* naccept, int* nreject, real* du_end, real* dsaved, real* steps_u,
    double* steps_t, const long long capacity#declared
) {
    EACH(column, count) {
        const long long i = first + column;
        const double sign = stop[i] < start[i] ? -1.0 : 1.0;
        const double goal = sign * stop[i];
        double now = sign * start[i];
        @load
        long long place = 0;
        double due = due_at(times, n_saved, by_row, i, place, sign);
        while (due == now) {
            @save_start
            due = due_at(times, n_saved, by_row, i, ++place, sign);
        }
        int code = now == goal ? #success : -1;
        long long taken = 0, tries = 0;
        double following = 1;
        bool rejected = false;
        @remember
        @watched
        if (code < 0) {
            @first
        }
        while (code < 0) {
            double ahead = now + following;
            @fixed_end
            ahead = smaller(ahead, goal);
            const double size = ahead - now, h = sign * size, t = sign * now, tn = sign * ahead;
            @stages
            ++tries;
            @judge
            if (accepted) {
                @tangents
                @record
                @events
                while (due <= ahead) {
                    @save
                    due = due_at(times, n_saved, by_row, i, ++place, sign);
                }
                @advance
                now = ahead;
                ++taken;
                @done
            }
            @fail
            if (code < 0 && tries >= max_steps) code = #tired;
        }
        if (u_end) {
            @leave
            t_reached[i] = sign * now;
            codes[i] = code;
            naccept[i] = (int)taken;
            nreject[i] = (int)(tries - taken);
        }
    }
}
"""


def cuda_forward_text(form: Form) -> str:
    """Return the text of `forward`, which calls `f`, and `df0`, `df1`, ... along directions."""
    return _Forward(form).text()


def _power(x: str, exponent: str, out: str) -> list[str]:
    return [f"{out} = {x} ** {exponent}"]


class _Forward:
    def __init__(self, form: Form):
        self.form, self.d, self.steps = form, form.d, steps_of(form, fused=False)
        self.adaptive = form.tableau.error is not None
        self.remembers = self.adaptive and isinstance(form.controller, PIController)
        self.tangents, self.watch = range(len(form.directions)), EventSearch(form, self.steps)
        self.scope: set[str] = set()  # what the body of the loop over steps declares

    def text(self) -> str:
        made = block(
            _KERNEL, load=self._load(), save_start=self._saved("u", "du"), first=self._first(),
            stages=[*rounded_step(self.form), *c_lines(self.steps.stages(), self.scope)],
            remember=[f"double before = {LEAST_ERROR!r};"] if self.remembers else [], judge=self._judge(),
            # As in `pool`: a last step of rounding's size is none.
            fixed_end=[] if self.adaptive else ["if (ahead > goal - 1e-9 * following) ahead = goal;"],
            tangents=self._tangent_stages(), record=self._record(), save=self._save(), advance=self._advance(),
            fail=self._fail(), leave=self._leave(), done=self._done(), watched=self.watch.begun(),
            events=self.watch.looked(),
        )  # fmt: skip
        made = made.replace("#declared", self.watch.declared())
        return made.replace("#success", str(ReturnCode.Success.code)).replace("#tired", str(ReturnCode.MaxIters.code))

    def _du(self, j: int) -> list[str]:
        return self.steps.state(f"du{j}")

    # ---- before the first step

    def _load(self) -> list[str]:
        form, state = self.form, self.steps.state
        made = [f"real u_{c} = u0[{c} * n + i];" for c in range(self.d)] + loaded_parameters(form)
        tolerances = len(form.numbers) if form.tolerances else 1
        made += [f"const real atol{c} = atol[{c}];" for c in range(tolerances)]
        made += ["const real rtol_ = rtol;"] if form.single else []
        made += own_memory(self.steps)
        made.append(f"real {', '.join(state('k0'))};")
        for j, (kind, place) in enumerate(form.directions):
            made.append(f"real {', '.join(state(f'l{j}_0'))};")
            made += [f"real {name} = {int(kind == 'u' and place == c)};" for c, name in enumerate(self._du(j))]
        return made

    def _first(self) -> list[str]:
        steps, scope = self.steps, {*self.steps.state("k0"), "h"}
        lines = [steps.call("k0", "u", 0)]
        for j in self.tangents:
            lines.append(steps.call(f"l{j}_0", "u", 0, f"df{j}", self._du(j)))
            scope.update(steps.state(f"l{j}_0"))
        return [
            "const double t = sign * now, span = goal - now;",
            "double h;",
            *c_lines([*lines, *steps.first_step()], scope),
            "following = larger(smaller(h, dtmax), least_step(now));",
        ]

    # ---- a step

    def _judge(self) -> list[str]:
        made = c_lines(self.steps.error(), self.scope)
        if not self.adaptive:
            return [*made, "const bool accepted = q2 == 0;"]
        return [
            *made,
            "const bool accepted = q2 < 1;",
            *c_lines(self.steps.factor(_power, "before", "rejected"), ["before"]),
            "following = smaller(size * factor, dtmax);",
            "rejected = !accepted;",
        ]

    def _tangent_stages(self) -> list[str]:
        """Return the tangents of all stages, for steps that are accepted only."""
        steps, lines = self.steps, []
        for j in self.tangents:
            for i in range(1, self.form.stages + 1):
                out = f"dnew{j}" if i == self.form.stages else f"z{j}_{i}"
                lines += steps.argument(out, i, f"l{j}_", f"du{j}", fused=True)
                lines.append(steps.call(f"l{j}_{i}", steps.argument_of(i), i, f"df{j}", steps.state(out)))
        return c_lines(lines)

    def _advance(self) -> list[str]:
        # The last stage is the first of the next step, and so is its tangent.
        last, made = self.form.stages, []
        for c in range(self.d):
            made += [f"u_{c} = new_{c};", f"k0_{c} = k{last}_{c};"]
            for j in self.tangents:
                made += [f"du{j}_{c} = dnew{j}_{c};", f"l{j}_0_{c} = l{j}_{last}_{c};"]
        return made + self.watch.advanced()

    def _done(self) -> list[str]:
        done = f"if (now == goal) code = {ReturnCode.Success.code};"
        return [f"if (ended) code = {ReturnCode.Terminated.code}; else {done}" if self.form.events else done]

    def _fail(self) -> list[str]:
        if not self.adaptive:
            return [f"if (!accepted) code = {ReturnCode.Unstable.code};"]
        return [
            "if (code < 0 && following < least_step(now)) {",
            "    if (accepted) following = least_step(now);",
            f"    else code = finite_number(q2) ? {ReturnCode.DtLessThanMin.code} : {ReturnCode.Unstable.code};",
            "}",
        ]

    # ---- what is kept

    def _record(self) -> list[str]:
        if not self.form.record:
            return []
        kept = [f"steps_u[(taken * {self.d} + {c}) * count + column] = u_{c};" for c in range(self.d)]
        kept += [f"steps_t[(2 * taken + {j}) * count + column] = {x};" for j, x in enumerate("th")]
        # Beyond its capacity it only counts, so that the next try has enough.
        return ["if (taken < capacity) {", *indented(kept), "}"]

    def _saved(self, u: str, du: str) -> list[str]:
        made = [f"saved[(place * {self.d} + {c}) * n + i] = {u}_{c};" for c in range(self.d)]
        made += [
            f"dsaved[(({j} * n_saved + place) * {self.d} + {c}) * n + i] = {du}{j}_{c};"
            for j in self.tangents for c in range(self.d)
        ]  # fmt: skip
        return made

    def _save(self) -> list[str]:
        at_end, steps = self._saved("new", "dnew"), self.steps
        if not self.form.inside:
            return at_end
        lines = ["x = (due - now) / size", *steps.weights()]
        for c in range(self.d):
            lines += steps.interpolated(f"mid_{c}", lambda i, c=c: f"k{i}_{c}", f"u_{c}")
            for j in self.tangents:
                stage = lambda i, c=c, j=j: f"l{j}_{i}_{c}"  # noqa: E731
                lines += steps.interpolated(f"dmid{j}_{c}", stage, f"du{j}_{c}", fused=True)
        inside = c_lines(lines) + self._saved("mid", "dmid")
        return ["if (due < ahead) {", *indented(inside), "} else {", *indented(at_end), "}"]

    def _leave(self) -> list[str]:
        made = [f"u_end[{c} * n + i] = u_{c};" for c in range(self.d)]
        made += [f"du_end[({j} * {self.d} + {c}) * n + i] = {x};" for j in self.tangents for c, x in enumerate(self._du(j))]
        return made + (["heads[i] = head;"] if self.form.events else [])
