"""The tables of accepted steps and events that CPU kernels write, with one row each, in the order of computation.

The memory of a record is reused by the next solve: a training loop records the same ensemble repeatedly, and the operating
system provides new memory page by page, which takes longer than the solve.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.arguments import from_parts, is_complex
from mpiad.ensemble.events import in_order
from mpiad.ensemble.jumps import FOUND, Jump
from mpiad.ensemble.outcome import Outcome
from mpiad.ensemble.record import Steps
from mpiad.ensemble.settings import Acting

# The row of an event has the trajectory, the event, the step (from 0), the fraction of the step at which the event lies,
# and its time; then the time before the step (column T), the signed size of the step (H), and the real components of the
# state before the step (from U on). If events act in a recorded solve, the components of the state at the event follow.
T, H, U = 5, 6, 7


class Tape(NamedTuple):
    """The steps of some trajectories; each row refers to the previous row of the same trajectory."""

    # `first`, `stop`: the range of trajectories.
    first: int
    stop: int
    rows: Array  # shape (m, 2 + d); time before the step, signed size, and real components of the state before the step
    previous: Array  # int, shape (m,); the row of the trajectory's previous step, or -1

    def steps(self, last: Array, counts: Array, dtype: np.dtype) -> Steps:
        """Return the steps, sorted into sweeps; `last`, `counts`, shape (N,): rows of the last steps, numbers of steps."""
        d = (self.rows.shape[1] - 2) // (2 if is_complex(dtype) else 1)
        steps = Steps(counts[self.first : self.stop], d, dtype)
        row = last[self.first : self.stop][steps.order]
        for s, width in enumerate(steps.widths):
            row = row[:width]  # trajectories with this many steps come first in the order
            ids, values = steps.order[:width], self.rows[row]
            steps.fill(ids, steps.counts[ids] - 1 - s, values[:, 0], values[:, 1], from_parts(values[:, 2:], dtype).T)
            row = self.previous[row]
        return steps


def note_crossings(outcome: Outcome, tables: list[Array], d: int) -> Array:
    """Store the sorted events in `outcome`; return the states at events, shape (m, d), or (m, 0) if not recorded."""
    rows = np.concatenate(tables)
    rows = rows[in_order(rows.T)]
    outcome.crossings, outcome.event_table = rows[:, : U + d], rows[:, :5].T
    return rows[:, U + d :]


def jumps_of(
    outcome: Outcome, acting: Acting, numbers: Array, before: Array, at_conditions: Array, dtype: np.dtype
) -> list[Jump]:
    """Return the jumps of a recorded solve. The record contains the states after jumps, so `Jump.after` isn't needed.

    `numbers`, shape (N, slots): the number of steps before each given time, or -1 if the time wasn't reached. `before`,
    shape (N, slots, d), `at_conditions`, shape (m, d): the states at given times and at roots, before events acted.
    """
    (count, slots), numbers = numbers.shape, numbers.ravel()
    rows = slice(None) if (numbers >= 0).all() else np.flatnonzero(numbers >= 0)
    ids, slot = np.repeat(np.arange(count), slots)[rows], np.tile(np.arange(slots), count)[rows]
    states = from_parts(before.reshape(-1, before.shape[2])[rows], dtype).T
    kinds, times = (table[:slots].T.ravel()[rows] for table in (acting.kinds, acting.times))
    jumps = [Jump(ids, numbers[rows], kinds, slot, times, states, states)]
    if outcome.event_table is not None:  # jumps at roots of conditions come before those at given times of the same step
        acts = np.array([acting.events[e].acts for e in acting.found])[outcome.event_table[1].astype(int)]
        ids, event, number = outcome.event_table[:3, acts].astype(int)
        states = from_parts(at_conditions[acts], dtype).T
        slots, time = np.full(len(ids), FOUND), outcome.event_table[4, acts]
        jumps.insert(0, Jump(ids, number + 1, np.array(acting.found)[event], slots, time, states, states))
    return jumps
