"""What is kept of a solve with events that change the state: its pieces and its jumps, for derivatives."""

from __future__ import annotations

from typing import NamedTuple

from mpiad._typing import Array
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.outcome import Outcome
from mpiad.ensemble.settings import Settings

__all__ = ["AT_END", "HERE", "Acted", "Flow"]

AT_END, HERE = -1, -2


class Flow(NamedTuple):
    """A piece: a solve of some trajectories.

    Parameters
    ----------
    ids : array of int, shape (n,)
        Which trajectories.
    slot : array of int, shape (n,)
        The given time at which the piece ends at the latest; AT_END where that is the end of tspan, and HERE where it is
        its start, since an event has ended the trajectory.
    saved : tuple of array of int, shape (m,)
        Of what it saved the columns, and the places among the piece's times and among all.
    """

    ids: Array
    slot: Array
    batch: Batch
    settings: Settings
    outcome: Outcome
    saved: tuple[Array, Array, Array]


class Acted(NamedTuple):
    """An event that changed the states of some trajectories, those with the numbers `ids`.

    Parameters
    ----------
    slot : array of int, shape (n,), or None
        At which given times; None where a condition vanished.
    """

    ids: Array
    event: int
    slot: Array | None
