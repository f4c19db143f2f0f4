"""When hyperbolas are tried, by numbers that are the same on all ranks.

They take several times the arithmetic of an iteration. So they are tried only where the domain has shown an end, and,
while they don't foretell the gradient, at ever longer intervals: an iteration longer after each failure.
"""

from __future__ import annotations

import numpy as np

__all__ = ["PAIRS", "Attempts"]

# Two pairs make a hyperbola; the third tells whether the one before was right.
PAIRS = 3


class Attempts:
    """What was tried so far.

    Attributes
    ----------
    at_edge : bool
        Whether a trial point wasn't finite so far.
    followed : bool
        Whether the direction leads to the zeros of hyperbolas.
    """

    def __init__(self) -> None:
        self.at_edge = self.followed = False
        self._unbroken = self._failures = self._wait = 0

    def count(self, kept: bool) -> None:
        """Note a step that makes a pair, or one that is left out: hyperbolas need gradients one after the other."""
        self._unbroken = self._unbroken + 1 if kept else 0

    def due(self, pairs: int) -> bool:
        """Return whether hyperbolas are to be tried now, where the memory holds so many pairs; called once an iteration."""
        if not self.at_edge or min(self._unbroken, pairs) < PAIRS:
            return False
        self._wait -= 1
        return self._wait < 0

    def note(self, tried: bool, followed: bool) -> None:
        """Note what came of it."""
        self.followed = followed
        if tried:
            self._failures = 0 if followed else self._failures + 1
            self._wait = max(self._failures - 1, 0)

    def numbers(self) -> np.ndarray:
        """Return all of it for a checkpoint."""
        return np.array([self.at_edge, self.followed, self._unbroken, self._failures, self._wait], dtype=float)

    def restore(self, numbers: np.ndarray) -> None:
        """Take over what `numbers` returned."""
        at_edge, followed, self._unbroken, self._failures, self._wait = (int(number) for number in numbers)
        self.at_edge, self.followed = bool(at_edge), bool(followed)
