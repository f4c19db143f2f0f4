"""One step of a Rosenbrock method in the kernel language (see `step_text`); `stages` has the vectorized implementation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np

from mpiad.compiling.source import indented, numbered
from mpiad.ensemble.column_lu import Places
from mpiad.ensemble.compiled.kernel_spec import Fields, KernelSpec, filled
from mpiad.ensemble.compiled.step_text import Steps
from mpiad.ensemble.controller import LEAST_ERROR
from mpiad.ensemble.jumps import LEAST, UNRESOLVED
from mpiad.ensemble.outcome import ReturnCode
from mpiad.ensemble.sparse_lu import Banded
from mpiad.ensemble.tableaus import RosenbrockTableau


# LU factorization of one small matrix with the entries w0_0, w0_1, ... in the kernel language, with partial pivoting.
#
# For small matrices the factorization is unrolled, and vector instructions operate on all lanes. For larger matrices this
# text would take minutes to compile. So larger matrices are factorized by loops over an array, which the lanes use one
# after the other, and vector instructions operate along the columns of the matrix.
class UnrolledLU:
    """An unrolled factorization whose factors are scalars; the diagonal contains the reciprocals of the pivots.

    Structural zeros aren't computed. To preserve them, the next unknown to be eliminated is always the one that takes the
    fewest operations. Rows are exchanged by selections, without branches: the pivot row is compared with each row below in
    which the entry may be nonzero. After an exchange the sparsity pattern of both rows is the union of both patterns.

    `entries`: (row, column) of the structural nonzeros and of the diagonal.
    """

    def __init__(self, d: int, entries: Iterable[tuple[int, int]]):
        self._d = d
        self._rows: list[set[int]] = [set() for _ in range(d)]
        for i, j in entries:
            self._rows[i].add(j)
        # Per column, the rows below the pivot in which the entry may be nonzero.
        self._compared: list[list[int]] = []
        self.factors: list[str] = []
        self.cleared: list[str] = []  # lines before the entries of the matrix are assigned
        self._remaining = set(range(d))
        self._order: list[int] = []
        while self._remaining:
            k = min(sorted(self._remaining), key=self._cost)
            self._order.append(k)
            self._eliminate(k)
            self._remaining.remove(k)

    @staticmethod
    def entry(i: int, j: int) -> str:
        """Return the variable of an entry of the matrix."""
        return f"w{i}_{j}"

    def _below(self, k: int) -> list[int]:
        return [i for i in sorted(self._remaining) if i != k and k in self._rows[i]]

    def _cost(self, k: int) -> int:
        row, total = self._rows[k] & self._remaining, 0
        for i in self._below(k):
            row = row | (self._rows[i] & self._remaining)
            total += len(row)
        return total

    def _eliminate(self, k: int) -> None:
        rows, lines, left = self._rows, self.factors, self._remaining
        below = self._below(k)
        self._compared.append(below)
        for i in below:
            choice = f"swap{k}_{i}"
            lines.append(f"{choice} = abs(w{i}_{k}) > abs(w{k}_{k})")
            for j in sorted((rows[k] | rows[i]) & left):
                upper, lower = (f"w{n}_{j}" if j in rows[n] else "zero" for n in (k, i))
                lines.append(f"v = {upper}")
                lines += [f"w{k}_{j} = where({choice}, {lower}, v)", f"w{i}_{j} = where({choice}, v, {lower})"]
            # The entries in earlier columns are factors, which aren't exchanged.
            pattern = (rows[k] | rows[i]) & left
            rows[k] |= pattern
            rows[i] |= pattern
        lines.append(f"w{k}_{k} = one / w{k}_{k} + (w{k}_{k} - w{k}_{k})")
        for i in below:
            lines.append(f"w{i}_{k} = w{i}_{k} * w{k}_{k}")
            for j in sorted(rows[k] & left - {k}):
                product = f"w{i}_{k} * w{k}_{j}"
                lines.append(f"w{i}_{j} = {f'w{i}_{j}' if j in rows[i] else 'zero'} - {product}")
                rows[i].add(j)

    def solved(self, x: str) -> list[str]:
        """Return lines that replace the right-hand side x_0, x_1, ... by the solution."""
        lines = []
        order = self._order
        for k, below in zip(order, self._compared):
            for i in below:
                lines += self._exchanged(x, k, i)
            lines += [f"{x}_{i} = {x}_{i} - w{i}_{k} * {x}_{k}" for i in below]
        for n in range(self._d - 1, -1, -1):
            k = order[n]
            lines.append(f"{x}_{k} = {x}_{k} * w{k}_{k}")
            lines += [f"{x}_{i} = {x}_{i} - w{i}_{k} * {x}_{k}" for i in order[:n] if k in self._rows[i]]
        return lines

    def solved_transposed(self, x: str) -> list[str]:
        """Return lines that replace x_0, x_1, ... by the solution with the transposed matrix."""
        lines = []
        for n, k in enumerate(self._order):
            lines.append(f"{x}_{k} = {x}_{k} * w{k}_{k}")
            lines += [f"{x}_{j} = {x}_{j} - w{k}_{j} * {x}_{k}" for j in self._order[n + 1 :] if j in self._rows[k]]
        for k, below in zip(reversed(self._order), reversed(self._compared)):
            lines += [f"{x}_{k} = {x}_{k} - w{i}_{k} * {x}_{i}" for i in below]
            for i in reversed(below):
                lines += self._exchanged(x, k, i)
        return lines

    @staticmethod
    def _exchanged(x: str, k: int, i: int) -> list[str]:
        choice = f"swap{k}_{i}"
        return [f"v = {x}_{k}", f"{x}_{k} = where({choice}, {x}_{i}, v)", f"{x}_{i} = where({choice}, v, {x}_{i})"]


_CLEARED = """
for n_ in range({size}):
    {b}[{start} + n_] = zero
"""

_FACTORED = """
for k_ in range({d}):
    below_ = min(k_ + {lower+1}, {d})
    right_ = min(k_ + {width+1}, {d})
    top_ = abs($w[k_, k_])
    best_ = k_
    for n_ in range(k_ + 1, below_):
        size_ = abs($w[n_, k_])
        if size_ > top_:
            top_ = size_
            best_ = n_
    $swap[k_] = best_
    if best_ != k_:
        for n_ in range(k_, right_):
            v = $w[k_, n_]
            $w[k_, n_] = $w[best_, n_]
            $w[best_, n_] = v
    v = $w[k_, k_]
    v = one / v + (v - v)
    $w[k_, k_] = v
    for n_ in range(k_ + 1, below_):
        $w[n_, k_] = $w[n_, k_] * v
    for m_ in range(k_ + 1, right_):
        v = $w[k_, m_]
        for n_ in range(k_ + 1, below_):
            $w[n_, m_] = $w[n_, m_] - $w[n_, k_] * v
"""

_EXCHANGED = """
best_ = np.int64($swap[k_])
if best_ != k_:
    v = $x[k_]
    $x[k_] = $x[best_]
    $x[best_] = v
"""

# The right-hand side is copied to the buffer, and the solution back.
_SOLVED = """
@read
for k_ in range({d}):
    @exchanged
    v = $x[k_]
    for n_ in range(k_ + 1, min(k_ + {lower+1}, {d})):
        $x[n_] = $x[n_] - $w[n_, k_] * v
for k_ in range({d-1}, -1, -1):
    v = $x[k_] * $w[k_, k_]
    $x[k_] = v
    for n_ in range(max(k_ - {width}, 0), k_):
        $x[n_] = $x[n_] - $w[n_, k_] * v
@written
"""

_SOLVED_TRANSPOSED = """
@read
for k_ in range({d}):
    v = $x[k_]
    for n_ in range(max(k_ - {width}, 0), k_):
        v = v - $w[n_, k_] * $x[n_]
    $x[k_] = v * $w[k_, k_]
for k_ in range({d-1}, -1, -1):
    v = $x[k_]
    for n_ in range(k_ + 1, min(k_ + {lower+1}, {d})):
        v = v - $w[n_, k_] * $x[n_]
    $x[k_] = v
    @exchanged
@written
"""


class LoopedLU:
    """A factorization by loops over the band; the buffer contains the factors, a right-hand side, and the row exchanges.

    The factors are stored by columns, in the order of the unknowns of `Banded`, or in the given order if the band is wide.
    `rolled`: whether right-hand sides are arrays.
    """

    def __init__(self, d: int, entries: Iterable[tuple[int, int]], buffer: str, start: int, rolled: bool = False):
        entries = list(entries)
        band, place = Banded(Places(*np.array(entries).T), d), list(range(d))
        # The entries of a column, with those of row exchanges, are consecutive; entry (i, j) is at w + j * stride + i.
        lower, width, stride, first = d - 1, d - 1, d, 0
        if 2 * band.lower + band.upper + 1 < d:
            lower, width, place = band.lower, band.lower + band.upper, np.argsort(band.order).tolist()
            stride, first = lower + width, width
        self.length, self._rolled = d * (lower + width + 1 if first else d) + 2 * d, rolled
        self._names = {"b": buffer, "start": start, "d": d, "size": self.length - 2 * d, "w": start + first}
        self._names |= {"lower": lower, "width": width, "stride": stride, "place": place}
        self._names |= {"rhs": start + self.length - 2 * d, "swaps": start + self.length - d}
        self._names["exchanged"] = filled(_EXCHANGED, self._names)
        self.cleared, self.factors = self._lines(_CLEARED), self._lines(_FACTORED)

    def entry(self, i: int, j: int) -> str:
        """Return the variable of an entry of the matrix."""
        return f"{self._names['b']}[{self._place(i, j)}]"

    def assigned(self, entries: Iterable[tuple[int, int]], assignment: str) -> list[str]:
        """Return a loop that assigns to entries of the matrix; `assignment`: operator and value, with the counter n_."""
        places = [self._place(i, j) for i, j in entries]
        table = f"entry_ = constants({', '.join(map(str, places))})"
        return [table, f"for n_ in range({len(places)}):", f"    {self._names['b']}[entry_[n_]] {assignment}"]

    def _place(self, i: int, j: int) -> int:
        place = self._names["place"]
        return self._names["w"] + place[j] * self._names["stride"] + place[i]

    def _lines(self, template: str, x: str = "") -> list[str]:
        right = r"right_[\1]" if self._rolled else r"{b}[{rhs} + \1]"
        elements = r"{b}[{w} + \2 * {stride} + \1]", right, r"{b}[{swaps} + \1]"
        places = self._names["place"]
        right = [f"{self._names['b']}[{self._names['rhs'] + k}]" for k in places]
        read = [f"{element} = {x}_{c}" for c, element in enumerate(right)]
        written = [f"{x}_{c} = {element}" for c, element in enumerate(right)]
        if self._rolled:
            loop = f"for c in range({len(places)}):"
            read = [f"place_ = constants({', '.join(map(str, places))})", loop, "    right_[place_[c]] = x[c]"]
            written = [loop, "    x[c] = right_[place_[c]]"]
        text = "\n".join(filled(template, self._names | {"read": read, "written": written}))
        for mark, element in zip((r"\$w\[(\w+), (\w+)\]", r"\$x\[(\w+)\]", r"\$swap\[(\w+)\]"), elements):
            text = re.sub(mark, filled(element, self._names)[0], text)
        return text.splitlines()

    def solved(self, x: str) -> list[str]:
        """Return lines that replace the right-hand side x_0, x_1, ... by the solution."""
        return [f"solved({x}_, {self._names['b']})"] if self._rolled else self._lines(_SOLVED, x)

    def solved_transposed(self, x: str) -> list[str]:
        """Return lines that replace x_0, x_1, ... by the solution with the transposed matrix."""
        return [f"solved_transposed({x}_, {self._names['b']})"] if self._rolled else self._lines(_SOLVED_TRANSPOSED, x)

    def functions(self, dtype: np.dtype) -> list[str]:
        """Return the functions that are called with right-hand sides that are arrays; each one is compiled once."""
        stack, lines = f"right_ = on_stack({self._names['d']}, np.{dtype.name})", list[str]()
        for name, template in (("solved", _SOLVED), ("solved_transposed", _SOLVED_TRANSPOSED)):
            lines += [f"def {name}(x, {self._names['b']}):", *indented([stack, *self._lines(template)])]
        return lines if self._rolled else []


LU: TypeAlias = "UnrolledLU | LoopedLU"


# Maximum numbers of lines and of structural nonzeros in an unrolled factorization. The largest one is compiled in ten
# seconds. Unrolled factorizations are several times as fast as loops.
_MOST_LINES, _MOST_ENTRIES = 4000, 100


def layout_of(spec: KernelSpec, template: str, fields: Fields | None = None) -> tuple[Fields, Steps, dict[str, Any]]:
    """Add the fields of a CPU kernel, or of a GPU kernel with `fields`; also return the lines of steps and placeholders."""
    by_lanes, fields = fields is None, fields or Fields(spec)
    steps = RosenbrockSteps(spec, fields if by_lanes else None) if spec.tableau.implicit else Steps(spec, by_lanes)
    names = {
        **spec._asdict(), **{code.name: code.code for code in ReturnCode}, "least_error": LEAST_ERROR,
        "real": spec.dtype.name, "by_lanes": by_lanes,
        # Functions that convert doubles to the precision of states, and the opposite.
        "rounded": "np.float32" if spec.single else "", "double": "np.float64" if spec.single else "",
        # Indices of components; of parameters per trajectory and shared ones; and of the cotangents of both kinds.
        "c": steps.components, "p": spec.loaded("p"), "s": [] if by_lanes and spec.shares_array else spec.loaded("s"),
        "wanted_p": range(spec.wanted_varying), "wanted_s": range(spec.wanted_shared),
        # Indices of tangents, events and stages.
        "j": range(len(spec.directions)), "e": range(len(spec.events)), "count": len(spec.events),
        "i": range(spec.stages + 1), "inner": range(1, spec.stages), "last": spec.stages, "used": steps.used(),
        "tolerance": range(len(spec.numbers) * (1 + spec.relative) if spec.tolerances and not steps.rolled else 1),
        "lu_length": steps.lu_length,
        "lane_range": steps.lane_range, "adaptive": spec.tableau.error is not None, "remembers": spec.remembers,
        "acts": spec.acts, "affected": spec.affects is not None, "least_value": LEAST, "unresolved": UNRESOLVED,
        # The distance from a time `at` to the next times in the precision of states: see `jumps.beside`.
        "gap": f"(abs(at) * {0.505 * float(np.finfo(spec.dtype).eps)} + {float(np.finfo(spec.dtype).tiny)})",
        "jumping": spec.jumps is not None, "limited": spec.affects is not None or bool(spec.clocks),
    }  # fmt: skip
    fields.add(filled(template, names))
    return fields, steps, names


class RosenbrockSteps(Steps):
    """The lines of one step. The function `jacobian` returns the structural nonzeros of ∂f/∂u, then of ∂f/∂t."""

    def __init__(self, spec: KernelSpec, fields: Fields | None):
        super().__init__(spec, fields is not None)
        self._table: RosenbrockTableau = spec.tableau  # type: ignore[assignment]
        self._mass = spec.mass or tuple((i, i, 1.0) for i in range(spec.d))
        entries = {*spec.jacobian, *((i, j) for i, j, _ in self._mass), *((i, i) for i in range(spec.d))}
        self._lu = self._factors(sorted(entries), fields)
        if not isinstance(self._lu, UnrolledLU):
            self.lane_range = "range"

    def _factors(self, entries: list[tuple[int, int]], fields: Fields | None) -> LU:
        d = self.spec.d
        if len(entries) <= _MOST_ENTRIES:
            lu = UnrolledLU(d, entries)
            if len(lu.factors) + len(self._table.coupling) * len(lu.solved("x")) <= _MOST_LINES:
                return lu
        lu = LoopedLU(d, entries, "lu", 0)
        if fields is None:
            self.lu_length = lu.length
            return lu
        lu = LoopedLU(d, entries, "b", fields.reserve("lu", lu.length), self.rolled)
        self.functions = lu.functions(self.spec.dtype)
        return lu

    def matrix(self, u: str = "u") -> list[str]:
        """Return lines for the LU factors of W (see `RosenbrockTableau`) at a state, and for h ∂f/∂t."""
        spec, h, lu, count = self.spec, self.h, self._lu, len(self.spec.jacobian)
        total = count + len(spec.slopes)
        entries = ["j_"] if self.rolled else [f"j_{n}" for n in range(total)]
        lines = [self.called(entries, "jacobian", u, self.time(0))] if total else []
        lines += [f"zero = {self.number(0.0)}", f"one = {self.number(1.0)}", *lu.cleared]
        terms = [(i, j, self.number(value / self._table.gamma)) for i, j, value in self._mass]
        if isinstance(lu, LoopedLU) and self.rolled:
            lines += lu.assigned([(i, j) for i, j in spec.jacobian], f"= j_[n_] * -{h}") if count else []
            lines.append(f"term_ = constants({', '.join(term for _, _, term in terms)})")
            lines += lu.assigned([(i, j) for i, j, _ in terms], "+= term_[n_]")
        else:
            lines += [f"{lu.entry(i, j)} = j_{n} * -{h}" for n, (i, j) in enumerate(spec.jacobian)]
            # The factorization also reads structurally zero entries on the diagonal, as pivots.
            zeros = {(i, i) for i in range(spec.d)} - {*spec.jacobian, *((i, j) for i, j, _ in self._mass)}
            lines += [f"{lu.entry(i, i)} = zero" for i, _ in sorted(zeros)]
            for i, j, term in terms:
                before = f"{lu.entry(i, j)} + " if (i, j) in spec.jacobian else ""
                lines.append(f"{lu.entry(i, j)} = {before}{term}")
        lines += [f"time_term_{i} = j_{n} * {h}" for n, i in enumerate(spec.slopes, count)]
        return [*lines, *lu.factors]

    def stages(self, separate: bool = True) -> list[str]:
        """Return lines for all stages but the first, and for the new state."""
        table, last = self._table, self.spec.stages
        lines = self.matrix()
        for i in range(1, last):
            at_end = i == last - 1 and table.ends_at_new_state
            if i == 1:
                lines += self.each("k1_{c} = k0_{c}")
            else:
                y = "new" if at_end else self.argument_of(i, separate)
                lines += [*self.argument(y, i, "k", "u"), self.call(f"k{i}", y, i)]
            if at_end:
                lines += self.each(f"k{last}_{{c}} = k{i}_{{c}}")
            lines += self.right_hand_side(i)
            lines += self._lu.solved(f"k{i}")
        if not table.ends_at_new_state:
            lines += [*self.argument("new", last, "k", "u"), self.call(f"k{last}", "new", last)]
        return lines

    def right_hand_side(self, i: int) -> list[str]:
        """Return lines that add Σ C_ij k_j + d_i h ∂f/∂t, as in `RosenbrockTableau`, to f at the argument of stage i."""
        lines, slope = [], self._table.slopes[i - 1]
        coupled = self._table.coupling[i - 1]
        if any(coupled) and self.spec.mass is None:
            lines += self.each(f"k{i}_{{c}} = k{i}_{{c}} + ({self.weighted(coupled, 'k')})")
        elif any(coupled):
            lines += self.each(f"coupled_{{c}} = {self.weighted(coupled, 'k')}")
            lines += [f"k{i}_{r} = k{i}_{r} + {self.number(value)} * coupled_{c}" for r, c, value in self._mass]
        if slope:
            lines += [f"k{i}_{c} = k{i}_{c} + time_term_{c} * {self.number(slope)}" for c in self.spec.slopes]
        return lines

    # ---- reverse sweep: see `reverse_kernel`

    @property
    def pulled_stages(self) -> range:
        """The indices of the method's stages; k0 and the last k are f at the ends of the step."""
        return range(1, self.spec.stages)

    moving_stages = pulled_stages

    def again(self) -> list[str]:
        """Return lines that recompute the stages from y0 for the reverse sweep: arguments y1, ..., then the new state."""
        spec = self.spec
        lines = self.matrix("y0")
        for i in range(1, spec.stages):
            if i == 1:
                lines += self.each("y1_{c} = y0_{c}")
                lines += self.each(f"m1_{{c}} = {self.number(0.0)}") if spec.timed else []
            else:
                lines += self.argument(f"y{i}", i, "k", "y0", f"m{i}" if spec.timed else "", fused=True)
            lines += [self.call(f"k{i}", f"y{i}", i), *self.right_hand_side(i), *self._lu.solved(f"k{i}")]
        if spec.timed:
            lines += self.argument(f"y{spec.stages}", spec.stages, "k", "y0", f"m{spec.stages}", fused=True)
        return lines

    def pulled(self, i: int, arrival: str) -> list[str]:
        """Return lines that propagate the cotangent of stage i to the state and the parameters: see `Steps.pulled`."""
        spec, table = self.spec, self._table
        later = range(spec.stages - 1, i, -1)
        arguments = [(j, self.number(row[i])) for j, row in enumerate(table.a, 1) if j > i and row[i]]
        coupled = [(j, self.number(table.coupling[j - 1][i])) for j in later if table.coupling[j - 1][i]]
        lines = [f"m = {arrival if spec.inside else self.number(0.0)}"]
        lines += [f"m = fma({w}, z{j}_{{c}}, m)" for j, w in reversed(arguments)]
        lines += [f"q{i}_{{c}} = {self.h} * m"]
        lines += [f"q{i}_{{c}} = fma({w}, {'r' if spec.mass else 'q'}{j}_{{c}}, q{i}_{{c}})" for j, w in coupled]
        lines = [*self.each(*lines), *self._lu.solved_transposed(f"q{i}")]
        if spec.mass:
            # The coupling terms are multiplied by the mass matrix, so the cotangents are multiplied by its transpose.
            lines += self.each(f"r{i}_{{c}} = {self.number(0.0)}")
            lines += [f"r{i}_{c} = fma({self.number(value)}, q{i}_{r}, r{i}_{c})" for r, c, value in spec.mass]
        wanted = self.wanted
        time = [["te"], ["tj"]] if spec.timed else [[], []]
        outputs = [*self.state(f"z{i}"), *numbered("e", wanted), *time[0]]
        lines.append(self.called(outputs, "g", f"y{i}", self.time(i), [*self.state(f"q{i}"), *self.bars]))
        # The derivatives of W and ∂f/∂t contain second derivatives of f at the state before the step.
        lines += self.each(f"direction_{{c}} = {self.h} * k{i}_{{c}}")
        seeds = [*self.state(f"q{i}"), *self.state("direction"), f"{self.h} * {self.number(table.slopes[i - 1])}"]
        outputs = [*self.state("second"), *numbered("b", wanted), *time[1]]
        lines.append(self.called(outputs, "curvature", "y0", self.time(0), [*seeds, *self.bars]))
        lines += [f"e{j} = e{j} + b{j}" for j in range(wanted)]
        lines += self.each(f"total_{{c}} = total_{{c}} + (z{i}_{{c}} + second_{{c}})")
        return lines + (self._size_cotangents(i) if spec.timed else [])

    def _size_cotangents(self, i: int) -> list[str]:
        """Return lines that add the contributions of W and h ∂f/∂t to the cotangents of h and t."""
        lines, slope = ["t_bar = t_bar + tj"], self.number(self._table.slopes[i - 1])
        if self.rolled and self.spec.jacobian:
            rows, columns = (", ".join(map(str, indices)) for indices in zip(*self.spec.jacobian))
            lines += [f"row_ = constants({rows})", f"column_ = constants({columns})"]
            lines += [f"for n_ in range({len(self.spec.jacobian)}):"]
            lines += [f"    h_bar = fma(q{i}_[row_[n_]] * j_[n_], k{i}_[column_[n_]], h_bar)"]
        for n, (row, column) in enumerate(() if self.rolled else self.spec.jacobian):
            lines.append(f"h_bar = fma(q{i}_{row} * j_{n}, k{i}_{column}, h_bar)")
        slopes = enumerate(self.spec.slopes, len(self.spec.jacobian))
        return lines + [f"h_bar = fma(q{i}_{c} * j_{n}, {slope}, h_bar)" for n, c in slopes]
