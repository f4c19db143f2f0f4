"""The file of a trace: all ranks' events in one, written whole or not at all."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

from mpiad._typing import Comm
from mpiad.debug.clocks import Clock
from mpiad.debug.recorder import Recorder
from mpiad.debug.timeline import rank_events

__all__ = ["gather_into", "write_part"]

_PIECE = 1 << 20  # characters, about
_HEADER = '{"displayTimeUnit": "ms", "otherData": {"ranks": %d, "events that were too many": %d}, "traceEvents": [\n'
_FOOTER = "\n]}\n"


def gather_into(path: Path, comm: Comm, recorder: Recorder, clock: Clock) -> None:
    """Write the events of all ranks; collective.

    Raises
    ------
    OSError
        On all ranks, where rank 0 can't write the file: there is none then, or the old one.
    """
    starts, dropped = zip(*comm.allgather((clock(recorder.since), recorder.dropped)))
    pieces = _pieces(rank_events(recorder, comm.rank, socket.gethostname(), clock, min(starts)))
    error = None
    if comm.rank == 0:
        # One rank's after another's: no rank holds them all.
        received = [iter(partial(comm.recv, source=rank), None) for rank in range(1, comm.size)]
        error = _Output(path).write_all(_HEADER % (comm.size, sum(dropped)), chain(pieces, *received))
    else:
        for piece in pieces:
            comm.send(piece, 0)
        comm.send(None, 0)  # ends this rank's pieces
    error = comm.bcast(error, 0)
    if error is not None:
        raise OSError(f"the trace of {comm.size} ranks can't be written to {path}: {error}")


class _Output:
    """A file that appears whole or not at all, and takes what comes also when it can't be written."""

    def __init__(self, path: Path):
        self._path, self._temporary = path, path.with_name(f"{path.name}.unfinished")
        self._error: str | None = None

    def write_all(self, header: str, pieces: Iterable[str]) -> str | None:
        """Write header, pieces and footer; return what went wrong."""
        with ExitStack() as stack:
            file: IO[str] = self._try(lambda: stack.enter_context(open(self._temporary, "w", encoding="utf-8")))
            self._try(lambda: file.write(header))
            for k, piece in enumerate(pieces):
                self._try(lambda text=(",\n" if k else "") + piece: file.write(text))
            self._try(lambda: file.write(_FOOTER))
            self._try(lambda: file.flush())
        self._try(lambda: os.replace(self._temporary, self._path))
        if self._error is not None:
            self._temporary.unlink(missing_ok=True)
        return self._error

    def _try(self, step: Callable[[], Any]) -> Any:
        # After a failure the pieces are still taken: their senders wait to be rid of them.
        if self._error is None:
            try:
                return step()
            except OSError as failure:
                self._error = str(failure)
        return None


def _pieces(events: Iterable[str]) -> Iterator[str]:
    held: list[str] = []
    size = 0
    for event in events:
        held.append(event)
        size += len(event)
        if size >= _PIECE:
            yield ",\n".join(held)
            held, size = [], 0
    if held:
        yield ",\n".join(held)


def write_part(path: Path, rank: int, recorder: Recorder, clock: Clock) -> Path:
    """Write this rank's events beside the file that won't come; return where."""
    part = path.with_name(f"{path.name}.rank{rank}")
    events = rank_events(recorder, rank, socket.gethostname(), clock, clock(recorder.since))
    error = _Output(part).write_all(_HEADER % (1, recorder.dropped), _pieces(events))
    if error is not None:
        raise OSError(f"the trace of rank {rank} can't be written to {part}: {error}")
    return part
