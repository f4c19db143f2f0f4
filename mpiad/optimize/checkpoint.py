"""Checkpoints of a solve: the argument `checkpoint`, the description of the problem, and the file that the root writes."""

from __future__ import annotations

import contextlib
import zlib
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy

from mpiad.checkpoint_files import WriteFailures, files_of_ranks, read, require_same_problem, write
from mpiad.optimize.evaluated_points import Point
from mpiad.optimize.history import Record
from mpiad.optimize.objective_evaluation import Program
from mpiad.optimize.packing import Packing
from mpiad.primitives.checks import positive_count
from mpiad.pytrees import described, rebuilt
from mpiad.transport.exits.signals import as_warnings


class CheckpointFile(NamedTuple):
    """The argument `checkpoint` of `minimize`; a path alone means a `CheckpointFile` with default values.

    Attributes
    ----------
    path : str or Path
        The file. With sharded methods each rank writes two files alternately, with the rank's number in their names.
    every : int
        Number of iterations between two written states.
    patience : float
        Maximum time in seconds to finish the iteration after SIGTERM, before the job ends without a further state.
    blocks : tuple of slice, optional
        Position of a rank's variables in the whole arrays of a sharded solve, along their last axes: for example
        `Domain.owned`, which `Domain.minimize` passes. With `blocks` a solve can resume on any number of ranks. Without
        `blocks`, arrays with one axis are assumed to be consecutive parts of whole arrays, in the order of ranks.
    signals : tuple of int
        Signals that end the job after the current iteration like SIGTERM, but without a limit of time, for example
        ``(signal.SIGUSR2,)``, which batch systems can send as a warning. The program mustn't have set another handler, as
        MPICH has for SIGUSR1.

    Examples
    --------
    >>> import tempfile
    >>> size = mpiad.mpi_size()
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
    signals: tuple[int, ...] = ()

    @property
    def file(self) -> Path:
        """Return the absolute path, since a program may change its working directory."""
        return Path(self.path).absolute()


def as_checkpoint(
    argument: str | PathLike[str] | CheckpointFile | None, call: str, writes: bool = True
) -> CheckpointFile | None:
    """Return a `CheckpointFile`; raise if the argument is invalid or, if this rank `writes`, the folder is missing."""
    if argument is None:
        return None
    found = argument if isinstance(argument, CheckpointFile) else CheckpointFile(argument)
    if not isinstance(found.path, (str, PathLike)):
        got = f"{type(argument).__name__} {argument!r:.60}"
        raise TypeError(f"{call}: checkpoint must be a path or an mpiad.optimize.CheckpointFile, but got {got}.")
    positive_count(found.every, f"{call}: every")
    as_warnings(found.signals, call)
    if writes and not found.file.parent.is_dir():
        raise ValueError(
            f"{call}: the folder of checkpoint {found.path!s:.200} doesn't exist: {found.file.parent}. Create it; "
            "sharded methods need a file system that all ranks share."
        )
    if writes:
        # Raises, for example, if the name is too long; from Python 3.14 on `Path.exists` doesn't.
        with contextlib.suppress(FileNotFoundError):
            found.file.stat()
    return found


def without_on_signal(options: dict | None, call: str) -> tuple[dict | None, str]:
    """Return the options of the method, and the option `on_signal`; raise a ValueError if the latter is invalid."""
    if not isinstance(options, dict):
        return options, "exit"
    others = dict(options)
    on_signal = others.pop("on_signal", "exit")
    if on_signal not in ("exit", "return"):
        raise ValueError(f"{call}: option on_signal must be 'exit' or 'return', but got {on_signal!r:.40}.")
    return others, on_signal


def fingerprint(*arrays: np.ndarray) -> str:
    """Return a checksum of arrays."""
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(np.ascontiguousarray(array).data, checksum)
    return f"{checksum:08x}"


def problem_of(program: Program, packing: Packing, start: np.ndarray, size: int) -> dict[str, object]:
    """Return a description of the problem, which is compared with that in a checkpoint."""
    return {
        "ranks": size,
        "objective": program.objective,
        "root": int(program.root),
        "variables": [f"{dtype}{list(shape)}" for shape, dtype in packing.specs],
        "x0 (checksum)": fingerprint(start),
    }


_LIMITS = "maxiter", "maxfun", "max_nfev"  # options on which the result of a converged solve doesn't depend


class RootCheckpoint:
    """Writes and reads iterates and the result of a converged solve, on the root; without effect if `settings` is None."""

    def __init__(
        self, checkpoint: CheckpointFile | None, problem: dict[str, object], options: dict[str, object], call: str
    ):
        self.settings, self._problem, self._call, self._failures = checkpoint, problem, call, WriteFailures(call)
        self._written = 0, b"", [0]  # iteration, point and counts of the last state
        texts = {name: fingerprint(each) if isinstance(each, np.ndarray) else repr(each) for name, each in options.items()}
        self._options = {name: text for name, text in texts.items() if name not in _LIMITS}
        self.result: dict[str, Any] | None = None  # of an earlier run that converged with the same options

    def load(self) -> dict[str, np.ndarray] | None:
        """Return an earlier run's arrays, the gradient empty if it wasn't evaluated; None if there is no file."""
        if self.settings is None:
            return None
        file = self.settings.file
        others = files_of_ranks(file)
        if others:
            raise ValueError(
                f"{self._call}: the checkpoint must have been written by {self._problem['method']!r}, but {others[0]} was "
                "written by a sharded method. Pass another file, or delete it."
            )
        if not file.exists():
            return None
        description, arrays = read(file)
        require_same_problem(file, description, self._problem, self._call)
        self._written = len(arrays["history"]) - 1, arrays["x"].tobytes(), arrays["counts"].tolist()
        if description.get("options") == self._options:
            self.result = {name: rebuilt(each, arrays) for name, each in description["result"].items()}
            if isinstance(self.result.get("hess_inv"), list):
                self.result["hess_inv"] = scipy.optimize.LbfgsInvHessProduct(*self.result["hess_inv"])
        return arrays

    def write_if_due(
        self, record: Record, point: Point | None, counts: dict[str, int], result: dict[str, Any] | None = None
    ) -> None:
        """Write an iterate, if there is one and it is due, and the result of a solve that converged.

        `counts` are the numbers of evaluations by kind; `result` is passed at the end of a solve.
        """
        if self.settings is None or point is None:
            return
        iteration = record.iterations
        if result is None and (iteration <= self._written[0] or iteration % self.settings.every):
            return
        # At the end of a solve an iterate is written again if the last line search has found a better point or made further
        # evaluations, which count for `maxfun`.
        state = iteration, point.x.tobytes(), list(counts.values())
        converged = result if result and result["success"] else {}
        if state == self._written and not converged:
            return
        gradient = np.zeros(0) if point.gradient is None else point.gradient
        arrays = {"x": point.x, "value": np.array(point.value, dtype=float), "gradient": gradient}
        arrays |= {"counts": np.array(state[2]), "history": record.table()}
        ending = {"options": self._options, "result": self._fields(converged, arrays)} if converged else {}
        try:
            write(self.settings.file, {**self._problem, **ending}, arrays.items())
        except OSError as error:
            self._failures.report(iteration, self._failures.reason(error, self.settings.file))
        else:
            self._failures.report(iteration, None)
            self._written = state

    def _fields(self, result: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, list[Any]]:
        """Return a description of the fields of a result, and add their arrays to `arrays`."""
        fields = {}
        for name, value in result.items():
            if isinstance(value, scipy.optimize.LbfgsInvHessProduct):
                value = [value.sk, value.yk]
            with contextlib.suppress(TypeError):  # files don't contain sparse Jacobians of constraints
                fields[name] = described(value, f"result/{name}", arrays, self._call)
        return fields
