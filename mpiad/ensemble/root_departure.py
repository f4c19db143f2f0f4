"""How a condition leaves its root after an affect: on which side, and when it will be back.

The affect may leave the condition where it vanishes, as a ball that bounces is still on the ground, and rounding decides on
its sign. What it does next is told by its values a little further on: after a straight step of the trajectory, and after a
bent one of second order. They make a parabola, whose second root is when it will be back.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpiad._typing import Array

# What a condition may be after the affect, by what it was before or by what it became on the way, to be at its root.
AT_ROOT, OF_WAY = 1e3, 1e-12
# How far ahead that is looked at, in parts of what lies between events, and if that is short; and at least, of tspan.
AHEAD, AHEAD_OF_SHORT, LEAST_AHEAD = 1e-2, 0.25, 1e-6
# In which part of tspan it must not be back, where what lay before was short, too.
AT_ONCE, SHORT_PIECE = 1e-7, 1e-5
# In a step of so small a part of tspan rounding may change the sign of a condition that was near its root.
UNRESOLVED = 1e-9
LEAST = 1e-300  # the value of a condition of which nothing is known but its sign
# So many events in a row, each within so small a part of tspan after the one before, are without end.
SHORT, MOST_SHORT = 1e-6, 10


class Departure(NamedTuple):
    """How the condition of an event goes on, for several trajectories."""

    side: Array  # shape (n,); the sign that it takes; 0 where it isn't at its root, and its own sign counts
    # Shape (n,). After what time it vanishes again as the event asks for; infinite where it isn't at its root, or doesn't.
    back: Array
    endless: Array  # bool, shape (n,); whether that is at once, and so would be again and again


def distance_ahead(gone: Array, span: Array) -> Array:
    """Return how far ahead to look, by how long it is since the events acted last and the lengths of tspan."""
    least = LEAST_AHEAD * span
    return np.where(gone > UNRESOLVED * span, np.minimum(AHEAD_OF_SHORT * gone, np.maximum(AHEAD * gone, least)), least)


def departure(values: tuple[Array, Array, Array, Array], direction: int, gone: Array, span: Array) -> Departure:
    """Return how a condition leaves its root.

    Its values, each of shape (n,), are those before the affect, after it, and `distance_ahead` later along a straight and
    along a bent step; `gone` and `span` are as there.
    """
    before, now, then, there = values
    ahead, rise, bend = distance_ahead(gone, span), then - now, there - then
    at_root = np.abs(now) <= np.maximum(AT_ROOT * np.abs(before), OF_WAY * np.abs(rise * gone / ahead))
    # What doesn't rise at all goes back at once to where it came from.
    side = np.where(rise != 0, np.sign(rise), -np.sign(bend))
    returns = at_root & (side * bend < 0) & ((direction == 0) | (side * direction < 0))
    back = np.where(returns, -ahead * rise / bend, np.inf)
    # Of a stiff system nothing is known of the way back by two derivatives, unless all is short.
    endless = (back <= AT_ONCE * span) & ((rise == 0) | (gone <= SHORT_PIECE * span))
    return Departure(np.where(at_root, side, 0.0), back, endless)
