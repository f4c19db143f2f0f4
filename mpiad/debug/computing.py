"""Where a rank computes: the time outside of all communication, by the lines of the program on both sides of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from mpiad.debug.recorder import Event, Recorder

_START, _END = "start of the recording", "end of the recording"


class Place(NamedTuple):
    """What lies between two communications, or inside one of the library's functions that makes several."""

    phase: str  # {"forward", "backward", "outside"}; of a derivative, or outside of all
    # `after`, `until`: the lines of the communications before and behind it (of adjoints, those of their forward calls).
    # The same line in both is a loop around it; inside a function of the library's both name that function.
    after: str
    until: str


class Stretch(NamedTuple):
    """What the ranks computed at one place."""

    place: Place
    seconds: np.ndarray  # shape (P,)


def computed(recorder: Recorder, events: Iterable[Event]) -> dict[Place, float]:
    """Return a rank's seconds by place; they and the innermost communications add up to what was recorded.

    Of the main thread: only there the time between two calls is known to be the program's. Others wait for most of theirs.
    """
    mine = [event for event in events if event.thread == 0]
    found: dict[Place, float] = defaultdict(float)
    for began, ended, place in gaps(recorder, mine):
        found[place] += ended - began
    for event, seconds in _inside(mine):
        # A solve communicates inside: what it computes between its messages belongs to its own line.
        named = f"inside {event.called}"
        found[Place("backward" if event.direction == "adjoint" else "forward", named, named)] += seconds
    return dict(found)


def gaps(recorder: Recorder, events: list[Event]) -> Iterator[tuple[float, float, Place]]:
    """Yield begin, end and place of what lies between a thread's communications, in pieces of one phase each."""
    phases: list[str] = []
    pending: list[tuple[float, float, str]] = []  # since the last communication: begin, end and phase
    at, after = recorder.since, _START

    def passed(time: float) -> None:
        if time > at:  # else inside a communication
            pending.append((at, time, phases[-1] if phases else "outside"))

    def reached(until: str) -> Iterator[tuple[float, float, Place]]:
        yield from [(began, ended, Place(phase, after, until)) for began, ended, phase in pending]
        pending.clear()

    for time, _, what in sorted(_marks(events), key=itemgetter(0, 1)):
        passed(time)
        at = max(at, time)
        if isinstance(what, Event):
            line = what.forward_site or what.site
            yield from reached(line)
            at, after = what.ended, line
        elif what:
            phases.append(what)
        elif phases:
            phases.pop()
    passed(recorder.since + recorder.elapsed)
    yield from reached(_END)


def _marks(events: list[Event]) -> Iterable[tuple[float, int, Event | str]]:
    """Yield times, an order where they are equal, and what happens: a communication, a phase's name, "" for its end."""
    for event in events:
        if event.direction == "phase":
            yield event.began, 1, event.name
            yield event.ended, 0, ""
        elif event.outermost:
            yield event.began, 2, event


def _inside(events: list[Event]) -> Iterable[tuple[Event, float]]:
    """Yield the outermost communications that have others inside, and their seconds outside of these."""
    inner = 0.0
    for event in events:  # in the order of their ends, so that what is inside comes first
        if event.direction == "phase":
            continue
        if event.innermost:
            inner += event.ended - event.began
        if event.outermost:
            if not event.innermost:
                yield event, max(event.ended - event.began - inner, 0.0)
            inner = 0.0
