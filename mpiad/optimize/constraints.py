"""Constraints of a method that the root drives: functions of the nest of variables, evaluated on the root alone.

The other ranks wait meanwhile, so a constraint that communicates is refused when it tries. Where a constraint needs what
other ranks hold, gather that before the solve.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import autograd.numpy as anp
import numpy as np
import scipy

from mpiad._typing import Function
from mpiad.device import to_host
from mpiad.differentiation import make_vjp
from mpiad.optimize.packing import Packing
from mpiad.transport import Channel

_REMEMBERED = 4
# Less than this is rounding, and not a violation.
_NOTHING = 1e-8
_WHO = "constraints are evaluated on the root alone, and the other ranks take no part"


class _Function:
    """A constraint's function of the vector of variables, with its Jacobian."""

    def __init__(self, fun: Callable, jac: Function | None, args: tuple, packing: Packing, used: Channel):
        self._fun, self._args, self._packing, self._used = fun, args, packing, used
        self._given = jac if callable(jac) else None
        self._known: deque[tuple[bytes, np.ndarray]] = deque(maxlen=_REMEMBERED)
        # '3-point' and 'cs' are wishes; '2-point' is what SciPy takes where nothing was said.
        self.jacobian = jac if isinstance(jac, str) and jac != "2-point" else self._jacobian

    def value(self, vector: np.ndarray) -> np.ndarray:
        """Return the constraint's values, shape (k,)."""
        key = np.asarray(vector, dtype=float).tobytes()
        for known, value in self._known:
            if known == key:
                return value.copy()
        with self._used.refusing(_WHO):
            found = to_host(self._fun(self._packing.unpack(vector), *self._args))
        # A copy, as below: it is remembered, and SciPy keeps a Jacobian, while the user may write into the same array.
        value = np.array(found, dtype=float).reshape(-1)
        self._known.append((key, value))
        return value.copy()

    def _jacobian(self, vector: np.ndarray) -> np.ndarray:
        x = self._packing.unpack(vector)
        with self._used.refusing(_WHO):
            if self._given is not None:
                return np.atleast_2d(np.array(to_host(self._given(x, *self._args)), dtype=float))
            # One row for each unit vector: a constraint has few values, and many variables.
            pull, value = make_vjp(lambda x: anp.reshape(anp.array(to_host(self._fun(x, *self._args))), (-1,)))(x)
            rows = [self._packing.pack_gradient(pull(unit)) for unit in np.eye(value.size)]
        return np.array(rows).reshape(value.size, self._packing.size)


class ConstraintSet:
    """What SciPy gets, and how far a point violates it."""

    def __init__(self) -> None:
        self.for_scipy: list[Any] = []
        self._checks: list[tuple[Callable[[np.ndarray], np.ndarray], Any, Any]] = []

    def add(self, constraint: object, fun: Callable[[np.ndarray], np.ndarray], low: object, high: object) -> None:
        """Append one, whose function must lie between `low` and `high`."""
        self.for_scipy.append(constraint)
        self._checks.append((fun, low, high))

    def excess(self, vector: np.ndarray) -> float:
        """Return the largest violation; 0 where it is nothing but rounding."""
        worst = 0.0
        for fun, low, high in self._checks:
            value = fun(vector)
            gaps = np.maximum(np.asarray(low) - value, value - np.asarray(high))
            worst = max(worst, float(np.max(gaps, initial=0.0))) if not np.any(np.isnan(gaps)) else np.inf
        return worst if worst > _NOTHING else 0.0


def constraints_of(given: Any, packing: Packing, used: Channel) -> ConstraintSet:
    """Return the root's constraints as functions of the vector of variables; raise where one isn't one of SciPy's."""
    found = ConstraintSet()
    for constraint in given if isinstance(given, (list, tuple)) else [given]:
        if isinstance(constraint, dict):
            _add_dict(found, constraint, packing, used)
        elif isinstance(constraint, scipy.optimize.NonlinearConstraint):
            _add_nonlinear(found, constraint, packing, used)
        elif isinstance(constraint, scipy.optimize.LinearConstraint):
            found.add(constraint, lambda x, matrix=constraint.A: np.asarray(matrix @ x), constraint.lb, constraint.ub)
        else:
            raise TypeError(
                f"minimize: a constraint must be a dict, LinearConstraint or NonlinearConstraint, but got "
                f"{type(constraint).__name__} {constraint!r:.60}."
            )
    return found


def _add_dict(found: ConstraintSet, given: dict, packing: Packing, used: Channel) -> None:
    kind, fun, args = given.get("type"), given.get("fun"), given.get("args", ())
    if not isinstance(kind, str) or kind.lower() not in ("eq", "ineq") or not callable(fun):
        raise ValueError(
            f"minimize: a constraint's dict must have a type, 'eq' or 'ineq', and a function fun, but got {given!r:.80}."
        )
    made = _Function(fun, given.get("jac"), args if isinstance(args, tuple) else (args,), packing, used)
    high = 0.0 if kind.lower() == "eq" else np.inf
    found.add({"type": kind, "fun": made.value, "jac": made.jacobian}, made.value, 0.0, high)


def _add_nonlinear(
    found: ConstraintSet, given: scipy.optimize.NonlinearConstraint, packing: Packing, used: Channel
) -> None:
    made = _Function(given.fun, given.jac, (), packing, used)
    hess = given.hess
    if callable(hess) and not isinstance(hess, scipy.optimize.HessianUpdateStrategy):

        def hess(vector: np.ndarray, weights: np.ndarray) -> Any:
            with used.refusing(_WHO):
                return given.hess(packing.unpack(vector), weights)

    constraint = scipy.optimize.NonlinearConstraint(
        made.value, given.lb, given.ub, jac=made.jacobian, hess=hess, keep_feasible=given.keep_feasible,
        finite_diff_rel_step=given.finite_diff_rel_step, finite_diff_jac_sparsity=given.finite_diff_jac_sparsity,
    )  # fmt: skip
    found.add(constraint, made.value, given.lb, given.ub)
