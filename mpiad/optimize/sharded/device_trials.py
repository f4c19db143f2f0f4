"""Trial points of a piece on a device: what is to be known of one is a single copy of a few numbers."""

from __future__ import annotations

import math

import numpy as np

from mpiad._typing import Array
from mpiad.optimize.sharded.box import Box
from mpiad.optimize.sharded.device_memory import DeviceMemory
from mpiad.optimize.sharded.point import Point
from mpiad.optimize.sharded.trials import Trials

__all__ = ["DeviceTrials"]


class DeviceTrials(Trials):
    """As `Trials`, for a piece on a device."""

    _memory: DeviceMemory

    def _measured(self, point: Point, here: Point | None, gradient: Array) -> list[float]:
        if self._box is None:
            return super()._measured(point, here, gradient)
        if not gradient.size:  # of nothing there is no largest entry
            return [0.0] * 5
        ring, rows = self._memory.ring, self._memory.tiles.memory
        rows[ring.trial] = gradient
        numbers = _largest(self._box, point.x, gradient)
        if here is not None:
            moved, direction = point.x - here.x, rows[ring.gradient + 1]
            # A variable that a bound has stopped doesn't move with the step any more, so it takes no part in the slope.
            free_way = direction * self._box.inside(point.x, slice(None))
            numbers += [np.sum(a * b) for a, b in (
                (gradient, free_way), (rows[ring.gradient], moved), (gradient, moved), (moved, moved)
            )]  # fmt: skip
            numbers.append(self._memory.clipped.astype(float))
        entry, largest, *rest = self._memory.fetched(np.stack(numbers)).tolist()
        # Where a gradient isn't finite, its projected step may be; where an entry is NaN, so is the largest.
        largest = largest if entry < math.inf else math.inf
        if here is None:
            return [largest, 0.0, 0.0, 0.0, 0.0]
        point.clipped = bool(rest.pop())
        return [largest, *rest]


def _largest(box: Box, x: Array, gradient: Array) -> list[Array]:
    """Return the largest absolute entries of the gradient and of its projected step."""
    return [np.max(np.abs(gradient)), np.max(np.abs(box.way(x, gradient, slice(None))))]
