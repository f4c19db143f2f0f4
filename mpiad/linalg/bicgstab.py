"""BiCGSTAB on blocks: two products and two reductions in each iteration, and no basis to keep.

The product of the next residual with the shadow residual is put together from what the second reduction brings, which
saves a third one; so is its norm.

References
----------
H. A. van der Vorst, Bi-CGSTAB, SIAM Journal on Scientific and Statistical Computing 13 (1992), the preconditioned algorithm
of section 4.
"""

from __future__ import annotations

import numpy as np

from mpiad._typing import LocalArray
from mpiad.linalg.diagnosis import require_iterations
from mpiad.linalg.system import System, preconditioned_product, preconditioned_start
from mpiad.linalg.vectors import add_scaled, column

# The shadow residual is as good as orthogonal to what is left: the recurrence would divide by rounding.
_LOST = 1e-14
_FAR = 1e6  # times the residual at the start: from there on the recurrence has lost its digits


def bicgstab(system: System, x: LocalArray, r: LocalArray, norms: np.ndarray, targets: np.ndarray) -> bool:
    """Improve the solution of any nonsingular systems until it is found or the recurrence breaks down: a `Method`."""
    require_iterations(system, targets)
    seen, norms, scale = preconditioned_start(system, r, norms)
    targets = targets * scale
    r, shadow, p = seen.copy(), seen.copy(), seen.copy()
    # The shadow is the first residual itself, so their product is its square.
    rho = (norms**2).astype(np.result_type(r.dtype, float))
    active, at_start = norms > targets, norms
    while active.any():
        require_iterations(system, targets / scale)
        ahead, v = preconditioned_product(system, p)
        (sv,) = _finite(system, v, (shadow, v))
        # Along p until the residual is orthogonal to the shadow, then along that residual to the least norm.
        alpha = _quotient(rho, sv, active)
        add_scaled(x, alpha, ahead)
        add_scaled(r, -alpha, v)
        along, t = preconditioned_product(system, r)
        tr, tt, rr, sr, st = _finite(system, t, (t, r), (t, t), (r, r), (shadow, r), (shadow, t))
        omega = _quotient(tr, tt, active)
        add_scaled(x, omega, along)
        add_scaled(r, -omega, t)
        # (shadow, r - ω t), of the products that came with the second reduction.
        rho_before, rho = rho, sr - omega * st
        beta = _quotient(rho * alpha, rho_before * omega, active)
        add_scaled(p, -omega, v)
        p *= column(p, beta)
        p += r
        # The least norm along t; what rounding makes negative is zero.
        left = np.sqrt(np.maximum(rr.real - np.abs(tr) ** 2 / np.abs(np.where(tt != 0.0, tt, 1.0)), 0.0))
        norms = np.where(active, left, norms)
        system.note(norms / scale)
        broken = (np.abs(rho) <= _LOST * norms * at_start) | (alpha * omega == 0.0) | (norms > _FAR * at_start)
        if broken[active & (norms > targets)].any():
            return False
        active = norms > targets
    return True


def _finite(system: System, product: LocalArray, *pairs: tuple[LocalArray, LocalArray]) -> np.ndarray:
    sums = system.dots(*pairs)
    if not np.isfinite(sums).all():
        system.require_finite(complex(sums.sum()), product, "a product with matvec or preconditioner")
    return sums


def _quotient(a: np.ndarray, b: np.ndarray, active: np.ndarray) -> np.ndarray:
    usable = active & (b != 0.0)
    return np.where(usable, a, 0.0) / np.where(usable, b, 1.0)
