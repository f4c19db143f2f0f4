"""Stopping of a sharded solve: its options, with SciPy's names and the defaults of its L-BFGS-B, and its tests.

Statuses are SciPy's numbers if SciPy has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from mpiad._typing import Function
from mpiad.optimize.evaluated_points import STOPPED, Ending

_REAL = "gtol", "grtol", "ftol", "radius"  # the others are integers


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


class Settings(NamedTuple):
    """Stopping criteria, and the size of the memory."""

    maxcor: int = 10  # stored pairs of steps and gradient changes, called m in papers
    # Largest absolute entry of the (projected) gradient, over all ranks, at which the solve has converged.
    gtol: float = 1e-5
    # Relative decrease of the objective in one iteration at which it has converged; 0 for never.
    ftol: float = 2.2204460492503131e-09
    maxiter: int = 15000
    maxfun: int = 15000  # evaluations, including those of line searches
    maxls: int = 20  # evaluations per line search

    @property
    def identity(self) -> dict[str, Any]:
        """Return the settings on which the iterates of a solve depend."""
        return {"method": "L-BFGS-sharded", "m": self.maxcor, "maxls": self.maxls}


def checked(name: str, value: Any) -> float:
    """Return the value of an option, a number; a ValueError if it is invalid."""
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


def ending_at(
    before: float, value: float, stopped: Callable[[], bool], made: tuple[int, int], settings: Settings | NewtonSettings
) -> Ending | None:
    """Return why a solve ends at an iterate whose gradient isn't small enough, or None if it continues.

    `before` is the objective at the iterate before, infinite if the last search found nothing; `made` are the numbers of
    iterations and evaluations, and ``stopped()`` returns whether a callback wants the solve to end.
    """
    if settings.ftol > 0.0 and before < math.inf:
        # As in L-BFGS-B: relative, but absolute below one, since solves with objectives near zero would never end.
        if before - value <= settings.ftol * max(abs(before), abs(value), 1.0):
            return REDUCTION
    if stopped():
        return STOPPED
    if made[0] >= settings.maxiter:
        return ITERATIONS
    return EVALUATIONS if made[1] >= settings.maxfun else None


_CHOICES = {"product": ("full", "gauss-newton"), "globalization": ("line search", "trust region")}
_FUNCTIONS = "preconditioner", "inner_product", "regularizer"


class NewtonSettings(NamedTuple):
    """The components of a Newton step, and stopping criteria."""

    # {"full", "gauss-newton"}. Products with the Hessian, or with JᵀJ of residuals; the regularizer's Hessian is full.
    product: str = "full"
    globalization: str = "line search"  # {"line search", "trust region"}
    # From a residual in the form of x to about H⁻¹ of it; by default the inner product's `precondition`, or its inverse.
    preconditioner: Callable[[Any], Any] | None = None
    inner_product: Callable[[Any], Any] | None = None  # from dJ/dx to the gradient in the inner product
    regularizer: Function | None = None  # added to half the squares of the residuals, with "gauss-newton"
    # `gtol`, `grtol`: the gradient's norm at which the solve has converged, absolute and relative to the first one.
    gtol: float = 1e-5
    grtol: float = 1e-6
    ftol: float = 0.0  # as in L-BFGS-sharded; 0 for never
    maxiter: int = 200
    maxfun: int = 15000
    maxls: int = 20
    maxcg: int = 200  # products per iteration
    # Of the first trust region, in the preconditioner's norm; by default the length of the steepest descent.
    radius: float | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """Return the settings on which the iterates of a solve depend."""
        names = ("product", "globalization", *_FUNCTIONS, "maxls", "maxcg", "radius")
        return {"method": "Newton-CG-sharded", **{name: self._described()[name] for name in names}}

    def __repr__(self) -> str:
        """Return a description of the settings that must be the same on all ranks."""
        return ", ".join(f"{name}={value}" for name, value in self._described().items())

    def _described(self) -> dict[str, Any]:
        return {name: "a function" if callable(value) else value for name, value in self._asdict().items()}


def settings_of(method: str, tol: float | None, options: dict | None) -> Settings | NewtonSettings:
    """Return the settings of a method; `tol` is the default of the tolerances, as in SciPy.

    A ValueError if an option doesn't exist, or its value is invalid.
    """
    given, newton = dict(options or {}), method.lower().startswith("newton")
    kind = NewtonSettings if newton else Settings
    if tol is not None:
        given = {**({"gtol": tol} if newton else {"gtol": tol, "ftol": tol}), **given}
    if newton and given.get("preconditioner") is None:
        # The object of the inner product often has a preconditioner for it, as priors do.
        given["preconditioner"] = getattr(given.get("inner_product"), "precondition", None)
    if not newton and "m" in given:
        given["maxcor"] = given.pop("m")  # its name in papers
    for name, value in given.items():
        if name not in kind._fields:
            known, names = ("Newton-CG-sharded", ()) if newton else ("L-BFGS-sharded", ("m",))
            listed = ", ".join((*names, *kind._fields))
            raise ValueError(f"minimize: method {known!r} has the options {listed}, but got {name!r}.")
        if name in _CHOICES:
            if value not in _CHOICES[name]:
                raise ValueError(f"minimize: option {name} must be one of {_CHOICES[name]}, but got {value!r}.")
        elif name in _FUNCTIONS:
            given[name] = _function(name, value)
        elif not (name == "radius" and value is None):
            given[name] = checked(name, value)
    settings = kind(**given)
    if isinstance(settings, NewtonSettings) and settings.regularizer is not None and settings.product == "full":
        raise ValueError(
            "minimize: option regularizer is for product='gauss-newton', whose fun returns residuals. Under product='full' "
            "add it to what fun returns."
        )
    return settings


def _function(name: str, value: object) -> Any:
    """Return the function that an option gives; for an object that solves, such as a prior, its `solve`."""
    solves = getattr(value, "solve", None)
    if name != "regularizer" and callable(solves):
        return solves
    if name == "regularizer" and callable(getattr(value, "cost", None)):
        return value.cost  # type: ignore[attr-defined]
    if value is not None and not callable(value):
        wanted = "callable, or have a method " + ("`cost`" if name == "regularizer" else "`solve`")
        raise TypeError(f"minimize: option {name} must be {wanted}, but got {type(value).__name__} {value!r:.60}.")
    return value
