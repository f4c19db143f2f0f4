"""The way over the steps of a block of trajectories, in visits: one step of several columns each.

All derivatives of a solve are sweeps over such visits: the adjoint backwards, tangents and replays forwards. A sweep asks
its sweep for the visits, and for what lies in each: saved values, events, ends of tspan. So each sweep is written once, for
records of two kinds, whose difference is data:

- On the host (`sorted_walk`) steps have been put into order, and a visit is about those columns that took a step.
- On a device (`on_device.device_run`) a visit is a round of the solve, of all columns of a block, with steps of length zero
  where none was accepted: there nothing can be counted without waiting. What a column saves in one step are several values
  in slots, and what it doesn't save goes to a slot that nobody reads.

Arrays follow NumPy's protocols, so the arithmetic is the same text for both. What differs in it is in `Coefficients`: sums
over stages, which the host takes one by one (a column's bits depend on no other column) and a device at once.

Where only some states were kept, those between are computed again, stretch by stretch, from one kept state to the next.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpiad._typing import Array

# Numbers of columns, or a slice of them.
Columns: TypeAlias = Array | slice


class Visit(NamedTuple):
    """A step of the first columns of a block."""

    number: int  # of the visit, counted by its sweep
    # `t`, `h`: shape (width,). Actual times before the step, and its signed sizes; zero where none was made.
    t: Array
    h: Array
    u: Array  # shape (d, width); before the step
    about: Any  # what its sweep knows of it: on the host the columns for which it is the last step, on a device the round
    made: Array | None = None  # bool, shape (width,), or None; which columns made this step; None where all did

    def of(self, columns: Columns) -> Visit:
        """Return the visit of some columns."""
        # An array of indices would leave the states in another order than that which NumPy takes fastest.
        u = self.u[:, columns] if type(columns) is slice else np.take(self.u, columns, axis=1)
        return self._replace(t=self.t[columns], h=self.h[columns], u=u)


class Saved(NamedTuple):
    """Values saved in one step, of which no column has two."""

    # `ids`, `place`: int, shape (m,). The trajectories, and which of their saved values each is.
    ids: Array
    place: Array
    columns: Columns  # int, shape (m,); in the visit
    # `x`, `h`: shape (m,). The part of the step that is gone there, and the step.
    x: Array = None
    h: Array = None
    weights: Sequence[Array] | Array = ()  # sequence of array, shape (m,); of the stages
    # Bool, shape (m,). Whether the last stage's share is taken in this step; if not, in the next one, whose first stage it
    # is.
    whole: Array | None = None

    def of(self, states: Array) -> Array:
        """Return the columns that these values belong to."""
        return states[..., self.columns]

    def seeds(self, saved: Array) -> Array:
        """Return the cotangents of these values, shape (d, m), by those of all, shape (N, n_saved, d)."""
        return np.swapaxes(saved[self.ids, self.place], -1, -2)


class SavedInStep(NamedTuple):
    """Values saved in one step, in groups in which no column comes twice."""

    at_end: Sequence[Saved] = ()
    inside: Sequence[Saved] = ()
    # Those inside the step before, whose last stage is this one's first, with its weight.
    handed_on: Sequence[Saved] = ()


class LocatedEvent(NamedTuple):
    """One event in one step of several columns."""

    event: int  # its place among the events of the solve
    terminal: bool
    columns: Array  # int, shape (m,); those that met it; of a terminal one those that it ended
    # `x`, `time`: shape (m,). The part of the step that is gone there, and when.
    x: Array
    time: Array
    row: Array  # int, shape (m,); which of all events these are


class StepSweep:
    """The visits of a block."""

    ids: Array  # int, shape (n,); the trajectories, where their states live
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
        """Return where stretches begin."""

    @abstractmethod
    def _stretch(self, begin: int) -> Iterator[Visit]:
        """Return the visits of one stretch, from its first step to its last."""

    @abstractmethod
    def saved(self, visit: Visit) -> SavedInStep:
        """Return the values saved in the step."""

    @abstractmethod
    def located(self, visit: Visit) -> Sequence[LocatedEvent]:
        """Return the events in the step, those on the way before those that end it."""

    def jumps(self, visit: Visit) -> Sequence[tuple[Array, Array]]:
        """Return which jumps of the run follow the step, in their order, and their columns."""
        return ()

    @abstractmethod
    def moves(self, visit: Visit) -> Array:
        """Tell in which columns the step ends where tspan does: array of bool, shape (width,)."""
