"""Conjugate gradients preconditioned by multigrid V-cycles.

A is applied to the preconditioned residual z; after the V-cycle that computes z, this takes half a product. A p, for the
search direction p, follows from A z by the recurrence of p, as in `linalg.krylov.conjugate_gradients`. Vectors are
updated by NumPy or the device's module, or by compiled loops, one per reduction. The loops are written in the kernel
language (see `mpiad.compiling.translation`), and are compiled from this file's source.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np

from mpiad._typing import Array, LocalArray
from mpiad.compiling.cache import functions_of
from mpiad.errors import ConvergenceError, NotFiniteError
from mpiad.linalg.multigrid.hierarchy import Level
from mpiad.linalg.vectors import column, inner, on_host, scale_and_add
from mpiad.transport import SUM, Channel
from mpiad.transport.core.agreement import agreed, raise_together
from mpiad.transport.core.collectives import allreduce
from mpiad.transport.exits.user_failures import DeferredFailures

_CALL = "linalg.Multigrid.solve"
_RIGHT = "the right-hand side"
_SMALLEST_SQUARE = 1e-260  # bound for |b|², so that squares of residuals of size 1e-20 |b| don't underflow


class Tolerance(NamedTuple):
    """Stopping criteria."""

    # The iteration ends when the norm of the residual is at most ``max(rtol * norm(b), atol)``.
    rtol: float
    atol: float
    maxiter: int
    callback: Callable[[float], Any] | None
    reported: bool  # whether any rank has a callback, which may raise
    # A collective function that returns a possible reason for slow convergence, for an error message.
    slowness_reason: Callable[[], str]


def preconditioned_cg(
    level: Level, r: LocalArray, group: Channel, tolerance: Tolerance, b: LocalArray | None = None
) -> tuple[LocalArray, list[float]]:
    """Return the solutions and the history of norms; `r` is overwritten. For errors see `Multigrid.solve`."""
    # `r`, of shape (systems, colors, size), contains the right-hand sides or, if `b` is passed, the residuals of x0.
    vectors = (FusedVectors if level.is_compiled else Vectors)(r)
    norms = _norms(group, r, squares_of(r), _RIGHT if b is None else "the residual of x0")
    targets = np.maximum(tolerance.rtol * (norms if b is None else _norms(group, b, squares_of(b), _RIGHT)), tolerance.atol)
    before, curvature, failures = np.full(len(r), np.inf), np.zeros(len(r)), DeferredFailures(group.user, _CALL)
    history = [math.hypot(*norms)]
    while (active := norms > targets).any():
        if len(history) > tolerance.maxiter:
            if tolerance.reported:
                failures.raise_together()
            text = f"the residual didn't fall to {math.hypot(*targets):.3e} within maxiter={tolerance.maxiter} iterations"
            _fail(group, f"{text}; {tolerance.slowness_reason()}", history)
        # Both arrays are memory of the level, which its next cycle overwrites.
        z = level.cycle(r)
        w = level.product_after(r)
        local = vectors.products(z, w) if failures.error is None else np.full((2, len(r)), np.nan)
        rz, wz = _sums(group, local)
        # Converged systems don't change. As in `conjugate_gradients`, p·Ap follows from a recurrence.
        beta = np.where(active, rz / before, 0.0)
        curvature = wz - beta * beta * curvature
        invalid = active & ~((rz > 0.0) & (curvature > 0.0))
        if invalid.any():
            failures.raise_together()
            text = f"r·z = {rz[invalid][0]:.3e} and p·Ap = {curvature[invalid][0]:.3e} should be positive"
            _fail(group, f"{text}: rounding errors dominate. Increase rtol; {tolerance.slowness_reason()}", history)
        squares = vectors.advance(z, w, beta, np.where(active, rz, 0.0) / np.where(active, curvature, 1.0))
        before, curvature = np.where(active, rz, np.inf), np.where(active, curvature, 0.0)
        norms = _norms(group, r, squares, "the residual")
        history.append(math.hypot(*norms))
        if tolerance.callback is not None:
            failures.attempt("callback", tolerance.callback, history[-1])
    if tolerance.reported and len(history) > 1:
        failures.raise_together()  # no reduction follows the last call of the callback
    return vectors.x, history


def _sums(group: Channel, local: np.ndarray) -> np.ndarray:
    return allreduce(group, local, SUM, _CALL)


def _norms(group: Channel, r: LocalArray, local: np.ndarray, name: str) -> np.ndarray:
    """Return the norms of r over all ranks, from the squared norms `local` of this rank's parts."""
    # NaN on one rank makes the sum NaN on all ranks, so that all ranks raise.
    total = _sums(group, local)
    if not np.isfinite(total).all():
        bad = int(on_host(np.sum(~np.isfinite(r))))
        text = f"{_CALL}: {name} is not finite: {bad} entries on rank {group.rank} are NaN or infinite."
        raise_together(group, NotFiniteError(text) if bad else None)
        raise agreed(group, ValueError(f"{_CALL}: the norm of {name} overflows. Scale the system."))
    if name == _RIGHT and (small := total < _SMALLEST_SQUARE).any():
        count = _sums(group, on_host(np.sum(r != 0.0, axis=tuple(range(1, r.ndim)))).astype(np.float64))
        if (small & (count > 0.0)).any():
            norm = math.sqrt(total[small & (count > 0.0)][0])
            small = f"the norm of {name}, {norm:.3e}, is so small that squares of residuals vanish"
            raise agreed(group, ValueError(f"{_CALL}: {small}. Scale the system."))
    return np.sqrt(total)


def _fail(group: Channel, problem: str, history: list[float]) -> NoReturn:
    norms = f"{history[-1]:.3e}, from {history[0]:.3e} at the start (`history` of this error contains all norms)"
    text = f"{_CALL}: {problem}. After {len(history) - 1} iterations the norm of the residual is {norms}."
    raise agreed(group, ConvergenceError(text, history))


def squares_of(blocks: LocalArray) -> np.ndarray:
    """Return the square of the norm of this rank's part of each system, on the host."""
    rows = blocks.reshape(len(blocks), -1)
    return inner((rows, rows))[0]


class Vectors:
    """Solutions x (initially zero), residuals r, directions p, and products A p; all of shape (systems, colors, size)."""

    def __init__(self, r: LocalArray):
        self.r, self.x, self._p, self._s = r, np.zeros_like(r), np.zeros_like(r), np.zeros_like(r)

    def products(self, z: LocalArray, w: LocalArray) -> np.ndarray:
        """Return this rank's part of r·z and w·z, shape (2, systems), on the host."""
        r, z, w = (vector.reshape(len(vector), -1) for vector in (self.r, z, w))
        return inner((r, z), (w, z))

    def advance(self, z: LocalArray, w: LocalArray, beta: np.ndarray, alpha: np.ndarray) -> np.ndarray:
        """Update directions by z and w = A z, then solutions and residuals; return this rank's part of squared norms."""
        scale_and_add(self._p, beta, z)
        scale_and_add(self._s, beta, w)
        step = column(self.r, alpha)
        self.x += step * self._p
        self.r -= step * self._s
        return squares_of(self.r)


class FusedVectors(Vectors):
    """`Vectors` with compiled loops."""

    def __init__(self, r: LocalArray):
        super().__init__(r)
        self._products, self._advance = _functions()

    def products(self, z: LocalArray, w: LocalArray) -> np.ndarray:
        """See `Vectors.products`."""
        out = np.empty((2, len(z)))
        self._products(*_rows(z, w), self.r.ravel(), out)
        return out

    def advance(self, z: LocalArray, w: LocalArray, beta: np.ndarray, alpha: np.ndarray) -> np.ndarray:
        """See `Vectors.advance`."""
        out = np.empty(len(z))
        vectors = (vector.reshape(-1) for vector in (self._p, self._s, self.x, self.r))
        self._advance(*_rows(z, w), np.stack([beta, alpha]), *vectors, out)
        return out


def _rows(z: LocalArray, w: LocalArray) -> tuple[Array, Array, int]:
    """Return the memory of z and w as one-dimensional arrays, and the stride from one system to the next."""
    length = z.size // len(z)
    stride = z.strides[0] // z.itemsize if len(z) > 1 else length
    size = (len(z) - 1) * stride + length
    # These views include the memory between the systems.
    z, w = (np.lib.stride_tricks.as_strided(vector, (size,), (vector.itemsize,)) for vector in (z, w))
    return z, w, stride


@functools.cache
def _functions() -> tuple:
    row = "float64[::1]"
    signatures = {
        "inner_products": f"void({row}, {row}, int64, {row}, float64[:, ::1])",
        "conjugate_step": f"void({row}, {row}, int64, float64[:, ::1], {row}, {row}, {row}, {row}, {row})",
    }
    # These fast-math flags allow reordering, but don't assume that numbers are finite.
    return tuple(functions_of(__name__, signatures, "reassoc contract nsz arcp"))


def inner_products(z: np.ndarray, w: np.ndarray, stride: int, r: np.ndarray, out: np.ndarray) -> None:
    """Compute r·z and w·z of each system."""
    length = z.size - (out.shape[1] - 1) * stride
    for system in range(out.shape[1]):
        a, b = z[system * stride : system * stride + length], w[system * stride : system * stride + length]
        c = r[system * length : (system + 1) * length]
        first, second = 0.0, 0.0
        for i in range(length):
            first += c[i] * a[i]
            second += b[i] * a[i]
        out[0, system] = first
        out[1, system] = second


def conjugate_step(
    z: np.ndarray, w: np.ndarray, stride: int, factors: np.ndarray, p: np.ndarray, s: np.ndarray, x: np.ndarray,
    r: np.ndarray, out: np.ndarray,
) -> None:  # fmt: skip
    """Update directions, take steps, and compute the square of each residual."""
    length = z.size - (out.size - 1) * stride
    for system in range(out.size):
        beta, alpha, square = factors[0, system], factors[1, system], 0.0
        for start in range(0, length, 512):
            n = min(512, length - start)
            k = system * stride + start
            new, product = z[k : k + n], w[k : k + n]
            k = system * length + start
            a, b, c, d = p[k : k + n], s[k : k + n], x[k : k + n], r[k : k + n]
            for i in range(n):
                a[i] = beta * a[i] + new[i]
                c[i] += alpha * a[i]
            for i in range(n):
                b[i] = beta * b[i] + product[i]
                d[i] -= alpha * b[i]
                square += d[i] * d[i]
        out[system] = square
