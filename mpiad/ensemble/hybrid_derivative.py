"""Derivatives of solves with events that change the state: a chain of pieces and affects that traces see.

Each piece is differentiated as any solve is (`differentiable`), by its initial state, its ends and its parameters,
an affect by autograd. A piece that an event ended, ended when the event was, which moves with the trajectory; the next one
starts then. So what follows from a shift of an event's time (the saltation term) needs no formula of its own.

Trajectories that fail in a later piece drop out of all: no derivative goes through their earlier pieces either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array
from mpiad.device.assembly import concatenate
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.differentiable import traced_results
from mpiad.ensemble.event_affects import affect_field
from mpiad.ensemble.events import by_trajectory, in_order
from mpiad.ensemble.hybrid_solve import HybridSolve
from mpiad.ensemble.linearization import Field
from mpiad.ensemble.outcome import came_through, names_of
from mpiad.ensemble.pieces import HERE, Acted, Flow
from mpiad.ensemble.run import Run
from mpiad.ensemble.solution import EnsembleSolution

__all__ = ["hybrid_solution"]


def hybrid_solution(solved: HybridSolve, given: Batch) -> EnsembleSolution:
    """Return the solution of a solve that has run, traced where `given`, the batch that it was made of, is."""
    batch, settings, codes = solved.batch, solved.settings, solved.codes
    u, u_end, reached = solved.saves.states, solved.u.T, solved.t
    where: Callable[[], Array] | None = None
    if given.traced and solved.chained:
        u, u_end, reached, chained = _Chain(solved, given).results()
        where = lambda: chained  # noqa: E731
    elif given.traced:
        run, due = Run(batch, settings, solved.outcome()), solved.given.traced(given)
        u, u_end, reached, crossed = traced_results(run, u, u_end, given, due)
        where = lambda: _event_times(solved, run, due, reached, crossed)  # noqa: E731

    def events() -> dict:
        ids, which, times, _ = solved.happened()
        order = np.argsort(ids, kind="stable")
        who, event = np.stack([ids, which])[:, order].astype(int).tolist()
        when = (times if where is None else where())[order]
        return by_trajectory(who, event, when if isbox(when) else when.tolist())

    later: dict[str, Callable[[], Any]] = {"retcode": lambda: names_of(codes), "events": events}
    shape = batch.shape
    return EnsembleSolution.lazy(
        later, u=anp.reshape(u, (*u.shape[:2], *shape)), t=np.array(settings.saveat),
        u_end=anp.reshape(u_end, (batch.size, *shape)), t_reached=reached, naccept=solved.naccept,
        nreject=solved.nreject, nf=solved.nf, _codes=codes, alg=settings.alg,
    )  # fmt: skip


def _event_times(solved: HybridSolve, run: Run, due: Array, reached: Array, crossed: Array) -> Array:
    """Return when the events of `HybridSolve.happened` were, as traces see it."""
    ids, _, times, source = solved.happened()
    ids, source = ids.astype(int), source.astype(int)
    given, (slots, count) = source < 0, due.shape
    # First all as they are, then given times, ends of trajectories, and events in their order.
    place, live = np.arange(len(ids)), run.live[ids]
    place[given & live] = len(ids) + ((-1 - source) * count + ids)[given & live]
    found = run.crossed_row[np.argsort(in_order(solved.conditions()))[source[~given]]]
    found = np.where(found < 0, ids[~given], count + found) + len(ids) + slots * count
    place[~given & live] = found[live[~given]]
    return concatenate([times, anp.reshape(due, (-1,)), reached, crossed])[place]


class _Chain:
    """The states, and the times, of all trajectories as traces see them, from piece to piece."""

    def __init__(self, solved: HybridSolve, given: Batch):
        self._solved, self._given = solved, given
        self._live, self._field = came_through(solved.codes), Field(solved.batch)
        self._u, self._t, self._due = given.u0, given.start, solved.given.traced(given)
        # At which given time each trajectory is, where its piece ended there: it is that time whatever moves it.
        self._at = np.full(solved.batch.size, -1)
        # Saved values as rows, and which row each is; the first is for what wasn't reached.
        self._rows: list[Array] = [np.full((1, len(solved.u)), np.nan, solved.u.dtype)]
        self._index, self._count = np.zeros(solved.saves.states.shape[:2], int), 1
        self._times: list[Array] = []
        for way in solved.ways:
            self._flow(way) if isinstance(way, Flow) else self._jump(way)

    def results(self) -> tuple[Array, Array, Array, Array]:
        """Return saved and final states, (N, n_saved, d) and (N, d), when trajectories ended, and when events were."""
        solved, live = self._solved, self._live
        u = concatenate(self._rows, axis=0)[self._index]
        u_end, reached = anp.transpose(self._u), self._t
        if not live.all():
            u = anp.where(live[:, None, None], u, solved.saves.states)
            u_end, reached = anp.where(live[:, None], u_end, solved.u.T), anp.where(live, reached, solved.t)
        return u, u_end, reached, concatenate(self._times) if self._times else np.empty(0)

    def _alive(self, x: Array, plain: Array, ids: Array) -> Array:
        """Return an array over some trajectories, plain for those that fail at some time."""
        live = self._live[ids]
        return x if live.all() else anp.where(live, x, plain)

    def _put(self, old: Array, ids: Array, new: Array) -> Array:
        """Return an array over trajectories with new values for some."""
        count = old.shape[-1]
        if len(ids) == count:
            return new
        order = np.arange(count)
        order[ids] = count + np.arange(len(ids))
        return concatenate([old, new], axis=-1)[..., order]

    # ---- pieces

    def _flow(self, way: Flow) -> None:
        ids, plain = way.ids, way.batch
        batch = plain._replace(
            u0=self._alive(self._u[:, ids], plain.u0, ids), start=self._alive(self._t[ids], plain.start, ids),
            p=plain.p._replace(leaves=self._leaves(ids)),
        )  # fmt: skip
        batch = batch._replace(end=self._end(way, batch.start))
        run, u_end, still = Run(plain, way.settings, way.outcome), way.outcome.u_end.T, plain.start == plain.end
        saved: Array = np.where(still[:, None, None], plain.u0.T[:, None], way.outcome.saved)  # type: ignore[arg-type]
        times: list[Array] = [run.reached, run.crossed] if way.settings.events else []
        if batch.traced:
            saved, u_end, *times = traced_results(run, saved, u_end, batch)
        reached, crossed = times or (batch.end, np.empty(0))
        u = self._drifted(anp.transpose(u_end), batch, ids, batch.end, still)
        self._note_events(way, run, reached, crossed)
        column, place, whole = way.saved
        self._rows.append(saved[column, place])
        self._index[ids[column], whole] = self._count + np.arange(len(column))
        self._count += len(column)
        self._u, self._t = self._put(self._u, ids, u), self._put(self._t, ids, reached)
        self._at[ids] = np.where(run.terminated, -1, way.slot)

    def _leaves(self, ids: Array) -> list[Any]:
        p = self._given.p
        return [leaf[..., ids] if varies else leaf for leaf, varies in zip(p.leaves, p.varies)]

    def _end(self, way: Flow, start: Array) -> Array:
        """Return when a piece ends at the latest."""
        end, ids, slot = self._given.end[way.ids], way.ids, way.slot
        if (slot >= 0).any():
            end = anp.where(slot >= 0, self._due[np.maximum(slot, 0), ids], end)
        if (slot == HERE).any():
            end = anp.where(slot == HERE, start, end)
        return self._alive(end, way.batch.end, ids)

    def _drifted(self, u: Array, at: Batch, ids: Array, later: Array, columns: Array) -> Array:
        """Return states as they move where times do that coincide: by f times what is between, which is zero."""
        between = later - at.start
        if not (columns.any() and isbox(between)):
            return u
        twice = np.arange(len(ids)) if len(ids) > 1 else np.zeros(2 * len(ids), int)
        leaves = [leaf[..., twice] if varies else leaf for leaf, varies in zip(at.p.leaves, at.p.varies)]
        # Of others f may not be finite, and no derivative may go there.
        now, between = at.start[twice], anp.where(columns, between, 0.0)[twice]
        rate = anp.where(columns[twice], self._field.array(u[:, twice], leaves, now), 0.0)
        # A step of second order, whose derivatives are right to that order.
        there = self._field.array(u[:, twice] + between * rate, leaves, now + between)
        rate = 0.5 * (rate + anp.where(columns[twice], there, 0.0))
        return u + (between * rate)[:, : len(ids)].astype(u.dtype)

    def _note_events(self, way: Flow, run: Run, reached: Array, crossed: Array) -> None:
        """Note when the events of a piece were."""
        table = way.outcome.event_table
        if table is None:
            return
        local, ends = table[0].astype(int), np.array([event.terminal for event in way.settings.events], bool)
        ended, live = ends[table[1].astype(int)], run.live[local]
        count, passed = len(way.ids), live & ~ended
        # When pieces ended comes first, then when events on the way were, in the order of the table, then all as they are.
        place = np.where(ended, local, count + np.cumsum(passed) - 1)
        place = np.where(live, place, count + np.count_nonzero(passed) + np.arange(len(local)))
        self._times.append(self._alive(concatenate([reached, crossed, table[4]])[place], table[4], way.ids[local]))

    # ---- events

    def _jump(self, way: Acted) -> None:
        solved, live = self._solved, self._live[way.ids]
        if way.slot is not None:
            time = self._alive(self._due[way.slot, way.ids], solved.given.times[way.slot, way.ids], way.ids)
            self._times.append(time)
        ids = way.ids[live]
        if not len(ids):
            return
        plain = solved.batch
        u, t, p = self._u[:, ids], self._t[ids], plain.p._replace(leaves=self._leaves(ids))
        if way.slot is not None:
            time, slot = time[live], way.slot[live]
            u = self._drifted(u, plain._replace(start=t, p=p), ids, time, self._at[ids] != slot)
            t, self._at[ids] = time, slot
        twice = np.arange(len(ids)) if len(ids) > 1 else np.zeros(2, int)
        leaves = [leaf[..., twice] if varies else leaf for leaf, varies in zip(p.leaves, p.varies)]
        after = affect_field(solved.settings.events[way.event], plain).array(u[:, twice], leaves, t[twice])
        self._u, self._t = self._put(self._u, ids, after[:, : len(ids)]), self._put(self._t, ids, t)
