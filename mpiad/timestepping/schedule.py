"""In which order a loop is run, kept, run again and reversed: one of checkpoint_schedules', in words of ours.

With s states kept of n steps, the least number of steps is run again that any schedule can do with: Griewank and Walther,
Algorithm 799: revolve (ACM TOMS 26, 2000), with the states on disk placed as by Stumm and Walther (SIAM J. Sci. Comput. 31,
2009).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mpiad.timestepping.checkpoints import Checkpoints

__all__ = ["Advance", "Keep", "Restore", "Reverse", "actions"]


class Keep(NamedTuple):
    """Keep the state, which is that before step `number`."""

    number: int
    on_disk: bool


class Advance(NamedTuple):
    """Run the steps from `first` up to before `stop`."""

    first: int
    stop: int


class Reverse(NamedTuple):
    """Run the steps from `first` up to before `stop` once more from the state before them, recorded, and their adjoints."""

    first: int
    stop: int


class Restore(NamedTuple):
    """Take the state before step `number` from those that are kept; `last`: it isn't needed again."""

    number: int
    last: bool


def actions(steps: int, kept: Checkpoints) -> Iterator[Keep | Advance | Reverse | Restore]:
    """Yield what to do, from the first step to the adjoint of the first step.

    Parameters
    ----------
    steps : int
    kept : Checkpoints
        Of all states, one at least.
    """
    length = kept.recorded
    blocks = -(-steps // length)
    # A schedule of blocks that are recorded together is one of steps, with longer steps.
    for action in _all_kept(blocks) if kept.memory >= blocks - 1 else _optimal(blocks, kept):
        if isinstance(action, (Advance, Reverse)):
            yield type(action)(action.first * length, min(action.stop * length, steps))
        else:
            yield action._replace(number=action.number * length)


def _optimal(steps: int, kept: Checkpoints) -> Iterator[Keep | Advance | Reverse | Restore]:
    # Imported here: loops that keep all states, or none, don't need it.
    from checkpoint_schedules import Copy, Forward, Move, MultistageCheckpointSchedule, StorageType

    # The library's last state before the end of the first run is the one that is at hand, and isn't counted.
    for action in MultistageCheckpointSchedule(steps, kept.memory, kept.disk):
        if isinstance(action, Forward):
            if action.write_ics:
                yield Keep(action.n0, action.storage == StorageType.DISK)
            if action.write_adj_deps:
                yield Reverse(action.n0, action.n1)
            else:
                yield Advance(action.n0, action.n1)
        elif isinstance(action, (Copy, Move)):
            yield Restore(action.n, isinstance(action, Move))


def _all_kept(steps: int) -> Iterator[Keep | Advance | Reverse | Restore]:
    for number in range(steps - 1):
        yield Keep(number, False)
        yield Advance(number, number + 1)
    # The last step's state is at hand when the reverse pass begins, and needn't be kept.
    yield Reverse(steps - 1, steps)
    for number in reversed(range(steps - 1)):
        yield Restore(number, True)
        yield Reverse(number, number + 1)
