"""The state of a sharded solve between two iterations: the current point, and the files from which it resumes.

Each rank writes two files alternately, and starts to write only when all ranks have completed the previous state. If a job
is killed at any time, all ranks therefore have a file of the last state, or all ranks have a file of the previous state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.checkpoint_files import files_of_ranks, read, read_description, require_same_problem, write
from mpiad.optimize.checkpoint import CheckpointFile, WriteFailures
from mpiad.optimize.sharded.redistribution import Layout, newest_state
from mpiad.transport import Channel
from mpiad.transport.core.agreement import agreed, raising_together
from mpiad.transport.exits.user_failures import StageFailures

_SLOTS = "a", "b"
OF_RANKS = "ranks", "variables", "x0 (checksum)", "bounds (checksum)"
"""The entries of a problem's description that depend on the number of ranks."""


@dataclass(eq=False, slots=True)
class Point:
    """A point: this rank's variables, and scalars that are the same on all ranks; `LimitedMemory` has the gradient."""

    x: Array  # shape (n,)
    value: float = math.nan  # the objective
    norm: float = math.nan  # largest absolute entry of the (projected) gradient
    slope: float = math.nan  # of the objective along the direction, without the variables that a bound stopped
    finite: bool = False  # whether the value and all entries of the gradient are finite
    clipped: bool = False  # whether a bound stopped any variable in the step
    step: float = math.nan  # factor of the direction
    length: float = 0.0  # 2-norm of the step from the previous point, over all ranks
    range: float = math.inf  # distance to the nearest trial point of the last search at which the objective wasn't finite
    change_before: float = math.nan  # product of the step with the gradient at the previous point
    change_after: float = math.nan  # product of the step with the gradient at this point
    current: bool = False  # whether this is the current point of the memory
    stored: bool = False  # whether the memory stores a copy of the gradient


class Identity(NamedTuple):
    """A description of the problem to which a state belongs."""

    problem: dict[str, Any]  # description for this number of ranks
    any_ranks: dict[str, Any] = {}  # description for any number of ranks
    layout: Layout | None = None  # positions of this rank's variables; needed to resume on another number of ranks


class StateFiles:
    """The files of states, without effect if there is no checkpoint; `iteration`: of the last state, or -1."""

    def __init__(self, checkpoint: CheckpointFile | None, identity: Identity, used: Channel, agreement: StageFailures):
        self._checkpoint, self._identity, self._used, self._agreement = checkpoint, identity, used, agreement
        self._obsolete = list[Path]()
        self._slot, self.iteration, self._failures = 0, -1, WriteFailures("minimize")

    @property
    def interrupted(self) -> bool:
        """Return whether the solve must end because a rank received SIGTERM."""
        return self._checkpoint is not None and self._agreement.end_requested

    def _file(self, slot: int) -> Path:
        file = self._checkpoint.file  # type: ignore[union-attr]
        return file.with_name(f"{file.stem}.rank{self._used.rank}of{self._used.size}.{_SLOTS[slot]}{file.suffix}")

    def load(self) -> dict[str, np.ndarray] | None:
        """Return the arrays of the newest state that all ranks have, or None; raise on all ranks if a file is invalid."""
        if self._checkpoint is None:
            return None
        others = files_of_ranks(self._checkpoint.file)
        if self._identity.layout is not None:
            # Redistribute if all ranks find the same files of another number of ranks, and no files of this number.
            names_here = [] if self._of_this_size(others) else [file.name for file in others]
            every = self._used.data.allgather(names_here)
            if every[0] and all(names == every[0] for names in every):
                return self._redistributed(others, self._identity.layout)
        with raising_together(self._used, (OSError, ValueError)):
            slots = self._iterations_on_disk(others)
        common = self._newest_common(slots)
        if common is None:
            return None
        self.iteration, self._slot = common, 1 - slots[common]
        with raising_together(self._used, ValueError):
            return self._state_of(common)

    def _redistributed(self, others: list[Path], layout: Layout) -> dict[str, np.ndarray]:
        """Return this rank's arrays of the newest state that another number of ranks has written."""
        found = newest_state(others, self._identity.any_ranks, self._used)
        if found is None:
            missing = (
                f"minimize: the files of another number of ranks, such as {others[0]}, don't have an iteration that is "
                "complete. Restore the missing files, or delete all of them."
            )
            raise agreed(self._used, ValueError(missing))
        self.iteration, self._obsolete = found.iteration, others
        with raising_together(self._used, ValueError):
            return found.arrays(layout)

    def _of_this_size(self, files: list[Path]) -> list[Path]:
        return [file for file in files if f"of{self._used.size}." in file.name]

    def _state_of(self, iteration: int) -> dict[str, np.ndarray]:
        """Read the arrays of an iteration from this rank's file."""
        file = self._file(1 - self._slot)
        description, arrays = read(file)
        if description["iteration"] != iteration:
            raise ValueError(
                f"minimize: the checkpoint {file} has changed from iteration {iteration} to {description['iteration']} "
                "while it was read: another job writes it. Pass another file, or end that job."
            )
        return arrays

    def _iterations_on_disk(self, others: list[Path]) -> dict[int, int]:
        """Return the slots of this rank's files, by iteration; `others` are the files of all ranks."""
        file, found = self._checkpoint.file, {}  # type: ignore[union-attr]
        if others and not self._of_this_size(others):
            raise ValueError(
                f"minimize: the checkpoint {others[0]} was written by another number of ranks than the "
                f"{self._used.size} of this call, and the positions of their variables aren't known. Start the same number "
                "of ranks, pass another file, or delete it; for later checkpoints pass CheckpointFile(blocks=...)."
            )
        if file.exists():
            raise ValueError(
                f"minimize: the checkpoint must have been written by a sharded method, but {file} was written by a method "
                "that runs on the root. Pass another file, or delete it."
            )
        for slot in range(len(_SLOTS)):
            if self._file(slot).exists():
                description = read_description(self._file(slot))
                require_same_problem(self._file(slot), description, self._identity.problem, "minimize")
                found[description["iteration"]] = slot
        return found

    def _newest_common(self, slots: dict[int, int]) -> int | None:
        """Return the newest iteration that all ranks have; raise on all ranks if only some ranks have two iterations."""
        every = self._used.data.allgather(set(slots))
        common = set.intersection(*every)
        if not common and any(len(iterations) > 1 for iterations in every):
            without = next(rank for rank, iterations in enumerate(every) if len(iterations) < 2)
            path = self._checkpoint.path  # type: ignore[union-attr]
            text = f"rank {without} has no file of the iterations that other ranks have written to the checkpoint {path}"
            raise agreed(self._used, ValueError(f"minimize: {text}. Restore its files, or delete those of all ranks."))
        return max(common, default=None)

    def write_if_due(self, iteration: int, ended: bool, arrays: Iterable[tuple[str, np.ndarray]]) -> None:
        """Write the state of an iteration if it is due; all ranks call this. Otherwise `arrays` isn't iterated over."""
        if self._checkpoint is None or iteration <= self.iteration:
            return
        if not ended and (iteration == 0 or iteration % self._checkpoint.every):
            return
        (problem, any_ranks, layout), error_here = self._identity, None
        description = {**problem, **any_ranks, "iteration": iteration}
        if layout is not None:
            description["boxes"] = layout.boxes
        try:
            write(self._file(self._slot), description, arrays)
        except OSError as error:
            error_here = f"rank {self._used.rank}: {self._failures.reason(error, self._file(self._slot))}"
        failures = [text for text in self._used.data.allgather(error_here) if text is not None]
        self._failures.report(iteration, failures[0] if failures else None)
        # After a failure the next state is written to the same slot, since the other slot has the last complete state.
        if not failures:
            self.iteration, self._slot = iteration, 1 - self._slot
            # The files of another number of ranks are now obsolete.
            for file in self._obsolete[self._used.rank :: self._used.size]:
                file.unlink(missing_ok=True)
            self._obsolete = []
