"""Path and interval of a solve's checkpoints, the problem that they belong to, and the last iterate written by the root."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpiad.checkpoint_files import files_of_ranks, read, remedy, require_problem, write
from mpiad.optimize.evaluated_points import Point
from mpiad.optimize.history import Record
from mpiad.optimize.objective_evaluation import Program
from mpiad.optimize.packing import Packing


class CheckpointFile(NamedTuple):
    """The argument `checkpoint` of `minimize`; a path alone stands for the defaults.

    Attributes
    ----------
    path : str or Path
        The file. With sharded methods each rank writes two alternately, with its number in their names.
    every : int
        Number of iterations between two written states.
    patience : float
        Seconds to finish the iteration after SIGTERM; then the job ends anyway.
    blocks : tuple of slice, optional
        Position of a rank's variables in the whole arrays of a sharded solve, along their last axes: for example
        `Domain.owned`, which `Domain.minimize` passes. With it a solve resumes on any number of ranks. Without it arrays
        with one axis are assumed to be consecutive parts of whole ones, in the order of ranks.

    Examples
    --------
    >>> import tempfile
    >>> loss = lambda x: mpiad.mpi_allreduce(np.sum((x - 1.0) ** 2)) / size
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = mpiad.optimize.CheckpointFile(f"{folder}/run.npz", every=5)
    ...     result = mpiad.minimize(loss, np.zeros(2), checkpoint=saved)
    >>> print(result.x.round(4))
    [1. 1.]
    """

    path: str | PathLike[str]
    every: int = 10
    patience: float = 30.0
    blocks: tuple[slice, ...] | None = None

    @property
    def file(self) -> Path:
        """Return the path, absolute: a program may change its working directory."""
        return Path(self.path).absolute()


def as_checkpoint(given: Any, call: str, writes: bool = True) -> CheckpointFile | None:
    """Return the user's argument as a `CheckpointFile`; a TypeError or ValueError if that is impossible.

    If `writes` is false this rank writes nothing, and may not see the folder, for example on another node's disk.
    """
    if given is None:
        return None
    found = given if isinstance(given, CheckpointFile) else CheckpointFile(given)
    if not isinstance(found.path, (str, PathLike)):
        raise TypeError(
            f"{call}: checkpoint must be a path or an mpiad.optimize.CheckpointFile, but got {type(given).__name__} "
            f"{given!r:.60}."
        )
    if not (isinstance(found.every, (int, np.integer)) and found.every >= 1):
        raise ValueError(f"{call}: a checkpoint is written every 1 or more iterations, but got every={found.every!r}.")
    if writes and not found.file.parent.is_dir():
        raise ValueError(
            f"{call}: checkpoint {found.path!s:.200} lies in a folder that doesn't exist, {found.file.parent}. Make it "
            "first, on a disk that all ranks see where several write."
        )
    return found


class WriteFailures:
    """Warn about states that weren't written: once per reason, until one is written again.

    `call`: name of the public function.
    """

    def __init__(self, call: str):
        self._call, self._told = call, ""

    @staticmethod
    def reason(error: OSError, file: Path) -> str:
        """Return why a file wasn't written, and a remedy."""
        return f"{file}: {error.strerror or error}. {remedy(error, file)}"

    def tell(self, iteration: int, reason: str) -> None:
        """Warn that the state of an iteration wasn't written."""
        if reason != self._told:
            warnings.warn(
                f"{self._call}: the checkpoint of iteration {iteration} wasn't written, the one before stays ({reason})",
                RuntimeWarning,
                stacklevel=3,
            )
        self._told = reason

    def end(self) -> None:
        """Note that a state was written."""
        self._told = ""


def fingerprint(*arrays: np.ndarray) -> str:
    """Return a checksum of arrays; equal arrays have the same."""
    found = 0
    for array in arrays:
        found = zlib.crc32(np.ascontiguousarray(array).data, found)
    return f"{found:08x}"


def problem_of(program: Program, packing: Packing, start: np.ndarray, size: int) -> dict[str, Any]:
    """Return the description of the problem that a state belongs to: another problem has another description."""
    return {
        "ranks": size,
        "objective": program.objective,
        "root": int(program.root),
        "variables": packing.described,
        "x0 (checksum)": fingerprint(start),
    }


class RootCheckpoint:
    """Write iterates and read them again; without a checkpoint it does nothing. Only the root has one.

    `problem`: description of the problem that the iterates belong to. `call`: name of the public function.
    """

    def __init__(self, checkpoint: CheckpointFile | None, problem: dict[str, Any], call: str = "minimize"):
        self._checkpoint, self._problem, self._written, self._call = checkpoint, problem, -1, call
        self._x, self._counts, self._failures = np.zeros(0), np.zeros(0), WriteFailures(call)

    @property
    def active(self) -> bool:
        """Return whether there is a checkpoint."""
        return self._checkpoint is not None

    def found(self) -> dict[str, np.ndarray] | None:
        """Return the arrays of an earlier run: "x", "value", "gradient", "counts", "history"; None if there is none.

        The gradient is empty if it wasn't known. A ValueError if the file is damaged, or belongs to another problem.
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
        require_problem(file, description, self._problem, self._call)
        self._written, self._x, self._counts = len(arrays["history"]) - 1, arrays["x"], arrays["counts"]
        return arrays

    def keep(self, iteration: int, ended: bool, point: Point, counts: Iterable[int], record: Record) -> None:
        """Write an iterate if it is due; `counts` are the numbers of evaluations per kind."""
        if self._checkpoint is None:
            return
        if not ended and (iteration <= self._written or iteration == 0 or iteration % self._checkpoint.every):
            return
        x, made = point.x, np.array(list(counts))
        # The last line search may have met a better point since the last iterate was written; and its evaluations count,
        # or all runs together could exceed the limit.
        if iteration <= self._written and np.array_equal(x, self._x) and np.array_equal(made, self._counts):
            return
        gradient = np.zeros(0) if point.gradient is None else point.gradient
        arrays = {"x": x, "value": np.array(point.value, dtype=float), "gradient": gradient, "counts": made}
        arrays["history"] = record.table()
        try:
            write(self._checkpoint.file, self._problem, arrays.items())
        except OSError as error:
            self._failures.tell(iteration, self._failures.reason(error, self._checkpoint.file))
        else:
            self._failures.end()
            self._written, self._x, self._counts = iteration, x, made
