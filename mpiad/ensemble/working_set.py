"""The vectorized solver: many trajectories that advance together, each with its own time, step size and error control.

Each iteration, called a turn, tries one step in every column. Rejected steps are masked, and ended trajectories remain in
their columns, with steps of size zero, until they are removed. All arithmetic is elementwise over columns, so the results
of a trajectory don't depend on other columns. The loop is the same on the host and on a device, with three differences:

- On the host the working set is a block of columns that fits into the cache. When enough trajectories have ended, waiting
  trajectories replace them. There are at least two columns, which norms require (see `controller`): a single trajectory is
  duplicated. On a device all trajectories enter at once, and ended ones are removed when they are at least half of all.
- On the host, operations on columns that end are omitted in turns without such columns. On a device they process all
  columns in each turn, and the number of active trajectories is read together with the numbers of saved values and events.
- `step_observers` records steps, saves states and locates events on the host, `device_rounds` on a device.

Times are multiplied by -1 for trajectories that are integrated backwards in time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.ensemble.batch import Batch, on_device_of
from mpiad.ensemble.coefficients import coefficients_of
from mpiad.ensemble.controller import LEAST_ERROR
from mpiad.ensemble.device_rounds import DeviceObservers
from mpiad.ensemble.initialization import Entrants, Initialization, Joint, least_step
from mpiad.ensemble.outcome import Outcome, ReturnCode, complete
from mpiad.ensemble.record import Step
from mpiad.ensemble.settings import MOVING, Advance, Settings
from mpiad.ensemble.stages import stages_for
from mpiad.ensemble.step_observers import StepObservers
from mpiad.transport.devices.device_arrays import arrays_of

# Number of entries per array of the working set on the host. About fifteen such arrays fit into the cache.
_BLOCK = 32_768
_LEAST_COLUMNS = 512
# On the host, ended columns are replaced when this number of their entries has been computed. A replacement costs about as
# much.
_IDLE = 10_000
# Maximum number of turns until events act on suspended columns, so that more columns are processed together.
_WAITING = 3
# With fixed steps, a remainder of tspan of up to this fraction of a step is added to the last step.
_ROUNDING = 1e-9


def integrate(batch: Batch, settings: Settings) -> Outcome:
    """Solve all trajectories of a batch; start and end times are on the host."""
    # With device arrays, all states and the record stay on the device; the rest is copied to the host in one transfer.
    outcome = Outcome.empty(batch, settings)
    # Return codes report overflow and NaN.
    with np.errstate(all="ignore"):
        WorkingSet(batch, settings, outcome).run()
    if settings.acting is not None:
        complete(outcome, settings.acting)
    return outcome


class WorkingSet:
    """The working set of a solve; results are written to `outcome`."""

    # Arrays of shape (n,), except for u.
    ids: Array  # trajectories
    number: Array  # numbers of accepted steps
    entered: Array  # the turns in which the trajectories entered; of inactive columns: the numbers of tried steps
    t: Array
    end: Array
    h: Array  # sizes of the next steps
    q2: Array  # mean square errors of the last accepted steps, relative to the tolerance
    live: Array  # whether the trajectory is active
    rejected: Array  # whether the last try was rejected
    idle: Array  # 1 for inactive columns, else 0
    code: Array  # return codes, MOVING for trajectories that haven't ended
    u: Array  # shape (d, n)

    def __init__(self, batch: Batch, settings: Settings, outcome: Outcome):
        self._batch, self._settings, self._outcome = batch, settings, outcome
        self._initialization = Initialization(batch, settings)
        self._xp: Any = arrays_of(batch.u0)
        self._controller, self._tableau = settings.alg.controller, settings.alg.tableau
        coefficients = coefficients_of(self._tableau, batch.u0)
        self._new_stages = stages_for(coefficients, batch, settings.mass)
        self._stages: Any = None
        observers: Any = StepObservers if self._xp is None else DeviceObservers
        self._observers = observers(batch, settings, outcome, self._initialization, coefficients)
        self._width = batch.size if self._xp is not None else max(_LEAST_COLUMNS, _BLOCK // max(1, len(batch.u0)))
        # Times, return codes, and numbers of accepted and of tried steps of the trajectories that have ended. All are
        # double, so that one copy from a device is enough.
        self._results = np.zeros_like(batch.u0, shape=(4, batch.size), dtype=float)
        self._results[0] = on_device_of(batch.start * self._initialization.signs, batch.u0)
        # The number of tried steps of an active trajectory is `_turn - entered`.
        self._turn = self._alive = 0
        # Limits for inexpensive checks: no trajectory reaches max_steps before this turn; on the host, steps of this size
        # are allowed.
        self._last_turn, self._least_step = settings.max_steps, 0.0
        self._p: Tree = None
        self._sign: Array | None = None
        # The number of suspended columns, and the number of turns since the first of them was suspended.
        self._suspended = self._turns_suspended = 0
        self._error: Array = None  # of the last step; None for fixed steps
        self._next_check = 1.0 if settings.watch is not None and self._xp is None else np.inf

    def run(self) -> None:
        """Advance until all trajectories have ended."""
        batch, outcome = self._batch, self._outcome
        self._report(int(np.count_nonzero(batch.start == batch.end)))
        while self._refill():
            idle, rows = 0, len(self.u)
            while self._alive and (idle < _IDLE if self._xp is None else 2 * self._alive > len(self.ids)):
                self._take_turn()
                if self._turn >= self._next_check:
                    self._next_check = self._settings.watch(self._advance())  # type: ignore[misc]
                idle += (len(self.ids) - self._alive - self._suspended) * rows
                if self._suspended:
                    self._turns_suspended += 1
                    if self._turns_suspended > _WAITING or not self._alive or idle >= _IDLE:
                        self._resume()
        t, code, number, tried = self._results if self._xp is None else self._xp.to_host(self._results)
        outcome.t_reached, outcome.codes = t * self._initialization.signs, code.astype(np.int8)
        outcome.naccept, outcome.nreject = number.astype(np.int64), (tried - number).astype(np.int64)
        self._observers.close(self._results)

    def _advance(self) -> Advance:
        batch, initialization, tried = self._batch, self._initialization, self._results[3]
        ids, steps = self.ids[self.live], (self._turn - self.entered[self.live]).astype(float)
        start, goal = batch.start[ids] * initialization.signs[ids], initialization.goal(ids)
        covered, h = np.maximum(self.t[self.live] - start, 1e-9 * (goal - start)), self.h[self.live]
        # After transients steps of stiff problems grow. If h is proportional to the covered time, covered / h more steps
        # multiply this time by e. With equal steps the estimate is too small at first, but it grows.
        expected = steps + np.minimum(steps, covered / np.maximum(h, self._least_step)) * np.log((goal - start) / covered)
        number = np.count_nonzero(tried) + len(ids)
        mean = (tried.sum() + expected.sum()) / number
        turns = self._turn + np.max(expected - steps, initial=0.0) + mean * (batch.size - number) / self._width
        return Advance(self._turn, float(tried.sum() + steps.sum()), float(turns), float(mean) * batch.size, batch.size)

    def _report(self, ended: int) -> None:
        if ended and self._settings.progress is not None:
            self._settings.progress(ended)

    # ---- the columns

    def _refill(self) -> bool:
        """Remove ended trajectories, and add waiting ones; return whether any trajectories remain."""
        if self._xp is not None and self._turn:
            self._store(slice(None))
        keep: Any = np.flatnonzero(self.live) if self._alive else ()
        new = self._initialization.admit(self._width - len(keep))
        count = len(keep) + len(new.ids)
        if not count:
            return False

        def joined(old: Array, more: Array) -> Array:
            if not len(keep):
                both = more.copy()
            else:
                both = np.take(old, keep, axis=-1)
                both = np.concatenate([both, more], axis=-1) if len(new.ids) else both
            return np.repeat(both, 2, axis=-1) if count == 1 and self._xp is None else both

        self._join(new, joined)
        self._alive = count
        if count < len(self.ids):  # a single trajectory was duplicated
            self._deactivate(np.array([False, True]))
        return True

    def _join(self, new: Entrants, joined: Joint) -> None:
        zeros, times = np.zeros_like(new.ids), np.zeros_like(new.t)
        entering = {"ids": new.ids, "number": zeros, "entered": zeros + self._turn, "t": new.t, "end": new.end, "h": new.h}
        entering |= {"q2": times + LEAST_ERROR, "live": zeros == 0, "rejected": zeros > 0, "idle": times, "u": new.u}
        entering |= {"code": zeros + MOVING} if new.sign is None else {"code": zeros + MOVING, "_sign": new.sign}
        k0 = joined(self._stages and self._stages.k[0], new.k)
        for name, array in entering.items():
            setattr(self, name, joined(getattr(self, name, None), array))
        if self._stages is None or self._stages.new.shape != self.u.shape:
            self._stages = self._new_stages(self.u)
        self._stages.k[0][...] = k0
        self._p = self._batch.parameters(self.ids)
        self._observers.enter(new, joined, self.ids, self.u, self._p, self.t, self._sign)
        if self._xp is None:
            self._last_turn = int(self.entered.min()) + self._settings.max_steps
            goal = self._initialization.goal(self.ids)
            self._least_step = least_step(np.maximum(np.abs(self.t), np.abs(goal)).max())

    def _store(self, columns: Array | slice) -> None:
        """Store the results of some columns."""
        ids, rows = self.ids[columns], (self.t, self.code, self.number, self.entered)
        self._outcome.u_end[:, ids] = self.u[:, columns]
        self._results[:, ids] = np.stack([row[columns].astype(float) for row in rows])

    def _end(self, code: Array) -> None:
        """Set the return codes of trajectories that end, and deactivate them; `code` is MOVING for the others."""
        ended = code != MOVING
        np.copyto(self.code, code, where=ended)
        self._deactivate(ended)
        if self._xp is None:
            columns = np.flatnonzero(ended)
            self._store(columns)
            self._alive -= len(columns)
            self._report(len(columns))

    def _deactivate(self, mask: Array) -> None:
        self.live &= ~mask
        np.copyto(self.entered, self._turn - self.entered, where=mask)
        # The next steps have size zero, since they end at `end`. The value 1 of `h` passes the check for small steps.
        np.copyto(self.end, self.t, where=mask)
        np.copyto(self.h, 1.0, where=mask)
        np.copyto(self.idle, 1.0, where=mask)

    # ---- one turn

    def _take_turn(self) -> None:
        """Try one step of every trajectory, and advance by the accepted steps."""
        self._turn += 1
        stages, t_new = self._stages, self.t + self.h
        if self._tableau.error is None:
            # Equal steps don't add up to tspan exactly. A remainder of the order of rounding errors isn't a separate step.
            np.copyto(t_new, self.end, where=t_new > self.end - _ROUNDING * self.h)
        np.minimum(t_new, self.end, out=t_new)
        h = t_new - self.t
        begin, end = self._observers.limits(self.ids, self.t, t_new, self.end)
        stages.compute(self.u, self._p, begin, h, end, self._sign)
        accepted = self._accepted_columns(h)
        step = Step(self.ids, self.number, accepted, self.t, h, t_new, self.u, stages.new, stages.k, self._sign)
        roots, tried = self._observers.clock_roots(step, self.live), accepted
        if roots is not None:
            retaken = roots < np.inf
            accepted, tried = accepted & ~retaken, accepted | retaken
            step = step._replace(accepted=accepted)
            np.copyto(self.end, roots, where=retaken)
            if self._tableau.error is not None:  # fixed steps keep their size
                np.copyto(self.h, h, where=retaken)
        done = t_new == self.end
        done &= accepted
        code = self._ending(tried, done, t_new)
        moving = None if code is None else self.live & (code == MOVING)
        stopped = self._observers.process(step, self._p, done, self.h, moving)
        # On the host, ended columns may be advanced, too, by steps of size zero: their results have been stored.
        every = self._xp is None and np.count_nonzero(accepted) == self._alive
        self.u = stages.advance(self.u, None if every else accepted)
        self.t = t_new if every else np.where(accepted, t_new, self.t)
        self.number = self.number + accepted
        if stopped.terminated is not None:
            code = np.where(stopped.terminated, ReturnCode.Terminated.code, MOVING if code is None else code)
        if stopped.suspended.size:
            self._suspend(stopped.suspended, code)
        if code is not None:
            self._end(code)
        if stopped.alive is not None:
            self._report(self._alive - stopped.alive)
            self._alive = stopped.alive

    def _accepted_columns(self, h: Array) -> Array:
        """Return a mask of the columns whose steps are accepted, and set the sizes of the next steps."""
        if self._tableau.error is None:
            return np.isfinite(self._stages.new).all(axis=0) & self.live
        q2 = self._error = self._stages.error(self.u, self._initialization.rtol, self._initialization.atol)
        accepted = q2 < 1.0
        if self._alive < len(accepted):
            accepted &= self.live
        factor = self._controller.factor(q2, self.q2, accepted, self.rejected, self._tableau.error_order)
        np.multiply(h, factor, self.h)
        if self._alive < len(accepted):
            np.maximum(self.h, self.idle, out=self.h)
        if self._settings.dtmax < np.inf:
            np.minimum(self.h, self._settings.dtmax, out=self.h)
        np.logical_not(accepted, self.rejected)
        if self._controller.remembers:
            np.copyto(self.q2, np.maximum(q2, LEAST_ERROR), where=accepted)
        return accepted

    def _ending(self, accepted: Array, done: Array, t_new: Array) -> Array | None:
        """Return the codes with which trajectories end after this step, otherwise MOVING; None on the host if none ends."""
        adaptive, exhausted = self._error is not None, self._turn >= self._last_turn
        if self._xp is None and not exhausted and not np.count_nonzero(done):
            if not np.count_nonzero(self.h < self._least_step) if adaptive else np.count_nonzero(accepted) == self._alive:
                return None
        code = np.where(done, ReturnCode.Success.code, MOVING)
        if adaptive:
            least = least_step(np.where(accepted, t_new, self.t))
            small = self.live & (self.h < least)
            np.copyto(self.h, least, where=small & accepted)
            failure = np.where(np.isfinite(self._error), ReturnCode.DtLessThanMin.code, ReturnCode.Unstable.code)
            code = np.where(small & ~accepted, failure, code)
        else:
            code = np.where(self.live & ~accepted, ReturnCode.Unstable.code, code)
        if exhausted:
            at_limit = self.live & (self._turn - self.entered >= self._settings.max_steps) & (code == MOVING)
            code = np.where(at_limit, ReturnCode.MaxIters.code, code)
        return code

    # ---- events that act, on the host

    def _suspend(self, columns: Array, code: Array | None) -> None:
        """Deactivate columns until events act on them, and remove them from the columns that end, given their `code`."""
        mask = np.zeros(len(self.ids), bool)
        mask[columns] = True
        self._deactivate(mask)
        self._alive -= len(columns)
        self._suspended += len(columns)
        if code is not None:
            code[columns] = MOVING

    def _resume(self) -> None:
        """Apply events to the suspended columns, which then continue or end."""
        self._suspended = self._turns_suspended = 0
        for resumed in self._observers.resume():
            columns, codes = resumed.columns, resumed.codes
            self.number[columns], self.t[columns] = resumed.number, resumed.t
            self.end[columns], self.h[columns] = resumed.end, resumed.h
            self.u[:, columns], self._stages.k[0][:, columns] = resumed.u, resumed.k
            self.entered[columns] = self._turn - self.entered[columns]
            self.live[columns], self.rejected[columns] = True, False
            self.idle[columns], self.q2[columns] = 0.0, LEAST_ERROR
            self._alive += len(columns)
            at_limit = (codes == MOVING) & (self._turn - self.entered[columns] >= self._settings.max_steps)
            code = np.full(len(self.ids), MOVING)
            code[columns] = np.where(at_limit, ReturnCode.MaxIters.code, codes)
            self._end(code)
        self._last_turn = int(self.entered[self.live].min(initial=self._turn)) + self._settings.max_steps
