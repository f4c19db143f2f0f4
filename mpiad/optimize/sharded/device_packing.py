"""A rank's piece on a device: any nest of device arrays for the user, one vector of doubles there for the method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.differentiation.trees import flatten
from mpiad.optimize.device_leaves import lies_on_device
from mpiad.optimize.variables import Packing
from mpiad.transport.device_arrays import arrays_of

__all__ = ["DevicePacking", "is_on_device"]


def is_on_device(start: Tree) -> bool:
    """Tell whether a piece is on a device.

    Raises
    ------
    TypeError
        Where some of its arrays are and others aren't, or on several devices.
    """
    packing = Packing(start)
    if not lies_on_device(flatten(start)[0]):
        return False
    if len(set(packing.homes)) > 1:
        raise TypeError(
            "minimize: with 'L-BFGS-sharded' a rank's variables must all be on the host or on one device, but x0 holds "
            "both. Bring them together with mpiad.device.to_device or mpiad.device.to_host."
        )
    return True


class DevicePacking(Packing):
    """As `Packing`, but the vector is on the device, too.

    Attributes
    ----------
    home : ArrayModule
        Makes arrays there.
    """

    def __init__(self, template: Tree):
        super().__init__(template)
        self.home: Any = self.homes[0]

    def lend(self) -> None:
        """Return None: the function gets new memory, which costs nothing there."""
        return None

    def nest_in(self, vector: Array) -> Tree:
        """Return the nest of a vector that the solve goes on working with, in new memory."""
        return self.unpack(vector)

    def _packed(self, tree: Tree, view: Callable[[Array], Array], into: Any = None) -> Array:
        leaves = flatten(tree)[0]
        if len(leaves) != len(self._leaves):
            raise TypeError(f"minimize: expected a nest of {len(self._leaves)} arrays like x0, but got {len(leaves)}.")
        pieces = []
        for place, (shape, dtype) in zip(self._places, self._specs):
            leaf = leaves[place]
            if arrays_of(leaf) != self.home or leaf.shape != shape:
                found = f"{type(leaf).__name__} of shape {np.shape(leaf)}"
                raise TypeError(f"minimize: expected an array of shape {shape} on the device of x0, but got {found}.")
            if leaf.dtype.kind == "c" and dtype.kind != "c":
                raise TypeError(f"minimize: expected {dtype}, like x0, but got {leaf.dtype}. Return its real part.")
            if dtype.kind == "c":
                leaf = self.home.contiguous(view(leaf).astype(complex)).reshape(-1).view(float)
            pieces.append(leaf.reshape(-1).astype(float))
        return np.concatenate(pieces)

    def _unpacked(self, vector: Array, view: Callable[[Array], Array]) -> Tree:
        leaves, start = list(self._leaves), 0
        for place, (shape, dtype), length in zip(self._places, self._specs, self._lengths):
            piece = vector[start : start + length]
            piece = view(piece.copy().view(complex)) if dtype.kind == "c" else piece
            leaves[place] = piece.astype(dtype).reshape(shape)
            start += length
        return self._build(leaves)
