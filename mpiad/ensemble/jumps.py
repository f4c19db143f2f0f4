"""`Jumps`: the events that changed the state in a solve, with the steps after which they acted, and their effects."""

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

# The departure of a condition from its root after an affect: its sign, and the time at which it vanishes again.
#
# After the affect the condition may still be zero, up to rounding: a bouncing ball, for example, is still on the ground.
# Its sign is then determined from its values a little later, after a step of first order and one of second order. These
# define a parabola, whose second root is the time at which the condition vanishes again.


# A condition is considered at its root if it is smaller than these multiples of its value before the affect, and of its
# change along the trajectory.
AT_ROOT, OF_WAY = 1e3, 1e-12
# The distance at which the condition is evaluated, as a fraction of the time between events (the second if that is short),
# and the smallest distance as a fraction of tspan.
AHEAD, AHEAD_OF_SHORT, LEAST_AHEAD = 1e-2, 0.25, 1e-6
# If a condition vanishes again within this fraction of tspan, after an equally short time before the event (second number),
# it would do so endlessly.
AT_ONCE, SHORT_PIECE = 1e-7, 1e-5
# In steps below this fraction of tspan, rounding may change the sign of a condition near its root.
UNRESOLVED = 1e-9
LEAST = 1e-300  # absolute value assigned to a condition of which only the sign is known
# Successive events within this fraction of tspan are considered an infinite sequence if there are more than this number.
SHORT, MOST_SHORT = 1e-6, 10


class Departure(NamedTuple):
    """The departure of a condition from its root, for several trajectories."""

    side: Array  # shape (n,); the sign that the condition takes; 0 if it isn't at its root
    # Shape (n,). The time until it vanishes again in the event's direction; infinite if it isn't at its root, or doesn't.
    back: Array
    endless: Array  # bool, shape (n,); whether that is immediately, and would repeat endlessly


def distance_ahead(elapsed: Array, span: Array) -> Array:
    """Return the distance at which to evaluate conditions; `elapsed`: the times since the events last acted."""
    least = LEAST_AHEAD * span
    distance = np.minimum(AHEAD_OF_SHORT * elapsed, np.maximum(AHEAD * elapsed, least))
    return np.where(elapsed > UNRESOLVED * span, distance, least)


def departure(values: tuple[Array, Array, Array, Array], direction: int, elapsed: Array, span: Array) -> Departure:
    """Return the departure of a condition from its root.

    `values`: the condition before the affect, after it, and at `distance_ahead` along steps of first and of second order,
    each of shape (n,). `elapsed`, `span`: as for `distance_ahead`.
    """
    before, now, euler, heun = values
    ahead, rise, bend = distance_ahead(elapsed, span), euler - now, heun - euler
    at_root = np.abs(now) <= np.maximum(AT_ROOT * np.abs(before), OF_WAY * np.abs(rise * elapsed / ahead))
    # If the slope is zero, the sign is that of the curvature.
    side = np.where(rise != 0, np.sign(rise), -np.sign(bend))
    returns = at_root & (side * bend < 0) & ((direction == 0) | (side * direction < 0))
    back = np.where(returns, -ahead * rise / bend, np.inf)
    # For stiff systems the parabola doesn't predict the return, unless all times are short.
    endless = (back <= AT_ONCE * span) & ((rise == 0) | (elapsed <= SHORT_PIECE * span))
    return Departure(np.where(at_root, side, 0.0), back, endless)


# The derivative u' of solutions of M u' = f(u, p, t), for shifts of states in time.
#
# If M is singular, f determines u' only up to N z, with the null vectors N of M. The algebraic equations Lᵀ f = 0 hold
# along a trajectory, so Lᵀ (f_u u' + f_t) = 0, and with N A⁻¹ Lᵀ of `consistent_start` this part is found in one step.
#
# Further steps with the same matrix, which are ordinary traced arithmetic, propagate the derivatives: one step per order.


# The last two are for first and second derivatives.
_STEPS = 3


def rates_of_change(batch: Batch, mass: Array | None, u: Array, leaves: Sequence[Any], t: Array) -> Array:
    """Return u' for at least two columns, shape (d, n); `leaves`: their parameters. Arguments but `mass` may be traced."""
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
        return Jump(*(x[..., mask] if isinstance(x, np.ndarray) else x for x in self))


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
        """Which jumps aren't at the end of a step, since another jump or the start is at the same time."""
        return (self.turn > 0) | (self.number == 0)

    @cached_property
    def lengthens(self) -> Array:
        """Which jumps are at given times that determine the end of the preceding step."""
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
