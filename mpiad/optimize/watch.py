"""Find out whether ranks wait in a communication for one that has failed and will never come.

A rank whose part of an evaluation fails goes to the agreement on the status of all ranks. There the others meet it when
their own parts are done, however long these take: unless they wait for that rank inside a communication. A rank that
waits can't look around, so each has a second thread, which wakes up five times a second. Once the failed rank has told
it, it looks where its main thread is, and answers if that has been inside one and the same communication for a while.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from mpiad._typing import Comm
from mpiad.transport.notices import Notices, threads_may_communicate

__all__ = ["Watch"]

_FAILED, _WAITING = 1, 2
_TICK = 0.2
_WAITS_AFTER = 0.5
# In code of the user's own a communication by bare mpi4py can't be told from a long computation.
_STUCK_AFTER = 10.0
_COMMUNICATES = ("mpiad.transport", "mpiad.primitives", "mpiad.differentiation", "mpiad.domain", "mpiad.linalg")
# Without a second thread the failed rank can only wait for so long.
_PATIENCE = 1.5


class Watch:
    """A rank's lookout during a solve; `close` ends it."""

    def __init__(self, comm: Comm):
        self._comm, self._notices = comm, Notices(comm)
        self._watched = threading.get_ident()
        self._noticed: set[int] = set()
        self._answered = False
        self._place: tuple[FrameType, int, float] | None = None
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        if comm.size > 1 and threads_may_communicate():
            self._thread = threading.Thread(target=self._look_out, name="mpiad-watch", daemon=True)
            self._thread.start()

    def _look_out(self) -> None:
        while not self._done.wait(_TICK):
            source = self._notices.take(_FAILED)
            if source is not None:
                self._noticed.add(source)
            if self._noticed and not self._answered and self._waits():
                self._answered = True
                for rank in self._noticed:
                    self._notices.post(rank, _WAITING)

    def _waits(self) -> bool:
        """Tell whether the main thread has been at one instruction for too long."""
        frame, now = sys._current_frames().get(self._watched), time.monotonic()
        if frame is None:
            return False
        if self._place is None or self._place[0] is not frame or self._place[1] != frame.f_lasti:
            self._place = frame, frame.f_lasti, now  # the frame is kept, so that no other can have its identity
            return False
        inside = frame.f_globals.get("__name__", "").startswith(_COMMUNICATES)
        return now - self._place[2] >= (_WAITS_AFTER if inside else _STUCK_AFTER)

    def wait_as_failed(self, request: Any, error: BaseException) -> None:
        """Wait until all ranks have come to an agreement; end the job where one never will."""
        start = time.monotonic()
        for rank in range(self._comm.size):
            if rank != self._comm.rank:
                self._notices.post(rank, _FAILED)
        while not request.Test():
            waiting = self._notices.take(_WAITING)
            if waiting is not None:
                _end_job(error, f"rank {waiting} waits for it in a communication")
            elif self._thread is None and time.monotonic() - start > _PATIENCE:
                _end_job(error, f"another rank has not finished its part for {_PATIENCE} seconds")
            time.sleep(1e-3)

    def close(self, failed: Sequence[int] = ()) -> None:
        """End the lookout and take the notices that the failed ranks have posted."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        self._place = None
        for rank in failed:
            if rank != self._comm.rank and rank not in self._noticed:
                self._notices.take_from(rank, _FAILED)
        self._notices.close()


def _end_job(error: BaseException, reason: str) -> None:
    sys.stderr.write(f"mpiad: minimize can't raise this exception on all ranks, since {reason}.\n")
    # The hook that the library installs ends the job. Where there is another (MPIAD_ABORT=0), this rank raises alone.
    sys.excepthook(type(error), error, error.__traceback__)
    raise error
