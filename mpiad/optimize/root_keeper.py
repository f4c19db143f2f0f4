"""The last iterate of a solve that the root drives, on disk: what can be had of SciPy's methods from outside."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from mpiad.checkpoint_files import differences, read, read_description, write
from mpiad.optimize.checkpoint import Checkpoint
from mpiad.optimize.history import Record
from mpiad.optimize.points import Points

__all__ = ["RootKeeper"]


class RootKeeper:
    """Write iterates and read them again; without a checkpoint it does nothing. Only the root has one.

    Parameters
    ----------
    checkpoint : Checkpoint or None
    problem : dict
        What the iterates belong to.
    """

    def __init__(self, checkpoint: Checkpoint | None, problem: dict[str, Any]):
        self._checkpoint, self._problem, self._written = checkpoint, problem, -1
        self._x: np.ndarray | None = None

    @property
    def active(self) -> bool:
        """Return whether there is a checkpoint."""
        return self._checkpoint is not None

    def found(self) -> dict[str, np.ndarray] | None:
        """Return the arrays of an earlier run: "x", "counts", "history"; None where there is none.

        Raises
        ------
        ValueError
            Where the file is damaged, or belongs to another problem.
        """
        if self._checkpoint is None:
            return None
        file = self._checkpoint.file
        others = sorted(file.parent.glob(f"{file.stem}.rank*of*.?{file.suffix}"))
        if others:
            raise ValueError(
                f"minimize: the checkpoint {others[0]} was written by 'L-BFGS-sharded', and not by "
                f"{self._problem['method']!r}. Name another file, or delete it."
            )
        if not file.exists():
            return None
        said = differences(read_description(file), self._problem)
        if said:
            raise ValueError(
                f"minimize: the checkpoint {file} belongs to another problem: {said}. Make the call that it belongs to, "
                "name another file, or delete it."
            )
        arrays = read(file)
        self._written, self._x = len(arrays["history"]) - 1, arrays["x"]
        return arrays

    def keep(self, iteration: int, ended: bool, points: Points, record: Record) -> None:
        """Write the last iterate where it is time to."""
        if self._checkpoint is None:
            return
        if not ended and (iteration <= self._written or iteration == 0 or iteration % self._checkpoint.every):
            return
        x = points.foremost.x  # type: ignore[union-attr]
        # The last line search may have met a better point since the last iterate was written.
        if iteration <= self._written and np.array_equal(x, self._x):  # type: ignore[arg-type]
            return
        arrays = {"x": x, "counts": np.array(list(points.counts.values())), "history": record.table()}
        try:
            write(self._checkpoint.file, self._problem, arrays.items())
            self._written, self._x = iteration, x
        except OSError as error:
            warnings.warn(
                f"minimize: the checkpoint of iteration {iteration} wasn't written, the one before stays ({error}). Make "
                "room on the disk.", RuntimeWarning, stacklevel=2,
            )
