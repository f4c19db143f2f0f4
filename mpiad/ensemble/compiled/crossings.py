"""Events as kernels write them: one row each, in the order in which lanes met them."""

from __future__ import annotations

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.outcome import Outcome

__all__ = ["H", "T", "U", "note_crossings", "room_for"]

# A row is the trajectory, which event, in which of its steps (from 0), the part of the step that is gone there, and when;
# then what the step started from: its time, its signed size, and the components of the state, of a complex one its parts.
T, H, U = 5, 6, 7
# Rows for which there is room at first, beside those of one turn.
_ROWS = 1024


def room_for(turn: int, d: int, before: Array | None = None) -> Array:
    """Return a table for events, with rows for one turn at least; after `before`, a longer one that begins with it.

    Parameters
    ----------
    turn : int
        How many events one turn can bring; none where no event is looked for.
    d : int
        Components of a state.
    before : array, shape (m, 7 + d), optional
    """
    if before is None:
        return np.empty((_ROWS + turn if turn else 0, U + d))
    longer = np.empty((2 * len(before) + turn, U + d))
    longer[: len(before)] = before
    return longer


def note_crossings(outcome: Outcome, tables: list[Array]) -> None:
    """Put the events of all shares into an outcome, those of each trajectory in the order of time.

    Parameters
    ----------
    outcome : Outcome
    tables : list of array, shape (m, 7 + d)
    """
    rows = np.concatenate(tables)
    # Within a step by its parts; equal ones in the order in which the events were given.
    outcome.crossings = rows = rows[np.lexsort((rows[:, 1], rows[:, 3], rows[:, 2], rows[:, 0]))]
    numbers, (part, time) = rows[:, :3].astype(int).T.tolist(), rows[:, 3:5].T.tolist()
    for i, e, j, x, t in zip(*numbers, part, time):
        outcome.event_times.setdefault(i, []).append((e, t))
        outcome.event_places.setdefault(i, []).append((j, x))
