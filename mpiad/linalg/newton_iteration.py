"""Newton's method on blocks: inexact linear solves, and steps shortened until the residual falls.

A step to η of the residual in the linear model must bring at least a small part of what that promises; if it doesn't, the
step is shortened to the minimum of the parabola through what is known. Near the root whole steps are taken, and η falls
with the square of the residual's ratio, so that convergence stays quadratic.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpiad._typing import Function, LocalArray
from mpiad.errors import ConvergenceError
from mpiad.linalg.diagnosis import diagnosis, rounding_floor
from mpiad.linalg.iteration import Method, iterate
from mpiad.linalg.solver_settings import Settings
from mpiad.linalg.system import System
from mpiad.transport.agreement import agreed_among
from mpiad.transport.user_failures import DeferredFailures

_FIRST_FORCING, _LARGEST_FORCING = 0.5, 0.9  # η₀ and η_max of Eisenstat and Walker
_SUFFICIENT = 1e-4  # of the decrease that the linear model promises
_SHORTEST = 1e-8
_FAR = 1e6
_PATIENCE, _SLOW = 5, 0.99  # so many steps must bring the residual to less than this part of what it was

Linear = Callable[[LocalArray, float], System]
"""``linear(u, rtol)``: the system with the Jacobian at u, to be solved to a tolerance."""


def find_root(
    residual: Function, linear: Linear, u0: LocalArray, settings: Settings, method: Method, failures: DeferredFailures
) -> LocalArray:
    """Return u, of the form of `u0`, where the residual is zero; collective. Raises as `newton`.

    ``linear(u, rtol)`` makes the system with the Jacobian at u, for `method` to solve. `failures` are those of the linear
    systems too: what one of them leaves unsaid, the next sum tells.
    """
    system = System(residual, None, u0, settings._replace(method="newton"), "residual", failures)
    u = system.rows(u0)
    f, norm = _evaluated(system, u)
    system.require_finite(norm, f, "the residual at u0")
    system.note(np.array([norm]))
    target, forcing = max(settings.rtol * norm, settings.atol), _FIRST_FORCING
    while norm > target:
        if system.iterations >= int(settings.maxiter or 0):
            system.fail(f"the residual didn't fall to {target:.3e} within maxiter={settings.maxiter} steps")
        # No more exactly than the target asks for: the last step would do work that nobody sees.
        within = max(forcing, 0.5 * target / norm)
        system.usable = system.block(u)
        step = _newton_step(system, linear, method, u, f, within)
        before = norm
        found = _search(system, u, step, norm, within)
        if found is None:
            _require_rounding(system, linear, u, norm, target)
            break
        u, f, norm = found
        system.note(np.array([norm]))
        if _has_stalled(system, linear, u, norm, target):
            break
        forcing = _next_forcing(forcing, norm / before)
    system.settle()
    return system.block(u)


def _evaluated(system: System, u: LocalArray) -> tuple[LocalArray, float]:
    f = system.apply(u)
    return f, float(system.norms(f)[0])


def _newton_step(system: System, linear: Linear, method: Method, u: LocalArray, f: LocalArray, within: float) -> LocalArray:
    """Return the solution of J s = -f to a relative residual."""
    b = system.block(-f)
    where, inner = f"in step {system.iterations + 1} the linear system wasn't solved", linear(system.block(u), within)
    try:
        step = system.rows(iterate(method, inner, b, None))
    except ConvergenceError as error:
        if not agreed_among(error):
            raise
        system.fail(f"{where} ({error})")
    lengths = np.sqrt(np.real(system.dots((step, step), (u, u), (f, f))[:, 0]))
    # So long a step may come from a Jacobian that maps it to zero but for rounding: one product tells.
    if lengths[0] > _FAR * (lengths[1] + lengths[2]):
        if rounding_floor(inner, step, np.zeros(1))[0] > lengths[2]:
            system.fail(f"{where}: the Jacobian is singular to working precision. {diagnosis(inner)}")
    return step


def _search(
    system: System, u: LocalArray, step: LocalArray, norm: float, within: float
) -> tuple[LocalArray, LocalArray, float] | None:
    """Return the new point, its residual and norm; None where no step along the direction makes the residual fall."""
    length = 1.0
    while length > _SHORTEST:
        new = u + np.zeros(0, u.dtype).real.dtype.type(length) * step
        f, found = _evaluated(system, new)
        if found <= (1.0 - _SUFFICIENT * length * (1.0 - within)) * norm:
            return new, f, found
        # Of the parabola with the square at 0 and here, and the slope that Newton's direction has.
        shorter = 0.1 if not np.isfinite(found) else norm**2 * length / (found**2 + (2.0 * length - 1.0) * norm**2)
        length *= float(np.clip(shorter, 0.1, 0.5))
    return None


def _has_stalled(system: System, linear: Linear, u: LocalArray, norm: float, target: float) -> bool:
    """Tell whether the residual is rounding only; raise on all ranks where it stalls above that."""
    since = system.history[-1 - _PATIENCE :][0]
    if len(system.history) <= _PATIENCE or norm <= target or norm <= _SLOW * since:
        return False
    if norm > rounding_floor(linear(system.block(u), 1.0), u, np.array([target]))[0]:
        system.fail(
            f"it stalled at step {system.iterations - _PATIENCE}, residual {since:.3e}: {_PATIENCE} steps more brought it "
            f"to {norm:.3e}, to fall to {target:.3e}. mpiad.testing.check_grads(residual, u0) tells whether its derivative "
            "is right; where it is, start nearer to the solution"
        )
    return True


def _next_forcing(before: float, ratio: float) -> float:
    # Choice 2 with γ = 0.9 and α = 2, and its safeguard.
    forcing, kept = 0.9 * ratio**2, 0.9 * before**2
    if kept > 0.1:  # not to be too demanding too early
        forcing = max(forcing, kept)
    return min(forcing, _LARGEST_FORCING)


def _require_rounding(system: System, linear: Linear, u: LocalArray, norm: float, target: float) -> None:
    """Raise on all ranks where the residual is more than rounding u to its precision makes of it."""
    if norm > rounding_floor(linear(system.block(u), 1.0), u, np.array([target]))[0]:
        system.fail(
            f"no step along Newton's direction makes the residual fall from {norm:.3e} to {target:.3e}: a minimum of its "
            "norm that is no root, or a kink. Start nearer to the solution, from that of an easier problem, or check that "
            "the residual is differentiable"
        )
