"""How far a long call has come, on standard error: tqdm's bar where somebody watches, plain lines elsewhere.

A bar needs tqdm, and a terminal or a notebook. mpiexec reads the ranks' standard error through pipes, so that under mpiexec
there are plain lines, at most one in a second.
"""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta
from typing import Any, TextIO

_SECONDS_BETWEEN_LINES = 1.0


class ProgressLine:
    """Count towards a limit, and tell how long it takes from there.

    - `unit`: what is counted, in the plural.
    - `total`: how many there will be, at most; by default that isn't known.
    - `done`: how many were there before, in a run that this one goes on from: they say nothing of how long the rest
      takes.
    - `stream`: standard error by default.

    A plain line is written where a second has passed since the one before; the first and the last always.
    """

    def __init__(self, unit: str, total: int | None = None, *, done: int = 0, stream: TextIO | None = None):
        self._stream = sys.stderr if stream is None else stream
        self._unit, self._total = unit, total
        self._before, self._done, self._said = done, done, ""
        self._bar = _bar(self._stream, unit, total, done)
        self._start, self._written, self._held = time.monotonic(), -float("inf"), False
        self._lock = threading.Lock()

    def advance(self, more: int) -> None:
        """Count more as done; any thread may call it."""
        with self._lock:
            self.show(self._done + more)

    def show(self, done: int, said: str = "", total: int | None = None) -> None:
        """Tell how many are done, now or when nothing newer comes, and a text behind it."""
        self._done, self._said, self._held = done, said, True
        self._total = self._total if total is None else total
        if self._bar is not None:
            self._bar.total = self._total
            self._bar.set_postfix_str(said, refresh=False)
            self._bar.update(done - self._bar.n)
        elif time.monotonic() - self._written >= _SECONDS_BETWEEN_LINES:
            self._write()

    def close(self) -> None:
        """Write the last line, or leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()
        elif self._held:
            self._write()

    def _write(self) -> None:
        self._written, self._held = time.monotonic(), False
        self._stream.write(self._text(self._written - self._start) + "\n")
        self._stream.flush()

    def _text(self, passed: float) -> str:
        limit = "" if self._total is None else f" of {self._total}"
        text = f"{self._done}{limit} {self._unit}, {_clock(passed)}"
        new = self._done - self._before
        if self._total is not None and 0 < new and self._done < self._total:
            text += f", {_clock(passed / new * (self._total - self._done))} left"
        return f"{text}: {self._said}" if self._said else text


def _bar(stream: TextIO, unit: str, total: int | None, done: int) -> Any:
    """Return a bar of tqdm's, None where there is no tqdm, or nobody to see a bar move."""
    try:
        import tqdm.auto
        import tqdm.autonotebook
    except ImportError:
        return None
    in_notebook = tqdm.autonotebook.tqdm is not tqdm.std.tqdm
    if not (in_notebook or stream.isatty()):
        return None
    # Each advance may be shown: by default tqdm looks at its clock less often where they come in bursts.
    return tqdm.auto.tqdm(desc=unit, total=total, initial=done, file=stream, miniters=1, dynamic_ncols=True)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
