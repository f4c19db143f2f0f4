"""What a table of events says, trajectory by trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.events import Event

__all__ = ["events_of", "in_order", "traced_events"]


def events_of(
    rows: np.ndarray, events: Sequence[Event], failed: np.ndarray
) -> tuple[dict[int, list[tuple[int, float]]], list[tuple[int, int, int]]]:
    """Return the events of each trajectory in the order of time, and where those are whose times have derivatives.

    Parameters
    ----------
    rows : array, shape (5, m)
        The trajectory, which event, in which of its steps, at which part of it (infinite where none was), and when; in any
        order.
    failed : array of bool, shape (N,)

    Returns
    -------
    dict
        From trajectories to lists of (event, time).
    list of (int, int, int)
        Those on the way of trajectories that didn't fail: the trajectory, which of its events it is, and the table's row.
    """
    ids, event, _, _, times = rows
    found: dict[int, list[tuple[int, float]]] = {}
    passed = []
    for row in in_order(rows).tolist():
        i, e = int(ids[row]), int(event[row])
        mine = found.setdefault(i, [])
        if not (events[e].terminal or failed[i]):
            passed.append((i, len(mine), row))
        mine.append((e, float(times[row])))
    return found, passed


def in_order(rows: np.ndarray) -> np.ndarray:
    """Return which rows say that an event was, trajectory by trajectory in the order of time."""
    ids, event, number, part, _ = rows
    # Within a step by its parts; equal ones in the order in which the events were given.
    order = np.lexsort((event, part, number, ids))
    return order[np.isfinite(part[order])]


def traced_events(
    found: dict[int, list[tuple[int, float]]], passed: Sequence[tuple[int, int, int]], ended: np.ndarray, reached: Array,
    times: Array,
) -> dict[int, list[tuple[int, Any]]]:  # fmt: skip
    """Return the events with traced times, but for those of trajectories that failed.

    Parameters
    ----------
    found, passed
        Of `events_of`.
    ended : array of bool, shape (N,)
        Which trajectories a terminal event ended.
    reached, times : array, shapes (N,), (m,)
        Traced: when each ended, and when all events of the table were.
    """
    events: dict[int, list[tuple[int, Any]]] = {i: list(mine) for i, mine in found.items()}
    for i, order, row in passed:
        events[i][order] = events[i][order][0], times[row]
    for i in np.flatnonzero(ended).tolist():
        events[i][-1] = events[i][-1][0], reached[i]
    return events
