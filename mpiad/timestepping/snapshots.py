"""States that are kept for a while, in memory or in files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence

import numpy as np

from mpiad._typing import Array
from mpiad.timestepping.checkpoints import Checkpoints

__all__ = ["Snapshots"]


class Snapshots:
    """The states of one loop that are kept, by the number of steps before them.

    Parameters
    ----------
    where : Checkpoints
    """

    def __init__(self, where: Checkpoints):
        self._where = where
        self._memory: dict[int, list[Array]] = {}
        self._files: dict[int, str] = {}
        self._folder: tempfile.TemporaryDirectory | None = None

    def keep(self, number: int, state: Sequence[Array], on_disk: bool) -> None:
        """Keep a copy of a state.

        Raises
        ------
        OSError
            Where a file can't be written.
        """
        if on_disk:
            self._files[number] = self._written(number, state)
        else:
            # A copy: a step may return the same buffer each time.
            self._memory[number] = [np.array(leaf) for leaf in state]

    def state(self, number: int, last: bool) -> list[Array]:
        """Return a state, and keep it no longer where it is asked for the last time."""
        if number in self._memory:
            return self._memory.pop(number) if last else self._memory[number]
        name = self._files.pop(number) if last else self._files[number]
        with open(name, "rb") as file:
            state = []
            while file.peek(1):
                state.append(np.load(file, allow_pickle=False))
        if last:
            os.remove(name)
        return state

    def _written(self, number: int, state: Sequence[Array]) -> str:
        try:
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="mpiad-steps-", dir=self._where.directory)
            name = os.path.join(self._folder.name, f"{number}.npy")
            with open(name, "wb") as file:
                for leaf in state:
                    np.save(file, leaf, allow_pickle=False)
        except OSError as error:
            place = self._folder.name if self._folder is not None else self._where.directory
            raise OSError(
                error.errno, f"timestepping.scan: the state before step {number} can't be written in {place}: "
                f"{error.strerror}. Checkpoints(directory=...) says where else.",
            ) from error  # fmt: skip
        return name
