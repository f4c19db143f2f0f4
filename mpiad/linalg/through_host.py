"""What SciPy does on the host alone, for arrays on devices: one copy there and one back, each time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpiad._typing import LocalArray
from mpiad.transport.device_arrays import arrays_of

__all__ = ["plain_values", "through_host"]


def through_host(solve: Callable[[LocalArray], LocalArray], r: LocalArray) -> LocalArray:
    """Return what a function of arrays on the host makes of one, where that one lives.

    Parameters
    ----------
    solve : callable
    r : array
        Untraced.
    """
    home = arrays_of(r)
    return solve(r) if home is None else home.to_device(solve(home.to_host(r)))


def plain_values(x: LocalArray) -> np.ndarray:
    """Return an untraced array on the host: a copy of one on a device."""
    home = arrays_of(x)
    return x if home is None else home.to_host(x)
