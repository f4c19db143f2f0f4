"""LU factors of one small matrix in the kernel language, with partial pivoting: see `column_lu`.

Those of few entries are written out, operation by operation, so that all lanes of a kernel go the same way, in vector
registers. A long text would take minutes to compile, so those of larger matrices are loops over a part of the lanes'
buffer: then the lanes go one after the other, and vector instructions are those along the matrix's columns.

The entries of the matrix are the scalars w0_0, w0_1, ...
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from mpiad.compiling.source import indented


class LU(Protocol):
    """Lines on the factors of a matrix, and on solutions."""

    factors: list[str]  # lines that make the factors

    def solved(self, x: str) -> list[str]:
        """Return lines that replace the right-hand side x_0, x_1, ... by the solution."""
        ...

    def solved_transposed(self, x: str) -> list[str]:
        """Return lines that replace x_0, x_1, ... by the solution with the transposed matrix."""
        ...


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


class LoopedLU:
    """The factors in a buffer, column by column, with the right-hand side and the exchanges of rows behind them.

    `places`: of the entries that are given as scalars. `start`: where in the buffer there is room for `room(d)` numbers.
    """

    def __init__(self, d: int, places: Iterable[tuple[int, int]], buffer: str, start: int):
        self._d, self._b, self._start = d, buffer, start
        self._rhs, self._swaps = start + d * d, start + d * d + d
        given = [f"{buffer}[{start + j * d + i}] = w{i}_{j}" for i, j in places]
        zeros = [f"for n_ in range({d * d}):", f"    {buffer}[{start} + n_] = zero"]
        self.factors = [*zeros, *given, f"for k_ in range({d}):", *indented(self._eliminated())]

    @staticmethod
    def room(d: int) -> int:
        """Return how many numbers the buffer has room for."""
        return d * d + 2 * d

    def _at(self, i: str, j: str) -> str:
        return f"{self._b}[{self._start} + {j} * {self._d} + {i}]"

    def _x(self, i: str) -> str:
        return f"{self._b}[{self._rhs} + {i}]"

    def _eliminated(self) -> list[str]:
        at, d = self._at, self._d
        return [
            f"top_ = abs({at('k_', 'k_')})",
            "best_ = k_",
            f"for n_ in range(k_ + 1, {d}):",
            f"    size_ = abs({at('n_', 'k_')})",
            "    if size_ > top_:",
            "        top_ = size_",
            "        best_ = n_",
            f"{self._b}[{self._swaps} + k_] = best_",
            "if best_ != k_:",
            f"    for n_ in range({d}):",
            f"        v = {at('k_', 'n_')}",
            f"        {at('k_', 'n_')} = {at('best_', 'n_')}",
            f"        {at('best_', 'n_')} = v",
            f"v = {at('k_', 'k_')}",
            "v = one / v + (v - v)",
            f"{at('k_', 'k_')} = v",
            f"for n_ in range(k_ + 1, {d}):",
            f"    {at('n_', 'k_')} = {at('n_', 'k_')} * v",
            f"for m_ in range(k_ + 1, {d}):",
            f"    v = {at('k_', 'm_')}",
            f"    for n_ in range(k_ + 1, {d}):",
            f"        {at('n_', 'm_')} = {at('n_', 'm_')} - {at('n_', 'k_')} * v",
        ]

    def _exchanged(self) -> list[str]:
        """Return lines that exchange entry k of the right-hand side."""
        return [
            f"best_ = np.int64({self._b}[{self._swaps} + k_])",
            "if best_ != k_:",
            f"    v = {self._x('k_')}",
            f"    {self._x('k_')} = {self._x('best_')}",
            f"    {self._x('best_')} = v",
        ]

    def _with(self, x: str, lines: list[str]) -> list[str]:
        """Return lines on the right-hand side in the buffer, taken from scalars and given back to them."""
        names = [(f"{self._b}[{self._rhs + c}]", f"{x}_{c}") for c in range(self._d)]
        return [*[f"{place} = {name}" for place, name in names], *lines, *[f"{name} = {place}" for place, name in names]]

    def solved(self, x: str) -> list[str]:
        """Return lines that replace the right-hand side x_0, x_1, ... by the solution."""
        at, at_x, d = self._at, self._x, self._d
        less = f"{at_x('n_')} = {at_x('n_')} - {at('n_', 'k_')} * v"
        return self._with(x, [
            f"for k_ in range({d}):",
            *indented(self._exchanged()),
            f"for k_ in range({d}):",
            f"    v = {at_x('k_')}",
            f"    for n_ in range(k_ + 1, {d}):",
            f"        {less}",
            f"for k_ in range({d - 1}, -1, -1):",
            f"    v = {at_x('k_')} * {at('k_', 'k_')}",
            f"    {at_x('k_')} = v",
            "    for n_ in range(k_):",
            f"        {less}",
        ])  # fmt: skip

    def solved_transposed(self, x: str) -> list[str]:
        """Return lines that replace x_0, x_1, ... by the solution with the transposed matrix."""
        at, at_x, d = self._at, self._x, self._d
        return self._with(x, [
            f"for k_ in range({d}):",
            f"    v = {at_x('k_')}",
            "    for n_ in range(k_):",
            f"        v = v - {at('n_', 'k_')} * {at_x('n_')}",
            f"    {at_x('k_')} = v * {at('k_', 'k_')}",
            f"for k_ in range({d - 1}, -1, -1):",
            f"    v = {at_x('k_')}",
            f"    for n_ in range(k_ + 1, {d}):",
            f"        v = v - {at('n_', 'k_')} * {at_x('n_')}",
            f"    {at_x('k_')} = v",
            f"for k_ in range({d - 1}, -1, -1):",
            *indented(self._exchanged()),
        ])  # fmt: skip
