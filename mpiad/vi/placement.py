"""Where variational parameters live: on the root's host, or on one device of the root's."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.device import to_device, to_host
from mpiad.differentiation.trees import flatten, is_variable
from mpiad.transport.device_arrays import arrays_of, is_device_array

__all__ = ["all_finite", "copied", "on_device", "placed", "require_one_place"]


def require_one_place(params: Tree, device: int | None, call: str) -> None:
    """Raise where variational parameters lie in several places, or not on the device that this rank was given.

    Parameters
    ----------
    params : nest of arrays
    device : int or None
        Of ``devices=``.
    call : str

    Raises
    ------
    TypeError, ValueError
    """
    leaves = [leaf for leaf in flatten(params)[0] if is_variable(leaf)]
    homes = [arrays_of(leaf) for leaf in leaves]
    there = next((home for home in homes if home is not None), None)
    if there is None:
        return
    if any(home != there for home in homes):
        places = ["on the host" if home is None else f"on device {home.device}" for home in homes]
        raise TypeError(
            f"{call}: variational parameters must all be on the host or on one device, but they are "
            f"{', '.join(places)}. Bring them together with mpiad.device.to_device or mpiad.device.to_host."
        )
    if device is not None and there.device != device:
        raise ValueError(
            f"{call}: variational parameters are on device {there.device}, but devices= gives the root cuda:{device}. Pass "
            f"mpiad.device.to_device(params, {device})."
        )


def on_device(params: Tree) -> Array | None:
    """Return an array of variational parameters that lies on a device, None where all are on the host."""
    return next((leaf for leaf in flatten(params)[0] if is_variable(leaf) and is_device_array(leaf)), None)


def placed(x: Array, params: Tree) -> Array:
    """Return an array of the host's where variational parameters lie."""
    there = on_device(params)
    return x if there is None else to_device(x, like=there)


def copied(params: Tree) -> Tree:
    """Return variational parameters in memory of their own."""
    leaves, build = flatten(params)
    return build([leaf.copy() if isinstance(leaf, np.ndarray) or is_device_array(leaf) else leaf for leaf in leaves])


def all_finite(params: Tree) -> bool:
    """Tell whether all variational parameters are finite: on a device by one number that is copied."""
    flags: list[Any] = [np.all(np.isfinite(leaf)) for leaf in flatten(params)[0] if is_variable(leaf)]
    there = [flag for flag in flags if is_device_array(flag)]
    here = all(bool(flag) for flag in flags if not is_device_array(flag))
    return here and (not there or bool(to_host(np.all(np.stack(there)))))
