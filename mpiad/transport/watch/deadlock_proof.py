"""The proof that waits of a program can't end, from two looks at all ranks.

A look is a set of states that the ranks send when they are asked. Let W be the ranks with the same waits in two looks, the
second of which began after the first had ended, and T a moment between them. The argument has three parts.

1. *The counts are those at T.* A rank counts a message before it starts to send it, and a receive before it starts it. A
   receive from any rank or with any tag is counted once more, with the rank and the tag of its message, when it has ended.
   So the counts of a rank in W don't change while it waits, and a state contains counts that were read before its waits.
2. *Nothing that could match is on its way.* Messages between two ranks with the same communicator and tag are received in
   the order in which they are sent. So the n-th receive is matched if the sender has counted n messages, received or not,
   and the n-th message is matched if the receiver has counted n receives. Receives from any rank or with any tag, whose
   message isn't known, don't count for the former, and count for each message that they could match for the latter. So a
   message in flight, in a queue, or received by a request that nobody has tested, is counted like one that MPI has matched:
   its receive may end, and so may its send, whose acknowledgement may be in flight. A collective may end once all its
   ranks have begun it.
3. *Nobody will make the missing call.* A wait that isn't matched at T needs a call that another rank makes later. Remove
   from W each rank whose wait may end, or needs a call that a rank outside W could make, until none is left. The ranks that
   are left include a first one to end its wait, which needs a call that one of the others makes before: a contradiction.

Nothing is claimed of communicators whose order of messages isn't known: on which a second thread has communicated, a call
has raised an exception, a request was cancelled, or messages have too many tags; nor of waits that a rank makes together
with threads that don't wait, and of ranks that don't answer.

The proof is one for programs that end for every MPI. A send is taken to wait for its receive, and a collective for its
ranks, though an MPI may buffer the former, and need only some ranks for the latter. That is why each thread must also have
polled for messages between the looks: by then, an MPI that can end such a call has ended it. Both ends of each message must
be watched: a message that isn't counted when it is sent, such as one of a library in C, but is received by a watched call,
makes its receive and the later ones appear to be without a message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from threading import get_ident
from typing import Any, NamedTuple

from mpi4py import MPI

from mpiad._typing import Rank, Status

COLLECTIVE, SEND, RECEIVE = "collective", "send", "receive"
State = dict[str, Any]
Stream = tuple[Rank, int]  # the messages from or to a rank with a tag, on a communicator
_ANY_SOURCE, _ANY_TAG = MPI.ANY_SOURCE, MPI.ANY_TAG
_MOST_STREAMS = 10_000
_RECENT = 16  # collectives
_COMPUTED = 1e-3  # seconds; a thread that waits in MPI polls for messages all the time


def is_open(stream: Stream) -> bool:
    """Return whether receives with these arguments are from any rank, or with any tag."""
    return stream[0] == _ANY_SOURCE or stream[1] == _ANY_TAG


class Operation(NamedTuple):
    """An operation of MPI on one rank. `peers`: the ranks in the world that may take part.

    `comm`: a number that is equal on all ranks of the communicator. `number`: of a collective on the communicator, or of a
    message or receive in its stream; for a receive from any rank or with any tag that of `Counts.requests`.
    """

    kind: str  # {"collective", "send", "receive"}
    name: str
    comm: int
    peers: tuple[Rank, ...]
    number: int
    tag: int = 0
    is_open: bool = False  # whether a receive is from any rank, or with any tag


class ThreadWait(NamedTuple):
    """The wait of a thread for all operations, or for any one of them; `cpu`: seconds that the thread has computed."""

    began: float
    cpu: float
    any_suffices: bool
    operations: list[Operation]


class Counts(NamedTuple):
    """The numbers of a rank's calls on a communicator, with ranks in the world; `sends` is None if an order is unknown."""

    collectives: int = 0
    recent: tuple[str, ...] = ()  # the names of the last collectives
    sends: Mapping[Stream, int] | None = None
    receives: Mapping[Stream, int] = {}  # noqa: RUF012  # with any rank or any tag in a stream: receives of unknown messages
    requests: int = 0  # receives with a rank and a tag that have been started by nonblocking calls

    def differs(self, operation: Operation) -> bool:
        """Return whether this rank has begun another collective in place of one."""
        place = operation.number - self.collectives - 1
        return -len(self.recent) <= place < 0 and _family(self.recent[place]) != _family(operation.name)


class Counter:
    """Counts this rank's calls on a communicator."""

    __slots__ = ("collectives", "is_ordered", "receives", "recent", "requests", "sends", "status", "thread")

    def __init__(self) -> None:
        self.collectives, self.requests, self.is_ordered = 0, 0, True
        self.recent = deque[str](maxlen=_RECENT)
        self.sends, self.receives = dict[Stream, int](), dict[Stream, int]()
        self.thread: int | None = None
        self.status = MPI.Status()  # for calls without one; if several threads use it, the order is unknown anyway

    def collective(self, name: str) -> int:
        """Count a collective; return its number."""
        self.collectives += 1
        self.recent.append(name)
        return self.collectives

    def count(self, counts: dict[Stream, int], stream: Stream) -> int:
        """Count a message or a receive before it starts; return its number in the stream."""
        if self.thread != get_ident():
            self.is_ordered, self.thread = self.is_ordered and self.thread is None, get_ident()
        number = counts[stream] = counts.get(stream, 0) + 1
        if number == 1 and len(counts) > _MOST_STREAMS:
            self.is_ordered = False
            counts.clear()
        return number

    def move(self, stream: Stream, status: Status) -> None:
        """Count a receive in the stream of its message; in none if it has received nothing, and `status` is None."""
        received = self.receives
        received[stream] = received.get(stream, 0) - 1
        if status is not None:
            self.count(received, (status.source, status.tag))

    def counts(self, members: Sequence[Rank]) -> Counts:
        """Return the counts; `members`: the ranks in the world."""
        sends, receives = (
            {(members[peer] if peer >= 0 else peer, tag): count for (peer, tag), count in counts.copy().items()}
            for counts in (self.sends, self.receives)
        )
        return Counts(self.collectives, tuple(self.recent), sends if self.is_ordered else None, receives, self.requests)


def _family(name: str) -> str:
    """Return the name of a collective, the same for calls that MPI may match."""
    name = name.lower()
    return name[name.startswith("i") :].rstrip("vw").replace("clone", "dup")


_UNKNOWN = Counts()


def _counts(states: Sequence[State | None], rank: Rank, operation: Operation) -> Counts:
    return (states[rank] or {}).get("counts", {}).get(operation.comm, _UNKNOWN)


def _is_known(states: Sequence[State | None], rank: Rank, operation: Operation) -> bool:
    """Return whether the calls of a rank that an operation depends on have been counted."""
    counts = _counts(states, rank, operation)
    return counts is not _UNKNOWN if operation.kind == COLLECTIVE else counts.sends is not None


def _is_matched(states: Sequence[State | None], rank: Rank, operation: Operation) -> bool:
    """Return whether the other end of a message has begun, as far as is known."""
    tag, number, mine = operation.tag, operation.number, _counts(states, rank, operation)
    if operation.kind == SEND:
        received = _counts(states, operation.peers[0], operation).receives
        return number <= sum(received.get((peer, of), 0) for peer in (rank, _ANY_SOURCE) for of in (tag, _ANY_TAG))
    if operation.is_open and number != mine.requests:  # later receives could also match its message
        return True
    for peer in operation.peers:
        sent = _counts(states, peer, operation).sends or {}
        for of in [of for dest, of in sent if dest == rank] if tag == _ANY_TAG else [tag]:
            needed = mine.receives.get((peer, of), 0) + 1 if operation.is_open else number
            if sent.get((rank, of), 0) >= needed:
                return True
    return False


def partners(states: Sequence[State | None], rank: Rank, operation: Operation) -> list[Rank] | None:
    """Return the ranks of which a message needs one, and a collective all, to end; None if it needs no further call."""
    if operation.kind != COLLECTIVE:
        return None if _is_matched(states, rank, operation) else list(operation.peers)
    each = ((peer, _counts(states, peer, operation)) for peer in operation.peers if peer != rank)
    return [peer for peer, counts in each if counts.collectives < operation.number or counts.differs(operation)] or None


def _missing(states: Sequence[State | None], rank: Rank, operation: Operation) -> list[Rank] | None:
    """Return the same as `partners`, but None for a message, and fewer ranks for a collective, if counts aren't known."""
    needed = partners(states, rank, operation)
    if needed is None or not _is_known(states, rank, operation):
        return None
    known = [peer for peer in needed if _is_known(states, peer, operation)]
    return known or None if operation.kind == COLLECTIVE or len(known) == len(needed) else None


def stuck_ranks(states: Sequence[State | None]) -> set[Rank]:
    """Return the ranks that have left or wait in calls that can't end; ranks that don't answer may do anything."""
    stuck = {rank for rank, state in enumerate(states) if state and (state["state"] == "left" or state.get("all_wait"))}
    waits: list[tuple[Rank, ThreadWait]] = [(rank, wait) for rank in stuck for wait in states[rank].get("threads", ())]  # type: ignore[union-attr]
    missing = [[_missing(states, rank, operation) for operation in wait.operations] for rank, wait in waits]

    def may_end(wait: ThreadWait, missing: list[list[Rank] | None]) -> bool:
        ends = [
            peers is None or (all if operation.kind == COLLECTIVE else any)(peer not in stuck for peer in peers)
            for operation, peers in zip(wait.operations, missing)
        ]
        return not ends or (any(ends) if wait.any_suffices else all(ends))

    while moving := {rank for (rank, wait), peers in zip(waits, missing) if rank in stuck and may_end(wait, peers)}:
        stuck -= moving
    return stuck


def is_same_wait(before: State | None, after: State | None) -> bool:
    """Return whether a rank is in the same waits as before, or has left, and its threads have polled since."""
    if before is None or after is None or "threads" not in after:
        return before is not None and after is not None and after["state"] == "left"
    if [wait.began for wait in before.get("threads", ())] != [wait.began for wait in after["threads"]]:
        return False
    return all(new.cpu - old.cpu > _COMPUTED for old, new in zip(before["threads"], after["threads"]))
