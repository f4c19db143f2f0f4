"""The bar of tqdm that long calls write to standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _StandardError:
    """Standard error without errors from failed writes: nobody may read it any more, but the computation continues."""

    def __init__(self) -> None:
        self._stream = sys.stderr

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        with self._dropping_failures():
            self._stream.write(text)

    def flush(self) -> None:
        with self._dropping_failures():
            self._stream.flush()

    @contextmanager
    def _dropping_failures(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            # Python keeps the text that it couldn't write, and would fail again at its exit, with code 120.
            with open(os.devnull, "w") as nothing:
                os.dup2(nothing.fileno(), self._stream.fileno())
        except (OSError, ValueError):  # a full disk, a closed stream
            pass


def progress_bar(unit: str, total: int | None = None, done: int = 0) -> Any:
    """Return a bar of tqdm that counts from `done` to `total`; if that is None, without an end."""
    from tqdm.auto import tqdm  # takes as long to import as the rest of mpiad

    stream, quiet = _StandardError(), sys.stderr is None
    # Under mpiexec standard error is a pipe, in which each update is text that stays: at most one per second.
    return tqdm(
        desc=unit, total=total, initial=done, file=stream, disable=quiet, miniters=1, mininterval=1.0, dynamic_ncols=True
    )
