"""The iteration that all sharded methods share, and the files of its state, from which a solve resumes.

A solve may resume on another number of ranks. Each file contains the boxes (index ranges in the whole arrays) of its
variables. A rank reads the files whose boxes intersect its own boxes. Data that don't belong to variables are the same in
all files.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from mpiad._typing import Array, Comm
from mpiad.checkpoint_files import files_of_ranks, read, read_description, require_same_problem
from mpiad.device import to_host
from mpiad.optimize.checkpoint import CheckpointFile
from mpiad.optimize.constraints import Box
from mpiad.optimize.evaluated_points import INTERRUPTED, STOPPED, Ending
from mpiad.optimize.history import Iterate
from mpiad.optimize.iterates import ShardedIterates
from mpiad.optimize.sharded.convergence import EVALUATIONS, ITERATIONS, NOT_FINITE, REDUCTION, AnySettings
from mpiad.pytrees import put
from mpiad.transport import Channel
from mpiad.transport.core.agreement import agreed, raising_together
from mpiad.transport.core.rank_files import RankFiles
from mpiad.transport.devices.device_arrays import arrays_of
from mpiad.transport.exits.user_failures import StageFailures


class ShardedPoint(Iterate, Protocol):
    """An iterate of a sharded method: this rank's variables, and scalars that are the same on all ranks."""

    length: float  # of the step from the previous point

    @property
    def finite(self) -> bool:
        """Whether the value and the derivatives are finite."""
        ...


P = TypeVar("P", bound=ShardedPoint)


class ShardedMethod(ABC, Generic[P]):
    """The base class of the methods; P is the type of their points."""

    @abstractmethod
    def _evaluated(self, x: Array, before: P | None, /) -> P:
        """Return the point x, with the length of the step from the point `before`."""

    @abstractmethod
    def _next_point(self, point: P, /) -> P | Ending:
        """Return the next point, or an ending."""

    @abstractmethod
    def _ending(self, point: P, /) -> Ending | None:
        """Return the ending at a point, or None."""

    @abstractmethod
    def _arrays(self, point: P, /) -> Iterator[tuple[str, np.ndarray]]:
        """Return names and arrays of the state, besides "x" and "history"."""

    @abstractmethod
    def _restored(self, arrays: dict[str, np.ndarray], x: Array, /) -> P:
        """Return the point of such arrays; x is in the variables' memory."""

    def __init__(self, iterates: ShardedIterates, files: StateFiles, box: Box | None, settings: AnySettings):
        self._iterates, self._files, self._box, self._settings = iterates, files, box, settings
        self.count = 0  # of evaluations

    def run(self, start: Array) -> tuple[P, Ending]:
        """Minimize from this rank's start, shape (n,), which is overwritten; return the last point and the ending."""
        found = self._files.load()
        if found is not None:
            point = self._restored(found, put([found["x"]], [arrays_of(start)])[0])
            self._iterates.record.restore(found["history"])
        else:
            if self._box is not None:
                self._box.project(start)
            point = self._evaluated(start, None)
            del start
            if point.finite:
                self._begin(point)
            self._iterates.record.add(point, self.count, point.length)
            if not point.finite:
                return point, NOT_FINITE
            self._arrive(point, None)
        while True:
            ending = self._ended(point)
            new = ending or self._next_point(point)
            if isinstance(new, Ending):
                return point, new
            self._iterates.report(new, self.count, new.length)
            self._arrive(new, point)
            point = new

    def _begin(self, point: P, /) -> None:
        """Prepare the iteration from a finite start, before it is recorded."""

    def _arrive(self, new: P, before: P | None, /) -> None:
        """Continue from a recorded point; `before` is None for the start."""

    def _ended(self, point: P) -> Ending | None:
        """Return the ending at a point, or None; write the state if it is due."""
        ending = self._ending(point) or (INTERRUPTED if self._files.interrupted else None)
        self._write(point, ending is not None)
        return ending

    def _limit_reached(self, before: float, value: float, stopped: Callable[[], bool]) -> Ending | None:
        """Return the ending of all methods at an iterate, or None; `before`: the objective at the previous iterate."""
        # Relative for large values and absolute below one, as in L-BFGS-B.
        ftol = self._settings.ftol
        if ftol > 0.0 and before < math.inf and before - value <= ftol * max(abs(before), abs(value), 1.0):
            return REDUCTION
        if stopped():
            return STOPPED
        if self._iterates.record.iterations >= self._settings.maxiter:
            return ITERATIONS
        return EVALUATIONS if self.count >= self._settings.maxfun else None

    def _write(self, point: P, ended: bool) -> None:
        def arrays() -> Iterator[tuple[str, np.ndarray]]:
            yield "x", to_host(point.x)
            yield "history", self._iterates.record.table()
            yield from self._arrays(point)

        self._files.write_if_due(self._iterates.record.iterations, ended, arrays())


OF_RANKS = "ranks", "variables", "x0 (checksum)", "bounds (checksum)"
"""The entries of a problem's description that depend on the number of ranks."""


class Identity(NamedTuple):
    """A description of the problem to which a state belongs."""

    problem: dict[str, object]  # description for this number of ranks
    any_ranks: dict[str, object] = {}  # description for any number of ranks
    layout: Layout | None = None  # positions of this rank's variables; needed to resume on another number of ranks


class StateFiles:
    """The files of states, without effect if there is no checkpoint."""

    def __init__(self, checkpoint: CheckpointFile | None, identity: Identity, channel: Channel, agreement: StageFailures):
        self._checkpoint, self._identity, self._channel, self._agreement = checkpoint, identity, channel, agreement
        self._obsolete = list[Path]()
        self._files = None if checkpoint is None else RankFiles(checkpoint.file, channel, identity.problem, "minimize")

    @property
    def interrupted(self) -> bool:
        """Return whether the solve must end because a rank received SIGTERM."""
        return self._checkpoint is not None and self._agreement.end_requested

    def load(self) -> dict[str, np.ndarray] | None:
        """Return the arrays of the newest state that all ranks have, or None; raise on all ranks if a file is invalid."""
        if self._checkpoint is None or self._files is None:
            return None
        others = files_of_ranks(self._checkpoint.file)
        if self._identity.layout is not None:
            # Redistribute if all ranks find the same files of another number of ranks, and no files of this number.
            names_here = [] if self._files.of_this_size(others) else [file.name for file in others]
            every = self._channel.data.allgather(names_here)
            if every[0] and all(names == every[0] for names in every):
                iteration, entries = newest_state(others, self._identity.any_ranks, self._channel)
                self._files.iteration, self._obsolete = iteration, others
                with raising_together(self._channel, ValueError):
                    return _redistributed_arrays(iteration, entries, self._identity.layout)
        with raising_together(self._channel, (OSError, ValueError)):
            if (file := self._checkpoint.file).exists():
                raise ValueError(
                    f"minimize: the checkpoint must have been written by a sharded method, but {file} was written by a "
                    "method that runs on the root. Pass another file, or delete it."
                )
        return self._files.load("; for later checkpoints pass CheckpointFile(blocks=...)")

    def write_if_due(self, iteration: int, ended: bool, arrays: Iterable[tuple[str, np.ndarray]]) -> None:
        """Write the state of an iteration if it is due; all ranks call this. Otherwise `arrays` isn't iterated over."""
        if self._checkpoint is None or self._files is None or iteration <= self._files.iteration:
            return
        if not ended and (iteration == 0 or iteration % self._checkpoint.every):
            return
        _, any_ranks, layout = self._identity
        if self._files.write(iteration, any_ranks if layout is None else {**any_ranks, "boxes": layout.boxes}, arrays):
            # The files of another number of ranks are now obsolete.
            for file in self._obsolete[self._channel.rank :: self._channel.size]:
                file.unlink(missing_ok=True)
            self._obsolete = []


IndexBox = list[list[int]]
"""Start and stop along each axis of a whole array."""
Entry = tuple[Path, list[IndexBox]]
"""A rank's file of a state, and the boxes of its variables."""


class Layout(NamedTuple):
    """The box of each of this rank's variables in its whole array, in the order of the vector, and the arrays' shapes."""

    boxes: list[IndexBox]
    shapes: list[list[int]]


def layout_of(specs: Sequence[tuple], checkpoint: CheckpointFile, comm: Comm) -> Layout | None:
    """Return the positions of this rank's variables, by the checkpoint's `blocks` or in the order of ranks, or None."""
    blocks = None if checkpoint.blocks is None else [[part.start, part.stop] for part in checkpoint.blocks]
    shapes = [tuple(shape) for shape, _ in specs]
    every = comm.allgather((shapes, blocks))
    before, boxes = every[: comm.rank], []
    for k, (shape, dtype) in enumerate(specs):
        if blocks is not None and list(shape[len(shape) - len(blocks) :]) == [stop - start for start, stop in blocks]:
            box = [*[[0, n] for n in shape[: len(shape) - len(blocks)]], *blocks]
        elif blocks is None and len(shape) == 1 and all(len(others) == len(shapes) for others, _ in every):
            start = sum(others[k][0] for others, _ in before if others[k])
            box = [[start, start + shape[0]]]
        else:
            box = []
        # A complex array has an additional last axis for real and imaginary parts.
        boxes.append([*box, *[[0, 2]] * (dtype.kind == "c")] if box else None)
    all_boxes = comm.allgather(boxes)
    if any(box is None for others in all_boxes for box in others) or len({len(others) for others in all_boxes}) > 1:
        return None
    ends = [[max(stops) for stops in zip(*[[stop for _, stop in box] for box in leaf])] for leaf in zip(*all_boxes)]
    return Layout(boxes, ends)


def global_checksum(vector: np.ndarray, layout: Layout, comm: Comm) -> str:
    """Return a checksum of a distributed vector that doesn't depend on the distribution; collective."""
    # Each number is hashed together with its position. The sum of the hashes doesn't depend on the order.
    numbers = np.ascontiguousarray(vector, np.float64).view(np.uint64)
    total = int(np.sum(_hashed(numbers ^ _hashed(_positions(layout.boxes, layout.shapes))), dtype=np.uint64))
    return f"{sum(comm.allgather(total)) % 2**64:016x}"


def _positions(boxes: list[IndexBox], shapes: list[list[int]]) -> np.ndarray:
    """Return a number for each variable in the boxes: its index in the whole array, plus the array's number times 2**56."""
    found = [np.zeros(0, np.uint64)]
    for k, (box, shape) in enumerate(zip(boxes, shapes)):
        indices = np.zeros((), np.uint64)
        for axis_indices, n in zip(np.ix_(*[np.arange(*ends, dtype=np.uint64) for ends in box]), shape):
            indices = indices * np.uint64(n) + axis_indices
        found.append(indices.ravel() + np.uint64(k << 56))
    return np.concatenate(found)


def _hashed(x: np.ndarray) -> np.ndarray:
    """Return the hashes of numbers by SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        x = (x + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def newest_state(files: list[Path], problem: dict[str, object], channel: Channel) -> tuple[int, list[Entry]]:
    """Return iteration and entries of the newest complete state; raise on all ranks if there is none; collective."""
    own = []
    with raising_together(channel, (OSError, ValueError)):
        for file in files[channel.rank :: channel.size]:
            description = read_description(file)
            require_same_problem(file, description, problem, "minimize")
            own.append((file, description["iteration"], description.get("boxes")))
    by_ranks: dict[tuple[int, int], dict[int, Entry]] = {}
    for file, iteration, boxes in [entry for entries in channel.data.allgather(own) for entry in entries]:
        rank, size = map(int, re.findall(r"\.rank(\d+)of(\d+)\.", file.name)[-1])
        by_ranks.setdefault((iteration, size), {})[rank] = file, boxes
    common = [key for key, found in by_ranks.items() if len(found) == key[1] and all(boxes for _, boxes in found.values())]
    if not common:
        missing = (
            f"minimize: the files of another number of ranks, such as {files[0]}, don't have an iteration that is "
            "complete. Restore the missing files, or delete all of them."
        )
        raise agreed(channel, ValueError(missing))
    return max(common)[0], [entry for _, entry in sorted(by_ranks[max(common)].items())]


def _redistributed_arrays(iteration: int, entries: list[Entry], layout: Layout) -> dict[str, np.ndarray]:
    """Return this rank's arrays of a state; raise a ValueError if a file is damaged or from another iteration."""
    own = _positions(layout.boxes, layout.shapes)
    found: dict[str, np.ndarray] = {}
    nonempty = [entry for entry in entries if _length(entry[1])]
    # A rank without variables reads the data that all files contain from the first file.
    for file, boxes in [entry for entry in nonempty if any(map(_intersect, entry[1], layout.boxes))] or nonempty[:1]:
        description, arrays = read(file)
        if description["iteration"] != iteration:
            raise ValueError(f"minimize: another job writes the checkpoint {file}. Pass another file, or end that job.")
        parts = {"x": arrays.pop("x")[None]}
        if "rows" in arrays:
            parts["rows"] = arrays.pop("rows")
        found = found or {**arrays, **{name: np.zeros((len(part), own.size)) for name, part in parts.items()}}
        _, theirs, here = np.intersect1d(_positions(boxes, layout.shapes), own, assume_unique=True, return_indices=True)
        for name, part in parts.items():
            found[name][:, here] = part[:, theirs]
    found["x"] = found["x"][0]
    return found


def _length(boxes: list[IndexBox]) -> int:
    return sum(prod(stop - start for start, stop in box) for box in boxes)


def _intersect(old: IndexBox, new: IndexBox) -> bool:
    return all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(old, new))
