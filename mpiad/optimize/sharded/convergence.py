"""Options and stopping criteria of sharded methods; names, defaults and statuses are those of SciPy's L-BFGS-B."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from mpiad._typing import Function, Scalar, Tree
from mpiad.optimize.evaluated_points import Ending
from mpiad.optimize.least_squares import LOSSES

_REAL = "gtol", "grtol", "ftol", "xtol", "catol", "radius"  # at least zero
# Upper limits of options that must be positive; all other numeric options are integers.
_POSITIVE = {
    "forcing": 1.0,
    "f_scale": math.inf,
    "move": 1.0,
    "asyinit": 10.0,
    "asymin": 1.0,
    "asydecr": 1.0,
    "asyincr": math.inf,
}
_STOPPING = "gtol", "grtol", "ftol", "xtol", "catol", "maxiter", "maxfun"
GRADIENT = Ending(0, "CONVERGENCE: the largest entry of the projected gradient is at most gtol.")
REDUCTION = Ending(0, "CONVERGENCE: the relative decrease of the objective is at most ftol.")
ITERATIONS = Ending(1, "STOP: the limit of iterations is reached. Raise maxiter, or accept x.")
EVALUATIONS = Ending(1, "STOP: the limit of evaluations is reached. Raise maxfun, or accept x.")
ABNORMAL = Ending(
    2,
    "ABNORMAL: no step along the steepest descent lowers the objective. Check the gradient (mpiad.testing.check_grads), "
    "or raise tolerances that are below rounding.",
)
NOT_FINITE = Ending(3, "ABNORMAL: the objective or its gradient isn't finite at x0. Choose an x0 at which both are finite.")


class Settings(NamedTuple):
    """Options of L-BFGS-sharded: stopping criteria, and the size of the memory."""

    method = "L-BFGS-sharded"
    maxcor: int = 10  # number of stored pairs of steps and gradient changes, m in the literature
    gtol: float = 1e-5  # tolerance of the largest absolute entry of the (projected) gradient over all ranks
    ftol: float = 2.2204460492503131e-09  # tolerance of the relative decrease in one iteration; 0 for none
    maxiter: int = 15000
    maxfun: int = 15000  # maximum number of evaluations, including those of line searches
    maxls: int = 20  # maximum number of evaluations per line search


def checked(name: str, value: Scalar) -> float:
    """Return the numeric value of an option; raise a ValueError if it is invalid."""
    real = name in _REAL or name in _POSITIVE
    lowest = 0 if real or name in ("maxiter", "maxfun") else 1
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if name in _POSITIVE and not 0.0 < number <= _POSITIVE[name]:
        raise ValueError(f"minimize: option {name} must be positive and at most {_POSITIVE[name]:g}, but got {value!r}.")
    if not number >= lowest or (not real and number % 1 != 0):
        kind = "a number" if real else "an integer"
        raise ValueError(f"minimize: option {name} must be {kind} of at least {lowest}, but got {value!r}.")
    return number if real else int(number)


_CHOICES = {
    "conservative": (False, True),
    "product": ("full", "gauss-newton"),
    "globalization": ("line search", "trust region"),
    "loss": tuple(LOSSES),
}
# Options that are functions, and the methods that objects may have in place of them.
_FUNCTIONS = {"preconditioner": "solve", "inner_product": "solve", "regularizer": "cost", "noise_precision": "apply"}
_OF_RESIDUALS = "regularizer", "noise_precision", "loss"  # for product="gauss-newton"


class NewtonSettings(NamedTuple):
    """Options of Newton-CG-sharded: the components of a step, and stopping criteria."""

    method = "Newton-CG-sharded"
    # {"full", "gauss-newton"}. The matrix of the Newton system: the Hessian of the objective, or JᵀJ plus the Hessian of
    # the regularizer, with the Jacobian J of the residuals.
    product: str = "full"
    globalization: str = "line search"  # {"line search", "trust region"}
    # Product of an approximate inverse Hessian with a vector. By default the method `precondition` of `inner_product`, or
    # `inner_product` itself.
    preconditioner: Callable[[Tree], Tree] | None = None
    inner_product: Callable[[Tree], Tree] | None = None  # product of R⁻¹ with a vector, for the inner product uᵀ R v
    regularizer: Function | None = None  # added to half the sum of squared residuals ("gauss-newton")
    noise_precision: Callable[[Tree], Tree] | None = None  # product of the noise's inverse covariance with residuals
    loss: str = "linear"  # robust loss of the residuals, as in `least_squares`
    f_scale: float = 1.0  # size of residuals at which the loss begins to reduce their weight
    # Tolerance of the relative residual of each Newton system. By default Eisenstat and Walker's, and the solve's own
    # tolerance if the problem is linear.
    forcing: float | None = None
    gtol: float = 1e-5  # tolerance of the norm of the gradient
    grtol: float = 1e-6  # tolerance of this norm, relative to the norm at x0
    ftol: float = 0.0  # as in L-BFGS-sharded
    maxiter: int = 200
    maxfun: int = 15000
    maxls: int = 20
    maxcg: int = 200  # maximum number of Hessian products per iteration
    radius: float | None = None  # of the first trust region; default: the length of the preconditioned gradient


class MMASettings(NamedTuple):
    """Options of MMA-sharded: the parameters of the approximation, with Svanberg's names, and stopping criteria."""

    method = "MMA-sharded"
    ftol = 0.0  # not an option: the objective isn't monotone
    move: float = 0.5  # largest step of a variable, relative to the distance of its bounds
    asyinit: float = 0.5  # first distance of the asymptotes, relative to the distance of the bounds
    asymin: float = 0.01  # smallest relative distance
    asydecr: float = 0.7  # factor of this distance if a variable oscillates
    asyincr: float = 1.2  # factor of this distance if it doesn't
    conservative: bool = False  # whether approximations must lie above the functions at their minimizer (GCMMA)
    gtol: float = 1e-5  # tolerance of the optimality conditions
    catol: float = 1e-6  # tolerance of the violation of constraints
    xtol: float = 1e-5  # tolerance of the largest change of a variable, relative to the distance of its bounds
    maxiter: int = 200
    maxfun: int = 15000
    maxls: int = 20  # maximum number of shorter steps if the objective isn't finite, and of conservative approximations


AnySettings: TypeAlias = Settings | NewtonSettings | MMASettings
_KINDS: dict[str, type[Any]] = {kind.method.lower(): kind for kind in (Settings, NewtonSettings, MMASettings)}


def compared_settings(settings: AnySettings) -> dict[str, object]:
    """Return the settings that must be the same on all ranks."""
    return {name: "a function" if callable(value) else value for name, value in settings._asdict().items()}


def identity_of(settings: AnySettings) -> dict[str, object]:
    """Return the settings on which the iterates of a solve depend: all except the stopping criteria."""
    found = {name: value for name, value in compared_settings(settings).items() if name not in _STOPPING}
    return {"method": settings.method, **found}


def settings_of(method: str, tol: float | None, options: dict | None) -> AnySettings:
    """Return the settings of a method; `tol` is the default of gtol, and of ftol in L-BFGS-sharded."""
    given, kind = dict(options or {}), _KINDS[method.lower()]
    if tol is not None:
        given = {**({"gtol": tol, "ftol": tol} if kind is Settings else {"gtol": tol}), **given}
    if kind is NewtonSettings and given.get("preconditioner") is None:
        # An object for the inner product, such as a prior, often defines a preconditioner, too.
        given["preconditioner"] = getattr(given.get("inner_product"), "precondition", None)
    if kind is Settings and "m" in given:
        given["maxcor"] = given.pop("m")  # its name in papers
    for name, value in given.items():
        if name not in kind._fields:
            listed = ", ".join((*(("m",) if kind is Settings else ()), *kind._fields))
            raise ValueError(f"minimize: method {kind.method!r} has the options {listed}, but got {name!r}.")
        if name in _CHOICES:
            if value not in _CHOICES[name]:
                raise ValueError(f"minimize: option {name} must be one of {_CHOICES[name]}, but got {value!r}.")
        elif name in _FUNCTIONS:
            given[name] = _function(name, value)
        elif not (name in ("radius", "forcing") and value is None):
            given[name] = checked(name, value)
    settings = kind(**given)
    if isinstance(settings, NewtonSettings):
        needs_residuals = [name for name in _OF_RESIDUALS if getattr(settings, name) not in (None, "linear")]
        if settings.product == "full" and needs_residuals:
            raise ValueError(
                f"minimize: option {needs_residuals[0]} is for product='gauss-newton', with a fun that returns residuals."
                " With product='full' compute the whole objective in fun."
            )
        if settings.noise_precision is not None and settings.loss != "linear":
            raise ValueError("minimize: option loss is for independent residuals, so noise_precision can't be given, too.")
    return settings


def _function(name: str, value: object) -> Function | None:
    """Return the function of an option, or for an object, its method of the name in `_FUNCTIONS`."""
    method = _FUNCTIONS[name]
    if callable(found := getattr(value, method, None)):
        return found
    if value is not None and not callable(value):
        got = f"{type(value).__name__} {value!r:.60}"
        raise TypeError(f"minimize: option {name} must be callable, or have a method `{method}`, but got {got}.")
    return value
