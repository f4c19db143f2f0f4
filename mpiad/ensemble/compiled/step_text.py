"""The lines of one Runge-Kutta step in the kernel language, a subset of Python, for CPU and GPU kernels.

For GPUs the lines are translated to C++ (`mpiad.compiling.c_translation`). The variables are scalars: the components u_0,
u_1, ... of the state before the step, new_0, ... of the state after the step, k0_0, ... of the stages, and y1_0, ... of
the arguments of f. The times `t` and `tn` of both ends of the step, and its signed size `h`, are in double precision.

In CPU kernels, states with many components are arrays, which are processed by loops over a variable c. Their entries are
written u_c, or u_0; `Steps.with_arrays` replaces these names by entries of an array u_, and declares the array.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from mpiad.compiling.source import indented, number, numbered
from mpiad.ensemble.compiled.kernel_spec import KernelSpec, filled
from mpiad.ensemble.controller import LEAST_ERROR

# Returns lines for a power, given the names of x, the exponent and the result.
Power: TypeAlias = Callable[[str, str, str], list[str]]


class Steps:
    """The lines of one step; `fused`: whether sums in derivatives use `fma`, as in CPU kernels; False for GPU kernels."""

    lu_length = 0  # length of the array `lu` of a GPU kernel
    lane_range = "lanes"  # the range of the loop over lanes: "range" if a step has branches
    _doubles = ("rate",)  # states in double precision

    def __init__(self, spec: KernelSpec, fused: bool = True):
        self.spec, self.fused, self.rolled = spec, fused, fused and spec.rolled
        self.functions: list[str] = []  # functions that a step calls, in addition to f and its derivatives
        self._passed = set[str]()  # the states whose arrays are passed to functions
        # Times are double. `h_` and `rtol_`, which are multiplied by states, have the precision of states.
        self.h = "h_" if spec.single else "h"
        shares = fused and spec.shares_array
        self.parameters = [f"{kind}{i}" for kind in ("p" if shares else "ps") for i in spec.loaded(kind)]
        # Entries of tables are read from the kernel's arguments p and s, at the trajectory of the lane, if it has one.
        tables = ["p", "s", "max(ids[l], 0)"] if fused else ["p", "s", "i", "n"]
        self.parameters += tables if spec.tables else ["s"] if shares else []
        if spec.tables:
            self.lane_range = "range"  # vectors have no indices of different lanes
        # Functions that add cotangents to the fields p_bar and s_bar of the lane l, instead of returning them.
        self.bars = ["live", "$$p_bar", "l"] if fused and spec.accumulates else []
        self.wanted = 0 if self.bars else spec.wanted_varying + spec.wanted_shared

    # ---- numbers

    def number(self, x: float) -> str:
        """Return a literal in the precision of states."""
        return f"np.float32({x!r})" if self.spec.single else number(x)

    def rounded(self, text: str) -> str:
        """Return the conversion of a double to the precision of states."""
        return f"np.float32({text})" if self.spec.single else text

    def doubled(self, text: str) -> str:
        """Return the conversion from the precision of states to double."""
        return f"np.float64({text})" if self.spec.single else f"({text})"

    def quotient(self, numerator: str, denominator: str) -> str:
        """Return a quotient; for GPUs the product with the reciprocal, which takes fewer instructions and registers."""
        return f"{numerator} / {denominator}" if self.fused else f"{numerator} * ({self.number(1.0)} / {denominator})"

    def rounded_step(self) -> list[str]:
        """Return lines that convert the step size `h` to the precision of states."""
        return [f"{self.h} = np.float32(h)"] if self.spec.single else []

    # ---- states

    @property
    def components(self) -> str | range:
        """The values of ``c`` in templates, or the text of a range."""
        return f"range({self.spec.d})" if self.rolled else range(self.spec.d)

    def state(self, name: str) -> list[str]:
        """Return the names of the components of a state, or of its array."""
        if not self.rolled:
            return [f"{name}_{c}" for c in range(self.spec.d)]
        self._passed.add(name)
        return [f"{name}_"]

    def each(self, *lines: str) -> list[str]:
        """Return lines with ``{c}`` for every component, or a loop over them."""
        return filled("\n".join(["each c:", *indented(list(lines))]), {"c": self.components})

    def summed(self, out: str, term: str) -> list[str]:
        """Return lines that assign the sum of a term with ``{c}`` over all components."""
        if not self.rolled:
            return [f"{out} = {' + '.join(term.format(c=c) for c in range(self.spec.d))}"]
        added = f"{out} = {out} + {term.format(c='c')}"
        return [f"{out} = {term.format(c=0)}", f"for c in range(1, {self.spec.d}):", f"    {added}"]

    def with_arrays(self, lines: list[str]) -> list[str]:
        """Return the lines of a kernel in which states are arrays, if `rolled`."""
        if not self.rolled:
            return lines
        # j: the entries of the Jacobian
        names = sorted({"j", *self._passed, *(name for line in lines for name in re.findall(r"\b(\w+)_c\b", line))})
        entry, spec, result = re.compile(rf"\b({'|'.join(names)})_(c|\d+)\b"), self.spec, list(self.functions)
        for line in lines:
            result.append(entry.sub(r"\1_[\2]", line))
            if line.endswith("aligned_stack()") or " in lanes(" in line:
                depth = len(line) - len(line.lstrip()) + 4 * line.endswith(":")
                for name in names:
                    dtype = "np.float32" if spec.single and name not in self._doubles else "np.float64"
                    length = len(spec.jacobian) + len(spec.slopes) if name == "j" else spec.d
                    result.append(f"{' ' * depth}{name}_ = on_stack({length}, {dtype})")
        return result

    # ---- stages

    def weighted(self, weights: Sequence[float], name: str, fused: bool = False) -> str:
        """Return the weighted sum of component ``{c}`` of the stages, whose names are `name` with their indices."""
        terms = [(self.number(w), f"{name}{j}_{{c}}") for j, w in enumerate(weights) if w]
        text = " * ".join(terms[0])
        for w, stage in terms[1:]:
            text = f"fma({w}, {stage}, {text})" if fused else f"{text} + {w} * {stage}"
        return text

    def argument(self, out: str, i: int, k: str, u: str, slope: str = "", fused: bool = False) -> list[str]:
        """Return lines for the argument of stage i, u + h Σ a_ij k_j; `slope`: the name of the sums, or empty."""
        lines, fused = [], fused and self.fused
        total = self.weighted(self.spec.tableau.a[i - 1], k, fused)
        if slope:
            lines.append(f"{slope}_{{c}} = {total}")
            total = f"{slope}_{{c}}"
        value = f"fma({total}, {self.h}, {u}_{{c}})" if fused else f"({total}) * {self.h} + {u}_{{c}}"
        return self.each(*lines, f"{out}_{{c}} = {value}")

    def time(self, i: int) -> str:
        """Return the time of stage i."""
        c = self.spec.tableau.c[i]
        return self.rounded("t" if c == 0 else "tn" if c == 1 else f"{number(c)} * h + t")

    def call(self, out: str, y: str, i: int, function: str = "f", more: Sequence[str] = ()) -> str:
        """Return a line that evaluates f, or its tangent, at the argument y of stage i."""
        return self.called(self.state(out), function, y, self.time(i), more)

    def called(self, out: Sequence[str], function: str, state: str, time: str, more: Sequence[str] = ()) -> str:
        """Return a line that assigns ``function(state, parameters, time, more)`` to the names `out`."""
        # Functions write to the arrays among their results, which are their first arguments.
        arrays = [x for x in out if x.endswith("_")]
        results = ", ".join(x for x in out if x not in arrays)
        given = ", ".join([*arrays, *self.state(state), *self.parameters, time, *more])
        return f"{results}{', = ' * bool(results)}{function}({given})"

    def argument_of(self, i: int, separate: bool = True) -> str:
        """Return the name of the argument of stage i; unless `separate`, later arguments overwrite earlier ones."""
        return "u" if i == 0 else "new" if i == self.spec.stages else f"y{i}" if separate else "y"

    def stages(self, separate: bool = True) -> list[str]:
        """Return lines for all stages but the first, and for the new state."""
        lines = []
        for i in range(1, self.spec.stages + 1):
            y = self.argument_of(i, separate)
            lines += [*self.argument(y, i, "k", "u"), self.call(f"k{i}", y, i)]
        return lines

    def tangents(self, j: int, first: int, last: int) -> list[str]:
        """Return lines for the tangents l{j}_{i} of stages `first` to `last`, and dnew{j} of the new state, given du{j}."""
        lines, stages = [], self.spec.stages
        for i in range(first, stages + 1):
            w = f"du{j}" if i == 0 else f"dnew{j}" if i == stages else f"w{j}"
            lines += self.argument(w, i, f"l{j}_", f"du{j}", fused=True) if i else []
            lines += [self.call(f"l{j}_{i}", self.argument_of(i), i, f"df{j}", self.state(w))] if i <= last else []
        return lines

    # ---- errors

    def tolerance(self, x: str, n: int | str) -> str:
        """Return the tolerance of entry n of a state, an index or ``{c}``, given its modulus x."""
        spec, count = self.spec, len(self.spec.numbers)
        absolute, relative = "atol0", "rtol_" if spec.single else "rtol"
        if spec.tolerances:
            places = (n, n + count) if isinstance(n, int) else ("{c}", f"{{c+{count}}}")
            names = [f"atol[{place}]" if self.rolled else f"atol{place}" for place in places]
            absolute, relative = names[0], names[1] if spec.relative else relative
        return f"{relative} * {x} + {absolute}"

    def error(self) -> list[str]:
        """Return lines for `q2`, the mean square of error over tolerance; for fixed steps 0, NaN if new isn't finite."""
        spec = self.spec
        if spec.tableau.error is None:
            # x - x is zero if x is finite, otherwise NaN.
            return [*self.summed("square", "(new_{c} - new_{c})"), f"q2 = {self.doubled('square')}"]
        lines, error = [], self.quotient(f"({self.weighted(spec.tableau.error, 'k')}) * {self.h}", "permitted")
        if not spec.in_pairs:
            # Variables have one precision in a kernel, and the variables of `forward_kernel` are double.
            modulus = ["before = abs(u_{c})", "after = abs(new_{c})", "modulus = where(after > before, after, before)"]
            lines = self.each(*modulus, f"permitted = {self.tolerance('modulus', '{c}')}", f"error_{{c}} = {error}")
        for n, parts in enumerate(spec.numbers if spec.in_pairs else ()):
            lines += [*self._modulus(parts), f"permitted = {self.tolerance('modulus', n)}"]
            lines += [f"error_{c} = {error.format(c=c)}" for c in parts]
        count = len(spec.numbers)
        lines += self.summed("square", "error_{c} * error_{c}")
        return [*lines, f"q2 = {self.doubled('square')} {f'/ {count}.0' if self.fused else f'* {1 / count!r}'}"]

    def _modulus(self, parts: tuple[int, ...]) -> list[str]:
        """Return lines for `modulus`, the larger of the moduli of a complex number before and after the step."""
        names = [f"{state}_{c}" for state in ("u", "new") for c in parts]
        # Division by the largest part prevents overflow of squares. A call of hypot would prevent vectorization.
        lines = [f"largest = {self.number(float(np.finfo(self.spec.dtype).tiny))}"]
        lines += [f"largest = where(abs({name}) > largest, abs({name}), largest)" for name in names]
        lines.append(f"scale = {self.number(1.0)} / largest")
        lines += [f"r_{name} = {name} * scale" for name in names]
        low, high = (" + ".join(f"r_{state}_{c} * r_{state}_{c}" for c in parts) for state in ("u", "new"))
        return [*lines, f"low = {low}", f"high = {high}", "modulus = math.sqrt(where(high > low, high, low)) * largest"]

    def factor(self, power: Power, before: str, rejected: str) -> list[str]:
        """Return lines for `factor`, as in `PIController.factor`; `before`: the name of the last accepted step's `q2`."""
        controller, order = self.spec.controller, self.spec.tableau.error_order
        beta, plain = controller.beta, number(-0.5 / order)
        lines = [f"exponent = {plain}"]
        if controller.remembers:
            lines = [f"exponent = where(q2 < 1.0, {number(-0.5 * (1 - 0.75 * beta) / order)}, {plain})"]
        lines += [*power("q2", "exponent", "factor"), f"factor = {number(controller.safety)} * factor"]
        if controller.remembers:
            lines += [
                *power(before, number(0.5 * beta / order), "steady"),
                "factor = where(q2 < 1.0, factor * steady, factor)",
                f"bounded = where(q2 > {LEAST_ERROR!r}, q2, {LEAST_ERROR!r})",
                f"{before} = where(accepted > 0.0, bounded, {before})",
            ]
        return [
            *lines,
            f"factor = where(factor > {number(controller.least)}, factor, {number(controller.least)})",
            f"most = where({rejected} > 0.0, 1.0, {number(controller.most)})",
            "factor = where(factor < most, factor, most)",
        ]

    def first_step(self) -> list[str]:
        """Return lines for the first step size `h` in a tspan of length `span`, as in `initialization.started`."""
        spec, lines = self.spec, list[str]()
        for n, parts in enumerate(spec.numbers if spec.in_pairs else ()):
            modulus = f"math.hypot({', '.join(f'u_{c}' for c in parts)})"
            lines += [f"scale_{c} = {self.tolerance(modulus, n)}" for c in parts]
        if not spec.in_pairs:
            lines = self.each(f"scale_{{c}} = {self.tolerance('abs(u_{c})', '{c}')}")
        for out, numerator in (("d0", "u_{c}"), ("d1", "k0_{c}")):
            lines += self._norm(out, numerator)
        lines += [
            # An Euler step of this size changes u by about one percent.
            "h0 = 1e-6 if d0 < 1e-5 or d1 < 1e-5 else 0.01 * d0 / d1",
            "h0 = span if h0 > span else h0",
            "h = sign * h0",
            *self.rounded_step(),
            *self.each(f"y_{{c}} = {self.h} * k0_{{c}} + u_{{c}}"),
            "tn = t + h",
            self.call("k1", "y", spec.stages),
            *self._norm("d2", "(k1_{c} - k0_{c})"),
            "d2 = d2 / h0",
            "steepest = d1 if d1 > d2 else d2",
            # The formula after `else` divides by `steepest`.
            "if d1 <= 1e-15 and d2 <= 1e-15:",
            "    h = max(1e-6, h0 * 1e-3)",
            "else:",
            f"    h = (0.01 / steepest) ** {1 / spec.tableau.error_order!r}",
            "h = min(min(100.0 * h0, h), span)",
            "if not np.isfinite(h):",
            "    h = span",
        ]
        return ["if dt > 0.0:", "    h = dt", "else:", *indented(lines)]

    def _norm(self, out: str, numerator: str) -> list[str]:
        lines = self.each(f"error_{{c}} = {numerator} / scale_{{c}}")
        if self.spec.in_pairs:  # the squares of both parts are added first
            squares = (" + ".join(f"error_{c} * error_{c}" for c in parts) for parts in self.spec.numbers)
            lines.append(f"norm = {' + '.join(f'({square})' for square in squares)}")
        else:
            lines += self.summed("norm", "error_{c} * error_{c}")
        return [*lines, f"{out} = np.sqrt({self.doubled('norm')} / {len(self.spec.numbers)}.0)"]

    # ---- states inside steps

    def used(self) -> list[int]:
        """Return the stages with nonzero weights in the interpolant."""
        return [i for i, row in enumerate(self.spec.tableau.dense) if row.any()]

    def weights(self, rates: bool = False) -> list[str]:
        """Return lines for the weights w0, ... of stages at the fraction `x`; `rates`: also for r0 = dw0/dx, ..."""
        lines = []
        for i in self.used():
            row = self.spec.tableau.dense[i]
            lines.append(f"w{i} = {self.rounded(_polynomial(row) + ' * x')}")
            lines += [f"r{i} = {_polynomial([(j + 1) * w for j, w in enumerate(row)])}"] if rates else []
        return lines

    def interpolated(
        self, target: str, stage: str, u: str, components: Sequence[int] | None = None, fused: bool = False
    ) -> list[str]:
        """Return lines for the interpolated state; names contain ``{c}`` for the component, ``{i}`` for the stage."""
        (first, *others), fused = self.used(), fused and self.fused
        lines = [f"total = w{first} * {stage.replace('{i}', str(first))}"]
        lines += [f"total = total + w{i} * {stage.replace('{i}', str(i))}" for i in others]
        value = f"fma(total, {self.h}, {u})" if fused else f"total * {self.h} + {u}"
        text = "\n".join(["each c:", *indented([*lines, f"{target} = {value}"])])
        return filled(text, {"c": self.components if components is None else components})

    # ---- events

    def condition(self, e: int, out: str, state: str, time: str, unread: str = "") -> str:
        """Return a line that computes the condition of event e; `unread`: if given, replaces components it doesn't read."""
        line = self.called([out], f"condition{e}", state, self.rounded(time))
        if unread and not self.rolled:
            components = [c for c in range(self.spec.d) if c not in self.spec.reads]
            line = re.sub(rf"\b{state}_(\d+)\b", lambda m: unread.format(c=m[1]) if int(m[1]) in components else m[0], line)
        return line

    def conditions(self, target: str, state: str, time: str) -> list[str]:
        """Return lines that store the values of all conditions in a field."""
        events = range(len(self.spec.events))
        return [x for e in events for x in (self.condition(e, "value", state, time), f"${target}[{e}] = value")]

    # ---- reverse sweep

    @property
    def pulled_stages(self) -> range:
        """The stages whose cotangents are propagated. The last stage affects only states inside the step."""
        return range(self.spec.stages + self.spec.inside)

    @property
    def moving_stages(self) -> range:
        """The stages that the interpolant may use."""
        return range(self.spec.stages + 1)

    def again(self) -> list[str]:
        """Return lines that recompute the stages and their arguments y1, ... from the state y0, for the reverse sweep."""
        lines, spec = [], self.spec
        for i in range(spec.stages + 1 if spec.inside or spec.timed else spec.stages):
            if i:
                lines += self.argument(f"y{i}", i, "k", "y0", f"m{i}" if spec.timed else "", fused=True)
            if i < spec.stages or (spec.inside and spec.timed):
                lines.append(self.call(f"k{i}", f"y{i}", i))
        return lines

    def pulled(self, i: int, arrival: str) -> list[str]:
        """Return lines that propagate the cotangent of stage i to its argument (z0, ...) and the parameters (e0, ...)."""
        # `arrival`: the contribution of states inside the step to the cotangent of component ``{c}`` of the stage.
        spec, table = self.spec, ((), *self.spec.tableau.a)
        # The term that was computed last is added last, so that the other additions needn't wait for it.
        weights = [(j, self.number(table[j][i])) for j in range(spec.stages, i, -1) if table[j][i]]
        more = arrival if spec.inside else self.number(0.0)
        if self.fused:
            lines = [f"m = {more}", *[f"m = fma({w}, z{j}_{{c}}, m)" for j, w in weights]]
        else:
            terms = [f"{w} * z{j}_{{c}}" for j, w in weights] + ([more] if spec.inside or not weights else [])
            lines = [f"m = {' + '.join(terms)}"]
        lines = self.each(*lines, f"q_{{c}} = {self.h} * m")
        outputs = self.state(f"z{i}") + numbered("e", self.wanted) + (["te"] if spec.timed else [])
        lines.append(self.called(outputs, "g", f"y{i}", self.time(i), [*self.state("q"), *self.bars]))
        return lines + self.each(f"total_{{c}} = total_{{c}} + z{i}_{{c}}")


def _polynomial(weights: Sequence[float]) -> str:
    text = number(weights[-1])
    for weight in list(weights)[-2::-1]:
        text = f"({text} * x + {number(weight)})"
    return text
