"""Options and stopping criteria of sharded methods; names, defaults and statuses are those of SciPy's L-BFGS-B."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from mpiad._typing import Function
from mpiad.optimize.evaluated_points import STOPPED, Ending

_REAL = "gtol", "grtol", "ftol", "radius"  # other numeric options are integers
GRADIENT = Ending(0, "CONVERGENCE: the largest entry of the projected gradient is at most gtol.")
REDUCTION = Ending(0, "CONVERGENCE: the relative decrease of the objective is at most ftol.")
ITERATIONS = Ending(1, "STOP: the limit of iterations is reached. Raise maxiter, or accept the best point so far.")
EVALUATIONS = Ending(1, "STOP: the limit of evaluations is reached. Raise maxfun, or accept the best point so far.")
ABNORMAL = Ending(
    2,
    "ABNORMAL: no step along the steepest descent lowers the objective. Check the gradient (mpiad.testing.check_grads), "
    "or raise tolerances that are below rounding.",
)
NOT_FINITE = Ending(3, "ABNORMAL: the objective or its gradient isn't finite at x0. Choose an x0 at which both are finite.")


class Settings(NamedTuple):
    """Options of L-BFGS-sharded: stopping criteria, and the size of the memory."""

    maxcor: int = 10  # number of stored pairs of steps and gradient changes, m in the literature
    gtol: float = 1e-5  # tolerance of the largest absolute entry of the (projected) gradient over all ranks
    ftol: float = 2.2204460492503131e-09  # tolerance of the relative decrease in one iteration; 0 for none
    maxiter: int = 15000
    maxfun: int = 15000  # maximum number of evaluations, including those of line searches
    maxls: int = 20  # maximum number of evaluations per line search

    @property
    def identity(self) -> dict[str, Any]:
        """Return the settings on which the iterates of a solve depend."""
        return {"method": "L-BFGS-sharded", "m": self.maxcor, "maxls": self.maxls}


def checked(name: str, value: Any) -> float:
    """Return the numeric value of an option; raise a ValueError if it is invalid."""
    real = name in _REAL
    lowest = 0 if real or name in ("maxiter", "maxfun") else 1
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not number >= lowest or (not real and number % 1 != 0):
        kind = "a number" if real else "an integer"
        raise ValueError(f"minimize: option {name} must be {kind} of at least {lowest}, but got {value!r}.")
    return number if real else int(number)


def ending_at(
    before: float, value: float, stopped: Callable[[], bool], counts: tuple[int, int], settings: Settings | NewtonSettings
) -> Ending | None:
    """Return the ending of a solve at an iterate whose gradient isn't small enough, or None if it continues.

    `before` is the objective at the previous iterate, or infinite if the last line search found no better point. `counts`
    are the numbers of iterations and evaluations. ``stopped()`` returns whether a callback has raised StopIteration.
    """
    # Relative for large values and absolute below one, as in L-BFGS-B.
    tolerance = settings.ftol * max(abs(before), abs(value), 1.0)
    if settings.ftol > 0.0 and before < math.inf and before - value <= tolerance:
        return REDUCTION
    if stopped():
        return STOPPED
    if counts[0] >= settings.maxiter:
        return ITERATIONS
    return EVALUATIONS if counts[1] >= settings.maxfun else None


_CHOICES = {"product": ("full", "gauss-newton"), "globalization": ("line search", "trust region")}
_FUNCTIONS = "preconditioner", "inner_product", "regularizer"


class NewtonSettings(NamedTuple):
    """Options of Newton-CG-sharded: the components of a step, and stopping criteria."""

    # {"full", "gauss-newton"}. The matrix of the Newton system: the Hessian of the objective, or JᵀJ plus the Hessian of
    # the regularizer, with the Jacobian J of the residuals.
    product: str = "full"
    globalization: str = "line search"  # {"line search", "trust region"}
    # Product of an approximate inverse Hessian with a vector. By default the method `precondition` of `inner_product`, or
    # `inner_product` itself.
    preconditioner: Callable[[Any], Any] | None = None
    inner_product: Callable[[Any], Any] | None = None  # product of R⁻¹ with a vector, for the inner product uᵀ R v
    regularizer: Function | None = None  # added to half the sum of squared residuals ("gauss-newton")
    gtol: float = 1e-5  # tolerance of the norm of the gradient
    grtol: float = 1e-6  # tolerance of this norm, relative to the norm at x0
    ftol: float = 0.0  # as in L-BFGS-sharded
    maxiter: int = 200
    maxfun: int = 15000
    maxls: int = 20
    maxcg: int = 200  # maximum number of Hessian products per iteration
    radius: float | None = None  # of the first trust region; default: the length of the preconditioned gradient

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
    """Return the settings of a method; `tol` is the default of gtol, and of ftol in L-BFGS-sharded."""
    given, newton = dict(options or {}), method.lower().startswith("newton")
    kind = NewtonSettings if newton else Settings
    if tol is not None:
        given = {**({"gtol": tol} if newton else {"gtol": tol, "ftol": tol}), **given}
    if newton and given.get("preconditioner") is None:
        # An object for the inner product, such as a prior, often defines a preconditioner, too.
        given["preconditioner"] = getattr(given.get("inner_product"), "precondition", None)
    if not newton and "m" in given:
        given["maxcor"] = given.pop("m")  # its name in papers
    for name, value in given.items():
        if name not in kind._fields:
            label, names = ("Newton-CG-sharded", ()) if newton else ("L-BFGS-sharded", ("m",))
            listed = ", ".join((*names, *kind._fields))
            raise ValueError(f"minimize: method {label!r} has the options {listed}, but got {name!r}.")
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
            "minimize: option regularizer is for product='gauss-newton', with a fun that returns residuals. With "
            "product='full' add the regularizer to the result of fun."
        )
    return settings


def _function(name: str, value: object) -> Any:
    """Return the function of an option; for an object, its method `cost` for a regularizer, otherwise `solve`."""
    method = "cost" if name == "regularizer" else "solve"
    if callable(found := getattr(value, method, None)):
        return found
    if value is not None and not callable(value):
        got = f"{type(value).__name__} {value!r:.60}"
        raise TypeError(f"minimize: option {name} must be callable, or have a method `{method}`, but got {got}.")
    return value
