"""Bounds of a piece on a device: as `box`, without a look at the values."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.optimize.sharded.box import Box

__all__ = ["DeviceBox"]


class DeviceBox(Box):
    """Bounds that are copied to the device once; the arithmetic is that of `Box`.

    Parameters
    ----------
    box : Box
        The same bounds on the host.
    home : ArrayModule
    """

    def __init__(self, box: Box, home: Any):
        super().__init__(*(home.to_device(limit) for limit in box.limits))

    def project(self, x: Array, part: slice = slice(None)) -> Array:  # type: ignore[override]
        """Move a part of x into its bounds, in place; return whether any variable moved, as an array on the device."""
        # Whether one moved is a number more in the copy that tells of a trial point: to decide here would wait for it.
        moved = np.any((x < self._low[part]) | (x > self._high[part]))
        x[...] = np.clip(x, self._low[part], self._high[part])
        return moved
