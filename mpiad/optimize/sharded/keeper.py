"""The state of a sharded solve on disk: each rank writes its own files, and all go on from one iteration.

Of two files a rank writes one in turn, and the next is begun only when all ranks have written theirs. So whenever a job
is killed, there is an iteration of which every rank has a file: the last, or the one before.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpiad.checkpoint_files import differences, files_of_ranks, read, read_description, write
from mpiad.optimize.agreement import Agreement
from mpiad.optimize.checkpoint import Checkpoint, WriteFailures
from mpiad.optimize.history import Record
from mpiad.optimize.sharded.ending import Ending
from mpiad.optimize.sharded.listener import Listener
from mpiad.optimize.sharded.memory import Memory
from mpiad.optimize.sharded.point import Point
from mpiad.optimize.sharded.trials import Trials
from mpiad.transport import Channel
from mpiad.transport.agreement import agreed

__all__ = ["Keeper", "State"]

_SLOTS = "a", "b"


class State(NamedTuple):
    """A solve between two iterations, beside its memory.

    Attributes
    ----------
    iteration, count : int
        Iterations and evaluations so far.
    here : Point
    value_before : float
        Objective at the iterate before; infinite where the last search found nothing.
    slope, length : float
        Of the objective along the next direction, and of the gradient.
    stopped : bool
        Whether a callback wants the solve to end.
    """

    iteration: int
    count: int
    here: Point
    value_before: float
    slope: float
    length: float
    stopped: bool


class Keeper:
    """Write states and read them again; without a checkpoint it does nothing.

    Parameters
    ----------
    checkpoint : Checkpoint or None
        This rank's own; all have one or none.
    problem : dict
        What the state belongs to.
    used : Channel
        The user's communicator.
    agreement : Agreement
        Knows whether a rank was told to end.
    """

    def __init__(self, checkpoint: Checkpoint | None, problem: dict[str, Any], used: Channel, agreement: Agreement):
        self._checkpoint, self._problem, self._used, self._agreement = checkpoint, problem, used, agreement
        self._slot, self._written, self._failures = 0, -1, WriteFailures("minimize")
        self._found: dict[str, np.ndarray] | None = None

    @property
    def interrupted(self) -> bool:
        """Return whether the solve is to end here, since a rank was told to."""
        return self._checkpoint is not None and self._agreement.asked

    def _file(self, slot: int) -> Path:
        file = self._checkpoint.file  # type: ignore[union-attr]
        return file.with_name(f"{file.stem}.rank{self._used.rank}of{self._used.size}.{_SLOTS[slot]}{file.suffix}")

    def look(self) -> None:
        """Find the newest state that all ranks have, and read it.

        Raises
        ------
        ValueError
            On all ranks, where a file of any is damaged, or belongs to another problem.
        """
        if self._checkpoint is None:
            return
        mine, wrong = {}, None
        try:
            mine = self._iterations_on_disk()
        except (OSError, ValueError) as error:
            wrong = error
        # A rank that raised by itself would leave the others in the next message.
        common = self._agreed(mine, wrong)
        if common is not None:
            self._written, self._slot = common, 1 - mine[common]
            try:
                self._found, wrong = self._state_of(common), None
            except ValueError as error:
                wrong = error
            self._agreed(mine, wrong)

    def _state_of(self, iteration: int) -> dict[str, np.ndarray]:
        """Return the arrays of an iteration that was found."""
        file = self._file(1 - self._slot)
        description, arrays = read(file)
        if description["iteration"] != iteration:
            raise ValueError(
                f"minimize: the checkpoint {file} was of iteration {iteration}, and a moment later of "
                f"{description['iteration']}: another job writes it. Name another file, or end that job."
            )
        return arrays

    def _iterations_on_disk(self) -> dict[int, int]:
        """Return the slot of each iteration that this rank has a file of."""
        self._refuse_others()
        found = {}
        for slot in range(len(_SLOTS)):
            if self._file(slot).exists():
                description = read_description(self._file(slot))
                said = differences(description, self._problem)
                if said:
                    raise ValueError(
                        f"minimize: the checkpoint {self._file(slot)} belongs to another problem: {said}. Make the "
                        "call that it belongs to, name another file, or delete it."
                    )
                found[description["iteration"]] = slot
        return found

    def _refuse_others(self) -> None:
        file = self._checkpoint.file  # type: ignore[union-attr]
        others = files_of_ranks(file)
        ours = [name for name in others if f"of{self._used.size}." in name.name]
        if others and not ours:
            raise ValueError(
                f"minimize: the checkpoint {others[0]} was written by another number of ranks than the "
                f"{self._used.size} of this call. Start as many, name another file, or delete it."
            )
        if file.exists():
            raise ValueError(
                f"minimize: the checkpoint {file} was written by a method that the root drives, and not by "
                "'L-BFGS-sharded'. Name another file, or delete it."
            )

    def _agreed(self, mine: dict[int, int], wrong: Exception | None) -> int | None:
        """Return the newest iteration that all ranks have; raise on all where one can't go on."""
        told = self._used.data.allgather((sorted(mine), None if wrong is None else str(wrong)))
        for rank, (_, text) in enumerate(told):
            if text is not None:
                raise agreed(self._used, ValueError(f"{text} (found on rank {rank})"))
        common = set.intersection(*(set(theirs) for theirs, _ in told))
        if not common and any(len(theirs) > 1 for theirs, _ in told):
            without = next(rank for rank, (theirs, _) in enumerate(told) if len(theirs) < 2)
            raise agreed(self._used, ValueError(
                f"minimize: rank {without} has no file of the iterations that other ranks have written to the checkpoint "
                f"{self._checkpoint.path}. Put its files back, or delete those of all ranks."  # type: ignore[union-attr]
            ))
        return max(common, default=None)

    def restored(self, memory: Memory, trials: Trials, listener: Listener) -> State | None:
        """Put a state that was found into the parts of the solve, and return the rest of it; None for a new solve."""
        found, self._found = self._found, None
        if found is None:
            return None
        numbers, here = found["numbers"].tolist(), Point(memory.taken(found["x"]))
        # The order is that in which `_arrays` writes them; the gradient is in the memory, which is settled there.
        here.value, here.norm, here.room, here.settled = numbers[0], numbers[1], numbers[5], True
        trials.count = count = int(found["count"])
        listener.record.restore(found["history"])
        memory.restore(found)
        return State(self._written, count, here, numbers[2], numbers[3], numbers[4], False)

    def keep(self, state: State, ending: Ending | None, memory: Memory, record: Record) -> None:
        """Write the state where it is time to; all ranks call this."""
        if self._checkpoint is None or state.iteration <= self._written:
            return
        if ending is None and (state.iteration == 0 or state.iteration % self._checkpoint.every):
            return
        description = {**self._problem, "iteration": state.iteration}
        wrong = None
        try:
            write(self._file(self._slot), description, _arrays(state, memory, record))
        except OSError as error:
            wrong = f"rank {self._used.rank}: {self._failures.reason(error, self._file(self._slot))}"
        failures = [text for text in self._used.data.allgather(wrong) if text is not None]
        if failures:
            # This slot again next time: the other one holds the last state that all ranks have.
            self._failures.tell(state.iteration, failures[0])
        else:
            self._failures.end()
            self._written, self._slot = state.iteration, 1 - self._slot


def _arrays(state: State, memory: Memory, record: Record) -> Iterator[tuple[str, np.ndarray]]:
    here = state.here
    yield "x", memory.written(here.x)
    yield "numbers", np.array([here.value, here.norm, state.value_before, state.slope, state.length, here.room])
    yield "count", np.array(state.count)
    yield "history", record.table()
    yield from memory.state().items()
