"""Message counts of debug mode: numbers sent to and received from each other rank, with the lines of the calls."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

_SITES = 32  # the last lines of each kind are kept: unreceived messages are mostly the last ones


class Entry(NamedTuple):
    """Messages of one kind; ranks are numbered as in the world."""

    communicator: str
    peer: int
    tag: int
    count: int
    places: tuple[str, ...]


class MessageCounts:
    """Counts the messages of one channel, which is the result of `owner()`."""

    def __init__(self, label: str, members: tuple[int, ...], owner: Any):
        self.label, self.members, self._owner = label, members, owner
        self._sent: dict[tuple[int, int], list[Any]] = {}
        self._received: dict[tuple[int, int], int] = {}
        _all[id(self)] = self

    def sent(self, peer: int, tag: int, place: str) -> None:
        """Count a sent message."""
        found = self._sent.get((peer, tag))
        if found is None:
            found = self._sent[peer, tag] = [0, deque(maxlen=_SITES)]
        found[0] += 1
        found[1].append(place)

    def received(self, peer: int, tag: int) -> None:
        """Count a received message."""
        self._received[peer, tag] = self._received.get((peer, tag), 0) + 1

    def close(self) -> None:
        """Stop counting, since `reset` has dropped the messages."""
        _all.pop(id(self), None)

    def entries(self) -> tuple[list[Entry], list[Entry], list[tuple[str, str, str]]]:
        """Return the messages sent, the messages received, and the requests started and not waited for."""
        # `copy` is one step. A loop over the items may be interrupted by garbage collection, and the program adds more.
        label, rank = self.label, self.members
        sent = [Entry(label, rank[peer], tag, n, tuple(sites)) for (peer, tag), (n, sites) in self._sent.copy().items()]
        received = [Entry(label, rank[peer], tag, n, ()) for (peer, tag), n in self._received.copy().items()]
        channel = self._owner()
        started = () if channel is None else tuple(channel.started.values())
        requests = [request for kind, held, _ in started if not kind.startswith("blocking") for request in held]
        return sent, received, [(self.label, *request.caller) for request in requests if hasattr(request, "caller")]


# The thread that answers other ranks reads it while the program adds to it: a weak set can't be copied in one step.
_all: WeakValueDictionary[int, MessageCounts] = WeakValueDictionary()


Summary = tuple[list[Entry], list[Entry], list[tuple[str, str, str]]]


def summary() -> Summary:
    """Return this rank's entries of all channels."""
    parts = [found.entries() for reference in _all.valuerefs() if (found := reference()) is not None]
    return tuple([entry for part in parts for entry in part[k]] for k in range(3))  # type: ignore[return-value]


def without(found: Summary, labels: set[str]) -> Summary:
    """Return a summary without the communicators with these names."""
    return tuple([entry for entry in entries if entry[0] not in labels] for entries in found)  # type: ignore[return-value]


def unreceived(summaries: list[Any]) -> list[str]:
    """Return a sentence for each kind of message that was sent and not received; `summaries`: of all ranks."""
    taken: dict[tuple, int] = {}
    for rank, found in enumerate(summaries):
        for entry in found[1] if found else ():
            taken[entry.communicator, entry.peer, rank, entry.tag] = entry.count
    lines = []
    for rank, found in enumerate(summaries):
        for entry in found[0] if found else ():
            # The receives of a rank without an answer are unknown.
            if summaries[entry.peer] is None:
                continue
            lost = entry.count - taken.get((entry.communicator, rank, entry.peer, entry.tag), 0)
            if lost > 0:
                lines.append(_sentence(rank, entry, lost))
    return lines


def _sentence(rank: int, entry: Entry, lost: int) -> str:
    places = ", ".join(dict.fromkeys(entry.places[-lost:]))
    what = "a message" if lost == 1 else f"{lost} messages"
    where = "" if entry.communicator == "world" else f" on {entry.communicator}"
    return f"Rank {rank} sent {what} to rank {entry.peer} with tag {entry.tag}{where} at {places}, not received there."
