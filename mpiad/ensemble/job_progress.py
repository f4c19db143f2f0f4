"""One progress line for an ensemble over the ranks: the others tell rank 0 now and then how many have ended.

Nobody waits for it while the trajectories advance: a notice is sent and forgotten, and rank 0 looks for notices between
two steps of its own share. When that is done it waits for what is left, and goes on counting.
"""

from __future__ import annotations

import sys
import threading
import time

from mpiad.progress_line import ProgressLine
from mpiad.transport import Channel
from mpiad.transport.notices import Notices

_SECONDS_BETWEEN_NOTICES = 0.2
_MOST = 2**15 - 1  # a notice is its tag alone, and MPI promises tags up to this
_END = 0  # nobody tells of no trajectories


class JobProgress:
    """Counts ended trajectories of all ranks; each makes one, calls it, and closes it.

    `total`: trajectories of all ranks.
    """

    def __init__(self, used: Channel, total: int):
        self._used, self._comm = used, used.derive()
        self._notices = Notices(self._comm)
        self._line = ProgressLine("trajectories", total) if used.rank == 0 else None
        self._others, self._unsaid, self._said = used.size - 1, 0, time.monotonic()
        self._lock, self._handled = threading.Lock(), sys.exc_info()[1]

    def __call__(self, finished: int) -> None:
        """Count more trajectories of this rank's as ended."""
        with self._lock:  # shares may run in threads
            if self._line is not None:
                self._line.advance(finished)
                while (notice := self._notices.take()) is not None:
                    self._hear(notice[1])
                return
            self._unsaid += finished
            if time.monotonic() - self._said >= _SECONDS_BETWEEN_NOTICES:
                self._say()

    def _say(self) -> None:
        while self._unsaid:
            part = min(self._unsaid, _MOST)
            self._notices.post(0, part)
            self._unsaid -= part
        self._said = time.monotonic()

    def _hear(self, count: int) -> None:
        if count == _END:
            self._others -= 1
        elif self._line is not None:
            self._line.advance(count)

    def close(self) -> None:
        """Tell rank 0 the rest, or wait until all others have; also after an exception in this rank's share.

        But for an interrupt, which ends the job: nobody waits then, neither for others nor for this rank.
        """
        raised = sys.exc_info()[1]
        if raised is not self._handled and not isinstance(raised, Exception | None):
            if self._line is not None:
                self._line.close()
            return
        if self._line is None:
            self._say()
            self._notices.post(0, _END)
        while self._line is not None and self._others:
            self._hear(self._notices.await_next()[1])
        if self._line is not None:
            self._line.close()
        self._notices.drain()
        self._used.drop(self._comm)
