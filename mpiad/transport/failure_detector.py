"""What becomes of a rank that failed and goes where the others will learn of it, when they don't come.

They may wait for a message that this rank never sends, and nothing tells that from a long computation: a wait inside MPI
can't be looked into. An exception that one rank raises alone ends the job where nobody catches it; so does one that all
were to raise, and never will.

A `LoneFailure` ends it after some time. A thread measures that, which there is on no rank that hasn't failed.

A `FailureDetector` finds out whether ranks wait in a communication for one that has failed. A rank that waits can't look
around, so each has a second thread, which wakes up five times a second. Once a failed rank has told it, it tells that
rank whenever its main thread begins to wait, moves on, or arrives at the agreement. When some wait and none moves, nobody
ever will. A call of the user's own, into a compiled solver or another program, may be long, or may be a communication by
bare mpi4py: from outside they look alike. So it counts as waiting only after minutes, or after `MPIAD_TIMEOUT`.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import traceback
from types import FrameType

from mpi4py import MPI

from mpiad._typing import Comm, Request
from mpiad.transport.abort import end_job, may_end_job
from mpiad.transport.channels import is_watched
from mpiad.transport.guarded.watch_settings import seconds_of
from mpiad.transport.notices import Notices, threads_may_communicate
from mpiad.transport.uncaught import end_by

SOON, LATE = 10.0, 300.0  # seconds: where others may well wait for this rank, and where that would be a surprise

_FAILED, _MOVES, _WAITS, _ARRIVED = range(1, 5)
_TICK = 0.2
_WAITS_AFTER = 0.5
# Where MPIAD_TIMEOUT says nothing: in code of the user's own a communication by bare mpi4py can't be told from a long
# computation.
_STUCK_AFTER = 300.0
_COMMUNICATES = ("mpiad.transport", "mpiad.primitives", "mpiad.differentiation", "mpiad.domain", "mpiad.linalg")
# These poll, and call what is to be looked at.
_POLLS = (
    "mpiad.transport.guarded", "mpiad.transport.polling", "mpiad.transport.user_failures",
    "mpiad.transport.failure_detector",
)  # fmt: skip
# Without a second thread the failed rank can only wait for so long.
_PATIENCE = 1.5
# MPI's abort may return some time before the launcher kills this process.
_DEATH_WITHIN = 2.0


class FailureDetector:
    """A rank's lookout during a call; `close` ends it. It listens only where ranks that wait can't be interrupted.

    `room`: module of whoever comes to agreements.
    """

    def __init__(self, comm: Comm, room: str, listens: bool = True):
        self._room, self._notices = room, Notices(comm)
        self._watched = threading.get_ident()
        self._told: dict[int, int] = {}  # failed ranks, and what they know of this one
        self._states = dict.fromkeys(set(range(comm.size)) - {comm.rank}, _MOVES)
        self._ear = threading.Lock()
        self._place: tuple[FrameType, int, float] | None = None
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        if listens and comm.size > 1 and threads_may_communicate():
            self._thread = threading.Thread(target=self._look_out, name="mpiad-watch", daemon=True)
            self._thread.start()

    def _look_out(self) -> None:
        while not self._done.wait(_TICK):
            self._hear()
            if self._told:
                self._tell(self._state())

    def _hear(self) -> None:
        """Take all notices that have come, in their order, whichever thread looks."""
        with self._ear:
            while (notice := self._notices.take()) is not None:
                source, kind = notice
                if kind == _FAILED:
                    self._told[source] = _MOVES
                else:
                    self._states[source] = kind

    def _tell(self, state: int) -> None:
        for rank in list(self._told):
            if self._told[rank] != state:
                self._told[rank] = state
                self._notices.post(rank, state)

    def _state(self) -> int:
        """Return what the main thread does: whether it has been at one instruction for long."""
        frame, now = sys._current_frames().get(self._watched), time.monotonic()
        # What polls doesn't stay at one instruction; who called it does.
        while frame is not None and frame.f_globals.get("__name__", "").startswith(_POLLS):
            frame = frame.f_back
        if frame is None:
            return _MOVES
        module = frame.f_globals.get("__name__", "")
        if module.startswith(self._room):
            return _ARRIVED
        if self._place is None or self._place[0] is not frame or self._place[1] != frame.f_lasti:
            self._place = frame, frame.f_lasti, now  # the frame is kept, so that no other can have its identity
        limit = _WAITS_AFTER if module.startswith(_COMMUNICATES) else _stuck_after()
        return _WAITS if now - self._place[2] >= limit else _MOVES

    def wait_as_failed(self, request: Request, error: BaseException) -> None:
        """Wait until all ranks have come to an agreement; end the job where one never will."""
        start = time.monotonic()
        for rank in self._states:
            self._notices.post(rank, _FAILED)
        while not request.Test():
            self._hear()
            waiting = [rank for rank, state in self._states.items() if state == _WAITS]
            if waiting and _MOVES not in self._states.values():
                _end_at_once(error, f"rank {waiting[0]} waits in a communication and no rank moves on")
            if self._thread is None and time.monotonic() - start > _PATIENCE:
                _end_at_once(error, f"another rank has not finished its part for {_PATIENCE} seconds")
            time.sleep(1e-3)

    def close(self, failed: bool = False) -> None:
        """End the lookout; all ranks say whether there was a failure, after which notices may be under way."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        self._place = None
        if failed:
            self._notices.drain()


def _stuck_after() -> float:
    """Return for how many seconds a rank may be in one call of the user's own before it counts as waiting."""
    given = os.environ.get("MPIAD_TIMEOUT")
    if not given:
        return _STUCK_AFTER
    return seconds_of(given, "MPIAD_TIMEOUT") or math.inf


def _end_at_once(error: BaseException, reason: str) -> None:
    sys.stderr.write(f"mpiad: minimize can't raise this exception on all ranks: {reason}.\n")
    end_by(error)  # under MPIAD_ABORT=0 it only shows it, and this rank raises alone
    time.sleep(_DEATH_WITHIN)
    raise error


class LoneFailure:
    """Ends the job after some time, unless `met` is called before; not under watch, where waits have their own limit.

    `error`: what this rank would raise. `call`: name of the public function.
    """

    def __init__(self, error: Exception, call: str, seconds: float):
        self._timer: threading.Timer | None = None
        if may_end_job() and not is_watched():
            self._timer = threading.Timer(seconds, _end_late, (error, call, seconds))
            self._timer.daemon = True
            self._timer.start()

    def met(self) -> None:
        """Note that the other ranks have come."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _end_late(error: Exception, call: str, seconds: float) -> None:
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    end_job(
        f"mpiad: rank {MPI.COMM_WORLD.rank} ended the job. {call} can't raise this exception on all ranks: others have not "
        f"come within {seconds:g} s. They wait for this rank in a communication of the user's function, or compute for so "
        f"long (MPIAD_TIMEOUT sets another limit).\n{trace}",
        1,
    )
