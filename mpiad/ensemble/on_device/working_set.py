"""The trajectories that still move, as columns of device arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array

__all__ = ["WorkingSet"]


class WorkingSet(NamedTuple):
    """n columns; times are in the direction of the solve.

    Parameters
    ----------
    ids : array of int, shape (n,)
        The trajectories.
    t, end, h, q2 : array, shape (n,)
        Times, ends, next steps, and the squared errors of the last accepted ones.
    number, tries, place : array of int, shape (n,)
        Accepted steps, all tries, and how many saved times have been passed.
    code : array of int, shape (n,)
        Return codes.
    live, rejected : array of bool, shape (n,)
        Which still move; whether the last try was rejected.
    sign : array, shape (n,), or None
        -1 for columns that go backwards; None where there are none.
    u, k : array, shape (d, n)
        The states, and f there in the direction of the solve.
    values : array, shape (events, n), or None
        Of the events' conditions there; None without events.
    leaves : list
        Of the parameters of these columns.
    """

    ids: Array
    t: Array
    end: Array
    h: Array
    q2: Array
    number: Array
    tries: Array
    place: Array
    code: Array
    live: Array
    rejected: Array
    sign: Array | None
    u: Array
    k: Array
    values: Array | None
    leaves: list[Any]

    def at(self, columns: Array, varies: list[bool]) -> WorkingSet:
        """Return some of the columns."""
        taken: list[Any] = [None if array is None else np.take(array, columns, axis=-1) for array in self[:-1]]
        leaves = [np.take(leaf, columns, axis=-1) if own else leaf for leaf, own in zip(self.leaves, varies)]
        return WorkingSet._make([*taken, leaves])
