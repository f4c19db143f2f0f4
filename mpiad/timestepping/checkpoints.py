"""`CheckpointSchedule`: how many states a loop may keep, and where."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from math import comb
from numbers import Integral
from typing import Any, NamedTuple

# In which order a loop is run, kept, run again and reversed: binomial checkpointing.
#
# With s states kept, the first one counted, and no step run more than r times, β(s, r) = (s + r)! / (s! r!) steps can be
# reversed at most. For β(s, r - 1) < n ≤ β(s, r) the least number of steps run is r n - β(s + 1, r - 1): Griewank and
# Walther, Algorithm 799: revolve (ACM TOMS 26, 2000). The states are a stack, and those places in it are on disk that are
# written and read least often: Stumm and Walther (SIAM J. Sci. Comput. 31, 2009).


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


def actions(steps: int, kept: CheckpointSchedule) -> Iterator[Keep | Advance | Reverse | Restore]:
    """Yield what to do, from the first step to the adjoint of the first step, where at least one state is kept."""
    length = kept.recorded
    blocks = -(-steps // length)
    # A schedule of blocks that are recorded together is one of steps, with longer steps.
    for action in _binomial(blocks, _places(blocks, kept)):
        if isinstance(action, (Advance, Reverse)):
            yield type(action)(action.first * length, min(action.stop * length, steps))
        else:
            yield action._replace(number=action.number * length)


def _binomial(steps: int, on_disk: Sequence[bool]) -> Iterator[Keep | Advance | Reverse | Restore]:
    """Yield the schedule of a stack of states, each place of which is in memory or on disk."""
    at, stack = 0, []
    for end in range(steps, 0, -1):
        while at < end - 1:
            if not stack or stack[-1] != at:
                yield Keep(at, on_disk[len(stack)])
                stack.append(at)
            first, at = at, at + _farthest(end - at, len(on_disk) - len(stack) + 1)
            yield Advance(first, at)
        yield Reverse(end - 1, end)
        if stack:
            at = stack[-1]
            last = at == end - 2
            yield Restore(at, last)
            if last:
                stack.pop()


def _farthest(steps: int, states: int) -> int:
    """Return how far to run from a kept state to where the next one is, for two steps or more and one state or more.

    Any m is optimal with β(s, r - 2) ≤ m ≤ β(s, r - 1) and β(s - 1, r - 1) ≤ n - m ≤ β(s - 1, r): the steps before the
    next state are run r - 1 times more at most, those behind it r times with one state less. This m keeps fewest states.
    """
    repeats = 1
    # So many steps can be reversed with these states, if none is run more often than `repeats` times.
    while comb(states + repeats, states) < steps:
        repeats += 1
    most = comb(states + repeats - 1, states)
    behind = comb(states + repeats - 2, states - 1)
    further = comb(states + repeats - 3, states - 2) if states > 1 else 0
    return min(max(steps - behind - further, most - behind, 1), most)


def _places(steps: int, kept: CheckpointSchedule) -> list[bool]:
    """Return for each place of the stack whether it is on disk."""
    # The state before the last step is at hand when the way back begins, and needn't be kept.
    states = min(kept.memory + kept.disk, steps - 1)
    if not 0 < kept.memory < states:
        return [kept.memory == 0] * states
    # Places of the stack that are read most often belong in memory: counted on a run without states.
    accesses, depth = Counter(), -1
    for action in _binomial(steps, [False] * states):
        if isinstance(action, (Keep, Restore)):
            depth += isinstance(action, Keep)
            accesses[depth] += 1
            depth -= isinstance(action, Restore) and action.last
    in_memory = sorted(range(states), key=lambda depth: -accesses[depth])[: kept.memory]
    return [depth not in in_memory for depth in range(states)]


class CheckpointSchedule(NamedTuple):
    """How many states are kept for the gradient of a loop, in memory and in files.

    Parameters
    ----------
    memory : int
        States kept in memory, the initial one counted.
    disk : int
        Further states kept in files: those that are written and read least often.
    directory : path, optional
        Where the files are written: a folder of its own is made in it for each loop on each rank, and removed with the
        gradient. By default the system's folder for temporary files, which may lie in memory itself.
    recorded : int
        Steps whose whole record, from one kept state on, may be held at once on the way back. With √n states and √n
        recorded steps each step is run twice only.
    dtype : str, optional
        ``"float32"``: states of double precision are kept in single precision, complex ones in complex64, in half the
        memory. On the way back the steps are run again from states of seven digits; the loop itself is run as ever.
    compress : bool
        Whether states are kept in 16 bits an entry, in a quarter of the memory of double precision: differences between
        neighbours, by which smooth fields keep five digits to seven, and rough ones four.
    host : bool
        Whether what is kept of arrays on devices is kept in the memory of the host; with `compress` it is.

    Examples
    --------
    A state kept every ten of 100 steps, and ten steps recorded at a time: each step is run twice.

    >>> mpiad.timestepping.CheckpointSchedule(memory=10, recorded=10)
    CheckpointSchedule(memory=10, disk=0, directory=None, recorded=10, dtype=None, compress=False, host=False)
    """

    memory: int = 0
    disk: int = 0
    directory: str | os.PathLike | None = None
    recorded: int = 1
    dtype: str | None = None
    compress: bool = False
    host: bool = False


def checkpoints_of(given: Any, call: str) -> CheckpointSchedule | None:
    """Return what a user gave as checkpoints, a number or `CheckpointSchedule`, in one form.

    A TypeError or ValueError where it is something else, or no state may be kept.
    """
    if given is None:
        return None
    kept = given if isinstance(given, CheckpointSchedule) else CheckpointSchedule(given)
    for name, number in (("memory", kept.memory), ("disk", kept.disk)):
        if not isinstance(number, Integral) or isinstance(number, bool):
            raise TypeError(
                f"{call}: checkpoints must be None, an integer or CheckpointSchedule(memory=..., disk=...), "
                f"but {name} is {type(number).__name__} {number!r:.60}."
            )
        if number < 0:
            raise ValueError(f"{call}: checkpoints must not be negative, but {name}={number}.")
    if not isinstance(kept.recorded, Integral) or kept.recorded < 1:
        raise ValueError(f"{call}: recorded must be an integer above zero, but got {kept.recorded!r}.")
    if kept.dtype not in (None, "float32"):
        raise ValueError(
            f"{call}: states are kept in their own precision (dtype=None) or in single precision (dtype='float32'), but "
            f"got dtype={kept.dtype!r:.40}."
        )
    for name, switch in (("compress", kept.compress), ("host", kept.host)):
        if not isinstance(switch, bool):
            raise TypeError(f"{call}: {name} must be True or False, but got {type(switch).__name__} {switch!r:.40}.")
    if kept.compress and kept.dtype is not None:
        raise ValueError(f"{call}: compress=True keeps 16 bits an entry, dtype={kept.dtype!r} 32: give one of them.")
    if kept.memory + kept.disk < 1:
        raise ValueError(f"{call}: checkpoints={given!r} keeps no state, but a gradient needs one at least: the first.")
    if kept.disk and kept.directory is not None and not os.path.isdir(kept.directory):
        raise ValueError(f"{call}: there is no folder {os.fspath(kept.directory)!r} for the checkpoints. Make it first.")
    return kept._replace(memory=int(kept.memory), disk=int(kept.disk), recorded=int(kept.recorded))
