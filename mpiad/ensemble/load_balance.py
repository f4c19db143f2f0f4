"""An ensemble divided into contiguous shares that take the same time, by what its trajectories cost in the last solve.

What a share costs: the steps of its trajectories, and its turns, of which there are as many as its longest trajectory has
steps. A turn has a price however few columns are left in it. So the longest trajectories belong together, and the share
that has them gets fewer of the others.
"""

from __future__ import annotations

import numpy as np

from mpiad._typing import Array

__all__ = ["LoadBalance"]

# Numbers that all ranks compute from all trajectories: in so many blocks a share misses its due by a thousandth at most.
_BLOCKS = 1024
_TRIES = 8


class LoadBalance:
    """What trajectories cost, in steps of a column.

    Parameters
    ----------
    steps : array, shape (N,)
        Of each.
    entry : float
        What each costs beside its steps.
    turn : float
        What a turn costs beside its columns.
    size : int
        The number of shares.
    """

    def __init__(self, steps: Array, entry: float, turn: float, size: int):
        count = len(steps)
        width = max(1, count // (_BLOCKS * size))
        starts = np.arange(0, count, width)
        self._edges = np.append(starts, count)
        self._costs = np.add.reduceat(steps, starts) + entry * np.diff(self._edges)
        self._longest = np.maximum.reduceat(steps, starts) + entry
        self._done = np.concatenate([[0.0], np.cumsum(self._costs)])
        self._turn, self._size = turn, size

    def bounds(self) -> Array:
        """Return where the shares begin and end, shape (size + 1,)."""
        own = np.zeros(self._size)
        best = shares = self._divided(own)
        shortest = self._slowest(best)
        for _ in range(_TRIES):
            # Half the way: a share that gives up its longest trajectory would get it back in the next try.
            before, own = shares, (own + self._turns(shares)) / 2
            shares = self._divided(own)
            if np.array_equal(shares, before):
                break
            slowest = self._slowest(shares)
            if slowest < shortest:
                best, shortest = shares, slowest
        return self._edges[best]

    def _divided(self, own: Array) -> Array:
        """Return shares, in blocks, that are equal with these costs of the shares' own."""
        done = self._done[1:]
        due = np.cumsum(np.maximum((done[-1] + own.sum()) / self._size - own, 0.0))[:-1]
        due = np.minimum(due, done[-1])  # clipped at zero, the dues may sum up to more than there is
        inner = np.searchsorted(done, due)
        # Before or after the block that crosses what is due, whichever is nearer.
        inner += done[inner] - due < due - (done[inner] - self._costs[inner])
        return np.concatenate([[0], np.maximum.accumulate(inner), [len(done)]])

    def _turns(self, shares: Array) -> Array:
        """Return what the shares' turns cost."""
        filled = np.diff(shares) > 0
        longest = np.zeros(self._size)
        # Empty shares have no place in reduceat, whose next group begins where they do.
        longest[filled] = np.maximum.reduceat(self._longest, shares[:-1][filled])
        return self._turn * longest

    def _slowest(self, shares: Array) -> float:
        return float((np.diff(self._done[shares]) + self._turns(shares)).max())
