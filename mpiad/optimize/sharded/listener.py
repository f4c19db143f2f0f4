"""What is told of a solve under way: the history everywhere, the progress line on the root, the callback everywhere."""

from __future__ import annotations

import scipy

from mpiad._typing import Function
from mpiad.optimize.agreement import Agreement
from mpiad.optimize.callback import takes_result
from mpiad.optimize.history import Record, Row
from mpiad.optimize.progress import Progress
from mpiad.optimize.sharded.point import Point
from mpiad.optimize.variables import Packing

__all__ = ["Listener"]


class Listener:
    """Note each iterate.

    Parameters
    ----------
    packing : Packing
    agreement : Agreement
        Makes an exception in a callback known to all.
    callback : callable or None
        This rank's own.
    anyone : bool
        Whether any rank has one.
    progress : Progress or None
    """

    def __init__(
        self, packing: Packing, agreement: Agreement, callback: Function | None, anyone: bool,
        progress: Progress | None,
    ):
        self._packing, self._agreement, self._callback, self._anyone = packing, agreement, callback, anyone
        self._progress, self.record = progress, Record()
        self._whole = takes_result(callback)

    def note(self, point: Point, evaluations: int) -> Row:
        """Add a row to the history."""
        row = self.record.add(point, evaluations, point.length)
        if self._progress is not None:
            self._progress.show(row)
        return row

    def heard(self, point: Point, evaluations: int) -> bool:
        """Add a row and call the callback; return whether it wants the solve to end. All ranks call this."""
        row = self.note(point, evaluations)
        # Nothing is agreed on where no rank has a callback; where one has, all agree, since it may raise.
        return self._anyone and self._agreement.run(lambda: self._ends(point, row))

    def _ends(self, point: Point, row: Row) -> bool:
        if self._callback is None:
            return False
        nest = self._packing.unpack(point.x)
        try:
            if not self._whole:
                self._callback(nest)
            else:
                result = scipy.optimize.OptimizeResult(
                    x=nest, fun=row.loss, nit=row.iteration, nfev=row.evaluations, gradient_norm=row.gradient_norm
                )
                self._callback(intermediate_result=result)
        except StopIteration:
            return True
        return False
