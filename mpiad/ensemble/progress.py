"""What a long solve's progress line says."""

from __future__ import annotations

import threading
import time
from typing import TextIO

from mpiad.progress_line import ProgressLine

__all__ = ["Progress"]

_SECONDS_BETWEEN = 1.0
_WIDTH = 30


class Progress:
    """A bar that counts ended trajectories.

    Parameters
    ----------
    total : int
    stream : text file, optional
        Standard error by default.
    """

    def __init__(self, total: int, stream: TextIO | None = None):
        self._total, self._done, self._line = total, 0, ProgressLine(stream)
        self._lock = threading.Lock()
        self._start = self._shown = time.monotonic()

    def __call__(self, finished: int) -> None:
        """Count more trajectories as ended."""
        with self._lock:  # shares may run in threads
            self._done += finished
            now = time.monotonic()
            # Some end in nearly every turn, and a turn takes less time than a line does on a terminal.
            if self._done >= self._total or now - self._shown >= _SECONDS_BETWEEN:
                self._shown = now
                self._line.show(self._text())

    def _text(self) -> str:
        filled = _WIDTH * self._done // max(1, self._total)
        counted = f"{self._done}/{self._total} trajectories"
        return f"[{'#' * filled:{_WIDTH}}] {counted}  {self._shown - self._start:.1f} s"

    def close(self) -> None:
        """End the line, also where not all trajectories have ended."""
        if self._shown > self._start:
            self._line.close()
