"""Exceptions of user functions: an exception on one rank is raised on all ranks of the call.

If one rank left the call alone, the others would wait for it in the next communication. If MPI can interrupt waiting
ranks, the exception leaves the call at once, and `recovery` synchronizes the ranks. Otherwise the failed rank stores the
exception until all ranks have reached an agreement:

- `StageFailures`: an agreement follows each stage of the call. It sums a flag, and optionally a number of each rank.
- `DeferredFailures`: a rank whose function raised continues with NaN in place of the value. So the next sum over the ranks
  is NaN on all of them, which then agree.

In the agreement the ranks exchange the exceptions, and all ranks raise. `FailureDetector` handles agreements that some
ranks never reach because they wait for the failed rank.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI
from mpi4py.MPI import SUM

from mpiad._typing import Comm, Function, Request
from mpiad.errors import ConvergenceError, DeadlockError, WorkerError
from mpiad.transport.core.agreement import (
    FAILURES,
    Failure,
    Failures,
    agreed,
    agreed_among,
    error_of,
    failures_among,
    first_of,
    forget_agreement,
    moments,
    raise_first,
)
from mpiad.transport.core.channels import communications, is_watched, live_channels, world_ranks
from mpiad.transport.core.lookup import channel
from mpiad.transport.core.polling import StateExchange
from mpiad.transport.core.tracing import note_channels, tracing
from mpiad.transport.exits.abort import end_by, end_job, may_end_job
from mpiad.transport.exits.recovery import recovers
from mpiad.transport.exits.signals import requested
from mpiad.transport.watch.watch_settings import seconds_of

# A failed rank waits in an agreement which the other ranks may never reach, because they wait for a message from it. MPI
# doesn't report whether a rank waits or computes. `DeferredFailures` end the job after some time, measured by a thread.
#
# A `FailureDetector` finds out whether ranks wait in a communication for a failed rank. Each rank has a second thread,
# which wakes up five times per second and answers questions of failed ranks. A rank waits if the thread of its call has
# stayed at one instruction for half a second. If some ranks wait and none moves, the ranks are deadlocked. But a waiting
# rank may move on after its answer. Therefore the failed rank asks all ranks twice, and the waiting ranks must have waited
# since before the first question. (Detection of termination by two rounds: F. Mattern, Distributed Computing 2, 1987.) A
# call from user code into a compiled solver can't be distinguished from a communication by mpi4py. It counts as a wait
# only after minutes, or after `MPIAD_TIMEOUT`.


# Seconds until a failed rank ends the job: if other ranks probably wait for it, and if they probably don't.
SOON, LATE = 10.0, 300.0

_TICK = 0.2
_ROUND_WITHIN = 5.0  # seconds for the answers to one question
_ARRIVED = math.inf  # in place of seconds: the rank has reached an agreement
_WAITS_AFTER = 0.5
_STUCK_AFTER = 300.0  # for calls from user code, if MPIAD_TIMEOUT isn't set
_COMMUNICATES = ("mpiad.transport", "mpiad.primitives", "mpiad.differentiation", "mpiad.domain", "mpiad.linalg")
# If the innermost frames belong to these modules, the frame of their caller is examined.
_POLLS = ("mpiad.transport.watch", "mpiad.transport.core.polling", "mpiad.transport.exits.user_failures")
_PATIENCE = 1.5  # seconds for which a failed rank waits if MPI doesn't allow a second thread


class FailureDetector:
    """Detects ranks that wait for a failed rank; agreements are in `stage_module`; `listens`: answers failed ranks."""

    def __init__(self, comm: Comm, call: str, stage_module: str, listens: bool):
        self._call, self._stage_module, self._size = call, stage_module, comm.size
        self._exchange = StateExchange(getattr(comm, "bare", comm), self._state, _TICK, "mpiad-watch")
        self.watched = threading.get_ident()
        self._place: tuple[FrameType, int, float] | None = None
        if listens:
            self._exchange.start()

    def _state(self) -> float:
        """Return the seconds for which this rank has counted as waiting, negative if it isn't waiting; or `_ARRIVED`."""
        frame, now = sys._current_frames().get(self.watched), time.monotonic()
        while frame is not None and frame.f_globals.get("__name__", "").startswith(_POLLS):
            frame = frame.f_back
        if frame is None:
            return -math.inf
        module = frame.f_globals.get("__name__", "")
        if module.startswith(self._stage_module):
            return _ARRIVED
        if self._place is None or self._place[0] is not frame or self._place[1] != frame.f_lasti:
            self._place = frame, frame.f_lasti, now  # a reference to the frame, so that its identity isn't reused
        limit = _WAITS_AFTER
        if not module.startswith(_COMMUNICATES):
            given = os.environ.get("MPIAD_TIMEOUT")
            limit = (seconds_of(given, "MPIAD_TIMEOUT") or math.inf) if given else _STUCK_AFTER
        return now - self._place[2] - limit

    def wait_as_failed(self, request: Request, error: BaseException) -> None:
        """Wait until all ranks have reached an agreement; end the job if they never will."""
        start = time.monotonic()
        first = math.inf  # start of the first of the latest consecutive rounds in which no rank moved
        while not request.Test():
            began = time.monotonic()
            if self._exchange.thread is not None:
                waits = self._exchange.ask_all(_ROUND_WITHIN, request.Test)
                stuck = len(waits) == self._size - 1 and min(waits.values()) >= 0 and min(waits.values()) != _ARRIVED
                if stuck and min(waits.values()) >= time.monotonic() - first:
                    rank = min(waits, key=lambda rank: waits[rank])
                    self._end(error, f"rank {rank} waits in a communication and no rank moves on")
                first = min(first, began) if stuck else math.inf
            elif began - start > _PATIENCE:
                self._end(error, f"another rank has not finished its part within {_PATIENCE} seconds")
            time.sleep(1e-3)

    def _end(self, error: BaseException, reason: str) -> None:
        end_by(error, f"{self._call} can't raise this exception on all ranks: {reason}")
        raise error  # with MPIAD_ABORT=0, on this rank alone

    def close(self, failed: bool = False) -> None:
        """Stop answering; `failed`: whether any rank has failed, so that messages may be pending."""
        self._exchange.stop()
        self._place = None
        if failed:
            self._exchange.drain()


T = TypeVar("T")

# Indices of the numbers that a rank contributes to an agreement: whether it failed, whether a solver didn't converge,
# whether the rank was requested to end, and its term of the sum.
_FAILED, _NOT_CONVERGED, _END_REQUESTED, _TERM = range(4)


class NotConverged(Exception):  # noqa: N818 - not an error, like StopIteration
    """Raised on all ranks if a solver hasn't converged on some rank in a stage; the call then continues."""


class WrongValueError(TypeError):
    """A user function returned an invalid value; all ranks raise a TypeError with its text."""


def common_error(failures: Failures, call: str = "minimize") -> Exception:
    """Return the exception that all ranks raise, which describes the failure of the first failed rank."""
    rank, others = first_of(failures)
    if failures[rank].kind == WrongValueError.__name__:
        return TypeError(f"{failures[rank].text} This happened on rank {rank}{others}.")
    return error_of(failures, call, WorkerError)


class StageFailures:
    """Agreements on failures in a call that consists of stages; `complete` completes an error's text before it is sent."""

    def __init__(
        self, comm: Comm, call: str, stage_module: str, complete: Callable[[BaseException, TracebackType | None], None]
    ):
        self._interrupts = recovers() and comm.size > 1
        self._comm, self._stage_module = comm, stage_module  # ranks whose innermost frame is in it reached an agreement
        self._detector = FailureDetector(comm, call, stage_module, listens=not self._interrupts)
        # Whether a stage failed on this rank (MPI interrupts the others), and any rank had SIGTERM at the last agreement.
        self.broken, self.end_requested, self._call, self._complete = False, False, call, complete
        self.members = tuple(getattr(comm, "members", None) or world_ranks(comm))
        self._refused = [found for found in live_channels() if found.fault]  # unusable since an earlier exception
        self._mine, self._sums = np.zeros(4), np.zeros(4)
        self.error: Exception | None = None  # raised on all ranks; there are no agreements after it
        self.tolerates = False  # whether ranks raise `NotConverged` for a ConvergenceError, so that the call may continue

    def run(self, stage: Callable[[], T]) -> T:
        """Return the result of `stage`; raise on all ranks a WorkerError, TypeError or `NotConverged` if any raises."""
        return self.summed(stage, lambda result: 0.0)[0]

    def summed(self, stage: Callable[[], T], term: Callable[[T], float]) -> tuple[T, float]:
        """Return the result of `stage` on this rank, and the sum of the ranks' ``term(result)``; raises as `run` does."""
        if self.error is not None:
            raise self.error
        try:
            result = stage()
            own = term(result)
        except NotConverged:  # raised on all ranks by a nested stage
            raise
        except FAILURES as failure:
            self._complete(failure, failure.__traceback__)
            alike = self._tolerated(failure) and len(agreed_among(failure)) >= self._comm.size
            if self._interrupts and not alike:
                self.broken = True
                forget_agreement(failure)  # since the ranks agree on another exception in the recovery
                raise
            if self.error is None:  # otherwise a nested stage has already agreed
                self._agree(failure)
            raise
        return result, self._agree(None, own)

    def _agree(self, failure: BaseException | None, term: float = 0.0) -> float:
        """Return the sum of all ranks' terms; raise on all ranks if one has failed."""
        not_converged = self._tolerated(failure)
        self._mine[:] = failure is not None and not not_converged, not_converged, requested() is not None, term
        if self._comm.size == 1:
            self._sums[:] = self._mine
        else:
            request = self._comm.Iallreduce(self._mine, self._sums, SUM)
            if failure is None or self._interrupts:
                request.Wait()
            else:
                self._detector.wait_as_failed(request, failure)
        self.end_requested |= bool(self._sums[_END_REQUESTED])
        if self._sums[_FAILED]:
            # The detector's messages are on the same communicator, so they must be received first.
            self._detector.close(failed=True)
            self.error = common_error(failures_among(self._comm, failure), self._call)
            if not self._interrupts:
                agreed(self, self.error)
                # Channels without pending messages are usable: after an agreement no collective is pending.
                for found in live_channels():
                    if found.fault and not found.has_messages and found not in self._refused:
                        found.fault = None
            raise self.error from failure
        if self._sums[_NOT_CONVERGED]:
            self._detector.close(failed=True)
            self._detector = FailureDetector(self._comm, self._call, self._stage_module, listens=not self._interrupts)
            raise NotConverged(f"{self._call}: a solver hasn't converged") from failure
        return float(self._sums[_TERM])

    def _tolerated(self, failure: BaseException | None) -> bool:
        return self.tolerates and isinstance(failure, ConvergenceError)

    def watch(self, thread: int) -> None:
        """Note the thread that runs the next stages."""
        self._detector.watched = thread

    def clear(self, members: tuple[int, ...]) -> None:
        """Drop the messages of an abandoned stage on communicators among `members`, before later receives; collective."""
        inside = {(found.members, found.number): found for found in live_channels() if set(found.members) <= set(members)}
        held = dict(zip(members, map(set, self._comm.allgather(list(inside)))))
        for key in sorted(set().union(*held.values())):
            if key in inside and all(key in held[rank] for rank in key[0]):
                inside[key].renew_beneath()

    def close(self) -> None:
        """Stop the detector, after the last stage on all ranks."""
        if self.error is None:
            self._detector.close()


class DeferredFailures:
    """Exceptions on this rank that the other ranks don't know yet.

    A user function may raise before it sends a message for which other ranks wait. If the failed call didn't
    communicate, and earlier calls, if any, did, the function is called again with a valid argument, so that it sends its
    messages. In any case the job ends if the ranks don't reach an agreement within some time.
    """

    def __init__(self, comm: Comm, call: str, communicated: set[str] | None = None, apart: bool = False):
        self.error: BaseException | None = None  # the first exception
        self._channel, self._call = channel(comm, call), call
        self._is_part = self._channel.size < MPI.COMM_WORLD.size
        self._agreement_comm = self._channel.separate() if apart else self._channel.data
        # The names of functions that have communicated; calls with the same functions share it.
        self._communicated = set() if communicated is None else communicated
        self._usual: dict[str, int] = {}  # the number of communications in a function's last call
        self._timer: threading.Timer | None = None
        self._fault: str | None = None

    def attempt(self, name: str, fun: Function, *args: Any, again: Callable[[], object] | None = None) -> Any:
        """Return ``fun(*args)``, or None after an exception; ``again()``: a valid argument for another call."""
        fault, start, since = self._channel.fault, next(communications), next(moments)
        try:
            out = fun(*args) if not self._is_part or name in self._communicated else self._among_members(name, fun, *args)
        except FAILURES as error:
            # A DeadlockError is raised on the waiting ranks, too.
            alone = self._channel.size == 1 or recovers() or isinstance(error, DeadlockError)
            if alone or set(self._channel.members) <= agreed_among(error, since):
                raise
            spent, usual = next(communications) - start - 1, self._usual.get(name)
            self.note(error, LATE if usual is not None and spent >= usual else SOON)
            if again is not None and not spent and (usual is None or name in self._communicated):
                with contextlib.suppress(*FAILURES):
                    fun(again())
            # The exception may have marked the channel as unusable, but the agreement needs it.
            if fault is None and self._channel.fault is not None:
                # After the agreement only messages can be pending, not collectives.
                self._fault = self._channel.fault if self._channel.has_messages else self._fault
                self._channel.fault = None
            return None
        self._usual[name] = spent = next(communications) - start - 1
        if spent:
            self._communicated.add(name)
        return out

    def _among_members(self, name: str, fun: Function, *args: Any) -> Any:
        """Return ``fun(*args)``; raise a ValueError if it communicates with ranks whose calls may end at another time."""
        around, tracing.channels = tracing.channels, set()
        try:
            out = fun(*args)
            others = {rank for used, pending in tracing.channels if not pending for rank in used.members}
        finally:
            # An enclosing tape knows of these channels, too.
            used, tracing.channels = tracing.channels, around
            note_channels(used)
        if not others <= set(self._channel.members):
            raise ValueError(
                f"{self._call}: {name} communicates with ranks that don't belong to comm={self._channel.user.name!r}, "
                "whose solves may take another number of iterations, so that ranks would wait for each other forever. Pass "
                "the communicator of all ranks; the unknowns of a system are the blocks of all its ranks."
            )
        return out

    def note(self, error: BaseException, seconds: float = LATE) -> None:
        """Record an error; the job ends if there is no agreement within `seconds`."""
        if self.error is not None:
            return
        self.error = error
        if may_end_job() and not is_watched():  # under the watch, waits have deadlines
            text = (
                f"mpiad: rank {MPI.COMM_WORLD.rank} ended the job. {self._call} can't raise this exception on all ranks: "
                f"others didn't reach the agreement within {seconds:g} s. They wait for this rank in a communication of a "
                f"user function, or compute for so long (MPIAD_TIMEOUT sets another limit).\n{Failure.of(error).trace}"
            )
            self._timer = threading.Timer(seconds, end_job, (text, 1))
            self._timer.daemon = True
            self._timer.start()

    def __enter__(self) -> None:
        """Begin a communication in which the other ranks learn of the failure."""

    def __exit__(self, kind: object, raised: object, trace: object) -> None:
        # The rank's own exception explains the DeadlockError that follows from it.
        if isinstance(raised, DeadlockError) and self.error is not None:
            raise raised from self.error

    def raise_together(self) -> None:
        """Raise a failed rank's exception on all ranks; collective, and unnecessary after a sum without NaN."""
        under_way = self._fault is not None or (self._channel, True) in (tracing.channels or ())
        mine, every = np.array([self.error is not None, under_way], np.int32), np.empty(2, np.int32)
        with self:
            self._agreement_comm.Allreduce(mine, every)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not every[0]:
            return
        # On all ranks, since a rank that continued alone would wait for the others.
        if every[1]:
            self._channel.mark(self._fault or f"an exception left {self._call} in which messages were under way.")
        error, self.error = self.error, None
        raise_first(self._channel, error)
