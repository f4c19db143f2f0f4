"""The iterates of a method that the root drives: noted, shown, and told to the user's callback."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import scipy

from mpiad._typing import Function
from mpiad.optimize.history import Record, Row
from mpiad.optimize.points import Points
from mpiad.optimize.progress import line_of
from mpiad.optimize.variables import Packing
from mpiad.progress_line import ProgressLine

__all__ = ["Iterates"]


class Iterates:
    """The callback that SciPy gets.

    Parameters
    ----------
    points : Points
    callback : callable or None
        The user's own.
    packing : Packing
    progress : ProgressLine or None

    Attributes
    ----------
    record : Record
    told : bool
        Whether the user's callback is running, or has raised.
    """

    def __init__(self, points: Points, callback: Function | None, packing: Packing, progress: ProgressLine | None):
        self._points, self._callback, self._packing, self._progress = points, callback, packing, progress
        self.record, self.told = Record(), False
        self._whole = callback is not None and set(inspect.signature(callback).parameters) == {"intermediate_result"}

    @property
    def count(self) -> int:
        """Return the number of iterations."""
        return max(len(self.record.rows) - 1, 0)

    def value(self, x: np.ndarray) -> float:
        """Evaluate the objective; note the starting point."""
        value = self._points.value(x)
        if not self.record.rows:
            self._note(x)
        return value

    def _note(self, x: np.ndarray) -> Row:
        before, self._points.iterate = self._points.iterate, self._points.at(x)
        step = 0.0 if before is None else float(np.linalg.norm(self._points.iterate.x - before.x))
        row = self.record.add(self._points.iterate, self._points.counts.of_objective, step)
        if self._progress is not None:
            self._progress.show(line_of(row))
        return row

    def __call__(self, x: np.ndarray, *state: Any) -> Any:
        """Note an iterate and tell the user's callback, whose StopIteration passes through."""
        row = self._note(x)
        if self._callback is None:
            return None
        self.told = True
        result = self._tell(self._callback, x, row)
        self.told = False
        return result

    def _tell(self, callback: Function, x: np.ndarray, row: Row) -> Any:
        nest = self._packing.unpack(np.array(x, dtype=float))
        if not self._whole:
            return callback(nest)
        return callback(
            intermediate_result=scipy.optimize.OptimizeResult(
                x=nest, fun=row.loss, nit=row.iteration, nfev=row.evaluations, gradient_norm=row.gradient_norm
            )
        )
