"""The rounds of a solve on the device once more, in functions that traces see.

Derivatives of derivatives are taken of it, and those by tspan: steps are fixed, but they move with the start, and the last
one of each trajectory ends where tspan does. The first derivatives of plain arrays (`adjoint`, `tangents`) are those of
this function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval, isbox

import mpiad.device.numpy as there
from mpiad._typing import Array
from mpiad.device.transfer import array_to_device
from mpiad.differentiation.products import jvp
from mpiad.ensemble.events import Event
from mpiad.ensemble.field import Field, is_whole
from mpiad.ensemble.on_device.events import Met
from mpiad.ensemble.on_device.record import Block, Record, Round
from mpiad.ensemble.replay import ROOT_STEPS
from mpiad.transport.device_arrays import arrays_of

__all__ = ["replayed"]


def replayed(
    record: Record, u0: Array, start: Array, end: Array, leaves: Sequence[Any]
) -> tuple[Array | None, Array, Array | None, Array | None]:
    """Return the results of a solve as functions that traces see.

    Parameters
    ----------
    record : Record
    u0 : array, shape (d, N)
    start, end : array, shape (N,)
        On the host.
    leaves : sequence
        All leaves of the parameters.

    Returns
    -------
    tuple
        Saved states (N, n_saved, d), None without any, zero where one failed or wasn't reached; final states (N, d); where
        events were looked for the times at which trajectories ended (N,), and those of all events (m,).
    """
    replay = _Replay(record, start, end, leaves)
    with np.errstate(all="ignore"):
        u0 = _masked(record, u0)
        states = u0
        for block in record.blocks:
            states = replay.through(block, states)
        return replay.saved(u0, states), anp.transpose(states), *replay.times()


class _Replay:
    """What was saved on the way, put together at the end."""

    def __init__(self, record: Record, start: Array, end: Array, leaves: Sequence[Any]):
        self._record, self._leaves, self._field = record, leaves, Field(record.batch)
        self._home: Any = arrays_of(record.batch.u0)
        self._values: list[Array] = []
        self._index: Any = None
        self._filled = 1  # the first is for what wasn't reached
        self._shift: Any = None
        self._crossings: list[tuple[Array, Met, Array]] = []
        if isbox(start) or isbox(end):
            # Numbers that are zero, but not their derivatives.
            shift, longer = start - getval(start), (end - getval(end)) - (start - getval(start))
            self._shift = [array_to_device(part, self._home) for part in (shift, longer)]
            self._ends = self._home.to_device(record.batch.end * record.signs)

    def through(self, block: Block, states: Array) -> Array:
        """Return the states of all trajectories, shape (d, N), after the rounds of a block."""
        varies = self._record.batch.p.varies
        leaves = [leaf[..., block.ids] if own else leaf for leaf, own in zip(self._leaves, varies)]
        u = states[:, block.ids]
        for done in block.rounds:
            u = self._round(block, done, u, leaves)
        # By a look-up of each trajectory's column, which derivatives can go through, instead of an assignment.
        column, member = self._numbers(block), self._home.full((states.shape[1],), False, bool)
        member[block.ids] = True
        return anp.where(member, u[:, column], states) if len(block.ids) else states

    def _numbers(self, block: Block) -> Array:
        found = self._home.full((self._record.batch.size,), 0, np.int64)
        found[block.ids] = self._home.arange(len(block.ids))
        return found

    def _round(self, block: Block, done: Round, u: Array, leaves: list[Any]) -> Array:
        step = _Step(self._record, self._field, block, done, self._moved(block, done))
        new = step.taken(u, leaves)
        cut = new
        for met in done.met:
            x = step.root(self._record.events.asked[met.event], met, u, new, leaves)  # type: ignore[union-attr]
            self._crossings.append((block.ids[met.columns], met, step.time(met.columns, x)))
            if met.terminal:
                cut = self._put(cut, met.columns, step.at(met.columns, x, u, new, leaves))
        if done.most:
            self._save(block, done, step, u, new, cut, leaves)
        return cut

    def _put(self, old: Array, columns: Array, new: Array) -> Array:
        """Return an array with some of its columns replaced, by a look-up that derivatives can go through."""
        order = self._home.arange(old.shape[-1])
        order[columns] = old.shape[-1] + self._home.arange(len(columns))
        return there.concatenate([old, new], axis=-1)[..., order]

    def _moved(self, block: Block, done: Round) -> tuple[Array, Array] | None:
        """Return by how much the start of a round moves with tspan, and its length: zeros with derivatives."""
        if self._shift is None:
            return None
        shift, longer = (part[block.ids] for part in self._shift)
        last = done.accepted & (done.t_new == self._ends[block.ids])
        for met in done.met:
            if met.terminal:  # it ends there before
                last[met.columns] = False
        return shift, anp.where(last, longer, 0.0)

    def _save(
        self, block: Block, done: Round, step: _Step, u: Array, new: Array, cut: Array, leaves: list[Any]
    ) -> None:
        due = self._record.due(block, done)
        values = cut[None]
        if self._record.saves.inside:  # type: ignore[union-attr]
            values = anp.where(due.at_end[:, None], values, step.inside(u, new, due.x, leaves))
        if self._index is None:
            self._index = self._home.full((self._record.batch.size, self._record.saves.count + 1), 0, np.int64)  # type: ignore[union-attr]
        count = due.x.size
        self._index[block.ids, due.slot] = self._filled + self._home.arange(count).reshape(due.x.shape)
        self._filled += count
        self._values.append(anp.reshape(anp.transpose(values, (0, 2, 1)), (count, -1)))

    def saved(self, u0: Array, end: Array) -> Array | None:
        """Return the saved states, shape (N, n_saved, d)."""
        saves = self._record.saves
        if saves is None:
            return None
        found = anp.zeros_like(getval(u0), shape=(u0.shape[1], saves.count, len(u0)))
        if self._index is not None:
            values = there.concatenate([anp.zeros_like(getval(self._values[0])[:1]), *self._values], axis=0)
            found = values[self._index[:, : saves.count]]
        for mask, states in zip(self._record.at_ends(), (u0, end)):
            if mask.any():
                found = anp.where(self._home.to_device(mask)[:, :, None], anp.transpose(states)[:, None], found)
        return found


    def times(self) -> tuple[Array | None, Array | None]:
        """Return when trajectories ended, and when all events were, None without any that were looked for."""
        events, shift = self._record.events, self._shift
        if events is None:
            return None, None
        # What no event ended, ended where tspan does.
        reached, times = events.reached if shift is None else events.reached + shift[0] + shift[1], events.times
        for ids, met, time in self._crossings:
            times = self._put(times, met.row, time)
            if met.terminal:
                reached = self._put(reached, ids, time)
        return reached, times


class _Step:
    """One round of several columns; the times are actual, the sizes signed."""

    def __init__(self, record: Record, field: Field, block: Block, done: Round, moved: tuple[Array, Array] | None):
        self._table, self._field, self._block, self._done, self._moved = record.table, field, block, done, moved
        self._batch = record.batch
        h = done.steps() if block.sign is None else done.steps() * block.sign
        self._h: Any = h.astype(self._table.real)
        if moved is not None:
            self._h = self._h + moved[1].astype(self._table.real)
        self._k: list[Array] = []

    def taken(self, u: Array, leaves: list[Any]) -> Array:
        """Return the states after the step."""
        y = u
        for i, row in enumerate(self._table.tableau.a):
            self._k.append(self._rate(y, leaves, i))
            y = u + self._h * _combined(row, self._k)
        return y

    def inside(self, u: Array, new: Array, x: Array, leaves: list[Any]) -> Array:
        """Return the states at parts of the step, shape (m, d, n), x of shape (m, n)."""
        weights = self._weights(self._stayed(x))
        return u + self._h * sum(weight[:, None] * one for weight, one in zip(weights, self._stages(new, leaves)))

    def at(self, columns: Array, x: Array, u: Array, new: Array, leaves: list[Any]) -> Array:
        """Return the states of some columns at parts of the step, shape (d, m), x of shape (m,)."""
        total = sum(weight * k[:, columns] for weight, k in zip(self._weights(x), self._stages(new, leaves)))
        return u[:, columns] + self._h[columns] * total

    def time(self, columns: Array, x: Array) -> Array:
        """Return the times of some columns at parts of the step."""
        done, sign, moved = self._done, self._block.sign, self._moved
        t, h = done.t[columns], done.h[columns]
        if sign is not None:
            t, h = t * sign[columns], h * sign[columns]
        if moved is not None:
            t, h = t + moved[0][columns], h + moved[1][columns]
        return t + x * h

    def root(self, event: Event, met: Met, u: Array, new: Array, leaves: list[Any]) -> Array:
        """Return the root of an event's condition, known by its value, as a function of all that moves it."""
        own = [x[..., met.columns] if varies else x for x, varies in zip(leaves, self._batch.p.varies)]
        x: Any = met.x

        def value(x: Array) -> Array:
            states = self.at(met.columns, x, u, new, leaves)
            return event.condition(states, self._batch.p.build(own), self.time(met.columns, x))

        # Newton's steps stay where they are, and each doubles the order to which the root's derivatives are right.
        for _ in range(ROOT_STEPS):
            found, slope = jvp(value, x, np.ones_like(met.x))
            x = x - (found - getval(found)) / slope
        return x

    def _weights(self, x: Array) -> list[Array]:
        return [_polynomial(row, x).astype(self._table.real) for row in self._table.tableau.dense.tolist()]

    def _stages(self, new: Array, leaves: list[Any]) -> list[Array]:
        if len(self._k) < self._table.tableau.stages:
            self._k.append(self._rate(new, leaves, len(self._k)))
        return self._k

    def _stayed(self, x: Array) -> Array:
        """Return the parts of the step at which saved times lie, which stay while the step moves."""
        if self._moved is None:
            return x
        plain = getval(self._h)
        made = plain != 0
        return anp.where(made, (x * plain - self._moved[0]) / anp.where(made, self._h, 1.0), 0.0)

    def _rate(self, y: Array, leaves: list[Any], i: int) -> Array:
        done, table = self._done, self._table
        t: Any = table.time(i, done.t, done.h, done.t_new, self._block.sign)
        if self._moved is not None:
            t = t + (self._moved[0] + table.tableau.c[i] * self._moved[1]).astype(table.real)
        rows = self._field.rows(y, leaves, t)
        if is_whole(rows, y.shape):
            return rows[0]
        return there.stack([row if anp.shape(row) else row * anp.ones_like(getval(y)[0]) for row in rows])


def _combined(weights: Sequence[float], k: Sequence[Array]) -> Array:
    return sum(weight * one for weight, one in zip(weights, k) if weight)  # type: ignore[return-value]


def _polynomial(row: Sequence[float], x: Array) -> Array:
    total: Any = row[-1] * x
    for coefficient in row[-2::-1]:
        total = (total + coefficient) * x
    return total


def _masked(record: Record, u0: Array) -> Array:
    return u0 if record.live is None else anp.where(record.live, u0, 0.0)
