"""One step of several trajectories, as those see it who look at steps: events, saved times, the record."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array

__all__ = ["Step"]


class Step(NamedTuple):
    """A step of n columns; times are in the direction of the solve.

    Parameters
    ----------
    ids, number : array of int, shape (n,)
        The trajectories, and the number of this step among the accepted ones of each, from 0.
    accepted : array of bool, shape (n,)
    t, h, t_new : array, shape (n,)
    u, new : array, shape (d, n)
        Before and after.
    k : list of array, shape (d, n), or on a device array, shape (stages, d, n)
        The stages.
    sign : array, shape (n,), or None
        -1 for columns that go backwards; None where there are none.
    """

    ids: Array
    number: Array
    accepted: Array
    t: Array
    h: Array
    t_new: Array
    u: Array
    new: Array
    k: Any
    sign: Array | None

    def at(self, columns: Array) -> Step:
        """Return the step of some columns."""
        taken: list = [np.take(array, columns, axis=-1) for array in self[:8]]
        block = not isinstance(self.k, list)
        taken.append(np.take(self.k, columns, axis=-1) if block else [np.take(k, columns, axis=-1) for k in self.k])
        taken.append(None if self.sign is None else self.sign[columns])
        return Step._make(taken)

    def actual(self, times: Array) -> Array:
        """Return times, or signed steps, as f sees them."""
        return times if self.sign is None else times * self.sign
