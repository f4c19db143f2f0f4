"""A progress bar on standard error, for long calls."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _StandardError:
    """Standard error that ignores failed writes, so that the computation continues after the end of the reading process."""

    def __init__(self) -> None:
        self._stream = sys.stderr

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        with self._ignoring_errors():
            self._stream.write(text)

    def flush(self) -> None:
        with self._ignoring_errors():
            self._stream.flush()

    @contextmanager
    def _ignoring_errors(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            # Without this, Python would write the buffered text again at exit, and fail with exit code 120.
            with open(os.devnull, "w", encoding="utf-8") as null_device:
                os.dup2(null_device.fileno(), self._stream.fileno())
        except (OSError, ValueError):  # a full disk, a closed stream
            pass


def progress_bar(unit: str, total: int | None = None, done: int = 0) -> Any:
    """Return a tqdm bar that counts from `done` to `total`, or without a limit if `total` is None."""
    from tqdm.auto import tqdm  # imported late, because the import takes long

    stream, disabled = _StandardError(), sys.stderr is None
    # At most one update per second, since under mpiexec each update is a new line.
    return tqdm(
        desc=unit, total=total, initial=done, file=stream, disable=disabled, miniters=1, mininterval=1.0, dynamic_ncols=True
    )
