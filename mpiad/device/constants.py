"""Arrays of the host that don't change, as indices and weights, and their copies on devices."""

from __future__ import annotations

from typing import Any

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.transport.device_arrays import ArrayModule, arrays_of


class Constants:
    """Arrays that are copied to a device when they are first used there, once.

    `*arrays`: on the host; nobody writes to them.
    """

    def __init__(self, *arrays: np.ndarray):
        self._arrays = arrays
        self._copies: dict[ArrayModule, tuple[Array, ...]] = {}

    def __reduce__(self) -> Any:
        # Without the copies, which other processes may have no device for.
        return Constants, self._arrays

    def beside(self, x: Array) -> tuple[Array, ...]:
        """Return the arrays where another one lies, which may be traced."""
        return self.on(arrays_of(getval(x)))

    def on(self, home: ArrayModule | None) -> tuple[Array, ...]:
        """Return the arrays on a device; as they are, where it is None."""
        if home is None:
            return self._arrays
        if home not in self._copies:
            # Once for each device: a gradient takes the same indices in every step.
            self._copies[home] = tuple(home.to_device(np.ascontiguousarray(array)) for array in self._arrays)
        return self._copies[home]
