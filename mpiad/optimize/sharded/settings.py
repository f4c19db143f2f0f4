"""The options of the sharded method, by SciPy's names and with the defaults of its L-BFGS-B."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

__all__ = ["Settings", "settings_of"]


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
        given[name] = _checked(name, value)
    return Settings(**given)


def _checked(name: str, value: Any) -> float:
    tolerance = name in ("gtol", "ftol")
    least = 0 if tolerance or name in ("maxiter", "maxfun") else 1
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not number >= least or (not tolerance and number % 1 != 0):
        kind = "a number" if tolerance else "an integer"
        raise ValueError(f"minimize: option {name} must be {kind} of at least {least}, but got {value!r}.")
    return number if tolerance else int(number)
