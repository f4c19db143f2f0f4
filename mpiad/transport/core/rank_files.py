"""Files of a state that is divided among the ranks: the newest state that all of them have written.

Each rank writes two files alternately, and starts to write only when all ranks have completed the previous state. If a job
is killed at any time, all ranks therefore have a file of the last state, or all ranks have a file of the previous state.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from mpiad.checkpoint_files import WriteFailures, files_of_ranks, read, read_description, require_same_problem, write
from mpiad.transport.core.agreement import agreed, raising_together
from mpiad.transport.core.channels import Channel

_SLOTS = "a", "b"


class RankFiles:
    """The two files of each rank for a path, of states of one problem; `iteration`: of the last state, or -1.

    `description`: of the state that was read.
    """

    def __init__(self, path: Path, channel: Channel, problem: dict[str, object], call: str):
        self._path, self._channel, self._problem, self._call = path, channel, problem, call
        self._slot, self.iteration, self._failures = 0, -1, WriteFailures(call)
        self.description: dict[str, Any] = {}

    def _file(self, slot: int) -> Path:
        path = self._path
        return path.with_name(f"{path.stem}.rank{self._channel.rank}of{self._channel.size}.{_SLOTS[slot]}{path.suffix}")

    def of_this_size(self, files: list[Path]) -> list[Path]:
        """Return the files that this number of ranks has written."""
        return [file for file in files if f"of{self._channel.size}." in file.name]

    def load(self, advice: str = "") -> dict[str, np.ndarray] | None:
        """Return this rank's arrays of the newest state that all ranks have, or None; raise a ValueError on all ranks.

        `advice`: for the error if another number of ranks has written the files; collective.
        """
        with raising_together(self._channel, (OSError, ValueError)):
            slots = self._iterations_on_disk(advice)
        common = self._newest_common(slots)
        if common is None:
            return None
        self.iteration, self._slot = common, 1 - slots[common]
        with raising_together(self._channel, ValueError):
            file = self._file(slots[common])
            self.description, arrays = read(file)
            if self.description["iteration"] != common:
                raise ValueError(
                    f"{self._call}: the checkpoint {file} has changed from iteration {common} to "
                    f"{self.description['iteration']} while it was read: another job writes it. Pass another file, or end "
                    "that job."
                )
            return arrays

    def _iterations_on_disk(self, advice: str) -> dict[int, int]:
        """Return the slots of this rank's files, by iteration."""
        others, found = files_of_ranks(self._path), {}
        if others and not self.of_this_size(others):
            raise ValueError(
                f"{self._call}: the checkpoint {others[0]} was written by another number of ranks than the "
                f"{self._channel.size} of this call, and the positions of their variables aren't known. Start the same "
                f"number of ranks, pass another file, or delete it{advice}."
            )
        for slot in range(len(_SLOTS)):
            if self._file(slot).exists():
                description = read_description(self._file(slot))
                require_same_problem(self._file(slot), description, self._problem, self._call)
                found[description["iteration"]] = slot
        return found

    def _newest_common(self, slots: dict[int, int]) -> int | None:
        """Return the newest iteration that all ranks have; raise on all ranks if only some ranks have two iterations."""
        every = self._channel.data.allgather(set(slots))
        common = set.intersection(*every)
        if not common and any(len(iterations) > 1 for iterations in every):
            without = next(rank for rank, iterations in enumerate(every) if len(iterations) < 2)
            text = f"rank {without} has no file of the iterations that other ranks have written to the checkpoint"
            raise agreed(
                self._channel,
                ValueError(f"{self._call}: {text} {self._path}. Restore its files, or delete those of all ranks."),
            )
        return max(common, default=None)

    def write(self, iteration: int, description: dict[str, object], arrays: Iterable[tuple[str, np.ndarray]]) -> bool:
        """Write a state with a description besides the problem's; return whether all ranks could, or warn; collective."""
        error_here = None
        try:
            write(self._file(self._slot), {**self._problem, **description, "iteration": iteration}, arrays)
        except OSError as error:
            error_here = f"rank {self._channel.rank}: {self._failures.reason(error, self._file(self._slot))}"
        failures = [text for text in self._channel.data.allgather(error_here) if text is not None]
        self._failures.report(iteration, failures[0] if failures else None)
        # After a failure the next state is written to the same slot, since the other slot has the last complete state.
        if not failures:
            self.iteration, self._slot = iteration, 1 - self._slot
        return not failures
