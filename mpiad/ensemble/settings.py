"""How to solve: what all trajectories of a solve have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.event import Event
from mpiad.ensemble.tableaus import Algorithm

__all__ = ["DueTimes", "Settings"]


class DueTimes(NamedTuple):
    """When events are to act in a kernel, of all trajectories in the order of their solves."""

    times: Array  # shape (m + 1, N) or (m + 1, 1); the last infinitely far
    kinds: Array  # array of int, of that shape; which event each is
    # Int, shape (2, N). Of each trajectory which comes next, and after how many it has gone on; the kernel counts on.
    slots: Array
    number: Array  # int, shape (N, m + 1); after how many steps each came, which a kernel that records writes down
    before: Array  # shape (N, m + 1, d); the states then
    found: tuple[int, ...]  # which of all events have conditions: those of the settings


class Settings(NamedTuple):
    """The arguments of a solve that every backend needs."""

    alg: Algorithm
    rtol: float
    atol: Array | float  # float or array, shape (d, 1)
    dt: float | None  # of fixed steps, or the first step
    dtmax: float
    max_steps: int
    events: tuple[Event, ...]
    saveat: Array | None  # shape (n_saved,) or (N, n_saved), or None
    record: bool  # whether to keep all accepted steps
    checkpoints: int | None = None  # keep the states before every so many steps only
    progress: Callable[[int], None] | None = None  # ``progress(finished)`` is told how many more trajectories have ended
    ends: bool = False  # whether initial and final states are all that is saved: then there are no times in `saveat`
    mass: Array | None = None  # shape (d, d), or None; the mass matrix; None for the identity
    # Shape (N,), or None. Of a piece of a solve between events that act: the first steps, infinite where they are to be
    # estimated; None: it is a whole one.
    restarts: Array | None = None
    # {"tangent", "adjoint"} or None. How plain gradients are computed: by tangents or by an adjoint; None: by the number of
    # directions.
    gradient: str | None = None
    adjoint: str = "discrete"  # {"discrete", "continuous"}
    given_times: DueTimes | None = None  # of a solve by a kernel in which events act
    # ``again(ids, outcome)`` is told which trajectories have ended, and returns those that go on, with what it has then
    # written into the batch and `restarts`; the outcome has the events since the last time.
    again: Callable[[Array, Any], Array] | None = None

    def share(self, rows: slice) -> Settings:
        """Return the settings of some of the trajectories."""
        restarts = None if self.restarts is None else self.restarts[rows]
        saveat = self.saveat if self.saveat is None or np.ndim(self.saveat) == 1 else self.saveat[rows]
        return self._replace(saveat=saveat, restarts=restarts)
