"""Which device a rank's model runs on, where variational parameters live, and constants beside them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.device import select, to_device, to_host
from mpiad.differentiation.trees import flatten, is_variable, refuse_objects
from mpiad.transport import Channel
from mpiad.transport.agreement import raising_together
from mpiad.transport.device_arrays import arrays_of, is_array, is_device_array


def require_one_place(params: Tree, device: int | None, call: str) -> None:
    """Raise if variational parameters lie in several places, not on this rank's device, or in an object of the user's."""
    refuse_objects(params, "params", call)
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
    return build([leaf.copy() if is_array(leaf) else leaf for leaf in leaves])


def all_finite(params: Tree) -> bool:
    """Tell whether all variational parameters are finite: on a device by one number that is copied."""
    flags: list[Any] = [np.all(np.isfinite(leaf)) for leaf in flatten(params)[0] if is_variable(leaf)]
    there = [flag for flag in flags if is_device_array(flag)]
    here = all(bool(flag) for flag in flags if not is_device_array(flag))
    # One flag for all leaves of a device: each copy to the host waits.
    return here and (not there or bool(to_host(np.all(np.stack(there)))))


def device_of(names: Sequence[str] | None, used: Channel, call: str) -> int | None:
    """Make this rank's GPU, of the `names` "cpu", "cuda:0" and so on, the current one; return its number, None on the cpu.

    All ranks call it. A TypeError or ValueError on all, where there are more names or fewer than ranks, or one has no such
    device.
    """
    if names is None:
        return None
    with raising_together(used):
        return _number(_own_name(names, used, call), used, call)


def _own_name(names: object, used: Channel, call: str) -> str:
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{call}: devices must be a list of names, one for each rank, as ['cpu', 'cuda:0'], not {names!r}.")
    if len(names) != used.size:
        raise ValueError(f"{call}: devices has {len(names)} names, but there are {used.size} ranks: give one for each.")
    return names[used.rank]


def _number(name: str, used: Channel, call: str) -> int | None:
    if name == "cpu":
        return None
    found = re.fullmatch(r"cuda:(\d+)", name)
    if found is None:
        raise ValueError(f"{call}: rank {used.rank} has no device {name!r}: names are 'cpu', 'cuda:0', 'cuda:1' and so on.")
    try:
        return select(int(found[1]))
    except (ImportError, RuntimeError, ValueError) as error:
        raise ValueError(f"{call}: rank {used.rank} has no device {name!r}: {error}") from error
