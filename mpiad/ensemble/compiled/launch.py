"""The forward kernel's call: from a batch to its outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.compiled.form import Form
from mpiad.ensemble.compiled.forward import field_count
from mpiad.ensemble.compiled.shares import each, shares_of
from mpiad.ensemble.compiled.signatures import argument
from mpiad.ensemble.compiled.tape import Tape
from mpiad.ensemble.outcome import Outcome

if TYPE_CHECKING:
    from mpiad.ensemble.compiled.solver import Solver

__all__ = ["launch"]

# Steps of a trajectory for which there is room at first.
_STEPS = 48


def launch(function: Callable[..., None], form: Form, solver: Solver) -> Outcome:
    """Run the forward kernel over all trajectories.

    Parameters
    ----------
    function : callable
        The kernel.
    form : Form
    solver : Solver
    """
    batch, settings = solver.batch, solver.settings
    outcome = Outcome.empty(batch, settings)
    still = batch.start == batch.end
    if settings.progress is not None and still.any():
        settings.progress(int(np.count_nonzero(still)))
    run = _Launch(function, form, solver, outcome)
    done = each(run.share, shares_of(batch.size, solver.threads), solver.threads)
    if form.record:
        outcome.tapes, outcome.last = done, run.last
    if form.directions:
        outcome.carried = run.carried(still)
    return outcome


class _Launch:
    def __init__(self, function: Callable[..., None], form: Form, solver: Solver, outcome: Outcome):
        self._function, self._form, self._solver, self._outcome = function, form, solver, outcome
        batch, settings = solver.batch, solver.settings
        d, count = batch.u0.shape
        m, n_saved = len(form.directions), solver.times.shape[1]
        self.last = np.full(count if form.record else 0, -1)
        self._du = np.zeros((m, d, count))
        self._dsaved = np.zeros((m if form.inside else 0, count, n_saved, d))
        save_step = outcome.save_step
        atol = argument(np.ravel(settings.atol))
        inputs = (argument(batch.u0), solver.p, solver.s, argument(batch.start), argument(batch.end))
        dt = -1.0 if settings.dt is None else float(settings.dt)
        rest = (settings.rtol, atol, dt, float(settings.dtmax), float(settings.max_steps))
        self._given = (*inputs, solver.times, *rest)
        self._made = (
            outcome.u_end, outcome.t_reached, outcome.codes, outcome.naccept, outcome.nreject, outcome.saved,
            np.empty((0, n_saved), np.int32) if save_step is None else save_step, self._du, self._dsaved, self.last,
        )  # fmt: skip

    def share(self, bounds: tuple[int, int]) -> Tape:
        """Solve the trajectories of a share; return their steps, where they are recorded."""
        (first, stop), form = bounds, self._form
        lanes, size = form.lanes, (stop - first) * _STEPS if form.record else 0
        rows, before = np.empty((size, form.d + 2)), np.empty(size, np.int64)
        state = np.array([first, lanes, 0])
        lane = (np.zeros(field_count(form) * lanes), np.full(lanes, -1), np.zeros(lanes, np.int64), state)
        while True:
            self._function(*lane, stop, *self._given, *self._made, rows, before)
            waiting, vacant, row = state
            if vacant == lanes and waiting == stop:
                break
            # There is no room left for the steps of a turn.
            rows, before = _longer(rows), _longer(before)
        if self._solver.settings.progress is not None:
            batch = self._solver.batch
            self._solver.settings.progress(int(np.count_nonzero(batch.start[first:stop] != batch.end[first:stop])))
        return Tape(first, stop, rows[:row], before[:row])

    def carried(self, still: Array) -> tuple[Array, Array]:
        """Return the tangents of final and saved states; zero for trajectories that failed."""
        du, dsaved, form = self._du, self._dsaved, self._form
        unit = np.array([[kind == "u" and place == c for c in range(form.d)] for kind, place in form.directions])
        if still.any():
            du[:, :, still] = unit[:, :, None]
            if len(dsaved):
                dsaved[:, still] = unit[:, None, None]
        failed = self._outcome.failed
        if failed.any():
            du[:, :, failed] = 0
            dsaved[:, failed] = 0
        return du, dsaved


def _longer(array: Array) -> Array:
    longer = np.empty((2 * len(array) + 1024, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer
