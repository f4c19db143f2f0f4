"""The last iterate of a solve that the root drives, on disk: what can be had of SciPy's methods from outside."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from mpiad.checkpoint_files import differences, files_of_ranks, read, write
from mpiad.optimize.checkpoint import Checkpoint, WriteFailures
from mpiad.optimize.history import Record

__all__ = ["Kept", "RootCheckpoint"]


class Kept(Protocol):
    """What is written of an iterate."""

    x: np.ndarray
    gradient: np.ndarray | None

    @property
    def value(self) -> float | None:
        """Return the objective."""
        ...


class RootCheckpoint:
    """Write iterates and read them again; without a checkpoint it does nothing. Only the root has one.

    Parameters
    ----------
    problem : dict
        What the iterates belong to.
    call : str
        Name of the public function.
    """

    def __init__(self, checkpoint: Checkpoint | None, problem: dict[str, Any], call: str = "minimize"):
        self._checkpoint, self._problem, self._written, self._call = checkpoint, problem, -1, call
        self._x, self._counts, self._failures = np.zeros(0), np.zeros(0), WriteFailures(call)

    @property
    def active(self) -> bool:
        """Return whether there is a checkpoint."""
        return self._checkpoint is not None

    def found(self) -> dict[str, np.ndarray] | None:
        """Return the arrays of an earlier run: "x", "value", "gradient", "counts", "history"; None where there is none.

        The gradient is empty where it wasn't known.

        Raises
        ------
        ValueError
            Where the file is damaged, or belongs to another problem.
        """
        if self._checkpoint is None:
            return None
        file = self._checkpoint.file
        others = files_of_ranks(file)
        if others:
            raise ValueError(
                f"{self._call}: the checkpoint {others[0]} was written by a sharded method, and not by "
                f"{self._problem['method']!r}. Name another file, or delete it."
            )
        if not file.exists():
            return None
        description, arrays = read(file)
        said = differences(description, self._problem)
        if said:
            raise ValueError(
                f"{self._call}: the checkpoint {file} belongs to another problem: {said}. Make the call that it belongs "
                "to, name another file, or delete it."
            )
        self._written, self._x, self._counts = len(arrays["history"]) - 1, arrays["x"], arrays["counts"]
        return arrays

    def keep(self, iteration: int, ended: bool, point: Kept, counts: Iterable[int], record: Record) -> None:
        """Write an iterate where it is time to.

        Parameters
        ----------
        iteration : int
            Its number.
        ended : bool
            Whether it is the last one.
        counts : iterable of int
            How often each thing was evaluated.
        """
        if self._checkpoint is None:
            return
        if not ended and (iteration <= self._written or iteration == 0 or iteration % self._checkpoint.every):
            return
        x, made = point.x, np.array(list(counts))
        # The last line search may have met a better point since the last iterate was written; and what it has evaluated
        # counts, or all runs together would evaluate more than they may.
        if iteration <= self._written and np.array_equal(x, self._x) and np.array_equal(made, self._counts):
            return
        gradient = np.zeros(0) if point.gradient is None else point.gradient
        arrays = {
            "x": x, "value": np.array(point.value, dtype=float), "gradient": gradient, "counts": made,
            "history": record.table(),
        }  # fmt: skip
        try:
            write(self._checkpoint.file, self._problem, arrays.items())
        except OSError as error:
            self._failures.tell(iteration, self._failures.reason(error, self._checkpoint.file))
        else:
            self._failures.end()
            self._written, self._x, self._counts = iteration, x, made
