"""How long a rank waited in each communication, before the others were there.

Inside a call of MPI waiting and transferring can't be told apart. What can be told is when each rank began: a rank that
receives waits until its sender begins to send; one that takes in what all ranks give, until the last of them begins; one
that takes in what the root gives, until the root begins. That, and at most the length of the call, is its wait; the rest
is transfer. Sends, and starts of what is completed later, wait for nobody. What completes a send or a reduction that
was started before counts as wait whole: the rank could do nothing else.

Times of different ranks are compared on one clock, which is as exact as messages are fast: a few microseconds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpiad._typing import Comm, Rank
from mpiad.debug.clocks import Clock
from mpiad.debug.recorder import Event, Message

_STARTS = ("mpi_isend", "mpi_irecv", "mpi_iallreduce", "mpi_send")
_COMPLETIONS = ("mpi_wait", "mpi_waitall")
_FROM_ROOT, _TO_ROOT = ("mpi_bcast", "mpi_scatter"), ("mpi_sum", "mpi_reduce", "mpi_gather")


class _Meeting(NamedTuple):
    """One collective: the same on all of its ranks, `number` counts those of a kind on a communicator."""

    communicator: str
    operation: str
    number: int


class _Arrival(NamedTuple):
    """When a rank of the world began it, and whose values it takes in: all ranks', or those of one (of the world)."""

    meeting: _Meeting
    rank: Rank
    began: float
    root: Rank | None


def wait_times(events: Sequence[Event], clock: Clock, comm: Comm) -> list[float]:
    """Return the seconds that this rank waited in each of its innermost communications; collective over the world."""
    sent = _sends(events, clock, comm)
    arrivals = _arrivals(events, clock, comm.rank)
    # Groups differ from call to call, so each is compared by its first member: no rank holds all ranks' arrivals.
    latest = _latest(arrivals, {k: events[k].arguments.members[0] for k in arrivals}, comm)
    return [_wait(event, sent, latest.get(k), clock) for k, event in enumerate(events)]


def _wait(event: Event, sent: dict[Message, float], others: float | None, clock: Clock) -> float:
    lasted = event.ended - event.began
    awaited = [sent[message] for message in event.messages if message in sent]
    if others is not None:
        awaited.append(others)
    if awaited:
        return min(max(max(awaited) - clock(event.began), 0.0), lasted)
    return lasted if event.operation in _COMPLETIONS and not event.messages else 0.0


def _sends(events: Sequence[Event], clock: Clock, comm: Comm) -> dict[Message, float]:
    """Return when the messages that came here were sent, by the receiver's name for them."""
    outgoing: list[list[tuple[Message, float]]] = [[] for _ in range(comm.size)]
    for event in events:
        for message in event.messages:
            if message.outgoing:
                outgoing[message.dest].append((message._replace(outgoing=False), clock(event.began)))
    return dict(pair for pairs in comm.alltoall(outgoing) for pair in pairs)


def _arrivals(events: Sequence[Event], clock: Clock, rank: Rank) -> dict[int, _Arrival]:
    """Return this rank's arrivals at collectives, by the place of their events."""
    counts: Counter[tuple[str, str]] = Counter()
    found = {}
    for k, event in enumerate(events):
        given, name = event.arguments, event.operation
        if not given.members or event.messages or name in _STARTS or name in _COMPLETIONS or given.peer is not None:
            continue
        kind = (given.communicator or "", name)
        root = None if given.root is None else given.members[given.root]
        # All ranks of a group make its collectives of a kind in the same order: the count tells which belong together.
        found[k] = _Arrival(_Meeting(*kind, counts[kind]), rank, clock(event.began), root)
        counts[kind] += 1
    return found


def _latest(arrivals: dict[int, _Arrival], owners: dict[int, Rank], comm: Comm) -> dict[int, float]:
    """Return, by place, when the last one began of those whom this rank waits for: each owner compares for its group."""
    places: list[list[int]] = [[] for _ in range(comm.size)]
    for k, owner in owners.items():
        places[owner].append(k)
    asked = comm.alltoall([[arrivals[k] for k in chosen] for chosen in places])
    began: dict[_Meeting, dict[Rank, float]] = defaultdict(dict)
    for arrival in (arrival for part in asked for arrival in part):
        began[arrival.meeting][arrival.rank] = arrival.began
    answers = comm.alltoall([[_awaited(arrival, began[arrival.meeting]) for arrival in part] for part in asked])
    return {k: time for chosen, times in zip(places, answers) for k, time in zip(chosen, times)}


def _awaited(arrival: _Arrival, began: dict[Rank, Any]) -> float:
    name, root = arrival.meeting.operation, arrival.root
    if root is not None and name in _FROM_ROOT:
        return began.get(root, arrival.began)
    if root is not None and name in _TO_ROOT and arrival.rank != root:
        # Who only gives to the root doesn't wait for the others.
        return arrival.began
    return max(began.values())
