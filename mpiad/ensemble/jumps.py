"""Events that changed the state, in the record of a solve: after which step each was, and what it changed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.differentiation.products import jvp
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.consistent_start import applied, gains, null_vectors
from mpiad.ensemble.field_jacobian import jacobian_of
from mpiad.ensemble.linearization import Field
from mpiad.ensemble.seeds import grouped
from mpiad.ensemble.sorted_sweep import columns_of
from mpiad.ensemble.step_sweep import Columns

if TYPE_CHECKING:
    from mpiad.ensemble.sorted_sweep import SortedSweep


# How a condition leaves its root after an affect: on which side, and when it will be back.
#
# The affect may leave the condition where it vanishes, as a ball that bounces is still on the ground, and rounding decides
# on its sign. What it does next is told by its values a little further on: after a straight step of the trajectory, and
# after a bent one of second order. They make a parabola, whose second root is when it will be back.


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


# u' of M u' = f(u, p, t) at columns, by which states move where no step says it: f itself, where M is the identity.
#
# Where M is singular, f leaves a part N z of u' open, with the null vectors N of M. The algebraic equations Lᵀ f = 0 hold
# all along a trajectory, so Lᵀ (f_u u' + f_t) = 0, and with N A⁻¹ Lᵀ of `consistent_start` that part is found in one step.
#
# Further steps with the same matrix, which are ordinary traced arithmetic, hand on the derivatives: one for each order.


# The last two are for first and second derivatives.
_STEPS = 3


def rates_of_change(batch: Batch, mass: Array | None, u: Array, leaves: Sequence[Any], t: Array) -> Array:
    """Return u' of at least two columns, shape (d, n), by their parameters' leaves; what isn't M may be traced."""
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
    """What one event did to some trajectories at once."""

    # `ids`, `number`: int, shape (n,); the trajectories, and how many steps each had made.
    ids: Array
    number: Array
    event: int | Array
    slot: Array  # int, shape (n,); at which given times; FOUND where a condition had vanished
    time: Array  # shape (n,)
    # `before`, `after`: shape (d, n).
    before: Array
    after: Array

    def chosen(self, mask: Array) -> Jump:
        """Return what it did to some of them."""
        ids, number, event, slot, time, before, after = self
        event = event[mask] if isinstance(event, np.ndarray) else event
        return Jump(ids[mask], number[mask], event, slot[mask], time[mask], before[:, mask], after[:, mask])


class Jumps:
    """All jumps of a solve, trajectory by trajectory, those of each in their order.

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
        """How many others of the trajectory came after the same step."""
        first = np.ones(len(self.ids), bool)
        first[1:] = (self.ids[1:] != self.ids[:-1]) | (self.number[1:] != self.number[:-1])
        place = np.arange(len(first))
        return place - np.maximum.accumulate(np.where(first, place, 0))

    @cached_property
    def kinds(self) -> list[tuple[int, Columns]]:
        """Each event, and which jumps are of it."""
        events = np.flatnonzero(np.bincount(self.event)).tolist()
        # Of a single one without a copy of all.
        return [(e, np.flatnonzero(self.event == e) if len(events) > 1 else slice(None)) for e in events]

    @cached_property
    def still(self) -> Array:
        """Whether no step ends at a jump, since one before was at the same time, or the start."""
        return (self.turn > 0) | (self.number == 0)

    @cached_property
    def lengthens(self) -> Array:
        """Whether the step before ends at the given time of the jump, whenever that is."""
        return ~self.still & (self.slot != FOUND)

    def bounds(self, count: int) -> Array:
        """Return which is the first of each of `count` trajectories, and behind them how many there are, (count + 1,)."""
        return np.searchsorted(self.ids, np.arange(count + 1))

    def before_steps(self) -> Jumps:
        """Return those that come before the first step."""
        mask = self.number == 0
        own = Jump(self.ids, self.number, self.event, self.slot, self.time, self.before, self.after).chosen(mask)
        return Jumps([own], np.ones(int(own.ids.max(initial=-1)) + 1, bool))

    def at_start(self) -> list[Array]:
        """Return which come before the first step, one of each trajectory after the other."""
        rows = np.flatnonzero(self.number == 0)
        if not rows.size:
            return []
        return [rows[self.turn[rows] == turn] for turn in range(int(self.turn[rows].max()) + 1)]

    def by_visits(self, sweep: SortedSweep) -> dict[int, list[tuple[Array, Array]]]:
        """Return by the visits of a sweep which come after its step, with their columns; one of each column at a time."""
        mine, columns = columns_of(sweep, np.where(self.number > 0, self.ids, -1))
        visits = sweep.visit_of(columns, self.number[mine] - 1)
        return grouped(visits, self.turn[mine], mine, columns)
