"""Variables on devices, where the method and the messages are on the host: copied together, one copy for each dtype.

The root's x0 says which leaves are on a device. Other ranks learn shapes and dtypes alone, and make arrays on devices of
their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpiad._typing import Array, Shape, Tree
from mpiad.device import to_device
from mpiad.differentiation.trees import flatten
from mpiad.transport.device_arrays import ArrayModule, arrays_of


@dataclass(frozen=True)
class Elsewhere:
    """An array on the root's device, as other ranks know it; `arrays` makes those of this rank."""

    shape: Shape
    dtype: np.dtype
    fingerprint: bytes
    arrays: ArrayModule | None = None


def described(start: Tree) -> Tree:
    """Return the root's variables as they are told to other ranks: without what is on a device."""
    leaves, build = flatten(start)
    return build([
        leaf if arrays_of(leaf) is None else Elsewhere(leaf.shape, leaf.dtype, fingerprint(on_host))
        for leaf, on_host in zip(leaves, fetched(leaves))
    ])  # fmt: skip


def fingerprint(array: np.ndarray) -> bytes:
    """Return a hash of an array's values, in which equal ones of two precisions, both zeros and all NaNs are the same."""
    values = np.array(array, complex if array.dtype.kind == "c" else float)
    parts = values.reshape(-1).view(float)
    parts += 0.0  # makes -0.0 a 0.0
    parts[np.isnan(parts)] = np.nan
    return hashlib.blake2b(parts.data, digest_size=16).digest()


def at_home(template: Tree, given: object, args: tuple) -> Tree:
    """Return the variables as another rank's: on the device of its own x0 or further arguments, else on the current one.

    `template` is what `described` returned on the root, `given` this rank's x0. An ImportError where this rank has no
    device arrays, and CuPy can't be loaded.
    """
    leaves, build = flatten(template)
    if not any(type(leaf) is Elsewhere for leaf in leaves):
        return template
    home = own_home(given, args)
    return build([replace(leaf, arrays=home) if type(leaf) is Elsewhere else leaf for leaf in leaves])


def own_home(*given: object) -> ArrayModule | None:
    """Return this rank's device: that of what it was given, else the current one."""
    # The root's device number says nothing on another node; this rank's own arrays do.
    return next(filter(None, map(arrays_of, flatten(list(given))[0])), None) or arrays_of(to_device(np.zeros(0)))


def lies_on_device(leaves: Sequence[Any]) -> bool:
    """Tell whether any of the leaves is on a device."""
    return any(arrays_of(leaf) is not None for leaf in leaves)


def fetched(leaves: Sequence[Any]) -> list[Any]:
    """Return leaves with host arrays for those on a device."""
    homes = [arrays_of(leaf) for leaf in leaves]
    return _moved(leaves, homes, lambda home, whole: home.to_host(whole))


def put(arrays: Sequence[np.ndarray], homes: Sequence[ArrayModule | None]) -> list[Any]:
    """Return arrays with those that have a home on its device."""
    return _moved(arrays, homes, lambda home, whole: home.to_device(whole))


def _moved(
    arrays: Sequence[Any], homes: Sequence[ArrayModule | None], move: Callable[[ArrayModule, Array], Array]
) -> list[Any]:
    """Return arrays with those that have a home moved: those of one home and dtype laid together, by one copy."""
    found, groups = list(arrays), dict[Any, list[int]]()
    for k, home in enumerate(homes):
        if home is not None:
            groups.setdefault((home, arrays[k].dtype), []).append(k)
    for (home, _), places in groups.items():
        flat = [arrays[k].reshape(-1) for k in places]
        whole, start = move(home, flat[0] if len(flat) == 1 else np.concatenate(flat)), 0
        for k in places:
            stop = start + arrays[k].size
            found[k], start = whole[start:stop].reshape(arrays[k].shape), stop
    return found
