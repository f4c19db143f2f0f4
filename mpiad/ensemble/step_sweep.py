"""Sweeps over the recorded steps of a block of trajectories; a *visit* is one step of several trajectories (columns).

All derivatives of a solve are computed in sweeps, by the adjoint backwards and by replays forwards. Two kinds exist:

- On the host (`run.SortedSweep`) steps have been sorted, and a visit has the columns that took a step.
- On a device (`device_rounds`) a visit is a round of the solve, with all columns of a block; columns without an
  accepted step have steps of size zero, since selecting columns would synchronize the device. A column may save
  several values in one step, each in a slot; unused values are written to a slot that is never read.

If only some states were stored, the other states are computed again, segment by segment, from one stored state to the next.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpiad._typing import Array

# Indices of columns, or a slice of them.
Columns: TypeAlias = Array | slice


def starts_of_runs(*keys: Array) -> Array:
    """Return the first index of each group of adjacent entries that are equal in all keys."""
    first = np.ones(len(keys[0]), bool)
    first[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return np.flatnonzero(first)


def turns(*keys: Array) -> Array:
    """Return for each entry the number of preceding adjacent entries that are equal in all keys."""
    starts = starts_of_runs(*keys)
    return np.arange(len(keys[0])) - np.repeat(starts, np.diff(np.append(starts, len(keys[0]))))


class Visit(NamedTuple):
    """A step of the first columns of a block."""

    number: int  # the index of the visit in its sweep
    t: Array  # shape (width,); actual times before the step
    h: Array  # shape (width,); signed step sizes, zero for columns without a step
    u: Array  # shape (d, width); states before the step
    about: Any  # on the host: a slice of the columns of which this is the last step; on a device: the `Round`
    step_mask: Array | None = None  # bool, shape (width,); a mask of the columns that have a step; None for all columns


class Saved(NamedTuple):
    """Values saved in one step, at most one per column."""

    ids: Array  # int, shape (m,); the trajectories
    place: Array  # int, shape (m,); the index of each value among the saved values of its trajectory
    columns: Columns  # int, shape (m,); the columns of the visit
    x: Array = None  # shape (m,); the fraction of the step
    weights: Sequence[Array] | Array = ()  # per stage: shape (m,); the weights of the interpolant

    def of(self, states: Array) -> Array:
        """Return the columns of `states` in which these values are saved."""
        return states[..., self.columns]

    def seeds(self, saved: Array) -> Array:
        """Return the cotangents of these values, (d, m), given the cotangents `saved` of all values, (N, n_saved, d)."""
        return np.swapaxes(saved[self.ids, self.place], -1, -2)


class SavedInStep(NamedTuple):
    """Values saved in one step, in groups with at most one per column."""

    at_end: Sequence[Saved] = ()
    inside: Sequence[Saved] = ()


class LocatedEvent(NamedTuple):
    """One event in one step of several columns."""

    event: int  # the index of the event among the events of the solve
    stops: bool  # whether the step ends at the event
    columns: Array  # the columns with the event; if `stops`, the columns in which it ends the step
    x: Array  # shape (m,); the fraction of the step
    time: Array  # shape (m,)
    row: Array  # int, shape (m,); the index of `time` among the times of all events, or among the final times


class EventTimes(NamedTuple):
    """The final times of trajectories, and the times of events, on the device of the states."""

    reached: Array  # shape (N,)
    ids: Array  # int, shape (m,); the trajectories of the events in `crossed`
    crossed: Array  # shape (m,); the times of all events except, on the host, terminal ones that don't act
    order: Array = None  # on a device: int, shape (m,), on the host; the permutation that sorts the events


class StepSweep:
    """The visits of a block of trajectories."""

    ids: Array  # int, shape (n,); the trajectories, on the device of their states
    leaves: list[Any]  # the leaves of the parameters of these columns

    def backwards(self) -> Iterator[Visit]:
        """Return the visits from the last step to the first."""
        for begin in reversed(self._starts()):
            yield from reversed(list(self._segment(begin)))

    def forwards(self) -> Iterator[Visit]:
        """Return the visits from the first step to the last."""
        for begin in self._starts():
            yield from self._segment(begin)

    @abstractmethod
    def _starts(self) -> range:
        """Return the first steps of the segments."""

    @abstractmethod
    def _segment(self, begin: int) -> Iterator[Visit]:
        """Return the visits of one segment, from its first step to its last."""

    @abstractmethod
    def saved(self, visit: Visit) -> SavedInStep:
        """Return the values saved in the step."""

    @abstractmethod
    def located(self, visit: Visit) -> Sequence[LocatedEvent]:
        """Return the events in the step; an event at which the step ends comes last."""

    def jumps(self, visit: Visit) -> Sequence[tuple[Array, Array]]:
        """Return the indices of the jumps (state changes by events) after the step, in order, and their columns."""
        return ()

    def limits(self, visit: Visit) -> tuple[Array, Array] | None:
        """Return the times of f at both ends of the step if they are given times of events, NaN for other columns."""
        return None

    @abstractmethod
    def moves(self, visit: Visit) -> Array:
        """Return a mask of the columns in which the step ends at the end of tspan, shape (width,)."""
