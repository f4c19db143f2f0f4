"""When a sharded solve ends: its options, by SciPy's names and with the defaults of its L-BFGS-B, and its tests.

Statuses are SciPy's numbers where it has them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from mpiad.optimize.sharded.solver_state import State

__all__ = ["ABNORMAL", "INTERRUPTED", "NOT_FINITE", "Ending", "Settings", "checked", "ending_at", "settings_of"]

_REAL = "gtol", "grtol", "ftol", "radius"  # the others are integers


class Ending(NamedTuple):
    """Status and what it means; zero is success."""

    status: int
    message: str


GRADIENT = Ending(0, "CONVERGENCE: the largest entry of the projected gradient is at most gtol.")
REDUCTION = Ending(0, "CONVERGENCE: the relative decrease of the objective is at most ftol.")
ITERATIONS = Ending(1, "STOP: the limit of iterations is reached. Raise maxiter, or accept the best point so far.")
EVALUATIONS = Ending(1, "STOP: the limit of evaluations is reached. Raise maxfun, or accept the best point so far.")
ABNORMAL = Ending(
    2,
    "ABNORMAL: no step along the steepest descent lowers the objective. Check the gradient (mpiad.testing.check_grads), "
    "or ask for less than rounding allows.",
)
NOT_FINITE = Ending(3, "ABNORMAL: the objective or its gradient isn't finite at x0. Start where both are.")
STOPPED = Ending(99, "`callback` raised `StopIteration`.")
INTERRUPTED = Ending(
    143,
    "INTERRUPTED: a rank was told to end by SIGTERM, and the state is written. Make the same call again to go on.",
)


class Settings(NamedTuple):
    """When to stop, and how much to remember.

    Attributes
    ----------
    maxcor : int
        Pairs of steps and gradient changes that are kept, called m in papers.
    gtol : float
        Largest absolute entry of the (projected) gradient, over all ranks, at which the solve has converged.
    ftol : float
        Relative decrease of the objective in one iteration at which it has converged; 0 for never.
    maxiter : int
    maxfun : int
        Evaluations, also those inside a line search.
    maxls : int
        Evaluations in one line search.
    """

    maxcor: int = 10
    gtol: float = 1e-5
    ftol: float = 2.2204460492503131e-09
    maxiter: int = 15000
    maxfun: int = 15000
    maxls: int = 20

    @property
    def identity(self) -> dict[str, Any]:
        """Return what the iterates of a solve depend on."""
        return {"method": "L-BFGS-sharded", "m": self.maxcor, "maxls": self.maxls}


def settings_of(tol: float | None, options: dict | None) -> Settings:
    """Return the settings; `tol` is both tolerances where the options don't say, as in SciPy.

    Raises
    ------
    ValueError
        Where there is no such option, or its value can't be.
    """
    given = dict(options or {})
    if "m" in given:
        given["maxcor"] = given.pop("m")
    if tol is not None:
        given = {"gtol": tol, "ftol": tol, **given}
    for name, value in given.items():
        if name not in Settings._fields:
            names = ", ".join(("m", *Settings._fields))
            raise ValueError(f"minimize: method 'L-BFGS-sharded' has the options {names}, but got {name!r}.")
        given[name] = checked(name, value)
    return Settings(**given)


def checked(name: str, value: Any) -> float:
    """Return the value of an option, a number; a ValueError where it can't be."""
    tolerance = name in _REAL
    least = 0 if tolerance or name in ("maxiter", "maxfun") else 1
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not number >= least or (not tolerance and number % 1 != 0):
        kind = "a number" if tolerance else "an integer"
        raise ValueError(f"minimize: option {name} must be {kind} of at least {least}, but got {value!r}.")
    return number if tolerance else int(number)


def ending_at(state: State, settings: Settings) -> Ending | None:
    """Return why a solve ends at an iterate, or None where it goes on."""
    here = state.here
    if here.norm <= settings.gtol:
        return GRADIENT
    if settings.ftol > 0.0 and state.value_before < math.inf:
        scale = max(abs(state.value_before), abs(here.value), 1.0)
        if state.value_before - here.value <= settings.ftol * scale:
            return REDUCTION
    if state.stopped:
        return STOPPED
    if state.iteration >= settings.maxiter:
        return ITERATIONS
    return EVALUATIONS if state.count >= settings.maxfun else None
