"""Krylov methods for distributed vectors: conjugate gradients, GMRES and BiCGStab.

The preconditioned conjugate gradient method takes one reduction per iteration, for all inner products: A is applied to the
preconditioned residual z, and A p, for the search direction p, follows from A z by the recurrence of p. On many ranks, a
second reduction would cost more than the additional vector updates. Near the end, an additional reduction computes the
norm of the residual; if it meets the tolerance, the preconditioner and A aren't applied again.

References
----------
A. T. Chronopoulos and C. W. Gear, s-step iterative methods for symmetric linear systems, Journal of Computational and
Applied Mathematics 25 (1989), algorithm 2.2 with s = 1.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import autograd.numpy as anp
import numpy as np
import scipy.linalg

from mpiad._typing import Array, LocalArray
from mpiad.compiling.c_translation import PRELUDE, c_statements
from mpiad.compiling.cache import functions_of
from mpiad.compiling.source import indented
from mpiad.linalg.compiled_iteration import Cycle
from mpiad.linalg.iteration import diagnosis, require_iterations
from mpiad.linalg.system import (
    ADVICE_FOR_COPIES,
    AnySystem,
    Iterations,
    System,
    preconditioned_product,
    preconditioned_start,
)
from mpiad.linalg.vectors import (
    are_finite,
    are_within,
    column,
    combined,
    inner,
    is_nearly_real,
    on_host,
    products,
    products_there,
)
from mpiad.primitives import mpi_allreduce
from mpiad.programs import jit
from mpiad.programs.device_loops import OPTIONS
from mpiad.transport.devices.device_arrays import ArrayModule, arrays_of, launcher_of

# Krylov spaces of several systems for GMRES, with one reduction per vector, on arrays or, for doubles, by kernels.
#
# Orthogonalization is classical Gram-Schmidt with two passes in one reduction. The reduction contains the inner
# products s of the basis with the new vector w, and the inner products of the basis with its last vector, which complete
# the Gram matrix G of the basis. So the correction of the second pass, s - G s, needs no further reduction. The norm of
# the remainder follows from the same inner products; if too many digits cancel, the norm is computed directly, with another
# pass. The basis needn't be exactly orthonormal, since A V = V H holds for any basis V computed in this way.
#
# A vector y with yᵀ H = 0 and y₀ = 1 follows from H by forward substitution, one entry per step. The minimal residual is
# proportional to the conjugate of V y, and its norm is |r| / |y|. A least-squares problem is solved only for the solution.
#
# For vectors of doubles on the host, kernels compute the products and the step. They are written in the kernel language
# and compiled from the source code of this file (see `mpiad.compiling.translation`). For vectors on a device, also complex
# ones, one thread of the device runs the kernel of the coefficients, so that steps run ahead of the host.
#
# References
# ----------
# E. H. Ayachour, A fast implementation for GMRES method, Journal of Computational and Applied Mathematics 159 (2003).
# K. Swirydowicz, J. Langou, S. Ananthan, U. Yang and S. Thomas, Low synchronization Gram-Schmidt and generalized minimal
# residual algorithms, Numerical Linear Algebra with Applications 28 (2021), section 3.


def arnoldi_of(system: System, first: LocalArray, norms: np.ndarray, targets: np.ndarray, length: int) -> Arnoldi:
    """Return the spaces of residuals `first` (k, n) with given norms and targets, for up to `length` steps."""
    # The ranks must take the same decisions, so the number of this rank's unknowns has no influence.
    if type(first) is np.ndarray and first.dtype == np.float64:
        return CompiledArnoldi(first, norms, targets, length)
    if system.may_run_ahead and (norms > targets).any():
        cycle = system.agreed_cycle(_product, (first,))
        if cycle is not None:
            return DeviceArnoldi(first, norms, targets, length, cycle)
    return Arnoldi(first, norms, targets, length)


class Arnoldi:
    """The Krylov spaces of k systems: bases V (m, k, n), Gram matrices G (k, m, m), Hessenberg matrices H (k, m, m - 1).

    `null` contains the vector y of each system, and `squares` its squared norm. `norms` are those of the minimal
    residuals. `complete`: whether a space can't grow, in which case the true residual shows if it contains the solution.
    """

    def __init__(self, first: LocalArray, norms: np.ndarray, targets: np.ndarray, length: int):
        k, n = first.shape
        kind = np.result_type(first.dtype, float)
        self.vectors = np.empty_like(first, order="C", shape=(length + 1, k, n))
        self.vectors[0] = first / column(first, np.where(norms > 0.0, norms, 1.0))
        self._gram, self._null = np.zeros((k, length + 1, length + 1), kind), np.zeros((k, length + 1), kind)
        self._hessenberg = np.zeros((k, length + 1, length), kind)
        self._null[:, 0] = 1.0
        # The rows are for the kernel. Of the last three, it uses the first number.
        self._state = np.zeros((_ROWS + length + 1, k))
        self._state[:4] = norms, norms, targets, np.ones(k)
        self._name_rows()
        # If the remainder is below this fraction of |w|², half of the digits are lost by cancellation.
        self._certain[0] = math.sqrt(np.finfo(first.dtype).eps)
        self.grows = bool(self._growing(0))  # whether another step is needed

    def _name_rows(self) -> None:
        self._first_norms, self.norms, self._targets, self._squares, self.steps, self._complete = self._state[:6]
        self._inverses, self._stop, self._unfinished, self._certain = self._state[6:_ROWS]

    def _growing(self, j: int) -> list[int]:
        """Return the systems that haven't converged after j steps, and whose spaces can grow."""
        _, norms, targets, _, steps, complete = self._state[:6]
        return np.flatnonzero((norms > targets) & (steps == j) & (complete == 0.0)).tolist()

    def advance(self, system: System, j: int, most: int) -> Iterator[np.ndarray]:
        """Take the next steps from step j on, at most `most`; yield the norms after each."""
        self.vectors[j + 1][...] = system.run(_product, self.vectors[j])[0]
        self._finish(system, j, system.sums(self.local_products(j)))
        yield self.norms

    def _finish(self, system: System, j: int, sums: np.ndarray) -> None:
        if not are_finite(sums[:, -1]):
            system.require_finite(sums, self.vectors[j + 1], _PRODUCT)
        self.extend(system, j, sums)

    def close(self) -> None:
        """End the use of programs, after the last step."""

    def local_products(self, j: int) -> np.ndarray:
        """Return this rank's part of the sums of a step (k, 2 j + 3), for which w is the vector after the last one."""
        basis = self.vectors[: j + 1]
        return np.concatenate([products(basis, basis[j]), products(self.vectors[: j + 2], self.vectors[j + 1])], axis=1)

    def extend(self, system: System, j: int, sums: np.ndarray) -> None:
        """Orthogonalize and normalize w."""
        basis, w, growing, count = self.vectors[: j + 1], self.vectors[j + 1], self._growing(j), j + 1
        h, remainders, inverses = np.zeros((len(w), count), self._null.dtype), np.zeros(len(w)), np.zeros(len(w))
        squares = np.real(sums[:, -1])
        for c in growing:
            of_last, s, gram = sums[c, :count], sums[c, count:-1], self._gram[c, :count, :count]
            gram[:, j], gram[j] = of_last, of_last.conj()
            # The sum of both passes of Gram-Schmidt is s + (s - G s). |w - V h|² follows up to order |G - 1|² |s|².
            h[c] = s + s - gram @ s
            remainders[c] = squares[c] - np.vdot(s, h[c]).real
        w = w - combined(basis, h)
        if any(remainders[c] <= self._certain[0] * squares[c] for c in growing):
            total = system.sums(np.concatenate([products(basis, w), inner((w, w)).T], axis=1))
            s, remainders = total[:, :-1], np.real(total[:, -1]) - np.sum(np.abs(total[:, :-1]) ** 2, axis=1)
            w, h = w - combined(basis, s), h + s
            # A remainder below this bound consists of rounding errors.
            remainders[remainders <= (10.0 * np.finfo(w.dtype).eps) ** 2 * squares] = 0.0
        for c in growing:
            norm, null = math.sqrt(max(remainders[c], 0.0)), self._null[c]
            self._hessenberg[c, :count, j], self._hessenberg[c, count, j], self.steps[c] = h[c], norm, count
            if norm == 0.0:
                self._complete[c], self.norms[c] = 1.0, self._least_squares(c)[1]
                continue
            null[count], inverses[c] = -(null[:count] @ h[c]) / norm, 1.0 / norm
            self._squares[c] += abs(null[count]) ** 2
            self.norms[c] = self._first_norms[c] / math.sqrt(self._squares[c])
        np.multiply(w, column(w, inverses.astype(w.real.dtype)), out=self.vectors[count])
        self.grows = bool(self._growing(count))

    def _least_squares(self, c: int) -> tuple[np.ndarray, float]:
        """Return the coefficients of one system's vector with the minimal residual, and the norm of this residual."""
        steps = int(self.steps[c])
        h, right = self._hessenberg[c, : steps + 1, :steps], np.zeros(steps + 1, self._hessenberg.dtype)
        right[0] = self._first_norms[c]
        # For a singular operator, the columns of H may be dependent: the rank is determined by pivoting.
        condition = steps * np.finfo(h.dtype).eps
        solution: Any = scipy.linalg.lstsq(h, right, condition, check_finite=False, lapack_driver="gelsy")
        return solution[0], float(np.linalg.norm(right - h @ solution[0]))

    def combination(self) -> LocalArray:
        """Return the vectors in the Krylov spaces with minimal residuals, shape (k, n)."""
        numbers = np.zeros((len(self.steps), int(self.steps.max())), self._hessenberg.dtype)
        for c, steps in enumerate(self.steps.astype(int).tolist()):
            numbers[c, :steps] = self._least_squares(c)[0]
        return combined(self.vectors[: numbers.shape[1]], numbers)


class CompiledArnoldi(Arnoldi):
    """The same for vectors of doubles on the host, by kernels, except for steps in which digits cancel."""

    def __init__(self, first: LocalArray, norms: np.ndarray, targets: np.ndarray, length: int):
        super().__init__(first, norms, targets, length)
        k, n = first.shape
        self._sums, self._numbers = np.zeros(k * (2 * length + 1)), np.array([0, k, n, length + 1])
        arrays = [self._numbers, self.vectors, self._sums, self._gram, self._hessenberg, self._null, self._state]
        words = [word for array in (*arrays, np.zeros(1)) for word in (array.ctypes.data, array.size)]
        self._block = np.array([0, 0, *words])
        self._address, self._kernels = self._block.ctypes.data, _kernels()

    def local_products(self, j: int) -> np.ndarray:
        """Return this rank's part of the sums of a step."""
        self._numbers[0] = j + 1
        self._kernels[0](self._address)
        k = len(self.steps)
        return self._sums[: k * (2 * j + 3)].reshape(k, 2 * j + 3)

    def extend(self, system: System, j: int, sums: np.ndarray) -> None:
        """Orthogonalize and normalize w."""
        self._sums[: sums.size] = sums.ravel()
        self._stop[0] = 0.0
        self._kernels[1](self._address)
        self.grows = self._unfinished[0] > 0.0
        if self._stop[0]:
            super().extend(system, j, sums)


class DeviceArnoldi(Arnoldi):
    """The same for vectors on a device: the host looks after several steps, and if digits cancel."""

    def __init__(self, first: LocalArray, norms: np.ndarray, targets: np.ndarray, length: int, cycle: Cycle):
        super().__init__(first, norms, targets, length)
        self._cycle, self._arrays = cycle, cast(ArrayModule, arrays_of(first))
        launcher = launcher_of(self._arrays)
        self._launch = partial(
            launcher.launch, launcher.compiled(_device_text(self._null.dtype.kind), "extended_coefficients", OPTIONS), 1, 32
        )
        # One array on the host, and one on the device, contain all numbers, complex ones as two each.
        small = self._gram, self._hessenberg, self._null, self._state
        self._host = np.concatenate([x.ravel().view(float) for x in small])
        self._gram, self._hessenberg, self._null, self._state = self._parts(self._host)
        self._name_rows()
        self._there = self._arrays.to_device(self._host)
        self.close = cycle.close

    def _parts(self, numbers: Array) -> list[Array]:
        k, length, kinds = len(self.norms), len(self.vectors) - 1, [*[self._null.dtype] * 3, np.dtype(float)]
        shapes = (k, length + 1, length + 1), (k, length + 1, length), (k, length + 1), (_ROWS + length + 1, k)
        ends = np.cumsum([0, *[math.prod(shape) * kind.itemsize // 8 for shape, kind in zip(shapes, kinds)]]).tolist()
        return [numbers[i:end].view(kind).reshape(shape) for i, end, shape, kind in zip(ends, ends[1:], shapes, kinds)]

    def advance(self, system: System, j: int, most: int) -> Iterator[np.ndarray]:
        """Take the next steps from step j on, at most `most`; yield the norms after each."""
        count = min(system.until_look(), most)
        sums = [self._step(system, step) for step in range(j, j + count)]
        self._host[...] = self._arrays.to_host(self._there)
        stop, end = int(self._stop[0]), int(self.steps.max())
        self.grows = bool(self._growing(end))
        for step in range(j, end):
            yield self._state[_ROWS + 1 + step]
        if stop:  # in the step with this number, counted from one
            self._stop[0] = 0.0
            self._finish(system, stop - 1, on_host(sums[stop - 1 - j]))
            self._there = self._arrays.to_device(self._host)
            yield self.norms

    def _step(self, system: System, j: int) -> Array:
        """Take a step on the device, without the host; return its sums."""
        count, (k, *_), basis, w = j + 1, self._null.shape, self.vectors[: j + 1], self.vectors[j + 1]
        self._cycle.state[0][...] = basis[j]
        self._cycle.run()
        w[...] = self._cycle.state[0]
        both = [products_there(basis, basis[j]), products_there(self.vectors[: count + 1], w)]
        local = np.concatenate(both, axis=1).astype(self._null.dtype, copy=False)
        sums = local if system.is_alone else mpi_allreduce(local, comm=system.settings.comm)
        parts = self._parts(self._there)
        self._launch([count, k, len(self.vectors), *[part.reshape(-1).view(np.float64) for part in (sums, *parts)]])
        _, hessenberg, _, state = parts
        h, inverses = (x.astype(w.dtype, copy=False) for x in (hessenberg[:, :count, j], state[6]))
        w[...] = (w - (h[:, None] @ basis.swapaxes(0, 1))[:, 0]) * inverses[:, None]
        return sums


_ROWS = 10  # rows of the state, before the norms after each step


@functools.cache
def _kernels() -> list[Callable[..., None]]:
    # The first kernel uses the first two floating-point arrays of the block.
    counts = {"inner_products": 2, "extended_spaces": 6}
    signatures = {name: f"linked(int64[::1], {', '.join(['float64[::1]'] * count)})" for name, count in counts.items()}
    return functions_of(__name__, signatures, "reassoc")


# The numbers of the kernel of the coefficients on a device.
_DEVICE_NUMBERS = {
    "f": """
typedef double Number;
INLINE double conjugate(double a) { return a; }
INLINE double real_part(double a) { return a; }
""",
    "c": """
struct Number {
    double x, y;
    __device__ Number(double x = 0.0, double y = 0.0) : x(x), y(y) {}
};
INLINE Number operator*(Number a, Number b) { return Number(a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x); }
INLINE Number operator-(Number a) { return Number(-a.x, -a.y); }
INLINE void operator+=(Number& a, Number b) { a.x += b.x; a.y += b.y; }
INLINE void operator-=(Number& a, Number b) { a.x -= b.x; a.y -= b.y; }
INLINE Number conjugate(Number a) { return Number(a.x, -a.y); }
INLINE double real_part(Number a) { return a.x; }
""",
}


@functools.cache
def _device_text(kind: str) -> str:
    """Return the kernel of the coefficients for a device, for vectors of real ("f") or complex ("c") numbers."""
    (function,) = ast.parse(inspect.getsource(extended_coefficients)).body
    function = cast(ast.FunctionDef, function)
    names = [argument.arg for argument in function.args.args]
    kinds = [*["long long"] * 3, "const Number*", *["Number*"] * 3, "double*"]
    head = ", ".join(f"{kind} {name}" for kind, name in zip(kinds, names))
    body = ["    EACH(thread, 1) {", *indented(c_statements(function.body[1:-1], names), 2), "    }"]
    return PRELUDE + _DEVICE_NUMBERS[kind] + "\n".join([f"KERNEL {function.name}({head}) {{", *body, "}\n"])


def inner_products(numbers: np.ndarray, vectors: np.ndarray, sums: np.ndarray) -> None:
    """Compute the inner products of the basis with its last vector and with w, and of w with itself."""
    count, systems, n = numbers[0], numbers[1], numbers[2]
    for c in range(systems):
        first, last, out = ((count - 1) * systems + c) * n, (count * systems + c) * n, c * (2 * count + 1)
        v, w = vectors[first : first + n], vectors[last : last + n]
        for i in range(count + 1):
            first = (i * systems + c) * n
            x, a, b = vectors[first : first + n], 0.0, 0.0
            for p in range(n):
                a += x[p] * v[p]
                b += x[p] * w[p]
            if i < count:
                sums[out + i] = a
            sums[out + count + i] = b


def extended_spaces(
    numbers: np.ndarray, vectors: np.ndarray, sums: np.ndarray, gram: np.ndarray, hessenberg: np.ndarray, null: np.ndarray,
    state: np.ndarray,
) -> None:  # fmt: skip
    """Do what `Arnoldi.extend` does, unless digits cancel in a step; see `extended_coefficients`."""
    count, k, n, m = numbers[0], numbers[1], numbers[2], numbers[3]
    stop = extended_coefficients(count, k, m, sums, gram, hessenberg, null, state)
    if stop == 0.0:
        for c in range(k):
            first, column, inverse = (count * k + c) * n, c * m * (m - 1) + count - 1, state[6 * k + c]
            w = vectors[first : first + n]
            if inverse > 0.0:
                for i in range(count):
                    h, first = hessenberg[column + i * (m - 1)], (i * k + c) * n
                    x = vectors[first : first + n]
                    for p in range(n):
                        w[p] -= h * x[p]
            for p in range(n):
                w[p] *= inverse


def conjugate(a: float) -> float:
    """Return the conjugate of a number, which is complex in kernels for devices only."""
    return a


def real_part(a: float) -> float:
    """Return the real part of a number."""
    return a


def extended_coefficients(
    count: int, k: int, m: int, sums: np.ndarray, gram: np.ndarray, hessenberg: np.ndarray, null: np.ndarray,
    state: np.ndarray,
) -> float:  # fmt: skip
    """Compute a column of each Hessenberg matrix, the factors of the remainders of w, and the number of unfinished systems.

    If digits cancel or sums aren't finite, `Arnoldi.extend` must do the step: the first number of the row `_stop` becomes
    the number of the step, and neither this step nor later ones change the spaces. Return this number.
    """
    stop = 7 * k
    state[8 * k] = 0.0
    if state[stop] == 0.0:
        for c in range(k):
            state[6 * k + c] = 0.0
            if state[k + c] > state[2 * k + c] and state[4 * k + c] == count - 1 and state[5 * k + c] == 0.0:
                s = c * (2 * count + 1)
                g = c * m * m
                column = c * m * (m - 1) + count - 1
                for i in range(count):
                    gram[g + i * m + count - 1] = sums[s + i]
                    gram[g + (count - 1) * m + i] = conjugate(sums[s + i])
                square = real_part(sums[s + 2 * count])
                remainder = square
                for i in range(count):
                    a = 2.0 * sums[s + count + i]
                    row = g + i * m
                    for p in range(count):
                        a -= gram[row + p] * sums[s + count + p]
                    hessenberg[column + i * (m - 1)] = a
                    remainder -= real_part(a * conjugate(sums[s + count + i]))
                hessenberg[column + count * (m - 1)] = remainder
                if not remainder > state[9 * k] * square:
                    state[stop] = count
    if state[stop] != 0.0:
        # w stays as it is.
        for c in range(k):
            state[6 * k + c] = 1.0 if state[stop] == count else 0.0
            column = c * m * (m - 1) + count - 1
            for i in range(count + 1):
                hessenberg[column + i * (m - 1)] = 0.0
    else:
        for c in range(k):
            if state[k + c] > state[2 * k + c] and state[4 * k + c] == count - 1 and state[5 * k + c] == 0.0:
                column = c * m * (m - 1) + count - 1
                dot = null[c * m] * hessenberg[column]
                for i in range(1, count):
                    dot += null[c * m + i] * hessenberg[column + i * (m - 1)]
                norm = math.sqrt(real_part(hessenberg[column + count * (m - 1)]))
                hessenberg[column + count * (m - 1)] = norm
                inverse = 1.0 / norm
                state[6 * k + c] = inverse
                null[c * m + count] = -dot * inverse
                state[3 * k + c] += real_part(dot * conjugate(dot)) * inverse * inverse
                state[k + c] = state[c] / math.sqrt(state[3 * k + c])
                state[4 * k + c] = count
                if state[k + c] > state[2 * k + c]:
                    state[8 * k] += 1.0
    for c in range(k):
        state[(10 + count) * k + c] = state[k + c]
    return state[stop]


_PRODUCT = "a product with matvec or preconditioner"

# Restarted GMRES with one reduction per iteration.
#
# References
# ----------
# Y. Saad and M. H. Schultz, GMRES, SIAM Journal on Scientific and Statistical Computing 7 (1986), algorithm 4.


def gmres(system: System, x: LocalArray, r: LocalArray, norms: np.ndarray, targets: np.ndarray) -> bool:
    """Improve the solutions of nonsingular systems by one cycle of GMRES; this is a `Method`."""
    require_iterations(system, targets)
    first, norms, scale = preconditioned_start(system, r, norms)
    targets, longest = targets * scale, max(1, min(system.settings.restart, system.unknowns))
    spaces = arnoldi_of(system, first, norms, targets, longest)
    j, most = 0, min(longest, max(1, system.limit - system.iterations))
    while spaces.grows and j < most:
        for norms in spaces.advance(system, j, most - j):
            system.note(norms / scale)
            j += 1
    spaces.close()
    if any(spaces.steps.tolist()):
        # With side="right" the preconditioner is applied to the combination of basis vectors.
        step = spaces.combination()
        x += step if system.side == "left" else system.precondition(step)
    return are_within(spaces.norms, targets)


def _product(system: AnySystem, v: LocalArray) -> tuple[LocalArray]:
    return (preconditioned_product(system, v)[1],)


# BiCGStab: two products and two reductions per iteration, without a stored basis. The norm of the next residual and its
# inner product with the shadow residual follow from the second reduction.
#
# References
# ----------
# H. A. van der Vorst, Bi-CGSTAB, SIAM Journal on Scientific and Statistical Computing 13 (1992), the preconditioned
# algorithm of section 4.

# Breakdown: the inner product of residual and shadow residual, divided by both norms, is only a rounding error.
_BREAKDOWN = 1e-14
# Breakdown: the residual has grown by this factor since the start, so few digits of the recurrence are accurate.
_DIVERGED = 1e6


def bicgstab(system: System, x: LocalArray, r: LocalArray, norms: np.ndarray, targets: np.ndarray) -> bool:
    """Improve the solutions of nonsingular systems until convergence or breakdown; this is a `Method`."""
    require_iterations(system, targets)
    first, norms, scale = preconditioned_start(system, r, norms)
    targets = targets * scale
    # The shadow residual is equal to the first residual, so their inner product is the square of its norm.
    numbers = np.stack([norms**2, norms, norms, targets]).astype(np.result_type(first.dtype, float))
    iterations = Iterations(system, _bicgstab_iteration, (x, first, first, numbers), 6, (first,))
    remaining, is_broken = (norms > targets).any(), 0.0
    while remaining:
        require_iterations(system, targets / scale)
        numbers, sums, (invalid, remaining, is_broken) = iterations.following()
        if invalid:
            _explain_bicgstab(system, first, iterations.before, sums)
        system.note(numbers[1].real / scale)
    x[...] = iterations.end()[0]
    return not is_broken


def _bicgstab_iteration(
    system: AnySystem, x: LocalArray, r: LocalArray, p: LocalArray, numbers: LocalArray, shadow: LocalArray
) -> tuple[LocalArray, ...]:
    """Return the next vectors and numbers, the sums, and counts.

    The counts are those of systems with invalid sums, of those to go on with (none after a breakdown), and of breakdowns.
    The rows of `numbers` are, for each system: the inner product of residual and shadow residual, the norms of the residual
    now and at the start, and the target.
    """
    rho_before, (norms, at_start, targets) = numbers[0], numbers[1:].real
    active = norms > targets
    # The residual becomes orthogonal to the shadow residual.
    change, v = preconditioned_product(system, p)
    first_sums = system.dots((shadow, v))
    alpha = _quotient(rho_before, first_sums[0], active)
    x, r = system.updated(_along_p, (x, r, change, v), (alpha,))
    # Its norm becomes minimal.
    change, t = preconditioned_product(system, r)
    sums = system.dots((t, r), (t, t), (r, r), (shadow, r), (shadow, t))
    tr, tt, rr, sr, st = sums
    omega = _quotient(tr, tt, active)
    # The inner product of the shadow residual with r - ω t follows from these sums.
    rho = sr - omega * st
    beta = _quotient(rho * alpha, rho_before * omega, active)
    x, r, p = system.updated(_along_r, (x, r, p, change, t, v), (omega, beta))
    # The norm of r - ω t follows from these inner products; if rounding makes its square negative, it is zero.
    square = rr.real - anp.abs(tr) ** 2 / anp.abs(anp.where(tt != 0.0, tt, 1.0))
    norms = anp.where(active, anp.sqrt(anp.maximum(square, 0.0)), norms)
    is_broken = anp.abs(rho) <= _BREAKDOWN * norms * at_start
    is_broken = is_broken | (alpha * omega == 0.0) | (norms > _DIVERGED * at_start)
    remaining, sums = active & (norms > targets), anp.concatenate([first_sums, sums])
    is_finite = anp.isfinite(anp.sum(anp.abs(sums), axis=0))
    invalid, remaining, broken = anp.sum(1.0 * anp.stack([~is_finite, remaining, is_broken & remaining]), axis=1)
    counts = anp.stack([invalid, anp.where(broken > 0.0, 0.0, remaining), broken])
    return x, r, p, anp.stack([rho, norms, at_start, targets]), sums, counts


def _explain_bicgstab(system: System, shadow: LocalArray, before: Sequence[LocalArray], sums: np.ndarray) -> None:
    """Raise the error of an iteration with invalid sums, on all ranks; `before`: the state before its vector updates."""
    x, r, p, numbers = before
    change, v = preconditioned_product(system, p)
    system.require_finite(sums[:1], v, _PRODUCT)
    alpha = _quotient(numbers[0], sums[0], numbers[1].real > numbers[3].real)
    _, r = system.updated(_along_p, (x, r, change, v), (alpha,))
    system.require_finite(sums, preconditioned_product(system, r)[1], _PRODUCT)


def _quotient(a: LocalArray, b: LocalArray, active: LocalArray) -> LocalArray:
    usable = active & (b != 0.0)
    return anp.where(usable, a, 0.0) / anp.where(usable, b, 1.0)


@jit
def _along_p(x: LocalArray, r: LocalArray, change: LocalArray, v: LocalArray, alpha: Array) -> tuple[LocalArray, ...]:
    return x + alpha * change, r - alpha * v


@jit
def _along_r(
    x: LocalArray, r: LocalArray, p: LocalArray, change: LocalArray, t: LocalArray, v: LocalArray, omega: Array, beta: Array
) -> tuple[LocalArray, ...]:
    r = r - omega * t
    return x + omega * change, r, beta * (p - omega * v) + r


def conjugate_gradients(system: System, x: LocalArray, r: LocalArray, norms: np.ndarray, targets: np.ndarray) -> bool:
    """Solve symmetric (complex: Hermitian) positive definite systems; this is a `Method`."""
    p, s = system.full(0.0), system.full(0.0)
    # Initially r·z is infinite, so that β is zero in the first iteration.
    numbers, norm_known = np.array([norms, norms, norms, norms, targets]), True
    numbers[0] = numbers[3] = np.inf
    numbers[1] = 0.0
    iterations = Iterations(system, _cg_iteration, (x, r, p, s, numbers), 3)
    while not (norm_known and are_within(norms, targets)):
        numbers, sums, (invalid, large, far) = iterations.following()
        if invalid:
            _explain_cg(system, iterations.before, sums)
        if not norm_known:
            norms = numbers[2]
            system.note(norms)
        if not large:
            break
        require_iterations(system, targets)
        norm_known = not (far or iterations.is_ahead)
        if norm_known:
            norms = system.norms(iterations.state[1])
            system.note(norms)
    x[...] = iterations.end()[0]
    return True


def _cg_iteration(
    system: AnySystem, x: LocalArray, r: LocalArray, p: LocalArray, s: LocalArray, numbers: LocalArray
) -> tuple[LocalArray, ...]:
    """Return the next vectors and numbers, the sums, and counts.

    The counts are those of systems with invalid sums, of those to go on with, whose residuals are above the target, and of
    residuals far above it. The rows of `numbers` are, for each system: r·z and p·Ap of the last iteration, the norm of r
    before it, the shortest step so far, and the target.
    """
    rz_before, curvature_before, norms_before, shortest, targets = numbers
    z = system.precondition(r)
    w = system.apply(z)
    sums = system.dots((r, r), (r, z), (w, z))
    rr, rz, wz = sums.real
    norms = anp.sqrt(rr)
    # In a converged system, the step is zero, and the direction is the preconditioned residual.
    active = norms > targets
    beta = anp.where(active, rz / rz_before, 0.0)
    # The curvature p·Ap for p = z + β p₋, where p₋ is the last direction: since p·Ap₋ = 0, z·Ap₋ is -β p₋·Ap₋.
    curvature = wz - beta * beta * curvature_before
    alpha = _quotient(rz, curvature, active)
    # The operator maps the direction of a very long step to zero, up to rounding.
    is_valid = (rz > 0.0) & (curvature > 0.0) & (alpha * np.finfo(r.dtype).eps <= shortest) & is_nearly_real(sums)
    x, r, p, s = system.updated(_cg_update, (x, r, p, s, z, w), (alpha, beta))
    numbers = [anp.where(active, rz, np.inf), anp.where(active, curvature, 0.0), norms]
    numbers += [anp.where(active, anp.minimum(shortest, alpha), shortest), targets]
    is_finite = anp.isfinite(rr) & anp.isfinite(rz) & anp.isfinite(wz)
    # If the norm would come within twice the target after a decrease by the same factor as in the last step, it is
    # computed by an additional reduction.
    is_far = norms * norms > 2.0 * targets * norms_before
    counts = anp.sum(1.0 * anp.stack([~is_finite | active & ~is_valid, active, is_far]), axis=1)
    return x, r, p, s, anp.stack(numbers), sums, counts


@jit
def _cg_update(
    x: LocalArray, r: LocalArray, p: LocalArray, s: LocalArray, z: LocalArray, w: LocalArray, alpha: Array, beta: Array
) -> tuple[LocalArray, ...]:
    p, s = beta * p + z, beta * s + w
    return x + alpha * p, r - alpha * s, p, s


def _explain_cg(system: System, before: Sequence[LocalArray], sums: np.ndarray) -> None:
    """Raise the error of an iteration with invalid numbers, on all ranks; `before`: the state before its vector updates."""
    _, r, _, _, numbers = before
    z = system.precondition(r)
    w = system.apply(z)
    (rr, rz, wz), (rz_before, curvature_before, *_, targets) = sums, numbers
    system.require_finite(rr, r, "the residual")
    system.require_finite(rz, z, "the result of preconditioner")
    system.require_finite(wz, w, "the result of matvec")
    active = np.sqrt(rr.real) > targets
    invalid = active & ((rz.real <= 0.0) | np.logical_not(is_nearly_real(sums[1:2])))
    if invalid.any():
        product = complex(rz[invalid][0])
        text = f"{product.real:.3e}" if product.imag == 0.0 else f"{product:.3e}"
        system.fail(f"it needs a symmetric positive definite preconditioner, but r·z = {text} for a nonzero residual r")
    if (active & np.logical_not(is_nearly_real(sums[2:]))).any():
        value = complex(wz[active][0])
        problem = f"it needs a Hermitian operator, but z·Az = {value:.3e} is not real. Take method='gmres'. "
        system.fail(problem + ADVICE_FOR_COPIES)
    curvature = wz.real - (rz.real / rz_before) ** 2 * curvature_before
    invalid = active & (curvature <= 0.0)
    if invalid.any():
        value = float(curvature[invalid][0])
        cause = (
            "it is indefinite or not symmetric. Is its sign right, and the sign of its coefficients, such as κ? "
            f"{ADVICE_FOR_COPIES}"
        )
        cause = cause if value else "it is singular."
        problem = f"it needs a symmetric positive definite operator, but p·Ap = {value:.3e} for a nonzero p"
        system.fail(f"{problem}: {diagnosis(system) or cause}")
    cause = diagnosis(system) or "the ratio of its largest and smallest curvature exceeds floating-point precision."
    system.fail(f"the operator is singular to working precision: {cause}")
