"""The options of "Newton-CG-sharded"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from mpiad._typing import Function
from mpiad.optimize.sharded.convergence import checked

__all__ = ["NewtonSettings", "newton_settings_of"]

_CHOICES = {"product": ("full", "gauss-newton"), "globalization": ("line search", "trust region")}
_FUNCTIONS = "preconditioner", "inner_product", "regularizer"


class NewtonSettings(NamedTuple):
    """What a Newton step is made of, and when to stop.

    Attributes
    ----------
    product : {"full", "gauss-newton"}
        Products with the Hessian, or with JᵀJ of residuals; the regularizer's Hessian is full.
    globalization : {"line search", "trust region"}
    preconditioner : callable or None
        From a residual in the form of x to about H⁻¹ of it; by default the inner product's `precondition`, or its inverse.
    inner_product : callable or None
        From dJ/dx to the gradient in the inner product.
    regularizer : callable or None
        Added to half the squares of the residuals, under "gauss-newton".
    gtol, grtol : float
        The gradient's norm at which the solve has converged, and that norm by the first one.
    ftol : float
        As in L-BFGS-sharded; 0 for never.
    maxiter, maxfun, maxls : int
    maxcg : int
        Products in one iteration.
    radius : float or None
        Of the first trust region, in the preconditioner's norm; by default the length of the steepest descent.
    """

    product: str = "full"
    globalization: str = "line search"
    preconditioner: Callable[[Any], Any] | None = None
    inner_product: Callable[[Any], Any] | None = None
    regularizer: Function | None = None
    gtol: float = 1e-5
    grtol: float = 1e-6
    ftol: float = 0.0
    maxiter: int = 200
    maxfun: int = 15000
    maxls: int = 20
    maxcg: int = 200
    radius: float | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """Return what the iterates of a solve depend on."""
        names = ("product", "globalization", *_FUNCTIONS, "maxls", "maxcg", "radius")
        values = self._asdict()
        shown = {name: "a function" if callable(values[name]) else values[name] for name in names}
        return {"method": "Newton-CG-sharded", **shown}

    def __repr__(self) -> str:
        """Return what must be the same on all ranks, in words."""
        shown = {name: "a function" if callable(value) else value for name, value in self._asdict().items()}
        return ", ".join(f"{name}={value}" for name, value in shown.items())


def newton_settings_of(tol: float | None, options: dict | None) -> NewtonSettings:
    """Return the settings; `tol` is `gtol` where the options don't say.

    Raises
    ------
    ValueError, TypeError
        Where there is no such option, or its value can't be.
    """
    given = dict(options or {})
    if tol is not None:
        given = {"gtol": tol, **given}
    if given.get("preconditioner") is None:
        given["preconditioner"] = getattr(given.get("inner_product"), "precondition", None)
    for name, value in given.items():
        if name not in NewtonSettings._fields:
            names = ", ".join(NewtonSettings._fields)
            raise ValueError(f"minimize: method 'Newton-CG-sharded' has the options {names}, but got {name!r}.")
        if name in _CHOICES:
            if value not in _CHOICES[name]:
                raise ValueError(f"minimize: option {name} must be one of {_CHOICES[name]}, but got {value!r}.")
        elif name in _FUNCTIONS:
            given[name] = _function(name, value)
        elif not (name == "radius" and value is None):
            given[name] = checked(name, value)
    settings = NewtonSettings(**given)
    if settings.regularizer is not None and settings.product == "full":
        raise ValueError(
            "minimize: option regularizer is for product='gauss-newton', whose fun returns residuals. Under product='full' "
            "add it to what fun returns."
        )
    return settings


def _function(name: str, value: object) -> Any:
    """Return the function that an option gives; of an object that solves, as a prior does, its `solve`."""
    solves = getattr(value, "solve", None)
    if name != "regularizer" and callable(solves):
        return solves
    if name == "regularizer" and callable(getattr(value, "cost", None)):
        return value.cost  # type: ignore[attr-defined]
    if value is not None and not callable(value):
        wanted = "callable, or have a method " + ("`cost`" if name == "regularizer" else "`solve`")
        raise TypeError(f"minimize: option {name} must be {wanted}, but got {type(value).__name__} {value!r:.60}.")
    return value
