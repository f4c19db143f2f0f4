"""The user's callback, as SciPy calls it."""

from __future__ import annotations

import inspect
from typing import Any

import scipy

from mpiad._typing import Function, Tree
from mpiad.optimize.history import Row

__all__ = ["Callback"]


class Callback:
    """A callback that wants the variables, or an OptimizeResult.

    Parameters
    ----------
    fun : callable
    """

    def __init__(self, fun: Function):
        self._fun, self._takes_result = fun, _takes_result(fun)

    def __call__(self, x: Tree, row: Row) -> Any:
        """Call it at an iterate; its exceptions pass through, StopIteration too."""
        if not self._takes_result:
            return self._fun(x)
        return self._fun(intermediate_result=scipy.optimize.OptimizeResult(
            x=x, fun=row.loss, nit=row.iteration, nfev=row.evaluations, gradient_norm=row.gradient_norm
        ))


def _takes_result(fun: Function) -> bool:
    """Return whether a callback wants an OptimizeResult, as SciPy sees it: by the name of its only parameter."""
    try:
        return set(inspect.signature(fun).parameters) == {"intermediate_result"}
    except ValueError:  # some builtins don't say
        return False
