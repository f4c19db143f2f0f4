"""A line of progress on standard error: written over on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

__all__ = ["ProgressLine"]

_SECONDS_BETWEEN_LINES = 1.0


class ProgressLine:
    """Write what is new as it comes.

    Parameters
    ----------
    stream : text file, optional
        Standard error by default. mpiexec reads it through a pipe, so that under mpiexec lines are plain.

    Notes
    -----
    On a terminal every text shows. Elsewhere a text shows where a second has passed since the one before; the first and
    the last always.
    """

    def __init__(self, stream: TextIO | None = None):
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._held: str | None = None
        self._written = -float("inf")

    def show(self, text: str) -> None:
        """Write a text, now or when nothing newer comes."""
        now = time.monotonic()
        if self._terminal:
            self._write("\r" + text + "\x1b[K")
        elif now - self._written >= _SECONDS_BETWEEN_LINES:
            self._write(text + "\n")
            self._written, self._held = now, None
        else:
            self._held = text

    def close(self) -> None:
        """Write the last text, or end the line on the terminal."""
        if self._terminal:
            self._write("\n")
        elif self._held is not None:
            self._write(self._held + "\n")
            self._held = None

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
