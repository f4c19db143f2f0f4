"""The gradient as a hyperbola in each variable by itself, for functions whose domain has an end.

Towards the end of a domain gradients often go to infinity as 1/x does, that of a log barrier exactly. A straight line
through two gradients, which a pair of the memory is, knows nothing of the end: from far inside, its zero lies beyond. A
hyperbola through three has a pole, and its zero lies on this side of it; for a sum of log barriers that zero is the
minimiser. So where the last gradient is what hyperbolas through those before it foretold, each variable by itself, the
next direction leads to their zeros.

They take several times the arithmetic of an iteration. So they are tried only where the domain has shown an end, and,
while they don't foretell the gradient, at ever longer intervals: an iteration longer after each failure.

With t reckoned from here, where the gradient is g, the hyperbola is g(t) = (g + b t) / (1 + e t).

References
----------
.. [1] P. Jarratt and D. Nudds, "The use of rational functions in the iterative solution of equations on a digital
   computer", Computer J. 8 (1965): a linear fraction through the last three points, in one variable.
.. [2] K. Svanberg, "The method of moving asymptotes", Int. J. Numer. Meth. Engng. 24 (1987): models with a pole in each
   variable by itself.
"""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

import numpy as np

from mpiad._typing import Array

# Two pairs make a hyperbola; the third tells whether the one before was right.
PAIRS = 3
# The largest misfit, as the share of a change, at which the hyperbolas are followed. Where the function couples its
# variables they cost nothing on average, by trials on analytic centres and on barriers with quadratics.
_FORETOLD = 0.2
_ROUNDING = 4.0 * sys.float_info.epsilon


class Pair(NamedTuple):
    """A step and the change of the gradient along it, shape (n,) each."""

    step: Array
    change: Array


class Attempts:
    """When hyperbolas are tried, by numbers that are the same on all ranks.

    `at_edge`: whether a trial point wasn't finite so far. `followed`: whether the direction leads to the zeros of
    hyperbolas.
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


class _Curves(NamedTuple):
    """Hyperbolas: b and e above; which of them can be followed; the slope of the line through the last two gradients."""

    slope: Array
    bend: Array
    usable: Array
    secant: Array


def way(gradient: Array, newest: Pair, older: Pair, otherwise: float) -> Array:
    """Return how far the zeros are: in each variable of the hyperbola, or else of the line through the last two gradients.

    That is a way of descent, shape (n,). The last two steps led here one after the other; where a variable's tell no
    positive curvature, the gradient is multiplied by `otherwise`.
    """
    curves = _through(gradient, newest, older)
    line = np.where(_rises(curves.secant), curves.secant, 1.0 / otherwise)
    return -gradient / np.where(curves.usable, curves.slope, line)


def misfit(gradient: Array, newest: Pair, older: Pair, oldest: Pair) -> tuple[Array, Array]:
    """Return how far the gradient is from what was to be expected before the last step, and how much it has changed.

    Both are sums of squares, shape (), weighted by the inverse of each variable's curvature: their ratio doesn't depend on
    scales.
    """
    before = gradient - newest.change
    curves = _through(before, older, oldest)
    below = 1.0 + curves.bend * newest.step
    line = before + np.where(_rises(curves.secant), curves.secant, 0.0) * newest.step
    expected = np.where(curves.usable & (below > 0.0), (before + curves.slope * newest.step) / below, line)
    weight = np.abs(newest.step / newest.change)
    weight = np.where(np.isfinite(weight), weight, 0.0)
    return np.sum(weight * (gradient - expected) ** 2), np.sum(weight * newest.change**2)


def are_followed(slope: float, missed: float, changed: float) -> bool:
    """Return whether the way is taken, by its slope and the misfit of all variables; a NaN among them means no."""
    return bool(missed <= _FORETOLD**2 * changed and -math.inf < slope < 0.0)


def _through(gradient: Array, newest: Pair, older: Pair) -> _Curves:
    """Return the hyperbolas through a gradient and the two before it."""
    both = Pair(newest.step + older.step, newest.change + older.change)
    secant, farther = newest.change / newest.step, both.change / both.step
    bend = (farther - secant) / older.change
    slope = secant + bend * (gradient - newest.change)
    largest = np.maximum(np.abs(gradient), np.maximum(np.abs(gradient - newest.change), np.abs(gradient - both.change)))
    # From steps so short that the secants differ by rounding only, any pole might come out.
    noise = _ROUNDING * largest * (1.0 / np.abs(newest.step) + 1.0 / np.abs(both.step))
    usable = (np.abs(farther - secant) > noise) & np.isfinite(bend) & _rises(slope)
    # It must rise here as well as at its zero, else the pole lies between.
    return _Curves(slope, bend, usable & (slope > bend * gradient), secant)


def _rises(slope: Array) -> Array:
    return np.isfinite(slope) & (slope > 0.0)
