"""`CheckpointSchedule`: the number of states that a loop may store, in memory and on disk."""

from __future__ import annotations

import functools
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from math import comb
from numbers import Integral
from typing import NamedTuple, TypeAlias

from mpiad.primitives.checks import positive_count

# Binomial checkpointing: the order in which a loop's steps are run and reversed, and states are stored and restored.
#
# The last run of each step is recorded, and isn't counted in the following. With s stored states, including the first, at
# most β(s, r) = (s + r)! / (s! r!) steps can be reversed if no step is run more than r times. For β(s, r - 1) < n ≤ β(s, r)
# the minimum total number of runs is r n - β(s + 1, r - 1):
# Griewank and Walther, Algorithm 799: revolve (ACM TOMS 26, 2000). The stored states form a stack, whose least frequently
# accessed levels are on disk: Stumm and Walther (SIAM J. Sci. Comput. 31, 2009).


class Keep(NamedTuple):
    """Store the state before step `number`."""

    number: int
    on_disk: bool


class Advance(NamedTuple):
    """Run the steps first, ..., stop - 1."""

    first: int
    stop: int


class Reverse(NamedTuple):
    """Run and record the steps first, ..., stop - 1, then run their adjoints."""

    first: int
    stop: int


class Restore(NamedTuple):
    """Restore the stored state before step `number`; `last`: whether this is the last use of the state."""

    number: int
    last: bool


Action: TypeAlias = Keep | Advance | Reverse | Restore
_log = logging.getLogger("mpiad")
_MOST_KNOWN = 1000  # the maximum number of steps for which a schedule's actions are kept in memory, for the next gradient


def actions(steps: int, schedule: CheckpointSchedule) -> Iterator[Action]:
    """Yield the actions from the first step to the adjoint of the first step; `schedule` must allow at least one state."""
    numbers = CheckpointSchedule(schedule.memory, schedule.disk, recorded=schedule.recorded)
    return iter(_known_actions(steps, numbers)) if steps <= _MOST_KNOWN else _actions(steps, numbers)


@functools.lru_cache(64)
def _known_actions(steps: int, schedule: CheckpointSchedule) -> tuple[Action, ...]:
    return tuple(_actions(steps, schedule))


def _actions(steps: int, schedule: CheckpointSchedule) -> Iterator[Action]:
    length = schedule.recorded
    blocks = -(-steps // length)
    # Blocks of steps that are recorded together are scheduled like single steps.
    for action in _binomial(blocks, _levels_on_disk(blocks, schedule)):
        if isinstance(action, (Advance, Reverse)):
            yield type(action)(action.first * length, min(action.stop * length, steps))
        else:
            yield action._replace(number=action.number * length)


def _binomial(steps: int, on_disk: Sequence[bool]) -> Iterator[Action]:
    """Yield the schedule for a stack of states; `on_disk` tells whether each level of the stack is on disk."""
    position, stack = 0, []
    for end in range(steps, 0, -1):
        while position < end - 1:
            if not stack or stack[-1] != position:
                yield Keep(position, on_disk[len(stack)])
                stack.append(position)
            first, position = position, position + _steps_to_next_state(end - position, len(on_disk) - len(stack) + 1)
            yield Advance(first, position)
        yield Reverse(end - 1, end)
        if stack:
            position = stack[-1]
            last = position == end - 2
            yield Restore(position, last)
            if last:
                stack.pop()


def _steps_to_next_state(steps: int, states: int) -> int:
    """Return the optimal distance to the next stored state; `states`: those that may be stored from here to the end."""
    # For n remaining steps and s states, any m with β(s, r - 2) ≤ m ≤ β(s, r - 1) and β(s - 1, r - 1) ≤ n - m ≤ β(s - 1, r)
    # is optimal: the first m steps run at most r - 1 more times, and the remaining steps at most r more times, with s - 1
    # states. The returned m leads to the fewest stored states. r is the smallest number of repetitions for which s states
    # suffice.
    repeats = 1
    while comb(states + repeats, states) < steps:
        repeats += 1
    beta = comb(states + repeats - 1, states)  # β(s, r - 1)
    beta_1 = comb(states + repeats - 2, states - 1)  # β(s - 1, r - 1)
    beta_2 = comb(states + repeats - 3, states - 2) if states > 1 else 0  # β(s - 2, r - 1)
    return min(max(steps - beta_1 - beta_2, beta - beta_1, 1), beta)


def _levels_on_disk(steps: int, schedule: CheckpointSchedule) -> list[bool]:
    """Return a list with one entry per level of the stack: whether the level is on disk."""
    # The state before the last step needn't be stored, since it is available when the reverse pass begins.
    states = min(schedule.memory + schedule.disk, steps - 1)
    if not 0 < schedule.memory < states:
        return [schedule.memory == 0] * states
    # The most frequently accessed levels are in memory; the accesses are counted in a dry run of the schedule.
    accesses, depth = Counter(), -1
    for action in _binomial(steps, [False] * states):
        if isinstance(action, (Keep, Restore)):
            depth += isinstance(action, Keep)
            accesses[depth] += 1
            depth -= isinstance(action, Restore) and action.last
    in_memory = sorted(range(states), key=lambda depth: -accesses[depth])[: schedule.memory]
    return [depth not in in_memory for depth in range(states)]


class CheckpointSchedule(NamedTuple):
    """The number of states stored for the gradient of a loop, in memory and in a file.

    Parameters
    ----------
    memory : int
        The number of states stored in memory. The initial state is one of the states in memory or in the file.
    disk : int
        The number of additional states stored in a file, namely the states that are accessed least often.
    directory : path, optional
        Folder for the file; by default the system's folder for temporary files, which may be in memory. Each loop on each
        rank has its own file. It has no name, so it doesn't remain, even if the job is killed.
    recorded : int
        The number of consecutive steps whose intermediate values are in memory at the same time in the reverse pass. With
        √n stored states and √n recorded steps, each of n steps runs only twice.
    dtype : str, optional
        With ``"float32"``, states in double precision are stored in single precision (complex64 if complex), which halves
        the memory. The reverse pass then runs the steps again from states with seven digits; the forward run is unaffected.
    compress : bool
        Whether states are stored in 16 bits per entry, a quarter of the memory of double precision, as differences of
        neighboring entries. The accuracy is five to seven digits for smooth fields, and four digits for rough fields.
    host : bool
        Whether states on devices are stored in the host's memory, as they always are with `compress`.

    Examples
    --------
    For 100 steps, a state is stored every ten steps, and ten steps are recorded at a time. Each step runs twice.

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


def schedule_of(value: int | CheckpointSchedule | None, steps: int) -> CheckpointSchedule | None:
    """Return the user's argument `checkpoints` as a schedule, or None; raise a TypeError or ValueError if it is invalid."""
    # The schedule depends on these two numbers alone: if it depended on sizes of arrays, ranks could communicate in
    # different orders.
    if value is None:
        return None
    call, schedule = "timestepping.scan", value if isinstance(value, CheckpointSchedule) else CheckpointSchedule(value)
    for name, number in (("memory", schedule.memory), ("disk", schedule.disk)):
        if not isinstance(number, Integral) or isinstance(number, bool):
            raise TypeError(
                f"{call}: checkpoints must be None, an integer or CheckpointSchedule(memory=..., disk=...), "
                f"but {name} is {type(number).__name__} {number!r:.60}."
            )
        if number < 0:
            raise ValueError(f"{call}: checkpoints must not be negative, but {name}={number}.")
    recorded = positive_count(schedule.recorded, f"{call}: recorded")
    if schedule.dtype not in (None, "float32"):
        raise ValueError(
            f"{call}: states are stored in their own precision (dtype=None) or in single precision (dtype='float32'), but "
            f"got dtype={schedule.dtype!r:.40}."
        )
    for name, switch in (("compress", schedule.compress), ("host", schedule.host)):
        if not isinstance(switch, bool):
            raise TypeError(f"{call}: {name} must be True or False, but got {type(switch).__name__} {switch!r:.40}.")
    if schedule.compress and schedule.dtype is not None:
        raise ValueError(
            f"{call}: compress=True stores 16 bits per entry, but dtype={schedule.dtype!r} stores 32: use one of them."
        )
    if schedule.memory + schedule.disk < 1:
        raise ValueError(f"{call}: checkpoints={value!r} stores no state, but a gradient needs at least the first state.")
    if not isinstance(schedule.directory, (str, os.PathLike, type(None))):
        got = f"{type(schedule.directory).__name__} {schedule.directory!r:.60}"
        raise TypeError(f"{call}: directory must be the path of a folder, or None, but got {got}.")
    if schedule.disk and schedule.directory is not None and not os.path.isdir(schedule.directory):
        raise ValueError(f"{call}: no folder {os.fspath(schedule.directory)!r} for the checkpoints. Create it first.")
    memory = int(schedule.memory)
    if schedule is not value:
        recorded = max(min(memory, -(-steps // (memory + 1))), 1)
    return schedule._replace(memory=memory, disk=int(schedule.disk), recorded=recorded)


def runs(steps: int, schedule: CheckpointSchedule) -> int:
    """Return the number of steps that a loop and its gradient run, without the steps that are recorded.

    Each step is recorded once, so this is the number of recomputed steps.
    """
    total, is_forward = 0, True
    for action in actions(steps, schedule):
        # The last steps run in the forward pass, too.
        if isinstance(action, Advance) or is_forward and isinstance(action, Reverse):
            total += action.stop - action.first
            is_forward &= isinstance(action, Advance)
    return total


def log_repeated_steps(steps: int, schedule: CheckpointSchedule) -> None:
    """Log the number of recomputed steps, on request."""
    if _log.isEnabledFor(logging.INFO):
        text = "timestepping.scan: the gradient of %d steps recomputes %d steps, and records %d steps at a time."
        _log.info(text, steps, runs(steps, schedule), min(schedule.recorded, steps))
