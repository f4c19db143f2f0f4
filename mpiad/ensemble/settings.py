"""The settings of a solve, the same for all trajectories."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.event import Event
from mpiad.ensemble.jumps import Jump
from mpiad.ensemble.tableaus import Algorithm

MOVING = -1  # the code of trajectories that haven't ended

# ``progress(ended)`` receives the number of newly ended trajectories.
Progress: TypeAlias = Callable[[int], None] | None


class Advance(NamedTuple):
    """How far a running solve by arrays has advanced; totals are estimated from the covered parts of tspan."""

    turns: float  # iterations of the loop over steps
    steps: float  # tried steps of all trajectories
    all_turns: float  # the estimated totals at the end of the solve
    all_steps: float
    size: int  # the number of trajectories


# ``watch(advance)`` returns the number of turns after which it wants to be called again; it may end the solve by raising.
Watch: TypeAlias = Callable[[Advance], float]


class Acting(NamedTuple):
    """The data of a solve with events that act, that is, change the state (see `solve`)."""

    events: tuple[Event, ...]  # all events; `Settings.events` are those with conditions
    times: Array  # shape (m + 1, N); m given times per trajectory, in the order of the solve, and infinity
    kinds: Array  # int, shape (m + 1, N); the index of the event at each given time
    first: Array  # index of the first given time after the start, int, shape (N,)
    codes: Array  # int, shape (N,); the return codes of trajectories that events at the start have ended, else MOVING
    started: tuple[Jump, ...]  # the state changes at the start
    varies: bool = False  # whether states change at the start, or given times have derivatives or aren't common to all

    @property
    def conditions(self) -> tuple[int, ...]:
        """The indices of the events with conditions."""
        return tuple(e for e, event in enumerate(self.events) if event.times is None)

    def until(self, end: Array, slots: Array, ids: Array, signs: Array) -> Array:
        """Return bounds on the ends of the next steps of the trajectories `ids`: next given times or ends of tspan."""
        # All times are in the direction of the solve (see `initialization`); `slots` has shape (N,).
        return np.minimum(end, self.times[slots[ids], ids] * signs)

    def share(self, rows: slice) -> Acting:
        """Return the data of some of the trajectories."""
        first, stop, _ = rows.indices(len(self.first))
        masks = [(jump.ids >= first) & (jump.ids < stop) for jump in self.started]
        started = tuple(jump.chosen(mask)._replace(ids=jump.ids[mask] - first) for jump, mask in zip(self.started, masks))
        of_rows = self.times[:, rows], self.kinds[:, rows], self.first[rows], self.codes[rows]
        return Acting(self.events, *of_rows, started, self.varies)


class Settings(NamedTuple):
    """The arguments of a solve that every backend needs."""

    alg: Algorithm
    rtol: Array | float  # float or array, shape (d, 1); then `atol` is an array, too
    atol: Array | float  # float or array, shape (d, 1)
    dt: float | None  # size of fixed steps, or of the first step
    dtmax: float
    max_steps: int
    events: tuple[Event, ...]  # if `acting` is given, only the events with conditions
    saveat: Array | None  # shape (n_saved,) or (N, n_saved), or None
    record: bool  # whether to store all accepted steps
    checkpoints: int | None = None  # if given, only the states before every `checkpoints`-th step are stored
    progress: Progress = None
    watch: Watch | None = None  # of a solve by arrays on the host
    ends: bool = False  # whether only initial and final states are saved; then `saveat` is empty
    mass: Array | None = None  # the mass matrix, shape (d, d); None for the identity
    gradient: str | None = None  # {"tangent", "adjoint"}; by default tangents if a kernel propagates them
    acting: Acting | None = None  # None unless events act

    def share(self, rows: slice) -> Settings:
        """Return the settings of some of the trajectories."""
        saveat = self.saveat if self.saveat is None or np.ndim(self.saveat) == 1 else self.saveat[rows]
        return self._replace(saveat=saveat, acting=self.acting and self.acting.share(rows))
