"""The part common to all iterations: a start, the true residual at the end, and a restart if the two residuals differ.

The residual of a recurrence drifts from the true one by rounding, and an operator without the properties required by its
method can make it meaningless. So a result is accepted only after one more product with the operator: the true residual
must be within ten times the tolerance, or within the effect of rounding the solution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from mpiad._typing import LocalArray
from mpiad.linalg.diagnosis import diagnosis, require_determined, rounding_floor
from mpiad.linalg.system import System
from mpiad.linalg.vectors import beside, column

Method: TypeAlias = Callable[[System, LocalArray, LocalArray, np.ndarray, np.ndarray], bool]
"""``method(system, x, r, norms, targets)`` improves x, shape (k, n), whose residual is r, in place, and returns whether its
own residuals meet their targets; the others are to be started anew from the true residual. All ranks call it.

`norms` and `targets`, shape (k,), are the norm of each residual and what it is to fall to; the system gets the norms after
each iteration as its history. On all ranks it raises a ValueError where a product with operator or preconditioner isn't
finite, a ConvergenceError where the iterations are used up or (conjugate gradients) one of them isn't positive definite."""

_SLACK = 10.0  # times the tolerance: allowed drift of recurrences
_PATIENCE = 3  # restarts in a row without progress, before the iteration counts as stalled


def iterate(method: Method, system: System, b: LocalArray, x0: LocalArray | None) -> LocalArray:
    """Return the solution of a system, of the shape and dtype of `b`, starting from `x0` or zero; all ranks call it.

    On all ranks it raises as `solve`.
    """
    b = system.rows(b)
    targets, norms = system.start(b)
    if not targets.any():
        return system.block(np.zeros_like(b))
    units = column(b, system.units.astype(b.real.dtype))
    # Largest residual accepted as rounding: a larger one means that the operator is singular to working precision.
    most = np.finfo(b.dtype).eps ** 0.25 * norms
    x, r, norms = _start(system, b, None if x0 is None else system.rows(x0) / units, norms)
    system.note(norms)
    # With left preconditioning the method has used another residual, so only the true one is decisive.
    idle, slack = 0, 1.0 if system.settings.side == "left" else _SLACK
    while True:
        arrived = method(system, x, r, norms, targets)
        if arrived and not system.settings.verify:
            break
        before = norms
        r, norms = _true_residual(system, b, x)
        if arrived and (norms <= slack * targets).all() or (norms <= targets).all():
            break
        if arrived and (norms <= np.minimum(rounding_floor(system, x, targets), most)).all():
            break
        idle = idle + 1 if (norms > 0.999 * before)[norms > targets].any() else 0
        if idle == (1 if arrived else _PATIENCE):
            _stalled(system, norms, targets, arrived)
    if system.settings.verify and system.settings.probe:
        require_determined(system, x, targets)
    x *= units
    return system.block(x)


def _start(system: System, b: LocalArray, x0: LocalArray | None, norms: np.ndarray) -> tuple:
    if x0 is None:
        return np.zeros_like(b), b.copy(), norms
    # With a zero right-hand side the solution is known.
    x = np.where(beside(b, np.where(norms > 0.0, 1.0, 0.0))[:, None] > 0.0, x0, 0.0).astype(b.dtype)
    return x, *_true_residual(system, b, x)


def _true_residual(system: System, b: LocalArray, x: LocalArray) -> tuple[LocalArray, np.ndarray]:
    r = b - system.apply(x)
    norms = system.norms(r)
    system.require_finite(float(norms.sum()), r, "the residual (of x0, or of the solution)")
    return r, norms


def _stalled(system: System, norms: np.ndarray, targets: np.ndarray, arrived: bool) -> None:
    worst = int(np.argmax(norms / np.where(targets > 0.0, targets, 1.0)))
    norm, wanted = float(norms[worst] * system.units[worst]), float(targets[worst] * system.units[worst])
    which = f" of system {worst}" if len(norms) > 1 else ""
    if arrived:
        what = f"its own residual met the tolerance, but the true one{which} has norm {norm:.3e} instead of {wanted:.3e}"
        advice = "Is matvec linear, and symmetric for 'cg'? If so, ask for less by rtol, or compute in a higher precision."
    else:
        what = f"it stalls: the residual{which} stays at {norm:.3e}, to fall to {wanted:.3e}"
        advice = "Try a larger restart, a better preconditioner, or another method."
    found = diagnosis(system)
    system.fail(f"{what}: {found}" if found else f"{what}. {advice}")
