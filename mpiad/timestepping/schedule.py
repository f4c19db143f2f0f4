"""In which order a loop is run, kept, run again and reversed: binomial checkpointing.

With s states kept, the first one counted, and no step run more than r times, β(s, r) = (s + r)! / (s! r!) steps can be
reversed at most. For β(s, r - 1) < n ≤ β(s, r) the least number of steps run is r n - β(s + 1, r - 1): Griewank and
Walther, Algorithm 799: revolve (ACM TOMS 26, 2000). The states are a stack, and those places in it are on disk that are
written and read least often: Stumm and Walther (SIAM J. Sci. Comput. 31, 2009).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import comb
from typing import NamedTuple

from mpiad.timestepping.checkpoints import CheckpointSchedule


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
