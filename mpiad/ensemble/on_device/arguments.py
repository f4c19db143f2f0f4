"""What can't be done with device arrays, refused by name before anything is computed."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiad.ensemble.batch import Batch
from mpiad.transport.device_arrays import arrays_of, is_device_array

__all__ = ["check_place", "is_on_device", "placed"]

def is_on_device(batch: Batch) -> bool:
    """Tell whether the states or parameters of a batch of plain arrays are device arrays."""
    return is_device_array(batch.u0) or any(map(is_device_array, batch.p.leaves))


def placed(batch: Batch) -> Batch:
    """Return a batch with the initial states where the parameters are: equal ones that a problem gives once."""
    home = next((arrays_of(leaf) for leaf in batch.p.leaves if is_device_array(leaf)), None)
    if home is None or is_device_array(batch.u0):
        return batch
    return batch._replace(u0=home.to_device(np.ascontiguousarray(batch.u0)))


def check_place(batch: Batch) -> None:
    """Raise where a solve on the device can't be made of such arguments.

    Raises
    ------
    TypeError
        Where parameters aren't on the device of the states, or the other way round.
    """
    home = arrays_of(batch.u0)
    for place, leaf in enumerate(batch.p.leaves):
        # A number of the host's goes along with any call, and needn't live on the device.
        array = np.ndim(leaf) > 0 if not is_device_array(leaf) else True
        if array and arrays_of(leaf) != home:
            raise TypeError(
                f"solve: u0 is {_place(batch.u0)}, but part {place} of p is {_place(leaf)}, of shape {np.shape(leaf)}. "
                "Bring both to one place first, with mpiad.device.to_device or mpiad.device.to_host."
            )


def _place(x: Any) -> str:
    found = arrays_of(x)
    return "on the host" if found is None else f"on device {found.device} ({found.name})"
