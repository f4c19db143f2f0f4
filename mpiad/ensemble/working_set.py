"""The vectorized solver: many trajectories that advance together, each with its own time, step size and error control.

Each iteration, called a turn, tries one step in every column. The class `Turns`, which controls steps and return codes, is
shared by the host and devices (`on_device.rounds`). Ended trajectories remain in their columns, with steps of size zero.
On the host, states are updated in place in masked columns, and results are stored when a trajectory ends. On a device,
operations process all columns, and return states as new arrays, to which the record refers; the host waits for the device
only once or twice per turn.

On the host the working set is a block of columns that fits into the cache. All arithmetic is elementwise over columns, so
the results of a trajectory don't depend on other columns. When enough trajectories have ended, waiting trajectories replace
them. There are at least two columns, which norms require (see `controller`): a single trajectory is duplicated.

Times are multiplied by -1 for trajectories that are integrated backwards in time.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.controller import LEAST_ERROR
from mpiad.ensemble.initialization import Entrants, Initialization, Joint, least_step
from mpiad.ensemble.outcome import Outcome, ReturnCode, complete
from mpiad.ensemble.record import Step
from mpiad.ensemble.settings import MOVING, Settings
from mpiad.ensemble.stages import stages_for
from mpiad.ensemble.step_observers import StepObservers, Stopped

# Number of entries per array of the working set. About fifteen such arrays fit into the cache.
_BLOCK = 32_768
_LEAST_COLUMNS = 512
# Ended columns are replaced when this number of their entries has been computed. A replacement costs about as much.
_IDLE = 10_000
# Maximum number of turns until events act on suspended columns, so that more columns are processed together.
_WAITING = 3
# With fixed steps, a remainder of tspan of up to this fraction of a step is added to the last step.
_ROUNDING = 1e-9
_ONE_MORE = np.array(1)
_NONE_STOPPED, _MAX_ITERS = Stopped(), ReturnCode.MaxIters.code


def integrate(batch: Batch, settings: Settings) -> Outcome:
    """Solve all trajectories of a batch."""
    outcome = Outcome.empty(batch, settings)
    empty_spans = np.count_nonzero(batch.start == batch.end)
    if empty_spans and settings.progress is not None:
        settings.progress(int(empty_spans))
    # Return codes report overflow and NaN.
    with np.errstate(all="ignore"):
        WorkingSet(batch, settings, outcome).run()
    if settings.acting is not None:
        complete(outcome, batch, settings.acting, settings.saveat)  # type: ignore[arg-type]
    return outcome


class Turns:
    """The turns of a working set, on the host or on a device."""

    # Arrays of shape (n,), except for u.
    ids: Array  # trajectories
    number: Array  # numbers of accepted steps
    entered: Array  # the turns in which the trajectories entered; of suspended ones: minus the number of tried steps
    t: Array
    end: Array
    h: Array  # sizes of the next steps
    q2: Array  # mean square errors of the last accepted steps, relative to the tolerance
    live: Array  # whether the trajectory is active
    rejected: Array  # whether the last try was rejected
    idle: Array  # 1 for columns that have ended, else 0
    u: Array  # shape (d, n)
    _one: Array | float = np.array(1.0)  # an array, which ufuncs process faster than a float

    def __init__(self, settings: Settings):
        self._settings = settings
        self._tableau, self._controller = settings.alg.tableau, settings.alg.controller
        # The number of tried steps of an active trajectory is `_turn - entered`.
        self._turn, self._alive, self._last_turn = 0, 0, settings.max_steps
        self._stages: Any = None
        self._sign: Array | None = None
        self._p: Tree = None
        self._rtol: Array | float = settings.rtol
        self._atol: Array | float = settings.atol
        self._error: Array | None = None

    def _take_turn(self) -> None:
        """Try one step of every trajectory."""
        self._turn += 1
        t_new, h = self._next_steps()
        self._stages.compute(self.u, self._p, self.t, h, t_new, self._sign)
        self._finish_turn(self._accepted_columns(h), h, t_new)

    @abstractmethod
    def _finish_turn(self, accepted: Array, h: Array, t_new: Array) -> None:
        """Advance by the accepted steps, and deactivate the trajectories that end."""

    @abstractmethod
    def _some_are_small(self) -> bool:
        """Return whether a step may be smaller than the resolution of time."""

    @abstractmethod
    def _end(self, mask: Array, code: ReturnCode) -> None:
        """Deactivate the trajectories of a mask, and store their return code."""

    def _next_steps(self) -> tuple[Array, Array]:
        """Return the times after the next steps, and the sizes of these steps."""
        t_new = self.t + self.h
        if self._tableau.error is None:
            # Equal steps don't add up to tspan exactly. A remainder of the order of rounding errors isn't a separate step.
            np.copyto(t_new, self.end, where=t_new > self.end - _ROUNDING * self.h)
        np.minimum(t_new, self.end, out=t_new)
        return t_new, t_new - self.t

    def _accepted_columns(self, h: Array) -> Array:
        """Return a mask of the columns whose steps are accepted, and set the sizes of the next steps."""
        if self._tableau.error is None:
            self._error = None
            return np.isfinite(self._stages.new).all(axis=0) & self.live
        q2 = self._error = self._stages.error(self.u, self._rtol, self._atol)
        accepted = np.less(q2, self._one)
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

    def _end_failed(self, accepted: Array) -> None:
        if self._error is None:
            self._end(self.live & ~accepted, ReturnCode.Unstable)
        elif self._some_are_small():
            least = least_step(self.t)
            small = self.live & (self.h < least)
            stuck, finite = small & ~accepted, np.isfinite(self._error)
            np.copyto(self.h, least, where=small & accepted)
            self._end(stuck & finite, ReturnCode.DtLessThanMin)
            self._end(stuck & ~finite, ReturnCode.Unstable)
        if self._turn >= self._last_turn:
            self._end(self.live & (self._turn - self.entered >= self._settings.max_steps), ReturnCode.MaxIters)


class WorkingSet(Turns):
    """The working set of a solve on the host; results are written to `outcome`."""

    def __init__(self, batch: Batch, settings: Settings, outcome: Outcome):
        super().__init__(settings)
        self._batch, self._outcome, self._initialization = batch, outcome, Initialization(batch, settings)
        self._new_stages = stages_for(self._tableau, batch, settings.mass)
        self._rtol, self._atol = self._initialization.rtol, self._initialization.atol
        observed = settings.record or settings.events or (outcome.saved is not None and outcome.saved.shape[1])
        self._observers = StepObservers(batch, settings, outcome, self._initialization) if observed else None
        self._width = max(_LEAST_COLUMNS, _BLOCK // max(1, len(batch.u0)))
        none, number = np.empty(0), np.empty(0, np.int64)
        self.ids = self.number = self.entered = number
        self.t = self.end = self.h = self.idle = self.q2 = none
        self.live = self.rejected = np.empty(0, bool)
        self.u = batch.u0[:, :0]
        # The number of suspended columns, and the number of turns since the first of them was suspended.
        self._suspended = self._turns_suspended = 0

    def run(self) -> None:
        """Advance until all trajectories have ended."""
        while self._refill():
            idle, rows = 0, len(self.u)
            while self._alive and idle < _IDLE:
                self._take_turn()
                idle += (len(self.ids) - self._alive - self._suspended) * rows
                if self._suspended:
                    self._turns_suspended += 1
                    if self._turns_suspended > _WAITING or not self._alive or idle >= _IDLE:
                        self._resume()
        if self._observers is not None:
            self._observers.close()

    def _refill(self) -> bool:
        """Replace ended trajectories by waiting ones, or remove them; return whether any trajectories remain."""
        keep, before = np.flatnonzero(self.live), len(self.ids)
        new = self._initialization.admit(self._width - len(keep))
        count = len(keep) + len(new.ids)
        if not count:
            return False
        order = np.concatenate([keep, np.arange(before, before + len(new.ids))])
        order = np.repeat(order, 2) if count == 1 else order
        self._join(new, lambda old, new: np.take(np.concatenate([old, new], axis=-1), order, axis=-1))
        self._alive = count
        if count == 1:
            self._deactivate(np.array([1]))
        return True

    def _join(self, new: Entrants, joined: Joint) -> None:
        zeros = np.zeros(len(new.ids), np.int64)
        self.ids, self.number = joined(self.ids, new.ids), joined(self.number, zeros)
        self.entered = joined(self.entered, zeros + self._turn)
        self.t, self.end, self.h = joined(self.t, new.t), joined(self.end, new.end), joined(self.h, new.h)
        self.idle, self.q2 = joined(self.idle, 0.0 * zeros), joined(self.q2, zeros + LEAST_ERROR)
        self.live, self.rejected = joined(self.live, zeros == 0), joined(self.rejected, zeros > 0)
        self.u, k0 = joined(self.u, new.u), joined(self._stages.k[0] if self._stages else self.u, new.k)
        if self._stages is None or self._stages.new.shape != self.u.shape:
            self._stages = self._new_stages(self.u, True)
        self._stages.k[0][...] = k0
        self._sign, self._p = self._initialization.sign(self.ids), self._batch.parameters(self.ids)
        if self._observers is not None:
            self._observers.enter(new, joined, self.u, self._p, self.t if self._sign is None else self.t * self._sign)
        # Limits for inexpensive checks: no trajectory reaches max_steps before this turn; steps of this size are allowed.
        self._last_turn = int(self.entered.min()) + self._settings.max_steps
        goal = self._initialization.goal(self.ids)
        self._least_step = np.array(least_step(np.maximum(np.abs(self.t), np.abs(goal)).max()))

    def _finish_turn(self, accepted: Array, h: Array, t_new: Array) -> None:
        done = t_new == self.end
        done &= accepted
        stopped, stages = _NONE_STOPPED, self._stages
        if self._observers is not None:
            step = Step(self.ids, self.number, accepted, self.t, h, t_new, self.u, stages.new, stages.k, self._sign)
            stopped = self._observers.process(step, self._p, done, self.h)
        if np.count_nonzero(accepted) == self._alive:
            # Ended columns are also advanced, by steps of size zero; after a failure their states aren't used.
            self.u, self.t = stages.advance(self.u, None), t_new
            np.add(self.number, _ONE_MORE, self.number)
        else:
            self.u = stages.advance(self.u, accepted)
            np.copyto(self.t, t_new, where=accepted)
            self.number += accepted
        for columns in (stopped.at_roots, stopped.at_times):
            if columns.size:
                done[columns] = False
                self._deactivate(columns)
                self.entered[columns] -= self._turn
                self._alive -= len(columns)
                self._suspended += len(columns)
        if stopped.terminated.size:
            done[stopped.terminated] = False
            self._store_ended(stopped.terminated, ReturnCode.Terminated)
        if np.count_nonzero(done):
            self._store_ended(np.flatnonzero(done), ReturnCode.Success)
        self._end_failed(accepted)

    def _resume(self) -> None:
        """Apply events to the suspended columns, which then continue or end."""
        self._suspended = self._turns_suspended = 0
        for resumed in self._observers.resume():  # type: ignore[union-attr]
            columns, codes = resumed.columns, resumed.codes
            self.number[columns], self.t[columns] = resumed.number, resumed.t
            self.end[columns], self.h[columns] = resumed.end, resumed.h
            self.u[:, columns], self._stages.k[0][:, columns] = resumed.u, resumed.k
            self.entered[columns] += self._turn
            self.live[columns], self.rejected[columns] = True, False
            self.idle[columns], self.q2[columns] = 0.0, LEAST_ERROR
            self._alive += len(columns)
            codes[(codes == MOVING) & (self._turn - self.entered[columns] >= self._settings.max_steps)] = _MAX_ITERS
            for code in np.flatnonzero(np.bincount(codes - MOVING)[1:]).tolist():
                self._store_ended(columns[codes == code], list(ReturnCode)[code])
        self._last_turn = int(self.entered.min()) + self._settings.max_steps

    def _some_are_small(self) -> bool:
        return bool(np.count_nonzero(np.less(self.h, self._least_step)))

    def _end(self, mask: Array, code: ReturnCode) -> None:
        self._store_ended(np.flatnonzero(mask), code)

    def _store_ended(self, columns: Array, code: ReturnCode) -> None:
        """Store the results of trajectories that have ended."""
        if not columns.size:
            return
        ids, outcome = self.ids[columns], self._outcome
        outcome.u_end[:, ids] = self.u[:, columns]
        outcome.t_reached[ids] = self.t[columns] * self._initialization.signs[ids]
        outcome.codes[ids] = code.code
        outcome.naccept[ids] = self.number[columns]
        outcome.nreject[ids] = self._turn - self.entered[columns] - self.number[columns]  # one try per turn
        self._deactivate(columns)
        self._alive -= len(columns)
        if self._settings.progress is not None:
            self._settings.progress(len(columns))

    def _deactivate(self, columns: Array) -> None:
        self.live[columns] = False
        # The next steps have size zero, since they end at `end`. The value 1 of `h` passes the check for small steps.
        self.end[columns] = self.t[columns]
        self.h[columns] = self.idle[columns] = 1.0
