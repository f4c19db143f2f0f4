"""Solves with events that change the state.

Events at the start act before the first step. Later events act during the solve, in NumPy (`step_observers`) or in a kernel
(`compiled.jump_text`): a step ends at an event, and the trajectory continues from the state after the event. For
derivatives all steps form one record, with jumps between steps (`jumps`). The record is differentiated like that of any
solve (`differentiable`), also with respect to given times. The time at which a condition vanishes depends on the
trajectory, and so do all later times (the saltation term). Trajectories that fail contribute no derivatives, not even of
states before an event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.device.assembly import concatenate
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.differentiable import traced_results
from mpiad.ensemble.event import Event
from mpiad.ensemble.events import by_trajectory, traced_times
from mpiad.ensemble.jumps import Jump
from mpiad.ensemble.outcome import Outcome, ReturnCode, evaluations
from mpiad.ensemble.run import Run
from mpiad.ensemble.settings import MOVING, Acting, Settings
from mpiad.ensemble.solution import EnsembleSolution
from mpiad.ensemble.step_observers import EventColumns


class GivenTimes:
    """The given times of events, for a batch of plain arrays.

    - `signs`: shape (N,); -1 for trajectories integrated backwards in time, otherwise 1.
    - `times`: shape (m + 1, N); sorted in the direction of the solve; the times in the last row are infinite.
    - `event`: int, shape (m + 1, N); the event at each time.
    - `first`: int, shape (N,); the index of the first time that isn't before the start.
    """

    def __init__(self, events: Sequence[Event], batch: Batch):
        self.signs = signs = np.where(batch.end < batch.start, -1.0, 1.0)
        self._events = [(e, event) for e, event in enumerate(events) if event.times is not None]
        given = self._given(batch)
        shape = len(given) + 1, batch.size
        # One column is enough if all trajectories have the same times and direction.
        same_times = all(np.ndim(time) == 0 for _, time in given) and bool((signs == signs[:1]).all())
        directions = signs[:1] if same_times else signs
        signed = np.stack([np.full(len(directions), np.inf), *(directions * time for _, time in given)])
        event = np.array([[-1], *([e] for e, _ in given)])
        # At equal times, earlier events in the list come first.
        order = np.lexsort((np.broadcast_to(event, signed.shape), signed), axis=0)
        signed = np.take_along_axis(signed, order, axis=0)
        self._order = np.broadcast_to(order, shape)
        self.event = np.broadcast_to(event[order, 0], shape)
        self.first = np.count_nonzero(signed < signs * batch.start, axis=0)
        self.times = np.broadcast_to(directions * signed, shape)

    def _given(self, batch: Batch) -> list[tuple[int, Any]]:
        """Return the indices of events and their given times, each a number or of shape (N,); parameters may be traced."""
        found = []
        for e, event in self._events:
            for time in event.due(batch.p.build(batch.p.leaves)):
                plain = np.asarray(getval(time))
                if plain.shape not in ((), (batch.size,)) or plain.dtype.kind not in "iuf" or np.isnan(plain).any():
                    raise ValueError(
                        f"Event: times(p) must return a list of times, each a number or of shape {(batch.size,)} here, one "
                        f"for each column, but got {np.array2string(plain, threshold=6)} of shape {plain.shape}."
                    )
                found.append((e, time))
        return found

    def passed(self, stop: Array) -> Array:
        """Return the given times that have passed, one per column; `stop`, int, shape (N,): the indices of the next times.

        The rows are the trajectories, the events, the times, and -1 minus the indices of the times in `times`.
        """
        slot = np.arange(len(self.times))
        ids, slot = np.nonzero((self.first[:, None] <= slot) & (slot < stop[:, None]))
        return np.stack([ids.astype(float), self.event[slot, ids], self.times[slot, ids], -1.0 - slot])

    def traced(self, batch: Batch) -> Array:
        """Return `times` as a function of traced parameters."""
        rows = [anp.reshape(time * np.ones(batch.size), (1, -1)) for _, time in self._given(batch)]
        every = anp.concatenate([np.full((1, batch.size), np.inf), *rows], axis=0)
        return every[self._order, np.arange(batch.size)]


def solved_with_events(
    solve: Callable[[Batch, Settings], Outcome], batch: Batch, settings: Settings, given: Batch
) -> EnsembleSolution:
    """Return the solution of a batch of plain arrays, with derivatives with respect to traced values in `given`.

    ``solve(batch, settings)`` is called after the events at the start have acted.
    """
    times = GivenTimes(settings.events, batch)
    outcome = _solved(solve, batch, settings, times)
    u, u_end, reached, codes = outcome.saved, outcome.u_end.T, outcome.t_reached, outcome.codes
    times_of: Callable[[_OccurredEvents], Array] = lambda found: found.times  # noqa: E731
    if given.traced and settings.record:
        run, due = Run(batch, settings, outcome), times.traced(given)
        u, u_end, reached, crossed = traced_results(run, u, u_end, given, due)  # type: ignore[arg-type]
        times_of = lambda found: found.traced(run, due, reached, crossed)  # noqa: E731

    def events() -> dict:
        found = _OccurredEvents(outcome, times)
        return by_trajectory(found.ids, found.event, times_of(found))

    nf = evaluations(outcome.naccept, outcome.nreject, settings.alg, settings.dt is not None) + outcome.resumed
    later: dict[str, Callable[[], Any]] = {"retcode": lambda: ReturnCode.names_of(codes), "events": events}
    shape = batch.shape
    u, u_end = anp.reshape(u, (*u.shape[:2], *shape)), anp.reshape(u_end, (batch.size, *shape))  # type: ignore[union-attr]
    fields: dict[str, Any] = {"u": u, "t": np.array(settings.saveat), "u_end": u_end, "t_reached": reached, "nf": nf}
    fields |= {"naccept": outcome.naccept, "nreject": outcome.nreject, "_codes": codes, "alg": settings.alg}
    return EnsembleSolution.lazy(later, **fields)


def _solved(solve: Callable[[Batch, Settings], Outcome], batch: Batch, settings: Settings, times: GivenTimes) -> Outcome:
    """Apply the events at the start, and solve from the states after them."""
    jumps: list[Jump] = []
    every, u, slots = np.arange(batch.size), batch.u0.copy(), times.first.copy()
    acting = Acting(settings.events, times.times, times.event, slots, np.full(batch.size, MOVING), ())
    columns = EventColumns(batch, acting, slots, times.signs, jumps, every, u, batch.start, np.zeros_like(every))
    with np.errstate(all="ignore"):
        columns.meet_given_times()
    ended = columns.codes != MOVING
    if jumps or ended.any():
        batch = batch._replace(u0=u, end=np.where(ended, batch.start, batch.end) if ended.any() else batch.end)
    acting = acting._replace(codes=columns.codes, started=tuple(jumps) if settings.record else ())
    events = tuple(settings.events[e] for e in acting.found)
    return solve(batch, settings._replace(events=events, acting=acting))


class _OccurredEvents:
    """All events of a solve, sorted; `ids`, `event`, `times`: trajectories, indices of events and times, of shape (m,)."""

    def __init__(self, outcome: Outcome, given: GivenTimes):
        table = np.empty((5, 0)) if outcome.event_table is None else outcome.event_table
        ids, event, _, _, times = table
        # The last row: for roots of conditions the column of the table, for given times -1 minus the index of the time.
        found = np.stack([ids, event, times, np.arange(len(ids))])
        passed = given.passed(outcome.slots)
        if passed.size:
            found = np.concatenate([found, passed], axis=1)
            # At equal times, roots of conditions come first.
            found = found[:, np.lexsort((given.signs[found[0].astype(int)] * found[2], found[0]))]
        (self.ids, self.event, self._source), self.times = found[[0, 1, 3]].astype(int), found[2]

    def traced(self, run: Run, due: Array, reached: Array, crossed: Array) -> Array:
        """Return the times of events with derivatives, from given times `due`, final times `reached` and `Run.crossed`."""
        ids, source = self.ids, self._source
        given = len(crossed) + (-1 - source) * due.shape[1] + ids
        places = np.where(source < 0, given, np.append(run.crossed_row, -1)[np.maximum(source, 0)])
        crossed = concatenate([crossed, anp.reshape(due, (-1,))])
        return traced_times(ids, self.times, places, run.live, reached, crossed)
