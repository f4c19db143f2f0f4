"""When events happen that come at given times: those of each trajectory, in the order of its solve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.event import Event


class GivenTimes:
    """The given times of a batch.

    - `events`: all events of the solve.
    - `batch`: of plain arrays.
    - `signs`, of shape (N,): -1 for trajectories that go backwards.
    - `times`, of shape (m + 1, N): in the order of the solve, the last infinitely far; NaN nowhere.
    - `event`, int, shape (m + 1, N): which event each is.
    - `first`, int, shape (N,): the first that doesn't lie before the start.
    """

    def __init__(self, events: Sequence[Event], batch: Batch):
        self.signs = signs = np.where(batch.end < batch.start, -1.0, 1.0)
        self._events = [(e, event) for e, event in enumerate(events) if event.times is not None]
        given = self._of(batch)
        shape = len(given) + 1, batch.size
        # One column serves all, where all have the same times and go the same way.
        alike = all(np.ndim(time) == 0 for _, time in given) and bool((signs == signs[:1]).all())
        own = signs[:1] if alike else signs
        ahead = np.stack([np.full(len(own), np.inf), *(own * time for _, time in given)])
        event = np.array([[-1], *([e] for e, _ in given)])
        # Of equal times those of events that were given first.
        order = np.lexsort((np.broadcast_to(event, ahead.shape), ahead), axis=0)
        ahead = np.take_along_axis(ahead, order, axis=0)
        self._order = np.broadcast_to(order, shape)
        self.event = np.broadcast_to(event[order, 0], shape)
        self.first = np.count_nonzero(ahead < signs * batch.start, axis=0)
        self.times = np.broadcast_to(own * ahead, shape)

    def _of(self, batch: Batch) -> list[tuple[int, Any]]:
        """Return which event is when, a number or of shape (N,), by the batch's parameters, which may be traced."""
        found = []
        for e, event in self._events:
            for time in event.due(batch.p.build(batch.p.leaves)):
                self._check(getval(time), batch.size)
                found.append((e, time))
        return found

    def _check(self, time: Array, count: int) -> None:
        if np.shape(time) not in ((), (count,)) or np.asarray(time).dtype.kind not in "iuf" or np.isnan(time).any():
            raise ValueError(
                f"Event: times(p) must return a list of times, each a number or of shape {(count,)} here, one for each "
                f"column, but got {np.array2string(np.asarray(time), threshold=6)} of shape {np.shape(time)}."
            )

    def passed(self, stop: Array) -> Array:
        """Return those that were before others, int of shape (N,), came next.

        The rows are the trajectories, which event, when, and -1 less the place among the given times.
        """
        slot = np.arange(len(self.times))
        ids, slot = np.nonzero((self.first[:, None] <= slot) & (slot < stop[:, None]))
        return np.stack([ids.astype(float), self.event[slot, ids], self.times[slot, ids], -1.0 - slot])

    def traced(self, batch: Batch) -> Array:
        """Return `times` as a function of traced parameters."""
        rows = [anp.reshape(time * np.ones(batch.size), (1, -1)) for _, time in self._of(batch)]
        every = anp.concatenate([np.full((1, batch.size), np.inf), *rows], axis=0)
        return every[self._order, np.arange(batch.size)]
