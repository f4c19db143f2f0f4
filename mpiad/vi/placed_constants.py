"""Constants of priors and layers, where the variational parameters lie."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.device import to_device
from mpiad.primitives import stop
from mpiad.transport.device_arrays import arrays_of

__all__ = ["Constant"]


class Constant:
    """An array of the host's, copied once to each device on which it is asked for.

    Parameters
    ----------
    array : array
    """

    def __init__(self, array: Array):
        self.host = np.asarray(array)
        self._copies: dict[tuple, Array] = {}

    def beside(self, x: Array) -> Array:
        """Return it where an array lies, which may be traced."""
        there = arrays_of(stop(x))
        if there is None:
            return self.host
        place = there.kind, there.device
        if place not in self._copies:
            self._copies[place] = to_device(self.host, like=stop(x))
        return self._copies[place]

    def __reduce__(self) -> Any:
        # Without the copies, which other processes may have no device for.
        return Constant, (self.host,)
