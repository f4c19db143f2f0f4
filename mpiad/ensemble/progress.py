"""The progress line of a long solve, on standard error."""

from __future__ import annotations

import sys
import time
from typing import TextIO

__all__ = ["Progress"]

_SECONDS_BETWEEN_LINES = 1.0
_WIDTH = 30


class Progress:
    """A bar that counts ended trajectories: written over on a terminal, a line a second elsewhere.

    Parameters
    ----------
    total : int
    stream : text file, optional
        Standard error by default.
    """

    def __init__(self, total: int, stream: TextIO | None = None):
        self._total, self._done = total, 0
        self._stream = sys.stderr if stream is None else stream
        self._start = self._written = time.monotonic()

    def __call__(self, finished: int) -> None:
        """Count more trajectories as ended."""
        self._done += finished
        now = time.monotonic()
        if self._done >= self._total or now - self._written >= _SECONDS_BETWEEN_LINES:
            self._written = now
            self._write()

    def _write(self) -> None:
        filled = _WIDTH * self._done // max(1, self._total)
        counted = f"{self._done}/{self._total} trajectories"
        text = f"[{'#' * filled:{_WIDTH}}] {counted}  {self._written - self._start:.1f} s"
        last = self._done >= self._total
        self._stream.write(f"\r{text}\x1b[K{chr(10) * last}" if self._stream.isatty() else f"{text}\n")
        self._stream.flush()
