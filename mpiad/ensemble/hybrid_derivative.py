"""Solutions of solves with events that change the state: where something is traced, by one record of all pieces.

It is differentiated as that of any solve (`differentiable`), by given times, too. A condition that let an event act
vanished at a time which moves with the trajectory, and so does all that follows (the saltation term).

Trajectories that fail in a later piece drop out: no derivative goes through their earlier pieces either.
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
from mpiad.ensemble.events import by_trajectory
from mpiad.ensemble.hybrid_solve import HybridSolve
from mpiad.ensemble.outcome import names_of
from mpiad.ensemble.run import Run
from mpiad.ensemble.solution import EnsembleSolution

__all__ = ["hybrid_solution"]


def hybrid_solution(solved: HybridSolve, given: Batch) -> EnsembleSolution:
    """Return the solution of a solve that has run, traced where `given`, the batch that it was made of, is."""
    batch, settings, codes = solved.batch, solved.settings, solved.codes
    u, u_end, reached = solved.saves.states, solved.u.T, solved.t
    where: Callable[[], Array] | None = None
    if given.traced and solved.record is not None:
        run, due = Run(batch, settings, solved.record.outcome(solved)), solved.given.traced(given)
        u, u_end, reached, crossed = traced_results(run, u, u_end, given, due)
        where = lambda: _event_times(solved, run, due, reached, crossed)  # noqa: E731

    def events() -> dict:
        ids, which, times, _ = solved.happened.all()
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
    """Return when the events of `HappenedEvents.all` were, as traces see it."""
    ids, _, times, source = solved.happened.all()
    ids, source = ids.astype(int), source.astype(int)
    given, (slots, count) = source < 0, due.shape
    # First all as they are, then given times, ends of trajectories, and events in their order.
    place, live = np.arange(len(ids)), run.live[ids]
    place[given & live] = len(ids) + ((-1 - source) * count + ids)[given & live]
    found = run.crossed_row[np.argsort(solved.happened.order)[source[~given]]]
    found = np.where(found < 0, ids[~given], count + found) + len(ids) + slots * count
    place[~given & live] = found[live[~given]]
    return concatenate([times, anp.reshape(due, (-1,)), reached, crossed])[place]
