"""Weighted sums of shifted rows, with the same weights for all right-hand sides: all operations of a level.

Smoothing, restriction, interpolation and the operator's product have this form. A row is a flat array of values or of
coefficients, with one entry for each point of a color (see `color_layout`). `Sums` uses NumPy or the device's module.
`CompiledSums` uses a compiled kernel, which computes each range of a row for all right-hand sides while the range's
weights are in cache. The kernel is written in the language of `mpiad.compiling.translation`, and is compiled from this
file's source. Its arguments are positions of rows in memory, so all levels use the same kernel, in any dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from mpiad._typing import Array, LocalArray
from mpiad.compiling.cache import functions_of
from mpiad.linalg.multigrid.color_layout import Layout
from mpiad.transport.devices.device_arrays import empty_like, zeros_like

# For blocks with fewer points, loading the kernel takes more time than the kernel saves.
_MIN_POINTS = 1 << 13
# Number of entries of a range. Such a range and its weights fit into the L2 cache; shorter ranges are slower.
_RANGE = 2048
_TABLES, _FLOATS = ("numbers", "sums", "terms"), ("coefficients", "right", "state", "part")

Step: TypeAlias = Callable[[LocalArray], None]
"""``step(f)`` computes sums for the right-hand sides f, a contiguous array of shape (systems, colors, size)."""


class Term(NamedTuple):
    """A shifted row of the state, times a shifted row of the coefficients, unless `coefficient` is None."""

    coefficient: int | None
    row: int
    shift: int = 0
    coefficient_shift: int = 0


class WeightedSum(NamedTuple):
    """Inner entries of a row, computed as ``scale * (base + sum(terms))``, or minus this value."""

    out: int  # the row of the state that is computed
    terms: Sequence[Term] = ()  # no term reads `out`
    base: int | None = None  # a row of the state, or of the right-hand side
    of_right: bool = True  # whether the base is a row of the right-hand side
    scale: int | None = None  # a row of the coefficients
    negative: bool = False  # whether the sign is changed; only for sums without base and scale


class Sums:
    """Computes sums by NumPy or a device's module, for coefficients (n, size) on this device; `state` contains the rows."""

    def __init__(self, layout: Layout, coefficients: LocalArray, rows: int):
        self._layout, self._coefficients, self._rows = layout, coefficients, rows
        self._memory = zeros_like(coefficients, (1, rows, layout.size))
        self.allocate(1)

    def step(self, sums: Sequence[WeightedSum]) -> Step:
        """Return a function that computes sums, one after another."""
        bound, state = list[Step](), None

        def run(f: LocalArray) -> None:
            nonlocal bound, state
            if state is not self.state:
                # Slices are created once, since on small levels their creation takes longer than the arithmetic.
                bound, state = [self._bind(item) for item in sums], self.state
            for compute in bound:
                compute(f)

        return run

    def allocate(self, systems: int) -> None:
        """Allocate the states of `systems` right-hand sides."""
        if systems > len(self._memory):
            self._memory = zeros_like(self._coefficients, (systems, self._rows, self._layout.size))
        self.state, inner = self._memory[:systems], self._layout.inner
        self._part = empty_like(self._coefficients, (systems, inner.stop - inner.start))

    def _at(self, shift: int) -> slice:
        inner = self._layout.inner
        return slice(inner.start + shift, inner.stop + shift)

    def _factors(self, term: Term) -> tuple[Array, LocalArray]:
        entries = self._at(term.coefficient_shift)
        weights = None if term.coefficient is None else self._coefficients[term.coefficient, entries]
        return weights, self.state[:, term.row, self._at(term.shift)]

    def _bind(self, item: WeightedSum) -> Step:
        state, inner, part = self.state, self._layout.inner, self._part
        out, terms = state[:, item.out, inner], [self._factors(term) for term in item.terms]
        first = terms.pop(0) if terms and item.base is None else None
        scale = None if item.scale is None else self._coefficients[item.scale, inner]

        def compute(f: LocalArray) -> None:
            base = None if item.base is None else (f if item.of_right else state)[:, item.base, inner]
            if base is not None and scale is not None and not terms:
                np.multiply(base, scale, out=out)
                return
            if first is not None:
                np.multiply(*first, out=out)
            elif item.of_right or item.base != item.out:
                out[...] = 0 if base is None else base
            for weights, values in terms:
                if weights is not None:
                    values = np.multiply(weights, values, out=part)
                np.add(out, values, out=out)
            if scale is not None:
                np.multiply(out, scale, out=out)
            if item.negative:
                np.negative(out, out=out)

        return compute


def are_compiled(points: int) -> bool:
    """Return whether cycles are compiled if the finest level has this number of points per block."""
    return points >= _MIN_POINTS


class CompiledSums(Sums):
    """Computes sums by a compiled kernel, on the host."""

    def __init__(self, layout: Layout, coefficients: LocalArray, rows: int):
        self._kernel, self._scratch = _kernel(), np.empty(_RANGE)
        super().__init__(layout, coefficients, rows)

    def step(self, sums: Sequence[WeightedSum]) -> Step:
        """Return a function that computes sums, one after another."""
        # The kernel's block (see `compiling.cache`): two zeros, since no kernel follows, and the address and
        # size of each array.
        tables, block, state = self._numbers_of(sums), np.zeros(2 + 2 * len(_TABLES) + 2 * len(_FLOATS), np.int64), None
        address, right, kernel = block.ctypes.data, 2 + 2 * (len(_TABLES) + 1), self._kernel

        def run(f: LocalArray) -> None:
            nonlocal state
            if state is not self.state:
                state, tables[0][0] = self.state, len(self.state)
                for k, array in enumerate([*tables, self._coefficients, f, state, self._scratch]):
                    block[2 + 2 * k : 4 + 2 * k] = array.ctypes.data, array.size
            block[right] = f.__array_interface__["data"][0]
            kernel(address)

        return run

    def _numbers_of(self, sums: Sequence[WeightedSum]) -> tuple[np.ndarray, ...]:
        """Return the arrays `numbers`, `sums` and `terms` of the kernel."""
        size, start, stop = self._layout.size, self._layout.inner.start, self._layout.inner.stop
        rows, terms = list[list[int]](), list[list[int]]()

        def position(row: int | None, shift: int = 0) -> int:
            return -1 if row is None else row * size + start + shift

        def numbers_of(term: Term) -> list[int]:
            return [position(term.coefficient, term.coefficient_shift), position(term.row, term.shift)]

        for item in sums:
            base = [position(item.base), -1] if item.of_right else [-1, position(item.base)]
            first = len(terms)
            terms += map(numbers_of, item.terms)
            scale = [position(item.scale), item.negative, first, len(terms)]
            rows.append([position(item.out), *base, *scale])
        numbers = [0, len(self._layout.colors) * size, self._rows * size, stop - start, len(sums)]
        tables = np.array(rows).ravel(), np.array(terms or [[-1, -1]]).ravel()
        return np.array(numbers, np.int64), *(table.astype(np.int64) for table in tables)


@functools.cache
def _kernel() -> Callable[[int], object]:
    signature = f"linked({', '.join(['int64[::1]'] * len(_TABLES) + ['float64[::1]'] * len(_FLOATS))})"
    return functions_of(__name__, {"weighted_sums": signature})[0]


def weighted_sums(
    numbers: np.ndarray, sums: np.ndarray, terms: np.ndarray, coefficients: np.ndarray, right: np.ndarray,
    state: np.ndarray, part: np.ndarray,
) -> None:  # fmt: skip
    """Compute sums of rows, described by the tables of `_numbers_of`; `part` is memory for one range."""
    systems, right_stride, state_stride, length = numbers[0], numbers[1], numbers[2], numbers[3]
    for number in range(numbers[4]):
        k = 7 * number
        out, base_right, base_state, scale = sums[k], sums[k + 1], sums[k + 2], sums[k + 3]
        negative, first, last = sums[k + 4], sums[k + 5], sums[k + 6]
        for start in range(0, length, 2048):
            n = min(2048, length - start)
            for system in range(systems):
                offset = system * state_stride + start
                if base_right >= 0:
                    k = base_right + system * right_stride + start
                    a = right[k : k + n]
                    for i in range(n):
                        part[i] = a[i]
                elif base_state >= 0:
                    a = state[base_state + offset : base_state + offset + n]
                    for i in range(n):
                        part[i] = a[i]
                else:
                    for i in range(n):
                        part[i] = 0.0
                t = first
                while t + 3 < last:
                    a = coefficients[terms[2 * t] + start : terms[2 * t] + start + n]
                    b = coefficients[terms[2 * t + 2] + start : terms[2 * t + 2] + start + n]
                    c = coefficients[terms[2 * t + 4] + start : terms[2 * t + 4] + start + n]
                    d = coefficients[terms[2 * t + 6] + start : terms[2 * t + 6] + start + n]
                    x = state[terms[2 * t + 1] + offset : terms[2 * t + 1] + offset + n]
                    y = state[terms[2 * t + 3] + offset : terms[2 * t + 3] + offset + n]
                    z = state[terms[2 * t + 5] + offset : terms[2 * t + 5] + offset + n]
                    w = state[terms[2 * t + 7] + offset : terms[2 * t + 7] + offset + n]
                    for i in range(n):
                        part[i] = part[i] + a[i] * x[i] + b[i] * y[i] + c[i] * z[i] + d[i] * w[i]
                    t += 4
                while t < last:
                    x = state[terms[2 * t + 1] + offset : terms[2 * t + 1] + offset + n]
                    if terms[2 * t] >= 0:
                        a = coefficients[terms[2 * t] + start : terms[2 * t] + start + n]
                        for i in range(n):
                            part[i] += a[i] * x[i]
                    else:
                        for i in range(n):
                            part[i] += x[i]
                    t += 1
                x = state[out + offset : out + offset + n]
                if scale >= 0:
                    a = coefficients[scale + start : scale + start + n]
                    for i in range(n):
                        x[i] = a[i] * part[i]
                elif negative > 0:
                    for i in range(n):
                        x[i] = -part[i]
                else:
                    for i in range(n):
                        x[i] = part[i]
