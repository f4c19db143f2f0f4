"""Preconditioned conjugate gradients on blocks, with one reduction in each iteration.

The inner products of an iteration are brought to one place: A is applied to the preconditioned residual z, and A p follows
by the recurrence of p. On many ranks a reduction costs more than the two vector updates that this adds. Near the end the
norm of the residual is asked for before the preconditioner runs, which costs a reduction and saves a cycle of multigrid.

References
----------
A. T. Chronopoulos and C. W. Gear, s-step iterative methods for symmetric linear systems, Journal of Computational and
Applied Mathematics 25 (1989), algorithm 2.2 with s = 1.
"""

from __future__ import annotations

import numpy as np

from mpiad._typing import LocalArray
from mpiad.linalg.diagnosis import diagnosis, require_iterations
from mpiad.linalg.system import System
from mpiad.linalg.vectors import add_scaled, column

_PRODUCT = "what matvec returned"
_ILL_CONDITIONED = "its largest and smallest curvature differ by more than floating point resolves."


def conjugate_gradients(system: System, x: LocalArray, r: LocalArray, norms: np.ndarray, targets: np.ndarray) -> bool:
    """Solve symmetric (complex: Hermitian) positive definite systems: a `Method`, which changes r to the residual."""
    p, s = np.zeros_like(r), np.zeros_like(r)
    # Infinite, so that the first direction has nothing of one before it.
    rz_before, curvature_before = np.full(len(x), np.inf), np.zeros(len(x))
    least, before, known = np.full(len(x), np.inf), norms, True
    while not (known and (norms <= targets).all()):
        z = system.precondition(r)
        w = system.apply(z)
        rr, rz, wz = system.dots((r, r), (r, z), (w, z))
        _require_finite(system, (rr, r, "the residual"), (rz, z, "what preconditioner returned"), (wz, w, _PRODUCT))
        if not known:
            before, norms = norms, np.sqrt(rr.real)
            system.note(norms)
            if (norms <= targets).all():
                break
        active = norms > targets
        require_iterations(system, targets)
        _require_positive(system, rz, active)
        # Those that have arrived stand still: no step, and a direction that starts anew.
        beta = np.where(active, rz.real / rz_before, 0.0)
        # p·Ap for p = z + β p₋: as p is conjugate to p₋, z·Ap₋ is -β p₋·Ap₋.
        curvature = wz.real - beta * beta * curvature_before
        least = _require_curvature(system, curvature, wz, rz.real, least, active)
        _renew(p, beta, z)
        _renew(s, beta, w)
        alpha = np.where(active, rz.real, 0.0) / np.where(active, curvature, 1.0)
        add_scaled(x, alpha, p)
        add_scaled(r, -alpha, s)
        rz_before, curvature_before = np.where(active, rz.real, np.inf), np.where(active, curvature, 0.0)
        # Where the residual would arrive if it fell once more as it just did, its norm is worth a reduction of its own.
        known = bool((norms * norms <= 2.0 * targets * before).all())
        if known:
            before, norms = norms, system.norms(r)
            system.note(norms)
    return True


def _renew(direction: LocalArray, beta: np.ndarray, new: LocalArray) -> None:
    direction *= column(direction, beta)
    direction += new


def _require_finite(system: System, *sums: tuple[np.ndarray, LocalArray, str]) -> None:
    if not all(np.isfinite(values).all() for values, _, _ in sums):
        for values, array, name in sums:
            system.require_finite(complex(values.sum()), array, name)


def _require_positive(system: System, rz: np.ndarray, active: np.ndarray) -> None:
    wrong = active & ((np.real(rz) <= 0.0) | (np.abs(np.imag(rz)) > 1e-3 * np.abs(rz)))
    if wrong.any():
        found = complex(rz[wrong][0])
        shown = f"{found.real:.3e}" if found.imag == 0.0 else f"{found:.3e}"
        system.fail(f"it needs a symmetric positive definite preconditioner, but r·z = {shown} for a residual r not zero")


def _require_curvature(
    system: System, curvature: np.ndarray, wz: np.ndarray, rz: np.ndarray, least: np.ndarray, active: np.ndarray
) -> np.ndarray:
    """Check p·Ap, which is positive for every p of a positive definite operator; return the least step so far."""
    if (active & (np.abs(np.imag(wz)) > 1e-3 * np.abs(wz))).any():
        found = complex(wz[active][0])
        system.fail(f"it needs a Hermitian operator, but z·Az = {found:.3e} is not real. Take method='gmres'")
    wrong = active & (curvature <= 0.0)
    if wrong.any():
        found = float(curvature[wrong][0])
        why = "it is indefinite or not symmetric. Is its sign right (of a coefficient too, as κ)?"
        why = diagnosis(system) or (why if found else "it is singular.")
        system.fail(
            f"it needs a symmetric positive definite operator, but p·Ap = {found:.3e} for a p that isn't zero: {why}"
        )
    step = rz / np.where(active, curvature, np.inf)
    # A step as long as that is along what the operator maps to zero but for rounding.
    if (active & (step * np.finfo(system.dtype).eps > least)).any():
        system.fail(f"the operator is singular to working precision: {diagnosis(system) or _ILL_CONDITIONED}")
    return np.where(active, np.minimum(least, step), least)
