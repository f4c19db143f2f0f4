"""The file of a trace: all ranks' events in one, written whole or not at all.

It has the format of Chrome's tracing, which Perfetto reads: one process for each rank, complete events. Times are whole
nanoseconds on one clock, so that what is inside something else stays inside after rounding. What lies between two
communications, in a phase or outside of all, is computation and becomes an event of its own.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from mpiad._typing import Comm
from mpiad.checkpoint_files import begin
from mpiad.debug.clocks import Clock
from mpiad.debug.computing import gaps
from mpiad.debug.recorder import Event, Message, Recorder

_PIECE = 1 << 20  # characters, about
_HEADER = '{"displayTimeUnit": "ms", "otherData": {"ranks": %d, "events that were too many": %d}, "traceEvents": [\n'
_FOOTER = "\n]}\n"
_SHORTEST = 1000  # nanoseconds of computation that are worth an event


def gather_into(path: Path, comm: Comm, recorder: Recorder, clock: Clock) -> None:
    """Write the events of all ranks; collective.

    An OSError on all ranks, where rank 0 can't write the file: there is none then, or the old one.
    """
    starts, dropped = zip(*comm.allgather((clock(recorder.since), recorder.dropped)))
    pieces = _pieces(_rank_events(recorder, comm.rank, socket.gethostname(), clock, min(starts)))
    error = None
    if comm.rank == 0:
        # One rank's after another's: no rank holds them all.
        received = [iter(partial(comm.recv, source=rank), None) for rank in range(1, comm.size)]
        error = _written(path, _HEADER % (comm.size, sum(dropped)), chain(pieces, *received))
    else:
        for piece in pieces:
            comm.send(piece, 0)
        comm.send(None, 0)  # ends this rank's pieces
    error = comm.bcast(error, 0)
    if error is not None:
        raise OSError(f"the trace of {comm.size} ranks can't be written to {path}: {error}")


def _written(path: Path, header: str, pieces: Iterator[str]) -> str | None:
    """Write header, pieces and footer to a file that appears whole or not at all; return what went wrong."""
    temporary = None
    try:
        temporary, made = begin(path)
        with io.TextIOWrapper(made, encoding="utf-8") as file:
            file.write(header)
            for k, piece in enumerate(pieces):
                file.write((",\n" if k else "") + piece)
            file.write(_FOOTER)
            file.flush()
            os.replace(temporary, path)  # while it is locked
    except (OSError, ValueError) as failure:
        for _ in pieces:
            pass  # still taken: their senders wait to be rid of them
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        return str(failure)
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
    events = _rank_events(recorder, rank, socket.gethostname(), clock, clock(recorder.since))
    error = _written(part, _HEADER % (1, recorder.dropped), _pieces(events))
    if error is not None:
        raise OSError(f"the trace of rank {rank} can't be written to {part}: {error}")
    return part


def _rank_events(recorder: Recorder, rank: int, node: str, aligned: Callable[[float], float], zero: float) -> Iterator[str]:
    """Yield a rank's events, each as the text of a JSON object; `node` names the machine.

    `aligned` maps this rank's clock to the one that all ranks share, on which `zero` is the beginning.
    """

    def tick(time: float) -> int:
        return round(1e9 * (aligned(time) - zero))

    yield _metadata(rank, 0, "process_name", name=f"rank {rank} ({node})")
    yield _metadata(rank, 0, "process_sort_index", sort_index=rank)
    events = recorder.events
    for number, name in enumerate(recorder.threads):
        yield _metadata(rank, number, "thread_name", name=name)
        spans = [(tick(e.began), tick(e.ended), e) for e in events if e.thread == number]
        # Of two that begin together the longer one is around the other; it was noted later where they end together too.
        spans.reverse()
        spans.sort(key=lambda span: (span[0], -span[1]))
        for start, end, event in spans:
            yield _complete(rank, number, start, end, event)
            for message in event.messages:
                yield _flow(rank, number, start, end, message)
        # Only of the main thread is the time between two calls known to be the program's.
        for began, ended, _ in gaps(recorder, [event for _, _, event in spans]) if number == 0 else ():
            start, end = tick(began), tick(ended)
            if end - start >= _SHORTEST:
                yield _complete(rank, number, start, end, None)


def _metadata(rank: int, thread: int, kind: str, **args: Any) -> str:
    return json.dumps({"ph": "M", "pid": rank, "tid": thread, "name": kind, "args": args})


def _complete(rank: int, thread: int, start: int, end: int, event: Event | None) -> str:
    name, category, args = ("computation", "computation", {}) if event is None else _described(event)
    found = {"ph": "X", "pid": rank, "tid": thread, "ts": start / 1000, "dur": (end - start) / 1000}
    return json.dumps(found | {"name": name, "cat": category, "args": args})


def _described(event: Event) -> tuple[str, str, dict[str, Any]]:
    if event.direction == "phase":
        return event.name, "phase", {}
    given = event.arguments
    args = {
        "site": event.site, "forward site": event.forward_site, "communicator": given.communicator, "root": given.root,
        "peer": given.peer, "tag": given.tag, "shape": None if given.shape is None else list(given.shape),
        "dtype": None if given.dtype is None else str(given.dtype), "bytes": given.nbytes, "reduction": given.reduction,
    }  # fmt: skip
    # Inside the adjoint of one operation is another operation.
    name = event.called if event.outermost else event.operation
    return name, event.direction, {key: value for key, value in args.items() if value not in (None, "")}


def _flow(rank: int, thread: int, start: int, end: int, message: Message) -> str:
    # Both ends make the same number of it. Arrows leave and arrive inside their events.
    # Of equal names Perfetto makes one arrow, so it must be unique; Python's hash would differ between processes.
    number = int.from_bytes(hashlib.blake2b(repr(message[1:]).encode(), digest_size=6).digest(), "big")
    found: dict[str, Any] = {"pid": rank, "tid": thread, "id": number, "name": "message", "cat": "message"}
    found |= {"ph": "s", "ts": start / 1000} if message.outgoing else {"ph": "f", "bp": "e", "ts": end / 1000}
    return json.dumps(found)
