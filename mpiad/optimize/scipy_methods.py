"""SciPy's methods on the root, with the objective of all ranks."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import numpy as np
import scipy  # loads its parts at their first use: to load them here would double the time of importing mpiad

from mpiad._typing import Function
from mpiad.optimize.history import History, Record, Row
from mpiad.optimize.points import Point, Points
from mpiad.optimize.progress import line_of
from mpiad.optimize.variables import Packing
from mpiad.progress_line import ProgressLine

__all__ = ["Method", "Wishes", "drive", "is_sharded", "method_named"]

_SHARDED = "L-BFGS-sharded"


class Method(NamedTuple):
    """What must be known of a method of SciPy.

    Attributes
    ----------
    name : str
        SciPy's name.
    together : bool
        Whether its line search wants the gradient at every point at which it wants the value.
    products : bool
        Whether it uses Hessian products.
    """

    name: str
    together: bool
    products: bool


_METHODS = {
    "l-bfgs": Method("L-BFGS-B", True, False),
    "l-bfgs-b": Method("L-BFGS-B", True, False),
    "bfgs": Method("BFGS", True, False),
    "cg": Method("CG", True, False),
    "tnc": Method("TNC", True, False),
    "slsqp": Method("SLSQP", False, False),
    "newton-cg": Method("Newton-CG", False, True),
    "trust-ncg": Method("trust-ncg", False, True),
    "trust-krylov": Method("trust-krylov", False, True),
    "trust-constr": Method("trust-constr", False, True),
}


def method_named(name: Any) -> Method:
    """Return the method of a name, in any case.

    Raises
    ------
    ValueError
        Where there is none of this name.
    """
    found = _METHODS.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        names = ", ".join(repr(method.name) for key, method in _METHODS.items() if key != "l-bfgs")
        raise ValueError(f"minimize: method must be 'L-BFGS', {_SHARDED!r} or one of {names}, but got {name!r}.")
    return found


def is_sharded(name: Any) -> bool:
    """Return whether a method of this name leaves the variables on their ranks; it isn't one of SciPy's.

    Raises
    ------
    ValueError
        Where there is none of this name.
    """
    if isinstance(name, str) and name.lower() == _SHARDED.lower():
        return True
    method_named(name)
    return False


class Wishes(NamedTuple):
    """What else the root was given for the method."""

    bounds: Any
    tol: float | None
    options: dict | None
    callback: Function | None


def drive(
    method: Method, points: Points, start: np.ndarray, wishes: Wishes, packing: Packing, progress: ProgressLine | None
) -> tuple[scipy.optimize.OptimizeResult, History]:
    """Run a method from `start`, shape (n,), on the root; return SciPy's result and the history of its iterates."""
    steps = _Steps(points, wishes.callback, packing, progress)
    try:
        result = scipy.optimize.minimize(
            steps.value,
            start,
            method=method.name,
            jac=points.gradient,
            hessp=points.product if method.products else None,
            bounds=_flat_bounds(wishes.bounds),
            tol=wishes.tol,
            options=dict(wishes.options or {}),
            callback=steps,
        )
    except StopIteration:  # which some of SciPy's methods let pass
        result = steps.stopped_result()
    return result, steps.record.history()


def _flat_bounds(bounds: Any) -> Any:
    if not isinstance(bounds, scipy.optimize.Bounds):
        return bounds
    low, high = (np.ravel(np.asarray(limit)) for limit in (bounds.lb, bounds.ub))
    return scipy.optimize.Bounds(low, high, bounds.keep_feasible)  # type: ignore[arg-type]


class _Steps:
    """The callback that SciPy gets: notes each iterate, shows it and tells the user's own callback."""

    def __init__(self, points: Points, callback: Function | None, packing: Packing, progress: ProgressLine | None):
        self._points, self._callback, self._packing, self._progress = points, callback, packing, progress
        self.record = Record()
        self._last: Point | None = None
        self._whole = callback is not None and set(inspect.signature(callback).parameters) == {"intermediate_result"}

    def value(self, x: np.ndarray) -> float:
        """Evaluate the objective; note the starting point."""
        value = self._points.value(x)
        if not self.record.rows:
            self._note(x)
        return value

    def _note(self, x: np.ndarray) -> Row:
        self._last = self._points.at(x)
        row = self.record.add(self._last, self._points.counts.of_objective)
        if self._progress is not None:
            self._progress.show(line_of(row))
        return row

    def __call__(self, x: np.ndarray, *state: Any) -> Any:
        row = self._note(x)
        if self._callback is None:
            return None
        nest = self._packing.unpack(np.array(x, dtype=float))
        if not self._whole:
            return self._callback(nest)
        return self._callback(
            intermediate_result=scipy.optimize.OptimizeResult(
                x=nest, fun=row.loss, nit=row.iteration, nfev=row.evaluations, gradient_norm=row.gradient_norm
            )
        )

    def stopped_result(self) -> scipy.optimize.OptimizeResult:
        """Return what SciPy returns elsewhere after a callback's StopIteration."""
        x = self._last.x  # type: ignore[union-attr]
        return scipy.optimize.OptimizeResult(
            x=x, fun=self._points.value(x), jac=self._points.gradient(x), nit=len(self.record.rows) - 1,
            nfev=self._points.counts.of_objective, success=False, status=99,
            message="`callback` raised `StopIteration`.",
        )
