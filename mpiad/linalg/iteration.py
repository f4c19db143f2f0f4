"""The driver of all iterative methods: the start, the check of the true residual, restarts, and the diagnosis of failures.

The residual of a recurrence differs from the true one by rounding errors, and is meaningless if the operator lacks
properties that the method requires. Therefore, unless `verify` is False, a solution is accepted only after one more product
with the operator: its true residual must be within ten times the tolerance (within the tolerance with left
preconditioning), or within the effect of rounding the solution. After a failure, a few products show whether the operator
is singular, not linear or not symmetric, or badly scaled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import autograd.numpy as anp
import numpy as np

from mpiad._typing import LocalArray
from mpiad.linalg.system import ADVICE_FOR_COPIES, AnySystem, System
from mpiad.linalg.vectors import are_within, column, on_device_of, on_host

Method: TypeAlias = Callable[[System, LocalArray, LocalArray, np.ndarray, np.ndarray], bool]
"""``method(system, x, r, norms, targets)`` improves x (k, n) in place; returns whether its residual is small enough.

`r` is the residual at the start. The method must not change it, since it may be the right-hand side.

`norms`, of shape (k,), are the norms of the residuals; `targets` are the norms to which these must fall. The method adds
the norms to the history of the system. If it raises a ValueError or ConvergenceError, it does so on all ranks. If it
returns False, the driver calls it again with the true residual."""

_SLACK = 10.0  # maximum accepted true residual, as a multiple of the tolerance
_PATIENCE = 3  # the iteration fails after this number of successive restarts without progress


def iterate(method: Method, system: System, b: LocalArray, x0: LocalArray | None) -> LocalArray:
    """Return the solution of a system, of the shape and dtype of `b`, starting from `x0` or zero; errors as in `solve`."""
    b = system.rows(b)
    targets, norms = system.start(b)
    if not any(targets.tolist()):
        system.note(norms)
        return system.block(np.zeros_like(b))
    # If a residual is larger than this, rounding isn't the only reason: the operator is singular to working precision.
    largest_rounding = np.finfo(b.dtype).eps ** 0.25 * norms
    x, r = system.full(0.0), b
    if x0 is not None:
        # For a zero right-hand side the solution is zero.
        nonzero = on_device_of(b, np.where(norms > 0.0, 1.0, 0.0))[:, None] > 0.0
        x = np.where(nonzero, system.rows(x0) / system.units_of_rows, 0.0).astype(b.dtype)
    elif system.has_inverse:
        x = system.precondition(b)
    if x0 is not None or system.has_inverse:
        r, norms, _ = _true_residual(system, b, x)
    system.note(norms)
    # With left preconditioning, the method uses the preconditioned residual, so the true residual gets no slack.
    restarts_without_progress, slack = 0, 1.0 if system.settings.side == "left" else _SLACK
    while True:
        converged = are_within(norms, targets) or method(system, x, r, norms, targets)
        if converged and not system.settings.verify:
            break
        before = norms
        r, norms, squares = _true_residual(system, b, x, converged and system.settings.probe)
        if are_within(norms, slack * targets if converged else targets):
            break
        if converged and are_within(norms, np.minimum(rounding_floor(system, x, targets), largest_rounding)):
            break
        restarts_without_progress = restarts_without_progress + 1 if (norms > 0.999 * before)[norms > targets].any() else 0
        if restarts_without_progress == (1 if converged else _PATIENCE):
            _fail_stalled(system, norms, targets, converged)
    if system.settings.verify and system.settings.probe:
        _require_unique(system, x, targets, squares if converged else _true_residual(system, b, x, True)[2])
    x *= system.units_of_rows
    return system.block(x)


def _true_residual(
    system: System, b: LocalArray, x: LocalArray, probes: bool = False
) -> tuple[LocalArray, np.ndarray, np.ndarray]:
    """Return b - A x, its norms, and if `probes` is true the squared norms of x and of the image of a constant."""
    r, sums, _ = system.run(_residual_and_image if probes else _residual, b, x)
    system.require_finite(sums[0], r, "the residual (of x0, or of the solution)")
    return r, np.sqrt(sums[0].real), sums[1:].real


def _residual(system: AnySystem, b: LocalArray, x: LocalArray) -> tuple[LocalArray, ...]:
    r = b - system.apply(x)
    return _with_sums(system, r, (r, r))


def _residual_and_image(system: AnySystem, b: LocalArray, x: LocalArray) -> tuple[LocalArray, ...]:
    r, image = b - system.apply(x), system.apply(anp.ones_like(x))
    return _with_sums(system, r, (r, r), (x, x), (image, image))


def _with_sums(system: AnySystem, r: LocalArray, *pairs: tuple[LocalArray, LocalArray]) -> tuple[LocalArray, ...]:
    sums = system.dots(*pairs)
    is_finite = anp.isfinite(anp.sum(anp.abs(sums), axis=0))
    return r, sums, anp.stack([anp.sum(1.0 * ~is_finite)])


def _fail_stalled(system: System, norms: np.ndarray, targets: np.ndarray, converged: bool) -> None:
    largest = int(np.argmax(norms / np.where(targets > 0.0, targets, 1.0)))
    norm, target = (float((numbers * system.units)[largest]) for numbers in (norms, targets))
    name = f" of system {largest}" if len(norms) > 1 else ""
    if converged:
        problem = f"the recurrence met the tolerance, but the true residual{name} has norm {norm:.3e}, above {target:.3e}"
        advice = "Is matvec linear, and symmetric for 'cg'? If so, increase rtol, or compute in a higher precision."
    else:
        problem = f"it stalls: the residual{name} stays at {norm:.3e}, but must fall to {target:.3e}"
        advice = f"Try a larger restart, a better preconditioner, or another method. {ADVICE_FOR_COPIES}"
        advice = f"{advice} {system.settings.advice}".rstrip()
    cause = diagnosis(system)
    system.fail(f"{problem}: {cause}" if cause else f"{problem}. {advice}")


_SEED = 20250101
_MARGIN = 100.0  # multiple of the rounding error of a product with the operator
_SINGULAR = (
    "it is singular: the operator maps a constant field to zero, so u is determined only up to a constant (and, for a "
    "symmetric operator, exists only if b has mean zero). Is this a pure Neumann or periodic problem? Fix the value of one "
    "cell, or add a small multiple of u to the operator"
)
_CONTRAST = 1e-8  # a row is very small if it is smaller than this fraction of the mean


def require_iterations(system: System, targets: np.ndarray) -> None:
    """Raise on all ranks if the maximum number of iterations is reached."""
    if system.iterations >= system.limit:
        target = math.hypot(*(targets * system.units).tolist())
        problem = f"the residual didn't fall to {target:.3e} within maxiter={system.limit} iterations"
        cause, advice = diagnosis(system), system.settings.advice if system.settings.maxiter is None else ""
        system.fail(f"{problem}: {cause}" if cause else f"{problem}. {advice}".rstrip())


def forcing_term(before: float, ratio: float, largest: float) -> float:
    """Return Eisenstat and Walker's choice 2 (γ = 0.9, α = 2) with their safeguard, for the ratio of the last two norms."""
    chosen, safeguard = 0.9 * ratio**2, 0.9 * before**2
    return min(largest, max(chosen, safeguard) if safeguard > 0.1 else chosen)


def rounding_floor(system: System, x: LocalArray, targets: np.ndarray) -> np.ndarray:
    """Return an estimate, for each system, of the norm of the residual that is due to rounding of the solution."""
    # Rounding changes each entry of x by up to half a unit in the last place, so the residual changes by about eps A (±x),
    # with random signs. The factor `_MARGIN` accounts for several such errors in an iteration.
    image = system.apply((_signs(x, 0) * x).astype(x.dtype))
    return np.maximum(targets, _MARGIN * np.finfo(x.dtype).eps * system.norms(image))


def _require_unique(system: System, x: LocalArray, targets: np.ndarray, squares: np.ndarray) -> None:
    """Raise on all ranks if the solution isn't unique, since the operator maps constants to zero; see `_true_residual`."""
    # The image shows whether x plus a constant of the size of x also meets the tolerance. If the tolerance is loose, it
    # may do so even if the operator is nonsingular; another product shows if the image of a constant is a rounding error.
    count, numbers = max(system.unknowns, 1), zip(*squares.tolist(), targets.tolist())
    doubtful = [square > 0.0 and math.sqrt(square * image / count) <= target for square, image, target in numbers]
    if any(doubtful):
        image = system.apply(_signs(x, 0).astype(x.dtype))
        rounding = squares[1] <= _rounding_squared(x.dtype) * system.dots((image, image))[0].real
        if rounding[doubtful].any():
            system.fail(diagnosis(system) or _SINGULAR)


def diagnosis(system: System) -> str:
    """Return a description of a problem of the operator after a failed solve; empty if no problem is detected."""
    if system.diagnose is not None:
        system.settle()  # other diagnoses have a sum, which reports failures of user functions
        return system.diagnose()
    like = system.full(0.0)
    field_1, field_2 = _signs(like, 0).astype(system.dtype), _signs(like, 1).astype(system.dtype)
    # The images of zero, of a constant, of two fields, and of the sum of the two fields.
    images = [system.apply(v) for v in (like, np.ones_like(like), field_1, field_2, field_1 + field_2)]
    squares = np.real(system.dots(*[(v, v) for v in images]))
    gap = images[4] - images[2] - images[3]
    nonlinear, product_12, product_21 = system.dots((gap, gap), (field_2, images[2]), (images[3], field_1))
    scale = squares[2] + squares[3]
    if (squares[0] > 0.0).any() or (nonlinear.real > 1e-6 * scale).any():
        return "matvec isn't linear in u, as it must be. Does it add a boundary value or a source? Add it to b instead."
    if not squares[1:3].any():
        return "the operator maps all fields to zero. Check the coefficients; if it is a derivative, start from another u."
    constant = (squares[1] <= _rounding_squared(system.dtype) * squares[2]).any()
    # If some rows are very small, these products don't show whether the operator is singular.
    contrast = _contrast(system, images[2], images[3], scale / system.unknowns)
    if constant and not contrast:
        return _SINGULAR + "."
    if system.settings.method == "cg" and (np.abs(product_12 - product_21) > 1e-6 * np.sqrt(scale * system.unknowns)).any():
        return (
            "the operator isn't symmetric. Take method='gmres' or 'bicgstab'. If it averages copies of unknowns, and some "
            "have more copies than others, divide its result and b by their numbers."
        )
    if contrast:
        return (
            f"the operator's rows differ by a factor of {contrast:.0e} in size: a coefficient of extreme contrast, whereas "
            f"{system.dtype} resolves {1.0 / np.finfo(system.dtype).eps:.0e}. Limit it, or precondition by the diagonal."
        )
    return ""


def _contrast(system: System, image_1: LocalArray, image_2: LocalArray, mean: np.ndarray) -> float:
    """Return the factor by which some rows of the operator are smaller than the mean; 0 if few rows are very small."""
    squares = np.abs(image_1) ** 2 + np.abs(image_2) ** 2
    is_small = (squares > 0.0) & (squares < column(squares, _CONTRAST**2 * mean))
    local = [on_host(np.sum(rows, axis=1)) for rows in (is_small, np.where(is_small, squares, 0.0))]
    count, total = np.real(system.sums(np.array(local, float)))
    # With random signs, entries cancel in at most about one row in sixteen.
    factors = np.sqrt(mean * count / np.where(total > 0.0, total, np.inf))
    return float(np.max(np.where(count > 0.2 * system.unknowns, factors, 0.0)))


def _rounding_squared(dtype: np.dtype) -> float:
    return float((_MARGIN * np.finfo(dtype).eps) ** 2)


def _signs(like: LocalArray, number: int) -> LocalArray:
    # The signs may be equal on different ranks.
    return on_device_of(like, np.random.default_rng(_SEED + number).integers(0, 2, like.shape) * 2 - 1)
