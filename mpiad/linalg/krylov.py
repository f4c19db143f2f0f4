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

from typing import Any

import autograd.numpy as anp
import numpy as np

from mpiad._typing import Array, LocalArray
from mpiad.linalg.iteration import diagnosis, require_iterations
from mpiad.linalg.system import System, preconditioned_product, preconditioned_start
from mpiad.linalg.vectors import are_within, column, combined, inner, is_nearly_real, products
from mpiad.programs import jit

_PRODUCT = "a product with matvec or preconditioner"

# Restarted GMRES with one reduction per iteration.
#
# Orthogonalization is classical Gram-Schmidt with two passes in one reduction. The reduction contains the inner
# products s of the basis with the new vector w, and the inner products of the basis with its last vector, which complete
# the Gram matrix G of the basis. So the correction of the second pass, s - G s, needs no further reduction. The norm of
# the remainder follows from the same inner products; if too many digits cancel, the norm is computed directly, with another
# pass. The basis needn't be exactly orthonormal, since A V = V H holds for any basis V computed in this way.
#
# A product of Givens rotations, Q, transforms H to triangular form. The residual of the least-squares problem decreases in
# each step by the sine of the new rotation.
#
# References
# ----------
# Y. Saad and M. H. Schultz, GMRES, SIAM Journal on Scientific and Statistical Computing 7 (1986), algorithm 4.
# K. Swirydowicz, J. Langou, S. Ananthan, U. Yang and S. Thomas, Low synchronization Gram-Schmidt and generalized minimal
# residual algorithms, Numerical Linear Algebra with Applications 28 (2021), section 3.

_FEW = 32  # basis vectors for which G and Q have space at first; more space takes another program


class _Basis:
    """The Krylov spaces of k systems: bases V (m, k, n) and Hessenberg matrices H (k, m, m - 1)."""

    def __init__(self, first: LocalArray, norms: np.ndarray, length: int):
        k, n = first.shape
        self.vectors = np.empty_like(first, order="C", shape=(length + 1, k, n))
        self.hessenberg = np.zeros((k, length + 1, length), np.result_type(first.dtype, float))
        self.norms = norms
        self.vectors[0] = first / column(first, np.where(norms > 0.0, norms, 1.0))

    def refined(self, system: System, j: int, w: LocalArray, h: np.ndarray, square: np.ndarray) -> tuple:
        """Return w, h and the square of the norm of w after another pass of Gram-Schmidt."""
        basis = self.vectors[: j + 1]
        total = system.sums(np.concatenate([products(basis, w), inner((w, w)).T], axis=1))
        s, squares = total[:, :-1], np.real(total[:, -1])
        remainder = squares - np.sum(np.abs(s) ** 2, axis=1)
        # A remainder below this bound consists of rounding errors.
        floor = (10.0 * np.finfo(w.dtype).eps) ** 2 * square
        h = np.concatenate([h[:, : j + 1] + s, np.zeros_like(h[:, j + 1 :])], axis=1)
        return w - combined(basis, s), h, np.where(remainder > floor, remainder, 0.0)

    def least_squares(self, c: int, steps: int) -> tuple[np.ndarray, float]:
        """Return the coefficients of one system's vector with the minimal residual, and the norm of this residual."""
        h, right = self.hessenberg[c, : steps + 1, :steps], np.zeros(steps + 1, self.hessenberg.dtype)
        right[:1] = self.norms[c]
        # `lstsq` uses singular values, since the columns may be dependent.
        y = np.linalg.lstsq(h, right, rcond=None)[0]
        return y, float(np.linalg.norm(right - h @ y))

    def combination(self, steps: list[int], complete: list[float], rotations: np.ndarray) -> LocalArray:
        """Return the vectors in the Krylov spaces with minimal residuals, shape (k, n)."""
        numbers = np.zeros((len(steps), max(steps)), self.hessenberg.dtype)
        for c, count in enumerate(steps):
            if complete[c]:
                numbers[c, :count] = self.least_squares(c, count)[0]
                continue
            h, q = self.hessenberg[c, : count + 1, :count], rotations[c, :count, : count + 1]
            right = self.norms[c] * (q[:, 0] + (np.arange(count) == 0))
            numbers[c, :count] = np.linalg.solve(h[:count] + q @ h, right)
        return combined(self.vectors[: max(steps)], numbers)


def gmres(system: System, x: LocalArray, r: LocalArray, norms: np.ndarray, targets: np.ndarray) -> bool:
    """Improve the solutions of nonsingular systems by one cycle of GMRES; this is a `Method`."""
    require_iterations(system, targets)
    first, norms, scale = preconditioned_start(system, r, norms)
    targets = targets * scale
    longest = max(1, min(system.settings.restart, system.unknowns))
    basis, size = _Basis(first, norms, longest), min(longest + 1, _FEW)
    gram = rotations = np.zeros((len(x), size, size), basis.hessenberg.dtype)
    numbers, remaining = np.stack([norms, targets, *np.zeros((3, len(x)))]), (norms > targets).any()
    for j in range(min(longest, max(1, system.limit - system.iterations))):
        if not remaining:
            break
        if j + 2 > size:
            size = min(longest + 1, 2 * size)
            more = (0, 0), *[(0, size - gram.shape[1])] * 2
            gram, rotations = np.pad(gram, more), np.pad(rotations, more)
        before, v = (rotations, numbers), basis.vectors[j]
        given = basis.vectors[:size], v, gram, rotations, numbers, float(j)
        w, gram, rotations, numbers, h, sums, counts = system.run(_gmres_iteration, *given)
        invalid, is_uncertain, is_complete, remaining = counts.tolist()
        if invalid:
            system.require_finite(sums, preconditioned_product(system, v)[1], _PRODUCT)
        if is_uncertain:
            w, h, remainder = basis.refined(system, j, w, h, np.real(sums[:, size + j + 1]))
            h, rotations, numbers, is_complete, remaining = _rotated(h, remainder, *before, float(j))
        basis.hessenberg[:, : j + 2, j] = h[:, : j + 2]
        # If the remainder is zero, the space can't grow; the true residual shows whether it contains the solution.
        for c in np.flatnonzero((numbers[3] > 0.0) & (numbers[2] == j + 1)).tolist() if is_complete else ():
            # For a singular operator, the columns of H may be dependent, so that Q can't be used.
            numbers[0, c] = basis.least_squares(c, j + 1)[1]
        np.multiply(w, column(w, numbers[4].astype(w.real.dtype)), out=basis.vectors[j + 1])
        system.note(numbers[0] / scale)
    if numbers[2].any():
        step = basis.combination(numbers[2].astype(int).tolist(), numbers[3].tolist(), rotations)
        # With side="right" the preconditioner is applied to the combination of basis vectors.
        x += step if system.side == "left" else system.precondition(step)
    return bool((numbers[0] <= targets).all())


def _gmres_iteration(
    system: Any, basis: LocalArray, v: LocalArray, gram: LocalArray, rotations: LocalArray, numbers: LocalArray, j: float
) -> tuple[LocalArray, ...]:
    """Return the next basis vector before its normalization, G, Q - 1, the numbers, a column of H, the sums, and counts.

    The rows of `numbers` are, for each system: the norm of the residual, the target, the number of vectors that form its
    space, whether this can't grow, and the inverse of the new vector's norm. The counts are those of systems with invalid
    sums, with a remainder of few accurate digits, with a space that can't grow, and of systems that need more vectors.
    """
    size, (norms, targets, steps, complete, _) = basis.shape[0], numbers
    _, w = preconditioned_product(system, v)
    sums = system.sums(system.call(_local_products, basis, v, w, j))
    of_last, s, places = sums[:, :size], sums[:, size:], anp.arange(float(size))
    square = anp.sum(anp.where(places == j + 1.0, s, 0.0), axis=1).real
    s = anp.where(places <= j, s, 0.0)
    at_j = 1.0 * (places == j)
    row, diagonal = anp.conj(of_last)[:, None], anp.sum(of_last * at_j, axis=1)[:, None, None]
    gram = gram + of_last[:, :, None] * at_j + (row - diagonal * at_j) * at_j[:, None]
    # The sum of both passes of Gram-Schmidt is s + (s - G s).
    h = 2.0 * s - anp.sum(gram * s[:, None], axis=2)
    w = w - system.call(_combination, basis, h, j)
    # |w - V h|² is computed from these inner products.
    products = anp.sum(anp.conj(h) * (anp.sum(gram * h[:, None], axis=2) - 2.0 * s), axis=1)
    remainder = square + products.real
    active = (norms > targets) & (steps == j) & (complete == 0.0)
    # If the remainder is below this fraction of |w|², half of the digits are lost by cancellation.
    uncertain = active & (remainder <= np.sqrt(np.finfo(w.dtype).eps) * square)
    is_finite = anp.isfinite(anp.sum(anp.abs(sums), axis=1))
    h, rotations, numbers, *counts = _rotated(h, remainder, rotations, numbers, j)
    counts = [anp.sum(1.0 * ~is_finite), anp.sum(1.0 * uncertain), *counts]
    return w, gram, rotations, numbers, h, sums, anp.stack(counts)


def _rotated(h: Array, remainder: Array, rotations: Array, numbers: Array, j: float) -> tuple[Array, ...]:
    """Return the new column of H, and rotations, numbers and the last two counts of `_gmres_iteration`."""
    norms, targets, steps, complete, _ = numbers
    active = (norms > targets) & (steps == j) & (complete == 0.0)
    norm = anp.sqrt(anp.maximum(anp.where(active, remainder, 0.0), 0.0))
    places = anp.arange(float(h.shape[1]))
    at_j, at_next = 1.0 * (places == j), 1.0 * (places == j + 1.0)
    h = anp.where(active[:, None], h + norm[:, None] * at_next, 0.0)
    # The rotation of rows j and j + 1 of Q maps (a, norm) to (length, 0).
    row = at_j + anp.sum(rotations * at_j[:, None], axis=1)
    a = anp.sum(row * h, axis=1)
    length = anp.sqrt(anp.abs(a) ** 2 + norm**2)
    length = anp.where(length > 0.0, length, 1.0)
    cosine, sine = (a / length)[:, None], (norm / length)[:, None]
    upper = anp.conj(cosine) * row + sine * at_next
    lower = cosine * at_next - sine * row
    rotations = rotations * (1.0 - at_j - at_next)[:, None]
    rotations = rotations + (upper - at_j)[:, None] * at_j[:, None] + (lower - at_next)[:, None] * at_next[:, None]
    is_complete, norms = active & (norm == 0.0), anp.where(active, norms * sine[:, 0], norms)
    numbers = [norms, targets, steps + 1.0 * active, complete + 1.0 * is_complete,
               anp.where(norm > 0.0, 1.0 / anp.where(norm > 0.0, norm, 1.0), 0.0)]  # fmt: skip
    remaining = active & ~is_complete & (norms > targets)
    return h, rotations, anp.stack(numbers), anp.sum(1.0 * is_complete), anp.sum(1.0 * remaining)


def _local_products(basis: LocalArray, v: LocalArray, w: LocalArray, j: float) -> np.ndarray:
    """Return this rank's part of inner products of j + 1 basis vectors with v and w, and of w with itself, by rows."""
    size, count = len(basis), int(j) + 1
    out = np.zeros((len(w), 2 * size), np.result_type(w.dtype, float))
    basis[count] = w  # in the place of the next vector, for its product with itself
    out[:, :count], out[:, size : size + count + 1] = products(basis[:count], v), products(basis[: count + 1], w)
    return out


def _combination(basis: LocalArray, numbers: np.ndarray, j: float) -> LocalArray:
    count = int(j) + 1
    return combined(basis[:count], numbers[:, :count])


# BiCGStab: two products and two reductions per iteration, without a stored basis.
#
# An iteration is computed in two halves, so that no message follows the reduction in a half: if its sums aren't finite, all
# ranks find out why. The norm of the next residual and its inner product with the shadow residual follow from the second
# reduction.
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
    targets, start = targets * scale, x
    r = p = first
    # The shadow residual is equal to the first residual, so their inner product is the square of its norm.
    numbers = np.stack([norms**2, norms, norms, targets]).astype(np.result_type(r.dtype, float))
    remaining, is_broken = (norms > targets).any(), False
    while remaining and not is_broken:
        require_iterations(system, targets / scale)
        x, r, v, alpha, sums, (invalid,) = system.run(_step_along_p, x, r, first, p, numbers)
        if invalid:
            system.require_finite(sums, v, _PRODUCT)
        before = r
        x, r, p, numbers, sums, counts = system.run(_step_along_r, x, r, first, p, v, alpha, numbers)
        invalid, is_broken, remaining = counts.tolist()
        if invalid:
            system.require_finite(sums, preconditioned_product(system, before)[1], _PRODUCT)
        system.note(numbers[1].real / scale)
    start[...] = x
    return not is_broken


# The rows of `numbers` are, for each system: the inner product of residual and shadow residual, the norms of the residual
# now and at the start, and the target.


def _step_along_p(
    system: Any, x: LocalArray, r: LocalArray, shadow: LocalArray, p: LocalArray, numbers: LocalArray
) -> tuple[LocalArray, ...]:
    """Make r orthogonal to the shadow residual; return also A p, the length, the sums, and the count of invalid sums."""
    change, v = preconditioned_product(system, p)
    sums = system.dots((shadow, v))
    alpha = _quotient(numbers[0], sums[0], numbers[1].real > numbers[3].real)
    x, r = system.updated(_along_p, (x, r, change, v), (alpha,))
    return x, r, v, alpha, sums, anp.sum(1.0 * ~anp.isfinite(anp.abs(sums)), axis=1)


def _step_along_r(
    system: Any, x: LocalArray, r: LocalArray, shadow: LocalArray, p: LocalArray, v: LocalArray, alpha: LocalArray,
    numbers: LocalArray,
) -> tuple[LocalArray, ...]:  # fmt: skip
    """Minimize the norm of r; return the next vectors and numbers, the sums, and three counts of systems.

    The counts are those of systems with invalid sums, of those that break down, and of those that haven't converged.
    """
    rho_before, (norms, at_start, targets) = numbers[0], numbers[1:].real
    active = norms > targets
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
    remaining, is_finite = active & (norms > targets), anp.isfinite(anp.sum(anp.abs(sums), axis=0))
    counts = anp.sum(1.0 * anp.stack([~is_finite, is_broken & remaining, remaining]), axis=1)
    return x, r, p, anp.stack([rho, norms, at_start, targets]), sums, counts


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
    start, p, s = x, system.full(0.0), system.full(0.0)
    # Initially r·z is infinite, so that β is zero in the first iteration.
    numbers, norm_known = np.array([norms, norms, norms, norms, targets]), True
    numbers[0] = numbers[3] = np.inf
    numbers[1] = 0.0
    while not (norm_known and are_within(norms, targets)):
        before = r, numbers
        x, r, p, s, numbers, sums, counts = system.run(_cg_iteration, x, r, p, s, numbers)
        invalid, large, far = counts.tolist()
        if invalid:
            _explain_cg(system, *before, sums)
        if not norm_known:
            norms = numbers[2]
            system.note(norms)
        if not large:
            break
        require_iterations(system, targets)
        norm_known = not far
        if norm_known:
            norms = system.norms(r)
            system.note(norms)
    start[...] = x
    return True


def _cg_iteration(
    system: Any, x: LocalArray, r: LocalArray, p: LocalArray, s: LocalArray, numbers: LocalArray
) -> tuple[LocalArray, ...]:
    """Return the next vectors and numbers, the sums, and three counts of systems.

    The counts are those of systems with invalid sums, with residuals above the target, and far above it. The rows of
    `numbers` are, for each system: r·z and p·Ap of the last iteration, the norm of r before it, the shortest step so far,
    and the target.
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
    alpha = anp.where(active, rz, 0.0) / anp.where(active, curvature, 1.0)
    # The operator maps the direction of a very long step to zero, up to rounding.
    is_valid = (rz > 0.0) & (curvature > 0.0) & (alpha * np.finfo(r.dtype).eps <= shortest) & is_nearly_real(sums)
    x, r, p, s = system.updated(_cg_update, (x, r, p, s, z, w), (alpha, beta))
    numbers = [anp.where(active, rz, np.inf), anp.where(active, curvature, 0.0), norms,
               anp.where(active, anp.minimum(shortest, alpha), shortest), targets]  # fmt: skip
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


def _explain_cg(system: System, r: LocalArray, numbers: np.ndarray, sums: np.ndarray) -> None:
    """Raise the error of an iteration with invalid numbers, on all ranks; the arguments precede its vector updates."""
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
        system.fail(f"it needs a Hermitian operator, but z·Az = {value:.3e} is not real. Take method='gmres'")
    curvature = wz.real - (rz.real / rz_before) ** 2 * curvature_before
    invalid = active & (curvature <= 0.0)
    if invalid.any():
        value = float(curvature[invalid][0])
        cause = "it is indefinite or not symmetric. Is its sign right, and the sign of its coefficients, such as κ?"
        cause = cause if value else "it is singular."
        problem = f"it needs a symmetric positive definite operator, but p·Ap = {value:.3e} for a nonzero p"
        system.fail(f"{problem}: {diagnosis(system) or cause}")
    cause = diagnosis(system) or "the ratio of its largest and smallest curvature exceeds floating-point precision."
    system.fail(f"the operator is singular to working precision: {cause}")
