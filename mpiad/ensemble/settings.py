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
    """When events are to act in a kernel, of all trajectories in the order of their solves.

    Parameters
    ----------
    times : array, shape (m + 1, N) or (m + 1, 1)
        The last infinitely far.
    kinds : array of int, of that shape
        Which event each is.
    slots : array of int, shape (2, N)
        Of each trajectory which comes next, and after how many it has gone on; the kernel counts on.
    number : array of int, shape (N, m + 1)
        After how many steps each came, which a kernel that records writes down.
    before : array, shape (N, m + 1, d)
        The states then.
    found : tuple of int
        Which of all events have conditions: those of the settings.
    """

    times: Array
    kinds: Array
    slots: Array
    number: Array
    before: Array
    found: tuple[int, ...]


class Settings(NamedTuple):
    """The arguments of a solve that every backend needs.

    Parameters
    ----------
    atol : float or array, shape (d, 1)
    dt : float or None
        Of fixed steps, or the first step.
    saveat : array, shape (n_saved,) or (N, n_saved), or None
    record : bool
        Whether to keep all accepted steps.
    checkpoints : int or None
        Keep the states before every so many steps only.
    progress : callable or None
        ``progress(finished)`` is told how many more trajectories have ended.
    mass : array, shape (d, d), or None
        The mass matrix; None for the identity.
    ends : bool
        Whether initial and final states are all that is saved: then there are no times in `saveat`.
    restarts : array, shape (N,), or None
        Of a piece of a solve between events that act: the first steps, infinite where they are to be estimated; None: it
        is a whole one.
    gradient : {"tangent", "adjoint"} or None
        How plain gradients are computed: by tangents or by an adjoint; None: by the number of directions.
    adjoint : {"discrete", "continuous"}
    given_times : DueTimes or None
        Of a solve by a kernel in which events act.
    again : callable or None
        ``again(ids, outcome)`` is told which trajectories have ended, and returns those that go on, with what it has then
        written into the batch and `restarts`; the outcome has the events since the last time.
    """

    alg: Algorithm
    rtol: float
    atol: Array | float
    dt: float | None
    dtmax: float
    max_steps: int
    events: tuple[Event, ...]
    saveat: Array | None
    record: bool
    checkpoints: int | None = None
    progress: Callable[[int], None] | None = None
    ends: bool = False
    mass: Array | None = None
    restarts: Array | None = None
    gradient: str | None = None
    adjoint: str = "discrete"
    given_times: DueTimes | None = None
    again: Callable[[Array, Any], Array] | None = None

    def share(self, rows: slice) -> Settings:
        """Return the settings of some of the trajectories."""
        restarts = None if self.restarts is None else self.restarts[rows]
        saveat = self.saveat if self.saveat is None or np.ndim(self.saveat) == 1 else self.saveat[rows]
        return self._replace(saveat=saveat, restarts=restarts)
