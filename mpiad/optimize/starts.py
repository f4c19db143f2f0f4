"""Starting points that travel to other ranks, and results that come back: by the host, from devices and to devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy

from mpiad._typing import Function, Tree
from mpiad.device import to_device
from mpiad.differentiation.trees import flatten
from mpiad.optimize.device_leaves import fetched, put
from mpiad.transport.device_arrays import ArrayModule, arrays_of, is_device_array

__all__ = ["Start", "home_of", "result_at", "result_on_host", "starts_of"]


class Start(NamedTuple):
    """A starting point on the host.

    Parameters
    ----------
    nest : nest of arrays
    away : list of bool
        Which of its leaves belong on a device.
    """

    nest: Tree
    away: list[bool]

    def at(self, home: ArrayModule | None) -> Tree:
        """Return the nest with those leaves on a device."""
        return self.like(self.nest, home) if any(self.away) else self.nest

    def like(self, nest: Tree, home: ArrayModule | None) -> Tree:
        """Return a nest of the same form with those leaves on a device."""
        leaves, build = flatten(nest)
        return build(put(leaves, [home if away else None for away in self.away]))


def starts_of(given: Sequence[Tree]) -> list[Start]:
    """Return starting points; an array's rows are as many."""
    if is_device_array(given):
        home: Any = arrays_of(given)
        return [Start(row, [True]) for row in home.to_host(given)]
    return [Start(_on_host(nest), [arrays_of(leaf) is not None for leaf in flatten(nest)[0]]) for nest in given]


def _on_host(nest: Tree) -> Tree:
    """Return a nest with arrays of the host's for those on a device."""
    leaves, build = flatten(nest)
    # A nest that is all on the host stays the object that it is.
    return build(fetched(leaves)) if any(arrays_of(leaf) is not None for leaf in leaves) else nest


def home_of(starts: list[Start], *given: Any) -> ArrayModule | None:
    """Return this rank's device: that of what it was given, else the current one; None where all starts are on the host.

    Raises
    ------
    ImportError
        Where this rank has no device arrays, and CuPy can't be loaded.
    """
    if not any(any(start.away) for start in starts):
        return None
    return next(filter(None, map(arrays_of, flatten(list(given))[0])), None) or arrays_of(to_device(np.zeros(0)))


def result_on_host(result: scipy.optimize.OptimizeResult) -> scipy.optimize.OptimizeResult:
    """Return a result as it can be sent."""
    return _with(result, _on_host)


def result_at(result: scipy.optimize.OptimizeResult, start: Start, home: ArrayModule) -> scipy.optimize.OptimizeResult:
    """Return a result with variables and gradient where the start was."""
    return _with(result, lambda nest: start.like(nest, home))


def _with(result: scipy.optimize.OptimizeResult, move: Function) -> scipy.optimize.OptimizeResult:
    moved = {name: move(result[name]) for name in ("x", "jac") if result.get(name) is not None}
    return scipy.optimize.OptimizeResult({**result, **moved})
