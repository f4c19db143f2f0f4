"""`Jumps`: the changes of states by the affects of events, which occur at roots of conditions or at given times."""

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
from mpiad.ensemble.step_sweep import turns

# The departure of a condition from its root after an affect: its next sign, and the time until it vanishes again.
#
# After the affect the condition may still be zero, up to rounding: a bouncing ball, for example, is still on the ground.
# The next sign is determined from two values of the condition a little later, at the same time: after a step of Euler's
# method, and after a step of Heun's method from the same state. Euler's value minus the value now gives the slope of a
# parabola, Heun's value minus Euler's the curvature. Its second root is the time at which the condition vanishes again.

# A condition is considered to be at its root if its absolute value is at most AT_ROOT times its absolute value before the
# affect, or at most OF_WAY times its estimated change along the trajectory since the event last acted.
AT_ROOT, OF_WAY = 1e3, 1e-12
# The step of both methods: AHEAD times the time since the event last acted, but at least LEAST_AHEAD times the length of
# tspan, and at most AHEAD_OF_SHORT times the time since the event last acted. If this time is at most the fraction
# UNRESOLVED of tspan, the step is LEAST_AHEAD times the length of tspan.
AHEAD, AHEAD_OF_SHORT, LEAST_AHEAD = 1e-2, 0.25, 1e-6
# A condition is expected to vanish again and again if it returns within the fraction AT_ONCE of tspan, and either the event
# last acted within the fraction SHORT_PIECE of tspan before, or the slope of the condition is zero.
AT_ONCE, SHORT_PIECE = 1e-7, 1e-5
# In steps shorter than this fraction of tspan, rounding errors may determine the sign of a condition near its root.
UNRESOLVED = 1e-9
LEAST = 1e-300  # absolute value assigned to a condition of which only the sign is computed
# At least MANY_SHORT successive intervals between events, each of at most the fraction SHORT of tspan, are considered to be
# the beginning of an infinite sequence.
SHORT, MANY_SHORT = 1e-6, 10


def distance_ahead(elapsed: Array, span: Array) -> Array:
    """Return the step of Euler's and Heun's methods for `departure`; `elapsed`: the time since the event last acted."""
    least = LEAST_AHEAD * span
    distance = np.minimum(AHEAD_OF_SHORT * elapsed, np.maximum(AHEAD * elapsed, least))
    return np.where(elapsed > UNRESOLVED * span, distance, least)


def departure(
    values: tuple[Array, Array, Array, Array], direction: int, elapsed: Array, span: Array
) -> tuple[Array, Array, Array]:
    """Return a condition's next sign, the time until it vanishes again, and whether it will vanish again and again."""
    # The sign is 0 if it isn't at its root; the time is infinite if it doesn't vanish again in the event's direction.
    # `values`: the condition before and after the affect, and after steps of Euler's and Heun's methods, each shape (n,).
    before, now, euler, heun = values
    ahead, change, curvature = distance_ahead(elapsed, span), euler - now, heun - euler
    at_root = np.abs(now) <= np.maximum(AT_ROOT * np.abs(before), OF_WAY * np.abs(change * elapsed / ahead))
    # If the slope is zero, the sign chosen is opposite to that of the curvature. The parabola then returns to zero at
    # once, as for a ball that lies on the ground.
    side = np.where(change != 0, np.sign(change), -np.sign(curvature))
    returns = at_root & (side * curvature < 0) & ((direction == 0) | (side * direction < 0))
    back = np.where(returns, -ahead * change / curvature, np.inf)
    # For stiff systems the parabola predicts the return only if all times are short.
    endless = (back <= AT_ONCE * span) & ((change == 0) | (elapsed <= SHORT_PIECE * span))
    return np.where(at_root, side, 0.0), back, endless


# The derivative u' of solutions of M u' = f(u, p, t).
#
# If M is singular, with the null vectors N of M and L of Mᵀ, f determines u' only up to a vector N z. The algebraic
# equations Lᵀ f = 0 hold along a trajectory, so Lᵀ (f_u u' + f_t) = 0. One Newton step with N A⁻¹ Lᵀ (see
# `consistent_start`) gives N z. If values are traced, the second step gives first derivatives, and the third step gives
# second derivatives.
_STEPS = 3


def mass_matrix_rhs(batch: Batch, mass: Array | None, u: Array, leaves: Sequence[Any], t: Array) -> Array:
    """Return u' of solutions of M u' = f, shape (d, n), for at least two columns; `u`, `leaves` and `t` may be traced."""
    field = Field(batch)
    rate = field.array(u, leaves, t)
    if mass is None:
        return rate
    rate, free = applied(np.linalg.pinv(mass)[..., None], rate), null_vectors(mass)
    if not free.shape[1]:
        return rate
    plain, p = getval(u), batch.p.of_columns([getval(leaf) for leaf in leaves], len(batch.shape) > 1)
    gain = gains(jacobian_of(batch).matrices(plain, p, getval(t)), free, null_vectors(mass.T))
    zeros = np.zeros_like(getval(t))
    for _ in range(_STEPS):
        along = jvp(lambda s, rate=rate: field.array(u + s * rate, leaves, t + s), zeros, zeros + 1)[1]
        rate = rate - applied(gain, along)
    return rate


def beside(t: Array, direction: Array | float, real: np.dtype) -> Array:
    """Return the next times of f, in the precision `real`, before (direction -1) or after (1) given times of events."""
    # f may jump at these times, so a step that ends or begins there evaluates f at the nearest time on its own side.
    return np.nextafter(t.astype(real), (np.zeros_like(t) + direction * np.inf).astype(real)).astype(float)


FOUND = -1  # the `slot` of jumps at roots of conditions


class Jump(NamedTuple):
    """The effect of one event on several trajectories."""

    ids: Array  # int, shape (n,); the trajectories
    number: Array  # int, shape (n,); the number of steps before the jump
    event: int | Array  # the index of the event, or int, shape (n,)
    slot: Array  # int, shape (n,); the index of the given time; FOUND if the event was at a root of its condition
    time: Array  # shape (n,)
    before: Array  # shape (d, n); the states before the event
    after: Array  # shape (d, n); the states after the event

    def chosen(self, mask: Array) -> Jump:
        """Return the jumps of the trajectories in a mask."""
        return Jump(*(x[..., mask] if isinstance(x, np.ndarray) else x for x in self))


class Jumps:
    """The jumps of the trajectories in the mask `live`, sorted by trajectory and then by time."""

    def __init__(self, jumps: Sequence[Jump], live: Array):
        # Jumps of one trajectory after the same step must be given in the order of time.
        parts = zip(*(jump._replace(event=0 * jump.ids + jump.event) for jump in jumps))
        joined = [part[0] if len(jumps) == 1 else np.concatenate(part, axis=-1) for part in map(list, parts)]
        ids, number = joined[:2]
        if len(jumps) > 1 or (ids[1:] < ids[:-1]).any() or not live.all():
            order = np.lexsort((number, ids))
            order = order[live[ids[order]]]
            joined = [x[..., order] for x in joined]
        self.ids, self.number, self.event, self.slot, self.time, self.before, self.after = joined

    @cached_property
    def turn(self) -> Array:
        """Per jump, the number of earlier jumps of its trajectory after the same step."""
        return turns(self.ids, self.number)

    @cached_property
    def stepless(self) -> Array:
        """Per jump, whether no step ends at it, since it occurs at the start or directly after another jump."""
        return (self.turn > 0) | (self.number == 0)

    def at_start(self) -> list[Array]:
        """Return the indices of the jumps before the first step, at most one per trajectory in each array."""
        rows = np.flatnonzero(self.number == 0)
        if not rows.size:
            return []
        return [rows[self.turn[rows] == turn] for turn in range(int(self.turn[rows].max()) + 1)]
