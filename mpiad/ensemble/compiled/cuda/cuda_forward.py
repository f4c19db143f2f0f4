"""The text of the forward kernel: a whole adaptive solve in each thread, its state in registers.

It takes the steps that the vectorised path takes: see `pool`, `starting`, `controller` and `saving`, whose arithmetic this
repeats in the same order. Times are in the direction of the solve, steps are signed.
"""

from __future__ import annotations

from mpiad.ensemble.compiled.cuda.cuda_events import Watch
from mpiad.ensemble.compiled.cuda.cuda_pieces import Pieces, block, dense_weights, numbered
from mpiad.ensemble.compiled.cuda.cuda_plan import Plan
from mpiad.ensemble.controller import LEAST_ERROR, PIController
from mpiad.ensemble.retcodes import ReturnCode

__all__ = ["forward_text"]

_KERNEL = """
// The trajectories first, ..., first + count - 1 of n. saved: (n_saved, d, n); the others: (rows, n). steps_u, steps_t:
// capacity rows of (d, count) and (2, count). Without u_end nothing is left but the steps. rows: (6, room).
KERNEL forward(
    const long long n, const long long first, const long long count, const real* u0, const real* p, const real* s,
    const double* start, const double* stop, const double* times, const long long n_saved, const long long by_row,
    const real rtol, const real* atol, const double dt, const double dtmax, const long long max_steps, real* u_end,
    real* saved, double* t_reached, int* codes, int* naccept, int* nreject, real* du_end, real* dsaved, real* steps_u,
    double* steps_t, const long long capacity@declared
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
        int code = now == goal ? @success : -1;
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
            const double size = ahead - now;
            const real h = (real)(sign * size);
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
            if (code < 0 && tries >= max_steps) code = @tired;
        }
        if (u_end) {
            @leave
            @heads
            t_reached[i] = sign * now;
            codes[i] = code;
            naccept[i] = (int)taken;
            nreject[i] = (int)(tries - taken);
        }
    }
}
"""

def forward_text(plan: Plan) -> str:
    """Return the text of `forward`, which calls `f`, and `df0`, `df1`, … along directions."""
    return _Forward(plan).text()


class _Forward:
    def __init__(self, plan: Plan):
        self.plan, self.d, self.pieces = plan, plan.d, Pieces(plan)
        self.adaptive = plan.tableau.error is not None
        self.remembers = self.adaptive and isinstance(plan.controller, PIController)
        self.tangents, self.watch = range(len(plan.directions)), Watch(plan)

    def text(self) -> str:
        made = block(
            _KERNEL, load=self._load(), save_start=self._saved("u", "du"), first=self._first(), stages=self._stages(),
            remember=f"double before = {LEAST_ERROR!r};" if self.remembers else [], judge=self._judge(),
            # As in `pool`: a last step of rounding's size is none.
            fixed_end=[] if self.adaptive else "if (ahead > goal - 1e-9 * following) ahead = goal;",
            tangents=self._tangent_stages(), record=self._record(), save=self._save(), advance=self._advance(),
            fail=self._fail(), leave=self._leave(), done=self._done(),
            watched=self.watch.begun(), events=self.watch.looked(),
            heads="heads[i] = head;" if self.plan.events else [],
        ).replace("@declared", self.watch.declared())  # fmt: skip
        codes = {"@success": ReturnCode.Success, "@tired": ReturnCode.MaxIters}
        for name, code in codes.items():
            made = made.replace(name, str(code.code))
        return made

    def _time(self, i: int) -> str:
        c = self.plan.tableau.c[i]
        return "(real)(sign * ahead)" if c == 1 else f"(real)(sign * (size * {c!r} + now))"

    # ---- before the first step

    def _load(self) -> list[str]:
        made = [f"real u_{c} = u0[{c} * n + i];" for c in range(self.d)] + self.pieces.loaded_parameters()
        made.append(self.pieces.declared(numbered("k0", self.d)))
        for j, (kind, place) in enumerate(self.plan.directions):
            made.append(self.pieces.declared(numbered(f"l{j}_0", self.d)))
            made += [f"real du{j}_{c} = {int(kind == 'state' and place == c)};" for c in range(self.d)]
        return made

    def _first(self) -> list[str]:
        d, pieces = self.d, self.pieces
        time = "(real)(sign * now)"
        begun = [pieces.call("f", "u", time, numbered("k0", d))]
        begun += [pieces.call(f"df{j}", "u", time, numbered(f"l{j}_0", d), self._du(j)) for j in self.tangents]
        chosen = block(
            """
            const double span = goal - now;
            @scales
            double d0 = 0, d1 = 0, d2 = 0;
            @norms
            double h0 = d0 < 1e-5 || d1 < 1e-5 ? 1e-6 : 0.01 * d0 / d1;
            h0 = smaller(h0, span);
            @probe
            d2 = d2 / h0;
            const double h1 = d1 <= 1e-15 && d2 <= 1e-15 ? larger(1e-6, h0 * 1e-3) : pow(0.01 / larger(d1, d2), @exponent);
            following = smaller(smaller(100 * h0, h1), span);
            if (!finite_number(following)) following = span;
            """,
            scales=[f"const real scale_{c} = fabs(u_{c}) * rtol + atol[{c}];" for c in range(d)],
            norms=[*self._norm("d0", "u_{0}"), *self._norm("d1", "k0_{0}")],
            probe=[
                "const real h = (real)(sign * h0);",
                *[f"const real probe_{c} = u_{c} + h * k0_{c};" for c in range(d)],
                pieces.declared(numbered("kp", d)),
                pieces.call("f", "probe", "(real)(sign * (now + h0))", numbered("kp", d)),
                *self._norm("d2", "(kp_{0} - k0_{0})"),
            ],
        ).replace("@exponent", repr(1 / self.plan.tableau.error_order))
        ended = ["} else {", *("    " + line for line in chosen.splitlines()), "}"]
        last = "following = larger(smaller(following, dtmax), least_step(now));"
        return [*begun, "if (dt > 0) {", "    following = dt;", *ended, last]

    def _norm(self, out: str, top: str) -> list[str]:
        terms = [f"({top.format(c)} / scale_{c}) * ({top.format(c)} / scale_{c})" for c in range(self.d)]
        return [f"{out} = sqrt((double)({' + '.join(terms)}) / {self.d});"]

    def _du(self, j: int) -> list[str]:
        return numbered(f"du{j}", self.d)

    # ---- a step

    def _stages(self) -> list[str]:
        return self.pieces.stages(self._time, self.plan.last)

    def _judge(self) -> list[str]:
        if not self.adaptive:
            # Zero where all are finite.
            total = " + ".join(f"(next_{c} - next_{c})" for c in range(self.d))
            return [f"const bool accepted = {total} == 0;"]
        plan, made, terms = self.plan, [], []
        for c in range(self.d):
            error = self.pieces.weighted(plan.tableau.error or (), "k", c)
            scale = f"((real)larger(fabs(u_{c}), fabs(next_{c})) * rtol + atol[{c}])"
            made.append(f"const real error_{c} = ({error}) * h / {scale};")
            terms.append(f"error_{c} * error_{c}")
        return [
            *made,
            f"const double q2 = (double)({' + '.join(terms)}) / {self.d};",
            "const bool accepted = q2 < 1;",
            *self._factor(),
            "following = smaller(size * factor, dtmax);",
            "rejected = !accepted;",
            *([f"if (accepted) before = larger(q2, {LEAST_ERROR!r});"] if self.remembers else []),
        ]

    def _factor(self) -> list[str]:
        controller, order = self.plan.controller, self.plan.tableau.error_order
        text = f"pow(q2, {-0.5 / order!r})"
        if isinstance(controller, PIController):
            steady = f"pow(q2, {-0.5 * (1 - 0.75 * controller.beta) / order!r})"
            text = f"(accepted ? {steady} * pow(before, {0.5 * controller.beta / order!r}) : {text})"
        return [
            # fmax, because an error that is NaN must shrink the step.
            f"double factor = fmax({text} * {controller.safety!r}, {controller.least!r});",
            f"factor = smaller(factor, rejected ? 1.0 : {controller.most!r});",
        ]

    def _tangent_stages(self) -> list[str]:
        """Return the tangents of all stages, for steps that are accepted only."""
        plan, pieces, made = self.plan, self.pieces, []
        for j in self.tangents:
            for i in range(1, plan.last + 1):
                out = f"dnext{j}" if i == plan.last else f"z{j}_{i}"
                made += pieces.argument(out, i, f"l{j}_", f"du{j}")
                values = numbered(f"l{j}_{i}", self.d)
                made.append(pieces.declared(values))
                made.append(pieces.call(f"df{j}", pieces.state_of(i), self._time(i), values, numbered(out, self.d)))
        return made

    def _advance(self) -> list[str]:
        # The last stage is the first of the next step, and so is its tangent.
        last, made = self.plan.last, []
        for c in range(self.d):
            made += [f"u_{c} = next_{c};", f"k0_{c} = k{last}_{c};"]
            for j in self.tangents:
                made += [f"du{j}_{c} = dnext{j}_{c};", f"l{j}_0_{c} = l{j}_{last}_{c};"]
        return made + self.watch.advanced()

    def _done(self) -> str:
        done = f"if (now == goal) code = {ReturnCode.Success.code};"
        return f"if (ended) code = {ReturnCode.Terminated.code}; else {done}" if self.plan.events else done

    def _fail(self) -> list[str]:
        if not self.adaptive:
            return [f"if (!accepted) code = {ReturnCode.Unstable.code};"]
        return block(
            f"""
            if (code < 0 && following < least_step(now)) {{
                if (accepted) following = least_step(now);
                else code = finite_number(q2) ? {ReturnCode.DtLessThanMin.code} : {ReturnCode.Unstable.code};
            }}
            """
        ).splitlines()

    # ---- what is kept

    def _record(self) -> list[str]:
        if not self.plan.record:
            return []
        kept = [f"steps_u[(taken * {self.d} + {c}) * count + column] = u_{c};" for c in range(self.d)]
        kept += [f"steps_t[(2 * taken + {j}) * count + column] = sign * {x};" for j, x in enumerate(("now", "size"))]
        # Beyond its capacity it only counts, so that the next try has enough.
        return ["if (taken < capacity) {", *("    " + line for line in kept), "}"]

    def _saved(self, u: str, du: str) -> list[str]:
        made = [f"saved[(place * {self.d} + {c}) * n + i] = {u}_{c};" for c in range(self.d)]
        made += [
            f"dsaved[(({j} * n_saved + place) * {self.d} + {c}) * n + i] = {du}{j}_{c};"
            for j in self.tangents for c in range(self.d)
        ]  # fmt: skip
        return made

    def _save(self) -> list[str]:
        at_end = self._saved("next", "dnext")
        if not self.plan.inside:
            return at_end
        weights = [float(row.any()) for row in self.plan.tableau.dense]
        used = [i for i, w in enumerate(weights) if w]

        def state(name: str, stage: str, before: str) -> list[str]:
            return [
                f"const real {name}_{c} = ({' + '.join(f'weight{i} * {stage}{i}_{c}' for i in used)}) * h + {before}_{c};"
                for c in range(self.d)
            ]  # fmt: skip

        inside = ["const double x = (due - now) / size;", *dense_weights(self.pieces), *state("mid", "k", "u")]
        for j in self.tangents:
            inside += state(f"dmid{j}", f"l{j}_", f"du{j}")
        inside += self._saved("mid", "dmid")
        return [
            "if (due < ahead) {", *("    " + line for line in inside), "} else {", *("    " + line for line in at_end), "}",
        ]  # fmt: skip

    def _leave(self) -> list[str]:
        made = [f"u_end[{c} * n + i] = u_{c};" for c in range(self.d)]
        return made + [f"du_end[({j} * {self.d} + {c}) * n + i] = du{j}_{c};" for j in self.tangents for c in range(self.d)]
