"""Sweeps over the steps of a block of trajectories, in visits: one step of several columns each.

All derivatives of a solve are computed in such visits: the adjoint backwards, tangents and replays forwards. They get from
the sweep the visits, and the saved values, events and ends of tspan in each. So each is written once, for two kinds of
records, which differ in data only:

- On the host (`run.SortedSweep`) steps have been sorted, and a visit has the columns that took a step.
- On a device (`on_device.device_run`) a visit is a round of the solve, of all columns of a block, with steps of length zero
  for columns without an accepted one, as counting them would synchronize. The values that a column saves in one step are in
  slots; unused ones write to a slot that is never read.

Arrays follow NumPy's protocols, so the arithmetic is the same source for both. `Coefficients` has the difference: sums over
stages, which the host adds one by one (a column's bits depend on no other column) and a device at once.

If only some states were kept, those between are computed again, segment by segment, from one kept state to the next.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpiad._typing import Array

# Indices of columns, or a slice of them.
Columns: TypeAlias = Array | slice


class Visit(NamedTuple):
    """A step of the first columns of a block."""

    number: int  # of the visit, counted by its sweep
    # `t`, `h`: shape (width,). Actual times before the step, and its signed sizes; zero if none was made.
    t: Array
    h: Array
    u: Array  # shape (d, width); before the step
    about: Any  # data of its sweep: on the host the columns for which it is the last step, on a device the round
    made: Array | None = None  # bool, shape (width,); which columns made this step; None: all

    def of(self, columns: Columns) -> Visit:
        """Return the visit of some columns."""
        # Indexing with an array would return the states in a memory order that NumPy processes more slowly.
        u = self.u[:, columns] if type(columns) is slice else np.take(self.u, columns, axis=1)
        return self._replace(t=self.t[columns], h=self.h[columns], u=u)


class Saved(NamedTuple):
    """Values saved in one step, at most one per column."""

    # `ids`, `place`: int, shape (m,). The trajectories, and the indices of the values among their saved ones.
    ids: Array
    place: Array
    columns: Columns  # int, shape (m,); in the visit
    # `x`, `h`: shape (m,). The fraction of the step at which they lie, and its size.
    x: Array = None
    h: Array = None
    weights: Sequence[Array] | Array = ()  # sequence of array, shape (m,); the weights of the stages
    # Bool, shape (m,). Whether the last stage's contribution is added in this step; otherwise it is added in the next one,
    # whose first stage it is.
    whole: Array | None = None

    def of(self, states: Array) -> Array:
        """Return the columns of an array that these values belong to."""
        return states[..., self.columns]

    def seeds(self, saved: Array) -> Array:
        """Return the cotangents of these values, shape (d, m), from those of all, shape (N, n_saved, d)."""
        return np.swapaxes(saved[self.ids, self.place], -1, -2)


class SavedInStep(NamedTuple):
    """Values saved in one step, in groups with at most one per column."""

    at_end: Sequence[Saved] = ()
    inside: Sequence[Saved] = ()
    # Values inside the step before, whose last stage is this one's first, with its weight.
    handed_on: Sequence[Saved] = ()


class LocatedEvent(NamedTuple):
    """One event in one step of several columns."""

    event: int  # its index among the events of the solve
    terminal: bool
    columns: Array  # the columns with the event; for a terminal event, those that it ended
    # `x`, `time`: shape (m,). The fraction of the step at which it lies, and its time.
    x: Array
    time: Array
    row: Array  # int, shape (m,); the rows among all events


class StepSweep:
    """The visits of a block."""

    ids: Array  # int, shape (n,); the trajectories, on the device of their states
    leaves: list[Any]  # of the parameters of these columns

    def backwards(self) -> Iterator[Visit]:
        """Return the visits from the last step to the first."""
        for begin in reversed(self._starts()):
            yield from reversed(list(self._stretch(begin)))

    def forwards(self) -> Iterator[Visit]:
        """Return the visits from the first step to the last."""
        for begin in self._starts():
            yield from self._stretch(begin)

    @abstractmethod
    def _starts(self) -> range:
        """Return the first steps of the segments."""

    @abstractmethod
    def _stretch(self, begin: int) -> Iterator[Visit]:
        """Return the visits of one segment, from its first step to its last."""

    @abstractmethod
    def saved(self, visit: Visit) -> SavedInStep:
        """Return the values saved in the step."""

    @abstractmethod
    def located(self, visit: Visit) -> Sequence[LocatedEvent]:
        """Return the events in the step, first those that don't end it."""

    def jumps(self, visit: Visit) -> Sequence[tuple[Array, Array]]:
        """Return the jumps of the run that follow the step, in order, and their columns."""
        return ()

    @abstractmethod
    def moves(self, visit: Visit) -> Array:
        """Return in which columns the step ends at the end of tspan: array of bool, shape (width,)."""
