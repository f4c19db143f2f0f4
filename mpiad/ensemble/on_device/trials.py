"""One step of each column before it counts: where it leads, and what the host learns of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.on_device.events import Happened
from mpiad.ensemble.retcodes import ReturnCode

__all__ = ["ENDED", "Look", "Try"]

ENDED = ReturnCode.Terminated.code


class Try(NamedTuple):
    """What became of one step of each column.

    Parameters
    ----------
    t, u, k : array, shapes (n,), (d, n), (d, n)
        Where it led, and f there.
    accepted : array of bool, shape (n,)
    code : array of int, shape (n,)
        Below zero: still under way.
    h, q2 : array, shape (n,)
        The next steps, and the errors.
    values : array, shape (events, n), or None
        Of the events' conditions.
    """

    t: Array
    u: Array
    k: Array
    accepted: Array
    code: Array
    h: Array
    q2: Array
    values: Array | None

    def cut(self, happened: Happened, t: Array) -> Try:
        """Return it with the steps cut short that a terminal event ended; t are the times before."""
        ended = happened.ended
        if ended is None:
            return self
        end = t + np.where(ended, happened.part, 0.0) * (self.t - t)
        code = np.where(ended, ENDED, self.code)
        return self._replace(t=np.where(ended, end, self.t), u=np.where(ended, happened.states, self.u), code=code)


class Look(NamedTuple):
    """What the host learns of a round: how many still move, how many saved times lie in the longest step, and events."""

    alive: int
    most: int
    count: Any
    events: list[int]
