"""States that are kept for a while, in memory or in files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.device import to_host
from mpiad.timestepping.checkpoints import Checkpoints
from mpiad.transport.device_arrays import arrays_of

__all__ = ["Snapshots", "own"]

_SINGLE = {np.dtype(np.float64): np.float32, np.dtype(np.complex128): np.complex64}


def own(leaf: Array) -> Any:
    """Return a copy of an array, where it lives; a number as it is."""
    arrays = arrays_of(leaf)
    if arrays is not None:
        return arrays.copy(leaf)
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf


class Snapshots:
    """The states of one loop that are kept, by the number of steps before them.

    Parameters
    ----------
    where : Checkpoints
    """

    def __init__(self, where: Checkpoints):
        self._where = where
        self._memory: dict[int, list[Array]] = {}
        self._files: dict[int, tuple[str, list[Any]]] = {}  # and where each leaf belongs
        self._dtypes: list[Any] = []  # of the state's leaves; the same for all states of a loop
        self._folder: tempfile.TemporaryDirectory | None = None

    def keep(self, number: int, state: Sequence[Array], on_disk: bool) -> None:
        """Keep a copy of a state.

        Raises
        ------
        OSError
            Where a file can't be written.
        FloatingPointError
            Where a state is too large for the precision in which it is to be kept.
        """
        if self._where.dtype is not None:
            state = self._rounded(number, state)
        if on_disk:
            self._files[number] = self._written(number, state), [arrays_of(leaf) for leaf in state]
        else:
            # A copy: a step may return the same buffer each time.
            self._memory[number] = [own(leaf) for leaf in state] if self._where.dtype is None else list(state)

    def state(self, number: int, last: bool) -> list[Array]:
        """Return a state, and keep it no longer where it is asked for the last time."""
        state = self._kept(number, last)
        if self._where.dtype is None:
            return state
        return [leaf if dtype is None else leaf.astype(dtype) for leaf, dtype in zip(state, self._dtypes)]

    def _rounded(self, number: int, state: Sequence[Array]) -> list[Any]:
        """Return a copy of a state, in single precision."""
        dtypes = [getattr(leaf, "dtype", None) for leaf in state]
        self._dtypes = [dtype if dtype in _SINGLE else None for dtype in dtypes]
        try:
            with np.errstate(over="raise"):
                return [leaf.astype(_SINGLE[t]) if t in _SINGLE else own(leaf) for leaf, t in zip(state, dtypes)]
        except FloatingPointError as error:
            raise FloatingPointError(
                f"timestepping.scan: the state before step {number} has entries beyond {np.finfo(np.float32).max:.2e}, "
                "which don't fit into Checkpoints(dtype='float32'). Scale the state, or leave dtype out."
            ) from error

    def _kept(self, number: int, last: bool) -> list[Array]:
        if number in self._memory:
            return self._memory.pop(number) if last else self._memory[number]
        name, homes = self._files.pop(number) if last else self._files[number]
        with open(name, "rb") as file:
            state: list[Any] = []
            for home in homes:
                leaf = np.load(file, allow_pickle=False)
                state.append(leaf if home is None else home.to_device(leaf))
        if last:
            os.remove(name)
        return state

    def _written(self, number: int, state: Sequence[Array]) -> str:
        try:
            if self._folder is None:
                # It removes itself at the latest with this object, also where no gradient is ever asked for.
                self._folder = tempfile.TemporaryDirectory(prefix="mpiad-steps-", dir=self._where.directory)
            name = os.path.join(self._folder.name, f"{number}.npy")
            with open(name, "wb") as file:
                for leaf in state:
                    np.save(file, to_host(leaf), allow_pickle=False)
        except OSError as error:
            place = self._folder.name if self._folder is not None else self._where.directory
            raise OSError(
                error.errno, f"timestepping.scan: the state before step {number} can't be written in {place}: "
                f"{error.strerror}. Checkpoints(directory=...) says where else.",
            ) from error  # fmt: skip
        return name
