"""The progress line of a solve: one line that is written over on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from mpiad.optimize.history import Row

__all__ = ["Progress"]

_SECONDS_BETWEEN_LINES = 1.0


class Progress:
    """Write rows as they come.

    Parameters
    ----------
    stream : text file, optional
        Standard error by default. mpiexec reads it through a pipe, so that under mpiexec lines are plain.

    Notes
    -----
    On a terminal every row shows. Elsewhere a row shows where a second has passed since the one before; the first and
    the last row always.
    """

    def __init__(self, stream: TextIO | None = None):
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._held: Row | None = None
        self._written = -float("inf")

    def show(self, row: Row) -> None:
        """Write a row, now or when nothing newer comes."""
        now = time.monotonic()
        if self._terminal:
            self._write("\r" + _line(row) + "\x1b[K")
        elif now - self._written >= _SECONDS_BETWEEN_LINES:
            self._write(_line(row) + "\n")
            self._written, self._held = now, None
        else:
            self._held = row

    def close(self) -> None:
        """Write the last row, or end the line on the terminal."""
        if self._terminal:
            self._write("\n")
        elif self._held is not None:
            self._write(_line(self._held) + "\n")
            self._held = None

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _line(row: Row) -> str:
    return (
        f"iteration {row.iteration:4d}  loss {row.loss:.6e}  |gradient| {row.gradient_norm:.2e}  "
        f"evaluations {row.evaluations:4d}  {row.seconds:6.1f} s"
    )
