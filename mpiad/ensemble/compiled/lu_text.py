"""LU factors of one small matrix in the kernel language, with partial pivoting: see `column_lu`.

Those of few entries are written out, operation by operation, so that all lanes of a kernel go the same way, in vector
registers. A long text would take minutes to compile, so those of larger matrices are loops over a part of the lanes'
buffer: then the lanes go one after the other, and vector instructions are those along the matrix's columns.

The entries of the matrix are the scalars w0_0, w0_1, ...
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeAlias

from mpiad.ensemble.compiled.kernel_template import filled


class WrittenLU:
    """The factors as scalars; after they have been made, the diagonal has its reciprocals.

    Entries that are zero whatever the numbers are aren't computed, and unknowns are eliminated in an order that leaves many
    of them so: next is always that which takes the fewest operations. Rows are exchanged by choices: each row below that
    may have the larger entry is compared with that on the diagonal, one after the other. An exchange fills both rows.

    `places`: of the entries that may not be zero, the diagonal included.
    """

    def __init__(self, d: int, places: Iterable[tuple[int, int]]):
        self._d = d
        self._rows: list[set[int]] = [set() for _ in range(d)]
        for i, j in places:
            self._rows[i].add(j)
        # For each column the rows that are compared with its own, and that it is taken from.
        self._compared: list[list[int]] = []
        self.factors: list[str] = []
        self._left = set(range(d))
        self._order: list[int] = []
        while self._left:
            k = min(sorted(self._left), key=self._cost)
            self._order.append(k)
            self._eliminate(k)
            self._left.remove(k)

    def _below(self, k: int) -> list[int]:
        return [i for i in sorted(self._left) if i != k and k in self._rows[i]]

    def _cost(self, k: int) -> int:
        row, total = self._rows[k] & self._left, 0
        for i in self._below(k):
            row = row | (self._rows[i] & self._left)
            total += len(row)
        return total

    def _eliminate(self, k: int) -> None:
        rows, lines, left = self._rows, self.factors, self._left
        below = self._below(k)
        self._compared.append(below)
        for i in below:
            choice = f"swap{k}_{i}"
            lines.append(f"{choice} = abs(w{i}_{k}) > abs(w{k}_{k})")
            for j in sorted((rows[k] | rows[i]) & left):
                upper, lower = (f"w{n}_{j}" if j in rows[n] else "zero" for n in (k, i))
                lines += [
                    f"v = {upper}", f"w{k}_{j} = where({choice}, {lower}, v)", f"w{i}_{j} = where({choice}, v, {lower})"
                ]  # fmt: skip
            # What is left of a row in the columns before are its factors, which stay.
            both = (rows[k] | rows[i]) & left
            rows[k] |= both
            rows[i] |= both
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


_FACTORED = """
for n_ in range({size}):
    {b}[{start} + n_] = zero
@given
for k_ in range({d}):
    top_ = abs($w[k_, k_])
    best_ = k_
    for n_ in range(k_ + 1, {d}):
        size_ = abs($w[n_, k_])
        if size_ > top_:
            top_ = size_
            best_ = n_
    $swap[k_] = best_
    if best_ != k_:
        for n_ in range({d}):
            v = $w[k_, n_]
            $w[k_, n_] = $w[best_, n_]
            $w[best_, n_] = v
    v = $w[k_, k_]
    v = one / v + (v - v)
    $w[k_, k_] = v
    for n_ in range(k_ + 1, {d}):
        $w[n_, k_] = $w[n_, k_] * v
    for m_ in range(k_ + 1, {d}):
        v = $w[k_, m_]
        for n_ in range(k_ + 1, {d}):
            $w[n_, m_] = $w[n_, m_] - $w[n_, k_] * v
"""

_EXCHANGED = """
best_ = np.int64($swap[k_])
if best_ != k_:
    v = $x[k_]
    $x[k_] = $x[best_]
    $x[best_] = v
"""

# The right-hand side is taken from scalars, and given back to them.
_SOLVED = """
each c: {b}[{rhs+c}] = {x}_{c}
for k_ in range({d}):
    @exchanged
for k_ in range({d}):
    v = $x[k_]
    for n_ in range(k_ + 1, {d}):
        $x[n_] = $x[n_] - $w[n_, k_] * v
for k_ in range({d-1}, -1, -1):
    v = $x[k_] * $w[k_, k_]
    $x[k_] = v
    for n_ in range(k_):
        $x[n_] = $x[n_] - $w[n_, k_] * v
each c: {x}_{c} = {b}[{rhs+c}]
"""

_SOLVED_TRANSPOSED = """
each c: {b}[{rhs+c}] = {x}_{c}
for k_ in range({d}):
    v = $x[k_]
    for n_ in range(k_):
        v = v - $w[n_, k_] * $x[n_]
    $x[k_] = v * $w[k_, k_]
for k_ in range({d-1}, -1, -1):
    v = $x[k_]
    for n_ in range(k_ + 1, {d}):
        v = v - $w[n_, k_] * $x[n_]
    $x[k_] = v
for k_ in range({d-1}, -1, -1):
    @exchanged
each c: {x}_{c} = {b}[{rhs+c}]
"""


class LoopedLU:
    """The factors in a buffer, column by column, with the right-hand side and the exchanges of rows behind them.

    `places`: of the entries that are given as scalars. `start`: where in the buffer there is room for `room(d)` numbers.
    """

    def __init__(self, d: int, places: Iterable[tuple[int, int]], buffer: str, start: int):
        self._names = {
            "b": buffer, "start": start, "d": d, "size": d * d, "rhs": start + d * d, "swaps": start + d * d + d,
            "c": range(d), "given": [f"{buffer}[{start + j * d + i}] = w{i}_{j}" for i, j in places],
        }  # fmt: skip
        self._names["exchanged"] = filled(_EXCHANGED, self._names)
        self.factors = self._lines(_FACTORED)

    @staticmethod
    def room(d: int) -> int:
        """Return how many numbers the buffer has room for."""
        return d * d + 2 * d

    def _lines(self, template: str, x: str = "") -> list[str]:
        places = r"{b}[{start} + \2 * {d} + \1]", r"{b}[{rhs} + \1]", r"{b}[{swaps} + \1]"
        text = "\n".join(filled(template, self._names | {"x": x}))
        for mark, place in zip((r"\$w\[(\w+), (\w+)\]", r"\$x\[(\w+)\]", r"\$swap\[(\w+)\]"), places):
            text = re.sub(mark, filled(place, self._names)[0], text)
        return text.splitlines()

    def solved(self, x: str) -> list[str]:
        """Return lines that replace the right-hand side x_0, x_1, ... by the solution."""
        return self._lines(_SOLVED, x)

    def solved_transposed(self, x: str) -> list[str]:
        """Return lines that replace x_0, x_1, ... by the solution with the transposed matrix."""
        return self._lines(_SOLVED_TRANSPOSED, x)


LU: TypeAlias = "WrittenLU | LoopedLU"
