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
from mpiad.linalg.arnoldi import arnoldi_of
from mpiad.linalg.iteration import diagnosis, require_iterations
from mpiad.linalg.system import System, preconditioned_product, preconditioned_start
from mpiad.linalg.vectors import are_finite, are_within, is_nearly_real
from mpiad.programs import jit

_PRODUCT = "a product with matvec or preconditioner"

# Restarted GMRES with one reduction per iteration, see `arnoldi`.
#
# References
# ----------
# Y. Saad and M. H. Schultz, GMRES, SIAM Journal on Scientific and Statistical Computing 7 (1986), algorithm 4.


def gmres(system: System, x: LocalArray, r: LocalArray, norms: np.ndarray, targets: np.ndarray) -> bool:
    """Improve the solutions of nonsingular systems by one cycle of GMRES; this is a `Method`."""
    require_iterations(system, targets)
    first, norms, scale = preconditioned_start(system, r, norms)
    targets, longest = targets * scale, max(1, min(system.settings.restart, system.unknowns))
    spaces = arnoldi_of(first, norms, targets, longest)
    for j in range(min(longest, max(1, system.limit - system.iterations))):
        if not spaces.grows:
            break
        w = spaces.vectors[j + 1]
        w[...] = system.run(_product, spaces.vectors[j])[0]
        sums = system.sums(spaces.local_products(j))
        if not are_finite(sums[:, -1]):
            system.require_finite(sums, w, _PRODUCT)
        spaces.extend(system, j, sums)
        system.note(spaces.norms / scale)
    if any(spaces.steps.tolist()):
        # With side="right" the preconditioner is applied to the combination of basis vectors.
        step = spaces.combination()
        x += step if system.side == "left" else system.precondition(step)
    return are_within(spaces.norms, targets)


def _product(system: Any, v: LocalArray) -> tuple[LocalArray]:
    return (preconditioned_product(system, v)[1],)


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
    """Minimize |r|; return vectors, numbers, sums, and the numbers of invalid, broken-down and unconverged systems."""
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
    alpha = _quotient(rz, curvature, active)
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
