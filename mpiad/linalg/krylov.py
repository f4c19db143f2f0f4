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
from mpiad.linalg.vectors import add_scaled, column, combined, is_nearly_real, on_host, products, scale_and_add
from mpiad.programs import jit

# Restarted GMRES with one reduction per iteration.
#
# Orthogonalization is classical Gram-Schmidt with two passes in one reduction. The reduction contains the inner
# products s of the basis with the new vector w, and the inner products of the basis with its last vector, which complete
# the Gram matrix G of the basis. So the correction of the second pass, s - G s, needs no further reduction. The norm of
# the remainder follows from the same inner products; if too many digits cancel, the norm is computed directly, with another
# pass. The basis needn't be exactly orthonormal, since A V = V H holds for any basis V computed in this way.
#
# References
# ----------
# Y. Saad and M. H. Schultz, GMRES, SIAM Journal on Scientific and Statistical Computing 7 (1986), algorithm 4.
# K. Swirydowicz, J. Langou, S. Ananthan, U. Yang and S. Thomas, Low synchronization Gram-Schmidt and generalized minimal
# residual algorithms, Numerical Linear Algebra with Applications 28 (2021), section 3.


class _Basis:
    """The Krylov spaces of k systems: bases V, Hessenberg matrices H and Gram matrices G of V."""

    def __init__(self, first: LocalArray, norms: np.ndarray, length: int):
        k, n = first.shape
        self.vectors = np.empty_like(first, order="C", shape=(k, length + 1, n))
        self.hessenberg = np.zeros((k, length + 1, length), first.dtype)
        self.gram = np.zeros((k, length + 1, length + 1), first.dtype)
        self.norms = norms
        self.steps, self.complete = np.zeros(k, int), np.zeros(k, bool)
        self.vectors[:, 0] = first / column(first, np.where(norms > 0.0, norms, 1.0))

    def extend(self, system: System, j: int, w: LocalArray, active: np.ndarray) -> None:
        """Append w, the product with basis vector j, to the basis, after orthogonalization."""
        basis = self.vectors[:, : j + 1]
        last = basis[:, j]
        s, square = self._products(system, basis, last, w)
        # The sum of both passes of Gram-Schmidt is s + (s - G s).
        h = 2.0 * s - np.einsum("kij,kj->ki", self.gram[:, : j + 1, : j + 1], s)
        w = w - combined(basis, h)
        gram_h = np.einsum("kij,kj->ki", self.gram[:, : j + 1, : j + 1], h)
        # |w - V h|² is computed from these inner products.
        remainder = square - 2.0 * np.sum(h.conj() * s, axis=1).real + np.sum(h.conj() * gram_h, axis=1).real
        # If the remainder is below this fraction of |w|², half of the digits are lost by cancellation.
        if (active & (remainder <= np.sqrt(np.finfo(w.dtype).eps) * square)).any():
            w, h, remainder = self._refine(system, basis, w, h, square)
        norm = np.sqrt(np.maximum(remainder, 0.0))
        self.hessenberg[:, : j + 1, j] = np.where(active[:, None], h, 0.0)
        self.hessenberg[:, j + 1, j] = np.where(active, norm, 0.0)
        inverse = np.where(active & (norm > 0.0), 1.0 / np.where(norm > 0.0, norm, 1.0), 0.0)
        self.vectors[:, j + 1] = w * column(w, inverse)
        self.steps[active] = j + 1
        # If the remainder is zero, the space can't grow; the true residual shows whether it contains the solution.
        self.complete |= active & (norm == 0.0)

    def _products(self, system: System, basis: LocalArray, last: LocalArray, w: LocalArray) -> tuple:
        squares = np.einsum("kn,kn->k", w.conj(), w)
        local = [products(basis, v).ravel() for v in (last, w)]
        total = system.sums(on_host(np.concatenate([*local, squares])))
        system.require_finite(total, w, "a product with matvec or preconditioner")
        column, s = total[: -len(w)].reshape(2, len(w), -1)
        j = column.shape[1] - 1
        self.gram[:, : j + 1, j] = column
        self.gram[:, j, : j + 1] = column.conj()
        return s, np.real(total[-len(w) :])

    def _refine(self, system: System, basis: LocalArray, w: LocalArray, h: np.ndarray, square: np.ndarray) -> tuple:
        total = system.sums(on_host(np.concatenate([products(basis, w).ravel(), np.einsum("kn,kn->k", w.conj(), w)])))
        s, squares = total[: -len(w)].reshape(len(w), -1), np.real(total[-len(w) :])
        w = w - combined(basis, s)
        remainder = squares - np.sum(np.abs(s) ** 2, axis=1)
        # A remainder below this bound consists of rounding errors.
        floor = (10.0 * np.finfo(w.dtype).eps) ** 2 * square
        return w, h + s, np.where(remainder > floor, remainder, 0.0)

    def residuals(self, j: int, active: np.ndarray, before: np.ndarray) -> np.ndarray:
        """Return each system's minimal norm of the residual after step j, and `before` for inactive systems."""
        norms = before.copy()
        # The residual is the projection of the first unit vector on the last column of Q, which is orthogonal to H.
        q = np.linalg.qr(self.hessenberg[active, : j + 2, : j + 1], mode="complete")[0]
        norms[active] = np.abs(q[:, 0, -1]) * self.norms[active]
        for c in np.flatnonzero(active & self.complete).tolist():
            # For a singular operator, the columns of H may be dependent, so that Q can't be used.
            norms[c] = self._least_squares(c)[1]
        return norms

    def _least_squares(self, c: int) -> tuple[np.ndarray, float]:
        steps = self.steps[c]
        h, right = self.hessenberg[c, : steps + 1, :steps], np.zeros(steps + 1, self.hessenberg.dtype)
        right[:1] = self.norms[c]
        # `lstsq` uses singular values, since the columns may be dependent.
        y = np.linalg.lstsq(h, right, rcond=None)[0]
        return y, float(np.linalg.norm(right - h @ y))

    def combination(self) -> LocalArray:
        """Return the vectors in the Krylov spaces with minimal residuals, shape (k, n)."""
        out = np.zeros_like(self.vectors[:, 0])
        for c, steps in enumerate(self.steps):
            out[c] = combined(self.vectors[c : c + 1, :steps], self._least_squares(c)[0].astype(out.dtype)[None])[0]
        return out


def gmres(system: System, x: LocalArray, r: LocalArray, norms: np.ndarray, targets: np.ndarray) -> bool:
    """Improve the solutions of nonsingular systems by one cycle of GMRES; this is a `Method`."""
    require_iterations(system, targets)
    first, norms, scale = preconditioned_start(system, r, norms)
    targets = targets * scale
    length = max(1, min(system.settings.restart, system.limit - system.iterations, system.unknowns))
    basis = _Basis(first, norms, length)
    for j in range(length):
        # Systems that have converged, or have a Krylov space that can't grow, don't change.
        active = (norms > targets) & (basis.steps == j) & ~basis.complete
        if not active.any():
            break
        _, product = preconditioned_product(system, basis.vectors[:, j])
        basis.extend(system, j, product, active)
        norms = basis.residuals(j, active, norms)
        system.note(norms / scale)
    step = basis.combination()
    # With side="right" the preconditioner is applied to the combination of basis vectors.
    x += step if system.settings.side == "left" else system.precondition(step)
    return bool((norms <= targets).all())


# BiCGStab: two products and two reductions per iteration, without a stored basis.
#
# The norm of the next residual and its inner product with the shadow residual follow from the second reduction.
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
    r, shadow, p = first.copy(), first.copy(), first.copy()
    # The shadow residual is equal to the first residual, so their inner product is the square of its norm.
    rho = (norms**2).astype(np.result_type(r.dtype, float))
    active, at_start = norms > targets, norms
    while active.any():
        require_iterations(system, targets / scale)
        step_p, v = preconditioned_product(system, p)
        (sv,) = _finite(system, v, (shadow, v))
        # A step along p makes r orthogonal to the shadow residual. A further step, along this r, minimizes the norm.
        alpha = _quotient(rho, sv, active)
        add_scaled(x, alpha, step_p)
        add_scaled(r, -alpha, v)
        step_r, t = preconditioned_product(system, r)
        tr, tt, rr, sr, st = _finite(system, t, (t, r), (t, t), (r, r), (shadow, r), (shadow, t))
        omega = _quotient(tr, tt, active)
        add_scaled(x, omega, step_r)
        add_scaled(r, -omega, t)
        # The inner product of the shadow residual with r - ω t follows from the second reduction.
        rho_before, rho = rho, sr - omega * st
        beta = _quotient(rho * alpha, rho_before * omega, active)
        add_scaled(p, -omega, v)
        scale_and_add(p, beta, r)
        # The norm of r - ω t follows from these inner products; if rounding makes its square negative, it is zero.
        reached = np.sqrt(np.maximum(rr.real - np.abs(tr) ** 2 / np.abs(np.where(tt != 0.0, tt, 1.0)), 0.0))
        norms = np.where(active, reached, norms)
        system.note(norms / scale)
        broken = (np.abs(rho) <= _BREAKDOWN * norms * at_start) | (alpha * omega == 0.0) | (norms > _DIVERGED * at_start)
        if broken[active & (norms > targets)].any():
            return False
        active = norms > targets
    return True


def _finite(system: System, product: LocalArray, *pairs: tuple[LocalArray, LocalArray]) -> np.ndarray:
    sums = system.dots(*pairs)
    system.require_finite(sums, product, "a product with matvec or preconditioner")
    return sums


def _quotient(a: np.ndarray, b: np.ndarray, active: np.ndarray) -> np.ndarray:
    usable = active & (b != 0.0)
    return np.where(usable, a, 0.0) / np.where(usable, b, 1.0)


def conjugate_gradients(system: System, x: LocalArray, r: LocalArray, norms: np.ndarray, targets: np.ndarray) -> bool:
    """Solve symmetric (complex: Hermitian) positive definite systems; this is a `Method`."""
    start, p, s = x, np.zeros_like(r), np.zeros_like(r)
    infinite = np.full(len(x), np.inf)
    # Initially r·z is infinite, so that β is zero in the first iteration.
    numbers, norm_known = np.stack([infinite, np.zeros(len(x)), norms, infinite, targets]), True
    while not (norm_known and (norms <= targets).all()):
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
    system.require_no_failure(sums)
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
