"""The iteration that all sharded methods share: the start, endings, history and checkpoints."""

from __future__ import annotations

from typing import Any

from mpiad._typing import Array
from mpiad.optimize.constraints import Box
from mpiad.optimize.evaluated_points import INTERRUPTED, Ending
from mpiad.optimize.iterates import ShardedIterates
from mpiad.optimize.sharded.convergence import NOT_FINITE
from mpiad.optimize.sharded.solver_state import StateFiles
from mpiad.pytrees import put
from mpiad.transport.devices.device_arrays import arrays_of


class ShardedMethod:
    """The base class of sharded methods; all ranks run the iteration with the same scalars.

    `count` is the number of evaluations so far; `box` are the bounds, on the device of the variables, or None on all ranks.
    Points have the attributes `x`, `value`, `norm` (of the gradient), `length` (of the step) and `finite`.
    """

    _evaluated: Any  # (x, before) -> the point x, with the length of the step from the point `before`
    _next_point: Any  # (point) -> the next point, or an Ending
    _ending: Any  # (point) -> the ending at a point, or None
    _arrays: Any  # (point) -> names and arrays of the state, with "x" and "history"
    _restored: Any  # (arrays, x) -> the point of such arrays; x is in the variables' memory

    def __init__(self, iterates: ShardedIterates, files: StateFiles, box: Box | None):
        self._iterates, self._files, self._box = iterates, files, box
        self.count, self._iteration = 0, 0

    def run(self, start: Array) -> tuple[Any, Ending]:
        """Minimize from this rank's start, shape (n,), which is overwritten; return the last point and the ending."""
        found = self._files.load()
        if found is not None:
            point = self._restored(found, put([found["x"]], [arrays_of(start)])[0])
            self._iteration = self._files.iteration
            self._iterates.record.restore(found["history"])
        else:
            if self._box is not None:
                self._box.project(start)
            point = self._evaluated(start, None)
            if point.finite:
                self._begin(point)
            self._iterates.record.add(point, self.count, point.length)
            if not point.finite:
                return point, NOT_FINITE
            self._arrive(point, None)
        while True:
            ending = self._ended(point)
            new = ending or self._next_point(point)
            if isinstance(new, Ending):
                return point, new
            self._iteration += 1
            self._iterates.report(new, self.count, new.length)
            self._arrive(new, point)
            point = new

    def _begin(self, point: Any) -> None:
        """Prepare the iteration from a finite start, before it is recorded."""

    def _arrive(self, new: Any, before: Any) -> None:
        """Continue from a recorded point; `before` is None for the start."""

    def _ended(self, point: Any) -> Ending | None:
        """Return the ending at a point, or None; write the state if it is due."""
        ending = self._ending(point) or (INTERRUPTED if self._files.interrupted else None)
        self._write(point, ending is not None)
        return ending

    def _write(self, point: Any, ended: bool) -> None:
        self._files.write_if_due(self._iteration, ended, self._arrays(point))
