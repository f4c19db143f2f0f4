"""Events that changed the state, in the record of a solve: the step after which each acted, and its effect on the state."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.differentiation.products import jvp
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.consistent_start import applied, gains, null_vectors
from mpiad.ensemble.field_jacobian import jacobian_of
from mpiad.ensemble.linearization import Field
from mpiad.ensemble.step_sweep import Columns

# How a condition leaves its root after an affect: on which side, and when it vanishes again.
#
# After the affect the condition may still vanish, as when a bouncing ball is still on the ground, and rounding decides on
# its sign. Its further course is found from its values a little later: after a straight step of the trajectory, and after a
# curved one of second order. They define a parabola, whose second root is the time at which the condition vanishes again.


# Bounds on the condition after the affect, relative to its value before and to its change along the trajectory, for it to
# be considered at its root.
AT_ROOT, OF_WAY = 1e3, 1e-12
# How far ahead to evaluate the condition, as a fraction of the time between events, and if that is short; and the least
# distance as a fraction of tspan.
AHEAD, AHEAD_OF_SHORT, LEAST_AHEAD = 1e-2, 0.25, 1e-6
# The fraction of tspan within which a condition must not vanish again, if the time before the event was short, too.
AT_ONCE, SHORT_PIECE = 1e-7, 1e-5
# In a step that is so small a fraction of tspan, rounding may change the sign of a condition that was near its root.
UNRESOLVED = 1e-9
LEAST = 1e-300  # the value of a condition of which only the sign is known
# Number of events in a row, each within this fraction of tspan after the one before, that are taken for an infinite
# sequence.
SHORT, MOST_SHORT = 1e-6, 10


class Departure(NamedTuple):
    """How the condition of an event continues, for several trajectories."""

    side: Array  # shape (n,); the sign that it takes; 0 if it isn't at its root, and its own sign counts
    # Shape (n,). The time until it vanishes again in the event's direction; infinite if it isn't at its root, or doesn't.
    back: Array
    endless: Array  # bool, shape (n,); whether that is at once, and would therefore repeat endlessly


def distance_ahead(gone: Array, span: Array) -> Array:
    """Return how far ahead to look, given the times since the events acted last and the lengths of tspan."""
    least = LEAST_AHEAD * span
    return np.where(gone > UNRESOLVED * span, np.minimum(AHEAD_OF_SHORT * gone, np.maximum(AHEAD * gone, least)), least)


def departure(values: tuple[Array, Array, Array, Array], direction: int, gone: Array, span: Array) -> Departure:
    """Return how a condition leaves its root.

    Its values, each of shape (n,), are those before the affect, after it, and at `distance_ahead` later along a straight
    and along a curved step; `gone` and `span` are as for `distance_ahead`.
    """
    before, now, then, there = values
    ahead, rise, bend = distance_ahead(gone, span), then - now, there - then
    at_root = np.abs(now) <= np.maximum(AT_ROOT * np.abs(before), OF_WAY * np.abs(rise * gone / ahead))
    # If its slope is zero, the condition returns at once to the side that it came from.
    side = np.where(rise != 0, np.sign(rise), -np.sign(bend))
    returns = at_root & (side * bend < 0) & ((direction == 0) | (side * direction < 0))
    back = np.where(returns, -ahead * rise / bend, np.inf)
    # For a stiff system two derivatives don't predict the return, unless all times are short.
    endless = (back <= AT_ONCE * span) & ((rise == 0) | (gone <= SHORT_PIECE * span))
    return Departure(np.where(at_root, side, 0.0), back, endless)


# u' of M u' = f(u, p, t) at columns, used to shift states when no step does: f itself if M is the identity.
#
# If M is singular, f determines u' only up to N z, with the null vectors N of M. The algebraic equations Lᵀ f = 0 hold
# along a trajectory, so Lᵀ (f_u u' + f_t) = 0, and with N A⁻¹ Lᵀ of `consistent_start` this part is found in one step.
#
# Further steps with the same matrix, which are ordinary traced arithmetic, propagate the derivatives: one step per order.


# The last two are for first and second derivatives.
_STEPS = 3


def rates_of_change(batch: Batch, mass: Array | None, u: Array, leaves: Sequence[Any], t: Array) -> Array:
    """Return u' of at least two columns, shape (d, n), given their parameters' leaves; all but M may be traced."""
    field = Field(batch)
    rate = field.array(u, leaves, t)
    if mass is None:
        return rate
    rate, free = applied(np.linalg.pinv(mass)[..., None], rate), null_vectors(mass)
    if not free.shape[1]:
        return rate
    plain, p = getval(u), batch.p.of_columns([getval(leaf) for leaf in leaves], len(batch.shape) > 1)
    jacobian = np.zeros_like(plain, shape=(len(plain), *plain.shape))
    jacobian_of(batch).write(jacobian, plain, p, getval(t))
    gain, still = gains(jacobian, free, null_vectors(mass.T)), np.zeros_like(getval(t))
    for _ in range(_STEPS):
        along = jvp(lambda s, rate=rate: field.array(u + s * rate, leaves, t + s), still, still + 1)[1]
        rate = rate - applied(gain, along)
    return rate


FOUND = -1


class Jump(NamedTuple):
    """The effect of one event on several trajectories."""

    # `ids`, `number`: int, shape (n,); the trajectories, and the number of steps that each had made.
    ids: Array
    number: Array
    event: int | Array
    slot: Array  # int, shape (n,); the index of the given time; FOUND if a condition had vanished
    time: Array  # shape (n,)
    # `before`, `after`: shape (d, n).
    before: Array
    after: Array

    def chosen(self, mask: Array) -> Jump:
        """Return the jumps of the trajectories in a mask."""
        ids, number, event, slot, time, before, after = self
        event = event[mask] if isinstance(event, np.ndarray) else event
        return Jump(ids[mask], number[mask], event, slot[mask], time[mask], before[:, mask], after[:, mask])


class Jumps:
    """All jumps of a solve, sorted by trajectory and then by time.

    Its arrays are those of `Jump`: `before` and `after` of shape (d, m), the others of shape (m,).
    """

    def __init__(self, jumps: Sequence[Jump], live: Array):
        parts = zip(*(jump._replace(event=0 * jump.ids + jump.event) for jump in jumps))
        joined = [part[0] if len(jumps) == 1 else np.concatenate(part, axis=-1) for part in map(list, parts)]
        ids = joined[0]
        if (ids[1:] < ids[:-1]).any() or not live.all():
            order = np.argsort(ids, kind="stable")
            order = order[live[ids[order]]]
            joined = [x[..., order] for x in joined]
        self.ids, self.number, self.event, self.slot, self.time, self.before, self.after = joined

    @cached_property
    def turn(self) -> Array:
        """The number of earlier jumps of the trajectory after the same step."""
        first = np.ones(len(self.ids), bool)
        first[1:] = (self.ids[1:] != self.ids[:-1]) | (self.number[1:] != self.number[:-1])
        place = np.arange(len(first))
        return place - np.maximum.accumulate(np.where(first, place, 0))

    @cached_property
    def kinds(self) -> list[tuple[int, Columns]]:
        """Each event with jumps, and the indices of its jumps."""
        events = np.flatnonzero(np.bincount(self.event)).tolist()
        # Without a copy if there is only one event.
        return [(e, np.flatnonzero(self.event == e) if len(events) > 1 else slice(None)) for e in events]

    @cached_property
    def still(self) -> Array:
        """Whether no step ends at a jump, since another jump or the start is at the same time."""
        return (self.turn > 0) | (self.number == 0)

    @cached_property
    def lengthens(self) -> Array:
        """Whether the step before ends at the given time of the jump, wherever that time moves."""
        return ~self.still & (self.slot != FOUND)

    def bounds(self, count: int) -> Array:
        """Return the index of the first jump per trajectory, and the number of all jumps, shape (count + 1,)."""
        return np.searchsorted(self.ids, np.arange(count + 1))

    def before_steps(self) -> Jumps:
        """Return the jumps before the first step."""
        mask = self.number == 0
        own = Jump(self.ids, self.number, self.event, self.slot, self.time, self.before, self.after).chosen(mask)
        return Jumps([own], np.ones(int(own.ids.max(initial=-1)) + 1, bool))

    def at_start(self) -> list[Array]:
        """Return the indices of the jumps before the first step, at most one per trajectory in each array."""
        rows = np.flatnonzero(self.number == 0)
        if not rows.size:
            return []
        return [rows[self.turn[rows] == turn] for turn in range(int(self.turn[rows].max()) + 1)]
