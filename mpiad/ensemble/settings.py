"""How to solve: what all trajectories of a solve have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.event import Event
from mpiad.ensemble.jumps import Jump
from mpiad.ensemble.tableaus import Algorithm

MOVING = -1  # no return code yet


class Acting(NamedTuple):
    """What a solve with events that act needs to know beside their conditions: see `hybrid_solve`."""

    events: tuple[Event, ...]  # all; the settings have those with conditions
    # Given times, shape (m + 1, N), those of each trajectory in the order of its solve, the last infinitely far; and which
    # event each is.
    times: Array
    kinds: Array
    first: Array  # int, shape (N,); which given time comes next after the start
    codes: Array  # int, shape (N,); how those have ended that events at the start have ended, else MOVING
    started: tuple[Jump, ...]  # what events have done at the start

    @property
    def found(self) -> tuple[int, ...]:
        """Which of all events have conditions."""
        return tuple(e for e, event in enumerate(self.events) if event.times is None)

    def due(self, slot: Array, ids: Array) -> Array:
        """Return given times of some trajectories."""
        return self.times[slot, ids]

    def until(self, end: Array, slots: Array, ids: Array, signs: Array) -> Array:
        """Return where the next steps of some trajectories end at the latest: at the next given time, or where tspan does.

        That is in the direction of the solve, where tspan ends at `end`; `slots`, shape (N,), are of all.
        """
        return np.minimum(end, self.due(slots[ids], ids) * signs)

    def share(self, rows: slice) -> Acting:
        """Return that of some of the trajectories."""
        first, stop, _ = rows.indices(len(self.first))
        mine = [(jump, (jump.ids >= first) & (jump.ids < stop)) for jump in self.started]
        started = tuple(jump.chosen(own)._replace(ids=jump.ids[own] - first) for jump, own in mine)
        return Acting(self.events, self.times[:, rows], self.kinds[:, rows], self.first[rows], self.codes[rows], started)


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
    # {"tangent", "adjoint"} or None. How plain gradients are computed: by tangents or by an adjoint; None: by the number of
    # directions.
    gradient: str | None = None
    acting: Acting | None = None  # of a solve with events that act

    def share(self, rows: slice) -> Settings:
        """Return the settings of some of the trajectories."""
        saveat = self.saveat if self.saveat is None or np.ndim(self.saveat) == 1 else self.saveat[rows]
        return self._replace(saveat=saveat, acting=self.acting and self.acting.share(rows))
