"""Events in the format of Chrome's tracing, which Perfetto reads: one process for each rank, complete events.

Times are whole nanoseconds on one clock, so that what is inside something else stays inside after rounding. What lies
between two communications, in a phase or outside of all, is computation and becomes an event of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from mpiad.debug.recorder import Event, Message, Recorder

__all__ = ["rank_events"]

_SHORTEST = 1000  # nanoseconds of computation that are worth an event
Span = tuple[int, int, Any]


def rank_events(recorder: Recorder, rank: int, node: str, aligned: Callable[[float], float], zero: float) -> Iterator[str]:
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
        # Only of the main thread is the time between two calls known to be the program's.
        whole = (tick(recorder.since), tick(recorder.until)) if number == 0 else (0, 0)
        for start, end, event in [*spans, *_computation(spans, whole)]:
            yield _complete(rank, number, start, end, event)
            if event is not None:
                for message in event.messages:
                    yield _flow(rank, number, start, end, message)


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


def _computation(spans: list[Span], whole: tuple[int, int]) -> Iterator[Span]:
    """Yield the gaps between communications, in phases and outside; `spans` are sorted, and nested as they should be."""
    around: list[list[int]] = [[*whole]]  # where the next gap of each open phase starts, and where that phase ends
    for start, end, event in spans:
        while len(around) > 1 and around[-1][1] <= start:
            yield from _gap(*around.pop())
        if around[-1][0] > start:
            continue  # inside a communication
        yield from _gap(around[-1][0], start)
        around[-1][0] = end
        if event.direction == "phase":
            around.append([start, end])
    for at, end in reversed(around):
        yield from _gap(at, end)


def _gap(start: int, end: int) -> Iterator[Span]:
    if end - start >= _SHORTEST:
        yield start, end, None
