"""Which row of the memory holds what: pairs of vectors in a ring, so that nothing is ever moved.

A slot has two rows. That of a pair holds a gradient change y and a step s. The current slot, behind the newest pair,
holds the gradient g where the solve is, and the direction from there once it is made; the one behind it takes the
gradients of trial points. When a trial is accepted, the slots only change their roles: g becomes y in place, the
direction is the step, and the oldest pair's slot becomes the next for trials.
"""

from __future__ import annotations

import numpy as np

__all__ = ["Ring"]


class Ring:
    """Roles of the slots.

    Parameters
    ----------
    maxcor : int
        Pairs that are kept.

    Attributes
    ----------
    first : int
        Slot of the oldest pair.
    count : int
        Number of pairs.
    """

    def __init__(self, maxcor: int):
        self._maxcor, self._slots = maxcor, maxcor + 2  # the current one, and that of trials
        self.first = self.count = 0

    @property
    def height(self) -> int:
        """Return how many rows there are."""
        return 2 * self._slots

    @property
    def gradient(self) -> int:
        """Return the current gradient's row; the direction's is the next."""
        return 2 * ((self.first + self.count) % self._slots)

    @property
    def newest(self) -> int:
        """Return the row of the newest pair's y; that of its s is the next."""
        return 2 * ((self.first + self.count - 1) % self._slots)

    def last(self, count: int) -> list[int]:
        """Return the rows of y of so many pairs, the newest first."""
        return [(self.newest - 2 * j) % self.height for j in range(count)]

    @property
    def trial(self) -> int:
        """Return the row for a trial point's gradient."""
        return 2 * ((self.first + self.count + 1) % self._slots)

    def advance(self) -> None:
        """Make the current slot the newest pair, and the trial's the current one."""
        if self.count < self._maxcor:
            self.count += 1
        else:
            self.first = (self.first + 1) % self._slots

    def forget(self) -> None:
        """Drop all pairs; the current slot stays what it is."""
        # Without pairs the current slot is the first.
        self.first, self.count = self.gradient // 2, 0

    def rows(self) -> np.ndarray:
        """Return the rows of all pairs, y before s and the oldest first, and the current gradient's at the end."""
        return (2 * self.first + np.arange(2 * self.count + 1)) % self.height

    def parts(self) -> list[tuple[slice, slice]]:
        """Return where those rows lie, as one slice or two, each with its places in `rows()`."""
        start, length = 2 * self.first, 2 * self.count + 1
        before_end = min(length, self.height - start)
        found = [(slice(start, start + before_end), slice(0, before_end))]
        if before_end < length:
            found.append((slice(0, length - before_end), slice(before_end, length)))
        return found
