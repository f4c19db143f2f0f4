"""One step of a Rosenbrock method in kernels (see `step_kernel`); `stages` has the vectorized implementation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple, TypeAlias

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.folding import inlined, static
from mpiad.compiling.kernel_language import constants, fma, separate, table, vector, where
from mpiad.ensemble.column_lu import Places
from mpiad.ensemble.compiled.kernel_spec import KernelSpec
from mpiad.ensemble.compiled.step_kernel import (
    Kernel,
    Seeds,
    Step,
    Vector,
    argument,
    copy,
    stage_time,
    state,
    tangent_argument,
    weighted,
)
from mpiad.ensemble.sparse_lu import Banded

# LU factorization of one small matrix with partial pivoting.
#
# For small matrices the factorization is unrolled, and vector instructions operate on all lanes. For larger matrices this
# would take minutes to compile. So larger matrices are factorized by loops over an array, which the lanes use one after the
# other, and vector instructions operate along the columns of the matrix.


class Pivot(NamedTuple):
    """The elimination of one unknown k."""

    k: int
    # The rows below the pivot in which the entry may be nonzero, and for each one the columns of the entries that are
    # exchanged with the pivot row, and whether the entries of the pivot row and of the row may be nonzero.
    below: list[tuple[int, list[tuple[int, bool, bool]]]]
    # For each of these rows, the columns of the entries that are eliminated, and whether they may be nonzero.
    eliminated: list[tuple[int, list[tuple[int, bool]]]]


class UnrolledLU:
    """The order of operations of an unrolled factorization, whose diagonal contains the reciprocals of the pivots.

    Structural zeros aren't computed. To preserve them, the next unknown to be eliminated is always the one that takes the
    fewest operations. Rows are exchanged by selections, without branches: the pivot row is compared with each row below in
    which the entry may be nonzero. After an exchange the sparsity pattern of both rows is the union of both patterns.

    `entries`: (row, column) of the structural nonzeros and of the diagonal.
    """

    def __init__(self, d: int, entries: Iterable[tuple[int, int]]):
        self.rows: list[set[int]] = [set() for _ in range(d)]  # the columns of the entries of each row
        for i, j in entries:
            self.rows[i].add(j)
        self.pivots: list[Pivot] = []
        remaining = set(range(d))
        while remaining:
            k = min(sorted(remaining), key=partial(self._cost, remaining))
            self.pivots.append(self._eliminate(k, remaining))
            remaining.remove(k)
        self.order = [pivot.k for pivot in self.pivots]

    def _below(self, k: int, remaining: set[int]) -> list[int]:
        return [i for i in sorted(remaining) if i != k and k in self.rows[i]]

    def _cost(self, remaining: set[int], k: int) -> int:
        row, cost = self.rows[k] & remaining, 0
        for i in self._below(k, remaining):
            row = row | (self.rows[i] & remaining)
            cost += len(row)
        return cost

    def _eliminate(self, k: int, remaining: set[int]) -> Pivot:
        rows, pivot = self.rows, Pivot(k, [], [])
        for i in self._below(k, remaining):
            # The entries in earlier columns are factors, which aren't exchanged.
            pattern = (rows[k] | rows[i]) & remaining
            pivot.below.append((i, [(j, j in rows[k], j in rows[i]) for j in sorted(pattern)]))
            rows[k] |= pattern
            rows[i] |= pattern
        for i, _ in pivot.below:
            columns = sorted(rows[k] & remaining - {k})
            pivot.eliminated.append((i, [(j, j in rows[i]) for j in columns]))
            rows[i].update(columns)
        return pivot

    @property
    def lines(self) -> tuple[int, int]:
        """The numbers of statements of the factorization and of one solution."""
        exchanges = sum(1 + 3 * len(columns) for pivot in self.pivots for _, columns in pivot.below)
        eliminated = sum(1 + len(columns) for pivot in self.pivots for _, columns in pivot.eliminated)
        upper = sum(k in self.rows[i] for n, k in enumerate(self.order) for i in self.order[:n])
        return exchanges + eliminated + len(self.order), sum(4 * len(one.below) + 1 for one in self.pivots) + upper


class LoopedLU:
    """The places of a factorization by loops over the band, in an array with the factors, a right-hand side and exchanges.

    The factors are stored by columns, in the order of the unknowns of `Banded`, or in the given order if the band is wide.
    """

    def __init__(self, d: int, entries: Iterable[tuple[int, int]]):
        band, self.place = Banded(Places(*np.array(list(entries)).T), d), list(range(d))
        # The entries of a column, with those of row exchanges, are consecutive; entry (i, j) is at first + j * stride + i.
        self.d, self.lower, self.width, self.stride, self.first = d, d - 1, d - 1, d, 0
        if 2 * band.lower + band.upper + 1 < d:
            self.lower, self.width, self.place = band.lower, band.lower + band.upper, np.argsort(band.order).tolist()
            self.stride, self.first = self.lower + self.width, self.width
        self.size = d * (self.lower + self.width + 1 if self.first else d)  # the number of factors
        self.length = self.size + 2 * d

    def entry(self, i: int, j: int) -> int:
        """Return the place of an entry of the matrix."""
        return self.first + self.place[j] * self.stride + self.place[i]


LU: TypeAlias = "UnrolledLU | LoopedLU"

# Maximum numbers of statements and of structural nonzeros in an unrolled factorization. The largest one is compiled in ten
# seconds. Unrolled factorizations are several times as fast as loops.
_MOST_LINES, _MOST_ENTRIES = 4000, 100


def mass_of(spec: KernelSpec) -> Sequence[tuple[int, int, float]]:
    """Return the nonzero entries of the mass matrix."""
    return spec.mass or [(i, i, 1.0) for i in range(spec.d)]


def zero_pivots(spec: KernelSpec) -> list[int]:
    """Return the indices of structurally zero entries on the diagonal of W."""
    return sorted({*range(spec.d)} - {i for i, j, *_ in (*spec.jacobian, *mass_of(spec)) if i == j})


@lru_cache(64)
def lu_of(spec: KernelSpec) -> LU:
    """Return the factorization of W (see `RosenbrockTableau`)."""
    entries = sorted({*spec.jacobian, *((i, j) for i, j, _ in mass_of(spec)), *((i, i) for i in range(spec.d))})
    if len(entries) <= _MOST_ENTRIES:
        unrolled = UnrolledLU(spec.d, entries)
        if _lines_of_step(spec, unrolled) <= _MOST_LINES:
            return unrolled
    return LoopedLU(spec.d, entries)


def _lines_of_step(spec: KernelSpec, lu: UnrolledLU) -> int:
    factors, solution = lu.lines
    return factors + len(spec.rosenbrock.coupling) * solution


def unrolled_lines(spec: KernelSpec) -> int:
    """Return the number of statements of the unrolled factorization and the solutions of a step, or 0."""
    lu = lu_of(spec)
    return _lines_of_step(spec, lu) if isinstance(lu, UnrolledLU) else 0


def reserved_of(spec: KernelSpec) -> int:
    """Return the length of the array of a looped factorization, or 0."""
    lu = lu_of(spec) if spec.tableau.implicit else None
    return lu.length if isinstance(lu, LoopedLU) else 0


def is_looped(spec: KernelSpec) -> bool:
    """Return whether a method's linear systems are solved by loops over an array."""
    return reserved_of(spec) > 0


class Factors:
    """The entries of a matrix, or of its factors, in an array; `start`: the place of the factorization in the array."""

    def __init__(self, lu: LoopedLU, array: Array, start: int):
        self._array, self._first, self._stride = array, start + lu.first, lu.stride

    def __getitem__(self, index: tuple[int, int]) -> float:
        return self._array[self._first + index[1] * self._stride + index[0]]

    def __setitem__(self, index: tuple[int, int], value: float) -> None:
        self._array[self._first + index[1] * self._stride + index[0]] = value


class Part:
    """The entries of an array from a place on."""

    def __init__(self, array: Array, first: int):
        self._array, self._first = array, first

    def __getitem__(self, index: int) -> float:
        return self._array[self._first + index]

    def __setitem__(self, index: int, value: float) -> None:
        self._array[self._first + index] = value


class Matrix(NamedTuple):
    """The factors of W at the start of a step."""

    lu: LU
    w: Array  # its entries, then its factors
    swaps: Array  # the exchanges of rows
    jacobian: Vector  # the structural nonzeros of ∂f/∂u, then of ∂f/∂t
    slopes: Vector  # h ∂f/∂t


@inlined
def factorized(kernel: Kernel, step: Step) -> Matrix:
    """Return the factors of W (see `RosenbrockTableau`) at a state."""
    spec, count = kernel.spec, len(kernel.spec.jacobian)
    jacobian, slopes = vector(count + len(spec.slopes), spec.rolled, spec.dtype.name), vector(spec.d)
    if count + len(spec.slopes):
        kernel.call("jacobian", (jacobian,), step.u, step.parameters, stage_time(spec, 0, step))
    lu, terms = lu_of(spec), [(i, j, spec.real(value / spec.rosenbrock.gamma)) for i, j, value in mass_of(spec)]
    if isinstance(lu, LoopedLU):
        matrix = Matrix(lu, Factors(lu, *kernel.lu), Part(kernel.lu[0], kernel.lu[1] + lu.size + spec.d), jacobian, slopes)
        factors = Part(*kernel.lu)
        for n in range(lu.size):
            factors[n] = spec.real(0.0)
    else:
        matrix = Matrix(lu, table((spec.d, spec.d)), table((spec.d, spec.d)), jacobian, slopes)
    if spec.rolled and isinstance(lu, LoopedLU):
        add_entries(kernel, lu, jacobian, terms, step.size)
    else:
        for n, (i, j) in static(enumerate(spec.jacobian)):
            matrix.w[i, j] = jacobian[n] * -step.size
        # The factorization also reads structurally zero entries on the diagonal, as pivots.
        for i in static(zero_pivots(spec)):
            matrix.w[i, i] = spec.real(0.0)
        for i, j, term in static(terms):
            matrix.w[i, j] = matrix.w[i, j] + term if (i, j) in spec.jacobian else term
    for n, i in static(enumerate(spec.slopes, count)):
        slopes[i] = jacobian[n] * step.size
    if isinstance(lu, LoopedLU):
        factorize_looped(lu, matrix.w, matrix.swaps, spec.real(1.0))
    else:
        factorize_unrolled(lu, matrix.w, matrix.swaps, spec.real(0.0), spec.real(1.0))
    return matrix


@inlined
def add_entries(
    kernel: Kernel, lu: LoopedLU, jacobian: Vector, terms: Sequence[tuple[int, int, float]], size: float
) -> None:
    """Assign W to the array of a looped factorization, by loops over its entries."""
    array, start = kernel.lu
    if kernel.spec.jacobian:
        places = constants([start + lu.entry(i, j) for i, j in kernel.spec.jacobian])
        for n in range(len(kernel.spec.jacobian)):
            array[places[n]] = jacobian[n] * -size
    diagonal, values = constants([start + lu.entry(i, j) for i, j, _ in terms]), constants([term for _, _, term in terms])
    for n in range(len(terms)):
        array[diagonal[n]] += values[n]


@inlined
def solve(kernel: Kernel, matrix: Matrix, x: Vector, transposed: bool = False, fused: bool = False) -> None:
    """Replace a right-hand side by the solution with W, or with its transpose; `fused`: whether products may use `fma`."""
    lu = matrix.lu
    if not isinstance(lu, LoopedLU):
        if transposed:
            solve_transposed_unrolled(lu, matrix.w, matrix.swaps, x)
        else:
            solve_unrolled(lu, matrix.w, matrix.swaps, x, fused)
    elif kernel.spec.rolled:
        # Each of these functions is compiled once.
        array, start = kernel.lu
        name = "solved_transposed" if transposed else "solved"
        separate(name, lambda x, array: solve_rolled(kernel.spec, lu, transposed, x, array, start), x, array)
    else:
        right = Part(kernel.lu[0], kernel.lu[1] + lu.size)
        for c, place in static(enumerate(lu.place)):
            right[place] = x[c]
        solve_looped(lu, matrix.w, matrix.swaps, right, transposed)
        for c, place in static(enumerate(lu.place)):
            x[c] = right[place]


@inlined
def solve_rolled(spec: KernelSpec, lu: LoopedLU, transposed: bool, x: Vector, array: Array, start: int) -> None:
    """Replace a right-hand side that is an array by the solution."""
    right = vector(spec.d, True, spec.dtype.name)
    place = constants(lu.place)
    for c in range(spec.d):
        right[place[c]] = x[c]
    solve_looped(lu, Factors(lu, array, start), Part(array, start + lu.size + spec.d), right, transposed)
    for c in range(spec.d):
        x[c] = right[place[c]]


# ---- unrolled factorizations


@inlined
def exchange(x: Vector, k: int, i: int, swap: bool) -> None:
    """Exchange two entries if `swap` is true."""
    v = x[k]
    x[k] = where(swap, x[i], v)
    x[i] = where(swap, v, x[i])


@inlined
def factorize_unrolled(lu: UnrolledLU, w: Array, swaps: Array, zero: float, one: float) -> None:
    """Replace the entries of a matrix by its factors; `swaps`: the exchanges of rows."""
    for k, below, eliminated in static(lu.pivots):
        for i, columns in static(below):
            swaps[k, i] = abs(w[i, k]) > abs(w[k, k])
            for j, in_upper, in_lower in static(columns):
                v = w[k, j] if in_upper else zero
                lower = w[i, j] if in_lower else zero
                w[k, j] = where(swaps[k, i], lower, v)
                w[i, j] = where(swaps[k, i], v, lower)
        w[k, k] = one / w[k, k] + (w[k, k] - w[k, k])
        for i, columns in static(eliminated):
            w[i, k] = w[i, k] * w[k, k]
            for j, is_entry in static(columns):
                w[i, j] = (w[i, j] if is_entry else zero) - w[i, k] * w[k, j]


def eliminated(x: float, factor: float, y: float, fused: bool) -> float:
    """Return x - factor * y."""
    return fma(-factor, y, x) if fused else x - factor * y


@inlined
def solve_unrolled(lu: UnrolledLU, w: Array, swaps: Array, x: Vector, fused: bool = False) -> None:
    """Replace a right-hand side by the solution."""
    for k, below, _ in static(lu.pivots):
        for i, _ in static(below):
            exchange(x, k, i, swaps[k, i])
        for i, _ in static(below):
            x[i] = eliminated(x[i], w[i, k], x[k], fused)
    for n, k in static(reversed([*enumerate(lu.order)])):
        x[k] = x[k] * w[k, k]
        for i in static(lu.order[:n]):
            if k in lu.rows[i]:
                x[i] = eliminated(x[i], w[i, k], x[k], fused)


@inlined
def solve_transposed_unrolled(lu: UnrolledLU, w: Array, swaps: Array, x: Vector) -> None:
    """Replace a right-hand side by the solution with the transposed matrix."""
    for n, k in static(enumerate(lu.order)):
        x[k] = x[k] * w[k, k]
        for j in static(lu.order[n + 1 :]):
            if j in lu.rows[k]:
                x[j] = x[j] - w[k, j] * x[k]
    for k, below, _ in static(reversed(lu.pivots)):
        for i, _ in static(below):
            x[k] = x[k] - w[i, k] * x[i]
        for i, _ in static(reversed(below)):
            exchange(x, k, i, swaps[k, i])


# ---- looped factorizations


@inlined
def factorize_looped(lu: LoopedLU, w: Factors, swaps: Part, one: float) -> None:
    """Replace the entries of a matrix by its factors; `swaps`: the rows with which the pivot rows are exchanged."""
    for k in range(len(lu.place)):
        below = min(k + (lu.lower + 1), len(lu.place))
        right = min(k + (lu.width + 1), len(lu.place))
        largest = abs(w[k, k])
        best = k
        for i in range(k + 1, below):
            size = abs(w[i, k])
            if size > largest:
                largest = size
                best = i
        swaps[k] = best
        if best != k:
            for j in range(k, right):
                v = w[k, j]
                w[k, j] = w[best, j]
                w[best, j] = v
        pivot = w[k, k]
        pivot = one / pivot + (pivot - pivot)
        w[k, k] = pivot
        for i in range(k + 1, below):
            w[i, k] = w[i, k] * pivot
        for j in range(k + 1, right):
            v = w[k, j]
            for i in range(k + 1, below):
                w[i, j] = w[i, j] - w[i, k] * v


@inlined
def exchange_looped(x: Vector, swaps: Part, k: int) -> None:
    """Exchange two entries."""
    best = np.int64(swaps[k])
    if best != k:
        v = x[k]
        x[k] = x[best]
        x[best] = v


@inlined
def solve_looped(lu: LoopedLU, w: Factors, swaps: Part, x: Vector, transposed: bool) -> None:
    """Replace a right-hand side, in the order of the factors, by the solution."""
    d = len(lu.place)
    if transposed:
        for k in range(d):
            v = x[k]
            for i in range(max(k - lu.width, 0), k):
                v = v - w[i, k] * x[i]
            x[k] = v * w[k, k]
        for k in range(d - 1, -1, -1):
            v = x[k]
            for i in range(k + 1, min(k + (lu.lower + 1), d)):
                v = v - w[i, k] * x[i]
            x[k] = v
            exchange_looped(x, swaps, k)
    else:
        for k in range(d):
            exchange_looped(x, swaps, k)
            v = x[k]
            for i in range(k + 1, min(k + (lu.lower + 1), d)):
                x[i] = x[i] - w[i, k] * v
        for k in range(d - 1, -1, -1):
            v = x[k] * w[k, k]
            x[k] = v
            for i in range(max(k - lu.width, 0), k):
                x[i] = x[i] - w[i, k] * v


# ---- steps


@inlined
def rosenbrock_stages(kernel: Kernel, step: Step) -> Matrix:
    """Compute all stages but the first, and the new state; return the factors of W."""
    spec, k, last = kernel.spec, step.k, kernel.spec.stages
    matrix = factorized(kernel, step)
    for i in static(range(1, last)):
        at_end = i == last - 1 and spec.rosenbrock.ends_at_new_state
        if i == 1:
            copy(spec, k[1], k[0])
        else:
            argument(spec, step.y[i], i, k, step.u, step.size)
            kernel.call("f", (k[i],), step.y[i], step.parameters, stage_time(spec, i, step))
        if at_end:
            copy(spec, k[last], k[i])
        right_hand_side(spec, matrix, k, i)
        solve(kernel, matrix, k[i])
    if not spec.rosenbrock.ends_at_new_state:
        argument(spec, step.new, last, k, step.u, step.size)
        kernel.call("f", (k[last],), step.new, step.parameters, stage_time(spec, last, step))
    return matrix


@inlined
def right_hand_side(spec: KernelSpec, matrix: Matrix, k: Sequence[Vector], i: int) -> None:
    """Add Σ C_ij k_j + d_i h ∂f/∂t, as in `RosenbrockTableau`, to f at the argument of stage i."""
    slope = spec.rosenbrock.slopes[i - 1]
    add_coupling(spec, k, i)
    if slope:
        for c in static(spec.slopes):
            k[i][c] = k[i][c] + matrix.slopes[c] * spec.real(slope)


@inlined
def add_coupling(spec: KernelSpec, k: Sequence[Vector], i: int, fused: bool = False) -> None:
    """Add Σ C_ij k_j to the right-hand side of stage i, multiplied by the mass matrix."""
    coupled = spec.rosenbrock.coupling[i - 1]
    if any(coupled) and spec.mass is None:
        for c in spec.components:
            k[i][c] = k[i][c] + weighted(spec, coupled, k, c, fused)
    elif any(coupled):
        sums = state(spec)
        for c in spec.components:
            sums[c] = weighted(spec, coupled, k, c, fused)
        for row, c, value in static(spec.mass or ()):
            k[i][row] = k[i][row] + spec.real(value) * sums[c]


@inlined
def rosenbrock_tangents(
    kernel: Kernel, step: Step, matrix: Matrix, seeds: Seeds, du: Vector, dnew: Vector, dk: Sequence[Vector]
) -> None:
    """Compute the tangents of the stages of a Rosenbrock method, and that of the new state."""
    spec, w, count = kernel.spec, state(kernel.spec), len(kernel.spec.jacobian) + len(kernel.spec.slopes)
    moved = vector(count, spec.rolled, spec.dtype.name)  # the tangents of h J and h ∂f/∂t
    if count:
        inputs = (step.u, step.parameters, stage_time(spec, 0, step), du, *seeds.at(spec, 0), *seeds.index)
        kernel.call("djacobian", (moved,), *inputs)
    for n in range(count) if spec.rolled else static(range(count)):
        moved[n] = moved[n] * step.size
        if seeds.dh is not None:
            moved[n] = fma(seeds.dh, matrix.jacobian[n], moved[n])
    for i in static(range(1, spec.stages)):
        y, along = static((step.u, du) if i == 1 else (step.y[i], w))
        if i > 1:
            tangent_argument(spec, along, i, dk, du, step, seeds)
        inputs = (y, step.parameters, stage_time(spec, i, step), along, *seeds.at(spec, i), *seeds.index)
        kernel.call("df", (dk[i],), *inputs)
        add_coupling(spec, dk, i, True)
        add_products(spec, moved, step.k[i], spec.real(spec.rosenbrock.slopes[i - 1]), dk[i])
        solve(kernel, matrix, dk[i], fused=True)
    tangent_argument(spec, dnew, spec.stages, dk, du, step, seeds)


def places_of(spec: KernelSpec) -> tuple[Sequence[int], Sequence[int]]:
    """Return the rows and the columns of the structural nonzeros of the Jacobian."""
    rows, columns = [i for i, _ in spec.jacobian], [j for _, j in spec.jacobian]
    return (constants(rows), constants(columns)) if spec.rolled and rows else (rows, columns)


@inlined
def add_products(spec: KernelSpec, entries: Vector, k: Vector, slope: float, out: Vector) -> None:
    """Add the product of a matrix with the places of the Jacobian and a stage, and `slope` times the derivative by time."""
    (rows, columns), count = places_of(spec), len(spec.jacobian)
    for n in range(count) if spec.rolled and count else static(range(count)):
        out[rows[n]] = fma(entries[n], k[columns[n]], out[rows[n]])
    for n, c in static(enumerate(spec.slopes, count)):
        out[c] = fma(entries[n], slope, out[c])
