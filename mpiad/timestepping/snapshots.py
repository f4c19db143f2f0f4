"""States that are kept for a while, in memory or in files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.device import to_host
from mpiad.timestepping.checkpoints import CheckpointSchedule
from mpiad.timestepping.difference_coding import SMALLEST, Coded, coded
from mpiad.transport.device_arrays import arrays_of

_SINGLE = {np.dtype(np.float64): np.float32, np.dtype(np.complex128): np.complex64}


def own(leaf: Array) -> Any:
    """Return a copy of an array, where it lives; a number as it is."""
    arrays = arrays_of(leaf)
    if arrays is not None:
        return arrays.copy(leaf)
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf


class Packed(NamedTuple):
    """A leaf of a state as it is kept."""

    arrays: list[Any]  # the leaf, or what stands for it
    dtype: Any = None  # what the leaf is to be again, where it is kept in less
    code: tuple[float, int, bool] | None = None  # what `Coded` has behind its arrays, which are kept
    home: Any = None  # where the leaf belongs, where it is kept on the host or in a file

    def leaf(self, before: Any) -> Any:
        """Return the leaf in its own precision, where it is kept; `before` is the one before it."""
        if self.code is not None:
            return Coded(self.arrays[0], self.arrays[1], *self.code).array(self.dtype, before)
        return self.arrays[0] if self.dtype is None else self.arrays[0].astype(self.dtype)


def _packed(leaf: Array, before: Any, kept: CheckpointSchedule) -> Packed:
    """Return a leaf as it is to be kept: itself, or a copy in less; where it is compressed all are on the host."""
    dtype = getattr(leaf, "dtype", None)
    if kept.compress and isinstance(leaf, np.ndarray) and leaf.size >= SMALLEST:
        alike = isinstance(before, np.ndarray) and (before.shape, before.dtype) == (leaf.shape, leaf.dtype)
        found = coded(leaf, before if alike else None)
        if found is not None:
            return Packed([found.differences, found.corner], dtype, found[2:])
    if kept.dtype is not None and dtype in _SINGLE:
        # A number that single precision can't hold would come back as infinity, and the gradient as NaN.
        with np.errstate(over="raise"):
            return Packed([leaf.astype(_SINGLE[dtype])], dtype)
    return Packed([leaf])


class Snapshots:
    """The states of one loop that are kept, by the number of steps before them."""

    def __init__(self, where: CheckpointSchedule):
        self._where = where
        self._memory: dict[int, list[Packed]] = {}
        self._files: dict[int, tuple[str, list[Packed]]] = {}  # the arrays of those are in the file
        self._folder: tempfile.TemporaryDirectory | None = None

    def keep(self, number: int, state: Sequence[Array], on_disk: bool) -> None:
        """Keep a copy of a state.

        An OSError where a file can't be written; a FloatingPointError where it is too large for the precision in which it
        is to be kept.
        """
        moved = self._where.host or self._where.compress
        homes = [arrays_of(leaf) if moved else None for leaf in state]
        given = [leaf if home is None else to_host(leaf) for leaf, home in zip(state, homes)]
        try:
            # Each beside the leaf before it: two fields of one wave are alike, and their difference takes fewer bits.
            leaves = [_packed(leaf, before, self._where) for leaf, before in zip(given, [None, *given])]
        except FloatingPointError as error:
            raise FloatingPointError(
                f"timestepping.scan: the state before step {number} has entries beyond {np.finfo(np.float32).max:.2e}, "
                "which don't fit into CheckpointSchedule(dtype='float32'). Scale the state, or leave dtype out."
            ) from error
        leaves = [each._replace(home=home) for each, home in zip(leaves, homes)]
        if on_disk:
            self._files[number] = self._written(number, leaves)
        else:
            # Copies: a step may return the same buffer each time.
            self._memory[number] = [
                each._replace(arrays=[own(leaf)]) if each.arrays[0] is leaf else each for each, leaf in zip(leaves, state)
            ]

    def state(self, number: int, last: bool) -> list[Array]:
        """Return a state, and keep it no longer where it is asked for the last time."""
        if number in self._memory:
            found = self._memory.pop(number) if last else self._memory[number]
        else:
            found = self._read(*(self._files.pop(number) if last else self._files[number]), last)
        leaves: list[Any] = []
        before = None
        for each in found:
            # In the order in which they were packed, since each may be coded as a difference to the one before.
            before = each.leaf(before)
            leaves.append(before if each.home is None else each.home.to_device(before))
        return leaves

    def _read(self, name: str, leaves: Sequence[Packed], last: bool) -> list[Packed]:
        with open(name, "rb") as file:
            read = [each._replace(arrays=[np.load(file, allow_pickle=False) for _ in each.arrays]) for each in leaves]
        if last:
            os.remove(name)
        return read

    def _written(self, number: int, leaves: Sequence[Packed]) -> tuple[str, list[Packed]]:
        """Write the arrays of a state into a file; return its name, and what else is to be known of the state."""
        try:
            if self._folder is None:
                # It removes itself at the latest with this object, also where no gradient is ever asked for.
                self._folder = tempfile.TemporaryDirectory(prefix="mpiad-steps-", dir=self._where.directory)
            name = os.path.join(self._folder.name, f"{number}.npy")
            with open(name, "wb") as file:
                for array in (array for each in leaves for array in each.arrays):
                    np.save(file, to_host(array), allow_pickle=False)
        except OSError as error:
            place = self._folder.name if self._folder is not None else self._where.directory
            raise OSError(
                error.errno, f"timestepping.scan: the state before step {number} can't be written in {place}: "
                f"{error.strerror}. CheckpointSchedule(directory=...) says where else.",
            ) from error  # fmt: skip
        homes = [each.home or arrays_of(each.arrays[0]) for each in leaves]
        return name, [each._replace(arrays=[None] * len(each.arrays), home=home) for each, home in zip(leaves, homes)]
