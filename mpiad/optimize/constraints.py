"""Bounds of variables, and constraints.

Constraints are functions of the pytree of variables. For SciPy's methods only the root evaluates them, while the other
ranks wait, so communication inside a constraint raises. If a constraint depends on data of other ranks, gather the data on
the root before the solve.

References
----------
.. [1] D. P. Bertsekas, "Projected Newton methods for optimization problems with simple constraints", SIAM J. Control
   Optim. 20 (1982): the direction is scaled by second-order information on the free variables only, and steps are
   projected.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import lru_cache
from typing import Any, NamedTuple

import autograd.numpy as anp
import numpy as np
import scipy

from mpiad._typing import Array, Function
from mpiad.device import to_host
from mpiad.differentiation import make_vjp
from mpiad.optimize.packing import Packing
from mpiad.transport import Channel
from mpiad.transport.devices.device_arrays import is_device_array, named

# Bertsekas's epsilon: the largest distance between an active bound and its variable.
_MAX_MARGIN = 1e-6


class Box(NamedTuple):
    """Lower and upper bounds, shape (n,) each, infinite if there is no bound."""

    low: np.ndarray
    high: np.ndarray

    def violation(self, x: np.ndarray) -> float:
        """Return the largest violation of a bound by x."""
        return float(max(np.max(self.low - x, initial=0.0), np.max(x - self.high, initial=0.0)))

    def project(self, x: Array) -> Array:
        """Project the variables x onto their bounds, in place; return whether any variable changed, on the device of x."""
        moved = np.any((x < self.low) | (x > self.high))
        np.clip(x, self.low, self.high, out=x)
        return moved

    def projected_step(self, x: np.ndarray, gradient: np.ndarray, part: slice = slice(None)) -> np.ndarray:
        """Return the projected gradient step P(x - g) - x of a part's variables; it is zero at a stationary point."""
        return np.clip(x - gradient, self.low[part], self.high[part]) - x

    def free(self, x: np.ndarray, gradient: np.ndarray, norm: float, part: slice = slice(None)) -> np.ndarray:
        """Return a mask of the variables that aren't at a bound to which -g points; `norm`: the largest projected step."""
        # The margin goes to zero with the projected step, so variables can leave bounds that aren't active at the solution.
        margin = min(_MAX_MARGIN, norm)
        at_bound = (x - self.low[part] <= margin) & (gradient > 0.0)
        at_bound |= (self.high[part] - x <= margin) & (gradient < 0.0)
        return ~at_bound

    def free_and_step(self, x: np.ndarray, gradient: np.ndarray, norm: float, part: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return the results of `free` and `projected_step`."""
        return self.free(x, gradient, norm, part), self.projected_step(x, gradient, part)

    def inside(self, x: np.ndarray, part: slice) -> np.ndarray:
        """Return a mask of a part's variables that lie strictly between their bounds."""
        return (x > self.low[part]) & (x < self.high[part])


def box_of(bounds: Any, packing: Packing, call: str = "minimize") -> Box | None:
    """Return the bounds of the variables, None if there are none; raise a TypeError or ValueError if one is invalid."""
    if bounds is None:
        return None
    for limit in (bounds.lb, bounds.ub) if isinstance(bounds, scipy.optimize.Bounds) else (bounds,):
        if is_device_array(limit):
            raise TypeError(
                f"{call}: bounds must be on the host, but got {named(limit)}. Pass mpiad.device.to_host(bounds), also "
                "for variables on a device."
            )
    parts = " A complex number is two variables, its real and its imaginary part." if packing.holds_complex else ""
    try:
        if isinstance(bounds, scipy.optimize.Bounds):
            limits = [bounds.lb, bounds.ub]
        else:
            given = list(bounds)
            one_for_all = len(given) == 2 and all(np.ndim(limit) == 0 for limit in given)
            pairs = [(low, high) for low, high in ([given] if one_for_all else given)]
            limits = [[-np.inf if low is None else low for low, _ in pairs]]
            limits.append([np.inf if high is None else high for _, high in pairs])
        low, high = (np.ravel(limit).astype(float, casting="same_kind") for limit in limits)
    except (TypeError, ValueError):
        raise ValueError(
            f"{call}: bounds must be pairs (low, high) of real numbers, but got {bounds!r:.60}. Pass one pair for all "
            f"variables or for each variable, with None for no bound, or a scipy.optimize.Bounds.{parts}"
        ) from None
    try:
        low, high = np.broadcast_to(low, packing.size).copy(), np.broadcast_to(high, packing.size).copy()
    except ValueError:
        got = f"{low.size} lower and {high.size} upper bounds"
        expected = f"one pair of bounds for each of the {packing.size} variables"
        raise ValueError(f"{call}: expected {expected}, but got {got}.{parts}") from None
    wrong = np.flatnonzero(~(low <= high))
    if wrong.size:
        k = int(wrong[0])
        got = f"lower bound {low[k]} and upper bound {high[k]}"
        raise ValueError(f"{call}: no lower bound may exceed the upper bound, but variable {k} has {got}.")
    return Box(low, high)


_MAX_STORED = 4  # number of stored values of a constraint
_ROUNDING = 1e-8  # smaller violations are treated as rounding errors
_ON_ROOT = "constraints are evaluated on the root alone, and the other ranks don't participate"


class _ConstraintFunction:
    """A constraint as a function of the vector of variables, with its Jacobian."""

    def __init__(self, fun: Callable, jac: Function | str | None, args: tuple, packing: Packing, channel: Channel):
        self._fun, self._args, self._packing, self._channel = fun, args, packing, channel
        self._user_jacobian = jac if callable(jac) else None
        self._stored = lru_cache(_MAX_STORED)(self._evaluated)
        # The exact Jacobian replaces '2-point', which is SciPy's default.
        self.jacobian = jac if isinstance(jac, str) and jac != "2-point" else self._jacobian

    def value(self, vector: np.ndarray) -> np.ndarray:
        """Return the constraint's values, shape (k,)."""
        return self._stored(np.asarray(vector, dtype=float).tobytes()).copy()

    def _evaluated(self, key: bytes) -> np.ndarray:
        with self._channel.refusing(_ON_ROOT):
            found = to_host(self._fun(self._packing.unpack(np.frombuffer(key)), *self._args))
        # A copy, because the user's function may write its next result into the same array.
        return np.array(found, dtype=float).reshape(-1)

    def _jacobian(self, vector: np.ndarray) -> np.ndarray:
        x = self._packing.unpack(vector)
        with self._channel.refusing(_ON_ROOT):
            if self._user_jacobian is not None:
                return np.atleast_2d(np.array(to_host(self._user_jacobian(x, *self._args)), dtype=float))
            # Reverse mode is used, since a constraint has few values and many variables.
            vjp, value = make_vjp(lambda x: anp.reshape(anp.array(to_host(self._fun(x, *self._args))), (-1,)))(x)
            rows = [self._packing.pack_gradient(vjp(unit)) for unit in np.eye(value.size)]
        return np.array(rows).reshape(value.size, self._packing.size)


class Constraint(NamedTuple):
    """A constraint as SciPy's object, and its values, which must lie between `low` and `high`."""

    for_scipy: Any
    values: Callable[[np.ndarray], np.ndarray]
    low: np.ndarray | float
    high: np.ndarray | float

    def violation(self, vector: np.ndarray) -> float:
        """Return the largest violation; 0 if it is at most a rounding error."""
        values = self.values(vector)
        gaps = np.maximum(np.asarray(self.low) - values, values - np.asarray(self.high))
        largest = np.inf if np.any(np.isnan(gaps)) else float(np.max(gaps, initial=0.0))
        return largest if largest > _ROUNDING else 0.0


def as_list(constraints: object) -> list:
    """Return the argument `constraints` of `minimize` as a list."""
    if constraints is None:
        return []
    return list(constraints) if isinstance(constraints, (list, tuple)) else [constraints]


def constraint_of(constraint: Any, packing: Packing, channel: Channel) -> Constraint:
    """Return a constraint as a function of the vector, which may not communicate on `channel`; raise if it is invalid."""
    if isinstance(constraint, scipy.optimize.LinearConstraint):
        return Constraint(constraint, lambda x: np.asarray(constraint.A @ x), constraint.lb, constraint.ub)
    parts = UserConstraint.of(constraint)
    function = _ConstraintFunction(parts.fun, parts.jac, parts.args, packing, channel)
    if isinstance(constraint, dict):
        in_scipy: Any = {"type": constraint["type"], "fun": function.value, "jac": function.jacobian}
        return Constraint(in_scipy, function.value, parts.low, parts.high)
    hess = constraint.hess
    if callable(hess) and not isinstance(hess, scipy.optimize.HessianUpdateStrategy):

        def hess(vector: np.ndarray, weights: np.ndarray) -> Array:
            with channel.refusing(_ON_ROOT):
                return constraint.hess(packing.unpack(vector), weights)

    in_scipy = copy(constraint)
    in_scipy.fun, in_scipy.jac, in_scipy.hess = function.value, function.jacobian, hess
    return Constraint(in_scipy, function.value, parts.low, parts.high)


class UserConstraint(NamedTuple):
    """One of the user's constraints: the values of `fun`, or of a matrix, lie between `low` and `high`."""

    low: np.ndarray
    high: np.ndarray
    fun: Any = None
    jac: Function | str | None = None  # a text in SciPy's methods: differences
    args: tuple = ()
    matrix: np.ndarray | None = None

    @classmethod
    def of(cls, constraint: Any) -> UserConstraint:
        """Return a constraint of SciPy's types; raise a TypeError or ValueError if it is invalid."""
        if isinstance(constraint, dict):
            kind, fun, args = constraint.get("type"), constraint.get("fun"), constraint.get("args", ())
            if not isinstance(kind, str) or kind.lower() not in ("eq", "ineq") or not callable(fun):
                raise ValueError(
                    "minimize: a constraint's dict must have a type, 'eq' or 'ineq', and a function fun, but got "
                    f"{constraint!r:.80}."
                )
            high = 0.0 if kind.lower() == "eq" else np.inf
            args = args if isinstance(args, tuple) else (args,)
            return cls(np.zeros(1), np.full(1, high), fun, constraint.get("jac"), args)
        if not isinstance(constraint, (scipy.optimize.LinearConstraint, scipy.optimize.NonlinearConstraint)):
            raise TypeError(
                "minimize: a constraint must be a dict, LinearConstraint or NonlinearConstraint, but got "
                f"{type(constraint).__name__} {constraint!r:.60}."
            )
        low, high = (np.atleast_1d(np.asarray(limit, dtype=float)) for limit in (constraint.lb, constraint.ub))
        if isinstance(constraint, scipy.optimize.NonlinearConstraint):
            return cls(low, high, constraint.fun, constraint.jac)
        rows = constraint.A
        matrix = rows.toarray() if scipy.sparse.issparse(rows) else np.atleast_2d(np.asarray(rows, dtype=float))
        return cls(low, high, matrix=matrix)
