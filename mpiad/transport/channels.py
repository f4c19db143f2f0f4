"""Communicators of the library's own: duplicates, so that its messages never meet the user's.

A `Channel` belongs to one communicator of the user's. It holds two duplicates (`data` for the forward messages and all
collectives, `reverse` for the messages of adjoints) and numbers the point-to-point messages: the k-th message from a
rank to another with a tag is the k-th on both sides, and the adjoint's message, which may be started in another order,
is found by that number. `lookup` finds the channel of a communicator.

An exception that leaves messages under way marks the channel, since an old message would be taken for a new one;
`reset` renews its duplicates. Buffers are held here until MPI is done with them: an exception drops the requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count, repeat
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakSet

import numpy as np
from mpi4py import MPI

from mpiad._typing import Comm, Request
from mpiad.errors import CommunicatorError
from mpiad.transport.fault_tolerance import FAULT_TOLERANT, is_interruption
from mpiad.transport.tracing import tracing

# Draining of a communicator before it is freed: pending messages that nobody will receive are received and dropped.
#
# MPI may give the context of a freed communicator to the next one that is made, and a message left on the first would be
# received on the second in place of a later one. Messages between two ranks come in the order in which they were
# sent, so each rank sends a last one to each, and receives from each until that has come.


ABANDONED: list[tuple] = []
"""What MPI may still use: buffers, and communicators that can't be freed."""


_LAST = np.frombuffer(b"mpiad: last one.", dtype=np.uint8)  # differs from the user's messages
# For each communicator: the sends of the last messages, and by peer the tag and content of the message that came last.
Drained: TypeAlias = "dict[int, tuple[list[Request], dict[int, tuple[int, np.ndarray]]]]"


def drain(comm: Comm, tag: int, drained: Drained | None = None) -> None:
    """Receive and drop all messages on a communicator on which this rank has no receive posted; collective.

    Each rank's last message has the `tag`. After an exception this rank can go on from `drained`, which is filled: the
    others needn't repeat anything.
    """
    for part in getattr(comm, "parts", (comm,)):  # under watch, the messages and their headers
        sending, come = ({} if drained is None else drained).setdefault(id(part), ([], {}))
        # In one step, so that no interrupt has one sent twice.
        sending.extend(map(part.Isend, repeat(_LAST), range(len(sending), part.size), repeat(tag)))
        for peer in range(part.size):
            _receive_until_last(part, peer, tag, come)
        for request in sending:
            request.Wait()


def _receive_until_last(comm: Comm, peer: int, tag: int, come: dict[int, tuple[int, np.ndarray]]) -> None:
    status = MPI.Status()
    while peer not in come or come[peer][0] != tag or not np.array_equal(come[peer][1], _LAST):
        comm.Probe(peer, MPI.ANY_TAG, status)
        # Noted before it comes: if an interrupt follows, it is known by its content.
        come[peer] = status.tag, np.zeros(status.Get_count(MPI.BYTE), dtype=np.uint8)
        comm.Recv(come[peer][1], peer, status.tag, status)


def has_ended(reduction: Request) -> bool:
    """Return whether a reduction has completed, so that none of its messages are pending."""
    try:
        return reduction.Test()
    except MPI.Exception:  # Open MPI stops midway if the ranks' sizes differ
        return False


def give_back(comms: list[Comm], unended: bool) -> None:
    """Free communicators; collective. They are kept if a rank has begun a collective on them that others don't begin."""
    # Its messages stay under way. MPI reuses the contexts of freed communicators, whose ranks would receive these messages:
    # the sums of a communicator made later would be wrong.
    if unended:
        ABANDONED.append(tuple(comms))
        return
    for comm in comms:
        if comm != MPI.COMM_NULL:
            comm.Free()


def cancel(receive: Request) -> None:
    """Cancel a receive, and wait for its end."""
    if not receive:  # an exception came after its end
        return
    receive.Cancel()
    try:
        receive.Wait()
    except MPI.Exception:  # it had come, and was too long
        pass


_GOLDEN_SECTION = 0.6180339887498949
_live: WeakSet[Channel] = WeakSet()
_numbers = count()

communications = count()
"""Each communication takes a number: whether there was any, or as many as before, is known by what it gives next."""


Used: TypeAlias = "tuple[Channel, bool]"
"""A channel, and whether messages on it may be left even after all its ranks have met."""


def note_use(channel: Channel) -> None:
    """Note for the trace or operator around that it has communicated other than by operations."""
    if tracing.channels is not None:
        tracing.channels.add((channel, False))


def make_communicator(make: Callable[..., Comm], *arguments: Any) -> Comm:
    """Return a communicator made by MPI, or raise an error with advice on freeing some if MPI has none left; collective."""
    try:
        return make(*arguments)
    except MPI.Exception as error:
        if is_interruption(error):
            raise
        raise CommunicatorError(
            f"MPI could not make a communicator ({str(error).strip().splitlines()[-1]}). mpiad makes two duplicates of "
            "each communicator that it communicates on, one for messages and collectives, one for the messages of reverse "
            "passes, so that none is taken for the program's own or for one in the other direction: "
            f"there are {2 * len(_live)} now, and MPICH has 2,048 in all. "
            "Free communicators that are no longer needed: comm.Free() on all their ranks frees their duplicates too."
        ) from error


class Counts(NamedTuple):
    """Numbers of messages to and from each (rank, tag), and of halo exchanges in two halves."""

    sent: dict[tuple[int, int], int]
    received: dict[tuple[int, int], int]
    exchanges: int


class Channel:
    """Duplicates and message numbers of one communicator."""

    def __init__(self, user: Comm):
        self.user = user
        self.rank, self.size = user.rank, user.size
        self.members, self.number, self.label = _named(user)
        self.fault: str | None = None
        self.has_messages = False  # while there is a fault, as in `Used`
        self.alone = False
        self.lost: tuple[int, ...] = ()  # ranks whose processes died
        self.pairs_compared = False
        self.headers: Comm | None = None  # for those of messages under watch
        self._order = next(_numbers)
        self._looking = threading.Lock()
        self._open(make_communicator(self._duplicate))
        _live.add(self)

    def _duplicate(self) -> Comm:
        return self.user.Dup() if _watch is None else _watch.duplicate(self)

    def _open(self, data: Comm) -> None:
        try:
            reverse = make_communicator(data.Dup)
        except CommunicatorError:
            data.Free()
            raise
        self.data, self.reverse = data, reverse
        self.derived: list[Comm] = []
        # MPI promises this attribute on the world alone.
        self.tag_limit = min(int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767), 2**31 - 1)
        self.tag_stride = int(self.tag_limit * _GOLDEN_SECTION)  # see `messages.Envelope`
        self.sent: dict[tuple[int, int], int] = {}
        self.received: dict[tuple[int, int], int] = {}
        # Halo exchanges in two halves: how many were begun, and by tag weak references to the last of them.
        self.exchanges, self.active_exchanges = 0, dict[int, Any]()
        self.pending: list[tuple[Any, np.ndarray]] = []
        self.started: dict[int, tuple[str, list[Any], Any]] = {}
        self.unended = False  # whether a collective was given up in its middle
        self._next_look = 1
        self._drained: Drained = {}
        self._backwards: Comm | None = None
        self._aside: tuple[Comm, Comm] | None = None
        if _watch is not None:
            _watch.put_on(self)

    def counts(self) -> Counts:
        """Return the numbers of messages, in dictionaries of their own."""
        return Counts(dict(self.sent), dict(self.received), self.exchanges)

    def count_from(self, counts: Counts) -> None:
        """Go on with these numbers of messages."""
        self.sent, self.received, self.exchanges = dict(counts.sent), dict(counts.received), counts.exchanges

    def count_on(self, counts: Counts) -> None:
        """Go on with these numbers of messages where they are the higher ones."""
        for mine, later in ((self.sent, counts.sent), (self.received, counts.received)):
            mine.update({key: max(number, mine.get(key, 0)) for key, number in later.items()})
        self.exchanges = max(self.exchanges, counts.exchanges)

    def backwards(self) -> Comm:
        """Return a duplicate with its ranks in reverse order (suffix sums are prefix sums there); collective at first."""
        if self._backwards is None:
            self._backwards = make_communicator(self.data.Split, 0, self.size - 1 - self.rank)
        return self._backwards

    def aside(self) -> Comm:
        """Return a duplicate for operations started in the middle of other communication; collective at first."""
        # When the watch is turned on or off, the ranks make another: each rank can detect it.
        if self._aside is None or self._aside[0] is not self.data:
            if self._aside is not None:
                self._aside[1].Free()
            self._aside = self.data, make_communicator(self.data.Dup)
        return self._aside[1]

    def derive(self, survivors: bool = False) -> Comm:
        """Return a duplicate, of the surviving ranks if `survivors`; freed with this channel's own; collective."""
        self.derived.append(self.data.Shrink() if survivors else make_communicator(self.data.Dup))
        return self.derived[-1]

    def drop(self, comm: Comm) -> None:
        """Free a communicator that `derive` returned, unless it was freed with this channel's own; collective."""
        if any(kept is comm for kept in self.derived):
            self.derived = [kept for kept in self.derived if kept is not comm]
            comm.Free()

    def keep(self, request: Request, array: np.ndarray) -> None:
        """Hold the buffer of a send until MPI is done with it."""
        self.pending.append((request, array))
        # One thread tests, since two mustn't test the same request; the others leave it to that one.
        if len(self.pending) >= self._next_look:
            held: list[bool] = []
            try:
                try:
                    # In one step: no interrupt can come between taking the lock and recording that.
                    held.extend(map(self._looking.acquire, (False,)))
                    if held[0]:
                        self._drop_sent()
                finally:
                    self._release(held)
            finally:  # once more: an interrupt may come before the first is done
                self._release(held)

    def _release(self, held: list[bool]) -> None:
        if held and held.pop():
            self._looking.release()

    def _drop_sent(self) -> None:
        looked = len(self.pending)
        # In place, and only the sends counted above: meanwhile other threads may add theirs.
        self.pending[:looked] = [held for held in self.pending[:looked] if not held[0].Test()]
        # Testing again only when twice as many are pending keeps the number of tests linear in the number of sends.
        self._next_look = 2 * len(self.pending) + 1

    def begin(self, kind: str, buffers: object, call: Callable[..., Request], x: Any, y: Any, z: Any) -> list[Request]:
        """Start a "send", "receive" or "reduction" by a call of MPI's; return its request, in a list, for `release`.

        The kinds "blocking send" and "blocking receive" are for those that the same call waits for.

        The buffers are held from before the call on, and the request is put into the list in one step with the call: an
        interrupt at any moment doesn't free memory that MPI uses.
        """
        requests: list[Request] = []
        self.started[id(requests)] = kind, requests, buffers
        try:
            requests.extend(map(call, (x,), (y,), (z,)))
        except Exception:
            self.release(requests)
            raise
        return requests

    def hold(self, kind: str, request: Request, buffers: object) -> None:
        """Hold the buffers of an operation that has already been started."""
        requests = [request]
        self.started[id(requests)] = kind, requests, buffers

    def release(self, requests: list[Request]) -> None:
        """Release the buffers of an operation that has ended."""
        self.started.pop(id(requests), None)

    def leave(self, requests: list[Request]) -> None:
        """Let a send complete in the background; its buffer is held until then."""
        held = self.started.get(id(requests))
        if held is not None:  # no reset has ended it
            if not requests[0].Test():
                self.keep(requests[0], held[2])
            self.release(requests)

    def end(self) -> None:
        """End all messages, received or not; collective. After an exception it may be called again."""
        # Under watch an interrupt may have come inside of a send, which is repeated.
        self.unended |= any(len(sending) < self.size for sending, _ in self._drained.values())
        for kind, requests, _ in self.started.values():
            for request in requests if kind.endswith("receive") else ():
                cancel(request)
        # After the receives, which would take messages away from it; before the sends are waited for, which end only when
        # the other ranks have taken theirs in the same way.
        for comm in (self.data, self.reverse):
            drain(comm, self.tag_limit, self._drained)
        for request in self._sends():
            request.Wait()
        # A reduction that not all ranks have started never ends; without its request its end can't be detected.
        self.unended = self._has_unended()
        ABANDONED.extend(held for held in self.started.values() if held[0] in ("reduction", "parcel") or not held[1])
        # A call that an exception has left may have messages under way there, which nobody receives: as in `give_back`.
        ABANDONED.extend((comm,) for comm in self.derived)
        self.derived = []
        self.pending.clear()
        self.started.clear()

    def has_unfinished(self) -> bool:
        """Return whether messages may be under way on any rank, and note on all whether a collective is; collective.

        Ending them takes a message from each rank to each, which thousands of ranks needn't send at every exit.
        """
        with self._looking:
            self._drop_sent()
        here = bool(self.pending or self.started or self.fault)
        # On one rank this is inconclusive, since it may only send; the sum over all ranks counts the unreceived messages.
        unreceived = sum(self.sent.values()) - sum(self.received.values())
        # All in one message, since every program pays for it at its exit.
        mine, every = np.array([here, unreceived, self._has_unended()], dtype=np.int64), np.empty(3, dtype=np.int64)
        # Not on `data`: a rank that leaves early would meet the collectives of those that still compute.
        self.reverse.Allreduce(mine, every, MPI.SUM)
        self.unended = bool(every[2])
        return bool(every.any())

    def _has_unended(self) -> bool:
        return self.unended or any(not has_ended(request) for request in self._requests("reduction"))

    def sends(self) -> bool:
        """Return whether messages of this rank are under way."""
        return any(not request.Test() for request in self._sends())

    def _sends(self) -> list[Request]:
        return [request for request, _ in self.pending] + self._requests("send")

    def _requests(self, kind: str) -> list[Request]:
        return [request for held in self.started.values() if held[0].endswith(kind) for request in held[1]]

    def refusing(self, reason: str) -> Refusing:
        """Refuse this rank's calls in a context, in which the other ranks take no part: they would never end."""
        return Refusing(self, reason)

    def evaluating(self, what: str) -> AbstractContextManager[None]:
        """Refuse calls while this rank evaluates `what` by itself; a single rank may make them."""
        advice = "inside it, communicate on MPI.COMM_SELF"
        reason = f"{what} is evaluated by one rank ({advice}), and the other ranks take no part"
        return self.refusing(reason) if self.size > 1 else nullcontext()

    def mark(self, reason: str, messages: bool = True) -> None:
        """Refuse further use until `renew`; `messages` as in `Used`."""
        if tracing.recorder is not None and tracing.recorder.marked(self, reason, messages):
            return
        if self.fault is None:
            self.fault, self.has_messages = reason, False
        self.has_messages |= messages

    def renew(self) -> None:
        """Replace the duplicates; collective. Messages under way on the old ones are dropped."""
        self.fault = self.fault or "a reset was interrupted."  # until its end
        if FAULT_TOLERANT:
            self.reopen(self.data.Shrink())
            return
        if _watch is not None:
            _watch.start_anew(self)
        self.end()
        old, unended = self.duplicates(), self.unended
        self._open(make_communicator(self._duplicate))
        self.fault, self.alone = None, False
        give_back(old, on_any_rank(self.data, unended))

    def renew_beneath(self) -> None:
        """Renew the duplicates, but keep the results of `derive`: a call that continues works with them; collective."""
        kept, self.derived = self.derived, []
        self.renew()
        self.derived = kept

    def duplicates(self) -> list[Comm]:
        """Return all communicators of this channel's own."""
        aside = self._aside[1] if self._aside is not None else None
        return [comm for comm in (self.data, self.reverse, self._backwards, aside, *self.derived) if comm is not None]

    def reopen(self, data: Comm) -> None:
        """Replace duplicates that may be revoked, `data` by this one of the same ranks; collective."""
        # Not freed: their numbers mustn't be given to others while old messages are still on their way.
        ABANDONED.append((self.duplicates(), self.pending, self.started))
        if _watch is not None:
            _watch.start_anew(self)
        self._open(data)
        self.fault, self.alone = None, False

    def lose(self, ranks: list[int]) -> None:
        """Refuse further use for good, since processes have died."""
        self.lost = tuple(ranks)
        self.fault = f"the process of rank {', '.join(map(str, ranks))} of {self.size} has died."

    def close(self) -> None:
        """Complete pending communication and free the duplicates; collective."""
        unended = False
        if not self.lost and self.has_unfinished():
            unended = self.unended
            self.end()
        give_back(self.duplicates(), unended)
        if self.headers is not None and self.headers != MPI.COMM_NULL and not self.lost:
            drain(self.headers, self.tag_limit)
            self.headers.Free()
        _live.discard(self)
        self.data = self.reverse = self._backwards = _Freed()
        self._aside, self.derived = None, []


class Refusing:
    """A context in which a channel refuses this rank's calls."""

    def __init__(self, channel: Channel, reason: str):
        self._channel, self._reason = channel, reason

    def __enter__(self) -> None:
        self._kept = self._channel.fault, self._channel.alone
        self.around, tracing.contexts = tracing.contexts, self
        self._channel.fault, self._channel.alone = self._reason, True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end(error, trace)
        tracing.contexts, self.around = self.around, None

    def end(self, error: BaseException | None, trace: TracebackType | None) -> None:
        """Let the channel be used again; this may be done twice."""
        self._channel.fault, self._channel.alone = self._kept


def tell_recorders(on: bool) -> None:
    """Turn on or off reports to a thread's trace of communication on a channel other than by operations."""
    # A property on the class comes before the object's attribute; without one, there is no additional lookup.
    for name in ("data", "reverse"):
        if on:
            setattr(Channel, name, property(partial(_told, name), partial(_set, name)))
        elif isinstance(Channel.__dict__.get(name), property):
            delattr(Channel, name)


def _told(name: str, self: Channel) -> Comm:
    if tracing.recorder is not None:
        tracing.recorder.communicated_by_itself()
    return self.__dict__[name]


def _set(name: str, self: Channel, comm: Comm) -> None:
    self.__dict__[name] = comm


class Watch(NamedTuple):
    """Functions that guard the communicators of channels; `guarded.switch` installs them."""

    duplicate: Callable[[Channel], Comm]  # makes a duplicate of a channel's communicator
    put_on: Callable[[Channel], None]  # guards a channel's communicators
    # Resets the agreements of a channel whose communicators are about to be replaced.
    start_anew: Callable[[Channel], None]


_watch: Watch | None = None


def set_watch(watch: Watch | None) -> None:
    """Guard communicators made after this call, or stop guarding new ones if None."""
    global _watch
    _watch = watch


def is_watched() -> bool:
    """Return whether waits have a limit of their own."""
    return _watch is not None


def _named(user: Comm) -> tuple[tuple[int, ...], int, str]:
    """Return the ranks in the world of a communicator's members, its number among those of the same, and its name."""
    members = tuple(world_ranks(user))
    # Collective calls come in the same order on all members, so they count alike.
    number = _made[members] = _made.get(members, 0) + 1
    if user == MPI.COMM_WORLD:
        return members, number, "world"
    listed = str(list(members)) if len(members) <= 8 else f"[{members[0]}, {members[1]}, ... {members[-1]}]"
    return members, number, f"communicator {number} of ranks {listed}"


_made: dict[tuple[int, ...], int] = {}


def world_ranks(comm: Comm) -> list[int]:
    """Return the ranks in the world of a communicator's members."""
    group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks = group.Translate_ranks(None, world)
    # Handles of MPI, which are limited in number.
    group.Free()
    world.Free()
    return ranks


class _Freed:
    """Placeholder for a freed duplicate: an adjoint may still refer to its channel."""

    def __getattr__(self, name: str) -> Any:
        raise CommunicatorError(
            "a communicator was freed before the reverse pass that runs its communication backwards. "
            "Free it after the gradient."
        )


def on_any_rank(comm: Comm, here: bool) -> bool:
    """Return whether `here` is true on any rank; collective."""
    mine, every = np.array(here, dtype=np.int32), np.empty((), dtype=np.int32)
    comm.Allreduce(mine, every, MPI.MAX)
    return bool(every)


def live_channels() -> list[Channel]:
    """Return the channels that aren't closed, in the order of their creation: the same on all ranks that share two."""
    return sorted(_live, key=lambda found: found._order)
