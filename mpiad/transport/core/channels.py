"""`Channel`: the library's duplicates of a user's communicator, which separate its messages from the user's.

A channel has two duplicates: `data` for forward messages and all collectives, and `reverse` for the messages of adjoints.
It numbers the point-to-point messages between two ranks with the same tag. The numbers agree on both sides, and identify
the corresponding messages of adjoints, which may be started in another order.

If an exception leaves messages in flight, the channel is marked as unusable, since an old message could be received in
place of a new one; `mpiad.reset` renews the duplicates. The channel holds references to buffers until MPI has finished with
them, even if an exception drops the requests.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import count, repeat
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
from mpi4py import MPI

from mpiad._typing import Comm, Request
from mpiad.errors import CommunicatorError
from mpiad.transport.core.fault_tolerance import FAULT_TOLERANT, is_interruption
from mpiad.transport.core.tracing import tracing
from mpiad.transport.devices.device_messages import discard

# Before a communicator is freed, pending messages are received and dropped: MPI may reuse its context for a new
# communicator, on which an old message could then be received. Messages between two ranks arrive in the order in which they
# were sent. So each rank sends a last message to every rank, and receives from every rank until the last message has
# arrived.


# Objects that are never freed since MPI may still use them: buffers, and communicators with pending messages.
ABANDONED: list[tuple] = []
_LAST = np.frombuffer(b"mpiad: last one.", dtype=np.uint8)  # content of the last messages
# By id of the communicator: the requests of the last messages, and for each peer the tag and content of its latest message.
Drained: TypeAlias = "dict[int, tuple[list[Request], dict[int, tuple[int, np.ndarray]]]]"


def drain(comm: Comm, tag: int, drained: Drained | None = None) -> None:
    """Receive and drop all messages, up to those with `tag`; `drained` is the progress after an interrupt; collective."""
    for part in getattr(comm, "parts", (comm,)):  # in debug mode, communicators for messages and for headers
        sending, latest = ({} if drained is None else drained).setdefault(id(part), ([], {}))
        # `extend` with `map` can't be interrupted between a send and its registration, so none is sent twice.
        sending.extend(map(part.Isend, repeat(_LAST), range(len(sending), part.size), repeat(tag)))
        for peer in range(part.size):
            _receive_until_last(part, peer, tag, latest)
        for request in sending:
            request.Wait()


def _receive_until_last(comm: Comm, peer: int, tag: int, latest: dict[int, tuple[int, np.ndarray]]) -> None:
    status = MPI.Status()
    while peer not in latest or latest[peer][0] != tag or not np.array_equal(latest[peer][1], _LAST):
        comm.Probe(peer, MPI.ANY_TAG, status)
        # Stored before the receive, so that after an interrupt the content shows whether it was the last message.
        latest[peer] = status.tag, np.zeros(status.Get_count(MPI.BYTE), dtype=np.uint8)
        comm.Recv(latest[peer][1], peer, status.tag, status)
        discard(latest[peer][1])


def has_ended(reduction: Request) -> bool:
    """Return whether a reduction is complete, so that none of its messages are pending."""
    try:
        return reduction.Test()
    except MPI.Exception:  # Open MPI stops in the middle if the ranks' sizes differ
        return False


def give_back(comms: list[Comm], unended: bool) -> None:
    """Free communicators, unless an `unended` collective could receive its messages on a new one; collective."""
    if unended:
        ABANDONED.append(tuple(comms))
        return
    for comm in comms:
        if comm != MPI.COMM_NULL:
            comm.Free()


def cancel(receive: Request) -> None:
    """Cancel a receive, and wait until it has ended."""
    if not receive:  # the null request: the receive has ended
        return
    receive.Cancel()
    with suppress(MPI.Exception):  # the message had arrived, and was too long
        receive.Wait()


_GOLDEN_SECTION = 0.6180339887498949
# By the order of creation. Unlike a WeakSet, it can be copied in one step while another thread adds a channel.
_live: WeakValueDictionary[int, Channel] = WeakValueDictionary()
_counts: dict[tuple[int, ...], int] = {}  # by members: the number of channels created so far
_numbers = count()

_base: Comm = MPI.COMM_WORLD  # of the ranks that use the library; a private communicator after the start
communications = count()  # advances at each communication
# A channel, and whether messages on it may be pending even after all its ranks have synchronized.
Used: TypeAlias = "tuple[Channel, bool]"


def note_use(channel: Channel) -> None:
    """Record that the enclosing tape or operator communicates on the channel without an `Operation`."""
    if tracing.channels is not None:
        tracing.channels.add((channel, False))


def make_communicator(make: Callable[..., Comm], *arguments: int) -> Comm:
    """Return a communicator created by ``make(*arguments)``; collective. The error advises on freeing communicators."""
    try:
        return make(*arguments)
    except MPI.Exception as error:
        if is_interruption(error):
            raise
        raise CommunicatorError(
            f"MPI could not make a communicator ({str(error).strip().splitlines()[-1]}). mpiad makes two duplicates of "
            "each communicator that it communicates on, one for messages and collectives, one for the messages of reverse "
            "passes, to separate its messages from the program's, and both directions from each other: "
            f"there are {2 * len(_live)} now, and MPICH allows 2,048 communicators in all. "
            "Free communicators that are no longer needed: comm.Free() on all their ranks frees their duplicates too."
        ) from error


class Counts(NamedTuple):
    """Numbers of messages to and from each (rank, tag), and of halo exchanges that are begun and ended separately."""

    sent: dict[tuple[int, int], int]
    received: dict[tuple[int, int], int]
    exchanges: int


class Channel:
    """The duplicates and message numbers of one communicator. `fault`: why it can't be used, or None."""

    def __init__(self, user: Comm):
        self.user = user
        self.rank, self.size = user.rank, user.size
        self.members, self.number, self.label = named(user)
        self.fault: str | None = None
        self.has_messages = False  # whether messages may be pending after the fault
        self.alone = False  # whether the fault is that the other ranks don't make the same calls
        self.lost: tuple[int, ...] = ()  # ranks whose processes have died
        self.pairs_compared = False  # whether `mpi_sendrecv` has checked that all ranks name the same pair
        self.headers: Comm | None = None  # the communicator for headers of messages in debug mode
        self.divisions: list[Comm] = []  # communicators of parts of the ranks that the library has made, for `reset`
        self._order = next(_numbers)
        self._test_lock = threading.RLock()  # reentrant, since a signal handler may send
        self._open(make_communicator(self._duplicate))
        _live[self._order] = self

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
        # Only the world is guaranteed to have this attribute.
        self.tag_limit = min(int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767), 2**31 - 1)
        self.tag_stride = int(self.tag_limit * _GOLDEN_SECTION)  # see `messages.Envelope`
        self.sent: dict[tuple[int, int], int] = {}
        self.received: dict[tuple[int, int], int] = {}
        # Halo exchanges in two halves: the number begun, and by tag a weak reference to the last one.
        self.exchanges, self.active_exchanges = 0, dict[int, Any]()
        self.started: dict[int, tuple[str, list[Request], object]] = {}
        self.unended = False  # whether a collective was abandoned before its end
        self._next_test = 1
        self._drained: Drained = {}
        self._backwards: Comm | None = None
        self._separate: tuple[Comm, Comm] | None = None
        if _watch is not None:
            _watch.put_on(self)

    def counts(self) -> Counts:
        """Return a copy of the message counts."""
        return Counts(dict(self.sent), dict(self.received), self.exchanges)

    def count_from(self, counts: Counts) -> None:
        """Set the message counts."""
        self.sent, self.received, self.exchanges = dict(counts.sent), dict(counts.received), counts.exchanges

    def count_on(self, counts: Counts) -> None:
        """Raise the message counts to at least these."""
        for mine, later in ((self.sent, counts.sent), (self.received, counts.received)):
            mine.update({key: max(number, mine.get(key, 0)) for key, number in later.items()})
        self.exchanges = max(self.exchanges, counts.exchanges)

    def backwards(self) -> Comm:
        """Return a duplicate with the ranks in reverse order, for suffix sums; the first call is collective."""
        if self._backwards is None:
            self._backwards = make_communicator(self.data.Split, 0, self.size - 1 - self.rank)
        return self._backwards

    def separate(self) -> Comm:
        """Return a duplicate for operations in the middle of communication on `data`; the first call is collective."""
        # The watch replaces `data` on all ranks; then all ranks create a new duplicate.
        if self._separate is None or self._separate[0] is not self.data:
            if self._separate is not None:
                self._separate[1].Free()
            self._separate = self.data, make_communicator(self.data.Dup)
        return self._separate[1]

    def derive(self, survivors: bool = False) -> Comm:
        """Make a duplicate, of the surviving ranks if `survivors`; freed or abandoned with the channel; collective."""
        self.derived.append(self.data.Shrink() if survivors else make_communicator(self.data.Dup))
        return self.derived[-1]

    def drop(self, comm: Comm) -> None:
        """Free a communicator returned by `derive`, unless the channel has freed or abandoned it; collective."""
        if any(kept is comm for kept in self.derived):
            self.derived = [kept for kept in self.derived if kept is not comm]
            comm.Free()

    def _drop_sent(self) -> None:
        """Release the buffers of background sends that MPI has finished with."""
        with self._test_lock:  # two threads mustn't test the same request
            for kind, requests, _ in tuple(self.started.values()):
                if kind == "background send" and requests[0].Test():
                    self.release(requests)
        # The number of tests stays linear in the number of sends if the next test waits until twice as many are pending.
        self._next_test = 2 * len(self.started) + 1

    def begin(
        self, kind: str, buffers: object, call: Callable[..., Request], x: Iterable, y: Iterable, z: Iterable
    ) -> list[Request]:
        """Start MPI operations, ``map(call, x, y, z)``; return the list of their requests, to be passed to `release`.

        `kind`: "send", "receive", "reduction", or "parcel" for a send of `polling.Mailbox`; "blocking send" or "blocking
        receive" if the same public call waits for it; "background send" after `leave`. `buffers`: the objects that MPI
        uses, which are held until `release`. They are stored before the call of MPI, and no interrupt can come between this
        call and the storage of its request. So an interrupt never frees memory in use.
        """
        requests: list[Request] = []
        self.started[id(requests)] = kind, requests, buffers
        try:
            requests.extend(map(call, x, y, z))
        except Exception:
            if not requests:
                self.release(requests)
            raise
        return requests

    def release(self, requests: list[Request]) -> None:
        """Release the buffers of an operation that has ended."""
        self.started.pop(id(requests), None)

    def leave(self, requests: list[Request]) -> None:
        """Let a send complete in the background, and hold its buffer until then."""
        held = self.started.get(id(requests))
        if held is None or requests[0].Test():  # a reset has completed it, or MPI
            self.release(requests)
            return
        self.started[id(requests)] = "background send", requests, held[2]
        if len(self.started) >= self._next_test:
            self._drop_sent()

    def end(self) -> None:
        """Complete or drop all pending messages; collective. After an exception it may be called again."""
        # With a `Watch`, `drain` may send a last message twice after an interrupt: the duplicates mustn't be freed.
        self.unended |= any(len(sending) < self.size for sending, _ in self._drained.values())
        for kind, requests, _ in self.started.values():
            for request in requests if kind.endswith("receive") else ():
                cancel(request)
        # Receives are canceled first, since they would receive the messages of `drain`. Sends are completed last, since
        # they may wait until the other ranks drain.
        for comm in (self.data, self.reverse):
            drain(comm, self.tag_limit, self._drained)
        for request in self._requests("send"):
            request.Wait()
        # A reduction that some ranks haven't started never ends. An operation whose request was lost may not have ended.
        self.unended = self._has_unended()
        ABANDONED.extend(held for held in self.started.values() if held[0] in ("reduction", "parcel") or not held[1])
        # Derived communicators may have pending messages; see `give_back`.
        ABANDONED.extend((comm,) for comm in self.derived)
        self.derived = []
        self.started.clear()

    def has_unfinished(self) -> bool:
        """Return whether any rank may have pending messages, so that `end` is necessary; set `unended`; collective."""
        self._drop_sent()
        here = bool(self.started or self.fault)
        # The sum over all ranks is the number of unreceived messages.
        unreceived = sum(self.sent.values()) - sum(self.received.values())
        # One reduction for all three numbers, since every program makes it at its end.
        mine, every = np.array([here, unreceived, self._has_unended()], dtype=np.int64), np.empty(3, dtype=np.int64)
        # On `reverse`, since on `data` ranks that end early would match collectives of other ranks.
        self.reverse.Allreduce(mine, every, MPI.SUM)
        self.unended = bool(every[2])
        return bool(every.any())

    def _has_unended(self) -> bool:
        return self.unended or any(not has_ended(request) for request in self._requests("reduction"))

    def has_pending_sends(self) -> bool:
        """Return whether sends of this rank are pending."""
        return any(not request.Test() for request in self._requests("send"))

    def _requests(self, kind: str) -> list[Request]:
        return [request for held in self.started.values() if held[0].endswith(kind) for request in held[1]]

    def refusing(self, reason: str) -> Refusing:
        """Return a context in which this rank's calls raise an error, since the other ranks don't make them."""
        return Refusing(self, reason)

    def evaluating(self, what: str) -> AbstractContextManager[None]:
        """Return a context in which this rank evaluates `what` alone; calls raise an error if there are other ranks."""
        advice = "inside it, communicate on MPI.COMM_SELF"
        reason = f"{what} is evaluated by one rank ({advice}), and the other ranks take no part"
        return self.refusing(reason) if self.size > 1 else nullcontext()

    def mark(self, reason: str, messages: bool = True) -> None:
        """Mark the channel as unusable until `renew`; `messages`: whether messages may be pending."""
        if tracing.recorder is not None and tracing.recorder.marked(self, reason, messages):
            return
        if self.fault is None:
            self.fault, self.has_messages = reason, False
        self.has_messages |= messages

    def renew(self) -> None:
        """Replace the duplicates, and drop pending messages; collective."""
        data = self.data  # first, since this ends the trace of a compiled program
        self.fault = self.fault or "a reset was interrupted."  # valid until the end of this method
        if FAULT_TOLERANT:
            self.reopen(data.Shrink())
            return
        if _watch is not None:
            _watch.start_anew(self)
        self.end()
        old, unended = self.duplicates(), self.unended
        self._open(make_communicator(self._duplicate))
        self.fault, self.alone = None, False
        give_back(old, on_any_rank(self.data, unended))

    def renew_beneath(self) -> None:
        """Renew the duplicates, but keep the results of `derive` for a call that continues; collective."""
        kept, self.derived = self.derived, []
        self.renew()
        self.derived = kept

    def duplicates(self) -> list[Comm]:
        """Return all communicators that this channel owns, except `headers`, which `renew` keeps."""
        separate = self._separate[1] if self._separate is not None else None
        return [comm for comm in (self.data, self.reverse, self._backwards, separate, *self.derived) if comm is not None]

    def reopen(self, data: Comm) -> None:
        """Replace the duplicates, which may be revoked; `data`: a new one, of which others are made here; collective."""
        # The old ones aren't freed: their contexts mustn't be reused while messages are in flight.
        ABANDONED.append((self.duplicates(), self.headers, self.started))
        self.headers = None
        if _watch is not None:
            _watch.start_anew(self)
        self._open(data)
        self.fault, self.alone = None, False

    def lose(self, ranks: list[int]) -> None:
        """Mark the channel as permanently unusable, since processes have died."""
        self.lost = tuple(ranks)
        self.fault = f"the process of rank {', '.join(map(str, ranks))} of {self.size} has died."

    def close(self) -> None:
        """Complete or drop pending communication, and free the duplicates; collective."""
        unended = False
        if not self.lost and self.has_unfinished():
            unended = self.unended
            self.end()
        give_back(self.duplicates(), unended)
        if self.headers is not None and not self.lost:
            drain(self.headers, self.tag_limit)  # of messages that were received after debug mode
            self.headers.Free()
        _live.pop(self._order, None)
        self._disable(_FREED)
        self._separate, self.derived = None, []

    def _disable(self, reason: str) -> None:
        self.data = self.reverse = self._backwards = _Unusable(reason)

    def refuse_in_child(self) -> None:
        """Make all calls on this copy of a rank's channel raise an error, those by its holders and requests, too."""
        self._disable(FORKED)
        self.fault, self._separate = FORKED, None
        for _, requests, _ in self.started.values():
            requests[:] = [_Unusable(FORKED)] * len(requests)


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
        """Restore the channel's fault from before the context; a second call has no effect."""
        self._channel.fault, self._channel.alone = self._kept


def report_to_recorders(on: bool) -> None:
    """Start or stop reports, to the trace of a compiled program, of communication that isn't a recorded operation."""
    # A property of the class takes precedence over the object's attribute. While reports are off, access has no overhead.
    for name in ("data", "reverse"):
        if on:
            setattr(Channel, name, property(partial(_get, name), partial(_set, name)))
        elif isinstance(Channel.__dict__.get(name), property):
            delattr(Channel, name)


def _get(name: str, self: Channel) -> Comm:
    if tracing.recorder is not None:
        tracing.recorder.communicated_by_itself()
    return self.__dict__[name]


def _set(name: str, self: Channel, comm: Comm) -> None:
    self.__dict__[name] = comm


class Watch(NamedTuple):
    """Functions that wrap communicators while waits have deadlines or calls are compared; `watch.switch` sets them."""

    duplicate: Callable[[Channel], Comm]  # duplicates the user's communicator
    put_on: Callable[[Channel], None]  # wraps a channel's communicators
    start_anew: Callable[[Channel], None]  # retires a channel's communicators before they are replaced


_watch: Watch | None = None


def set_watch(watch: Watch | None) -> None:
    """Wrap communicators that are created after this call; if `watch` is None, stop wrapping them."""
    global _watch
    _watch = watch


def is_watched() -> bool:
    """Return whether waits have deadlines or ranks compare their calls."""
    return _watch is not None


def named(user: Comm) -> tuple[tuple[int, ...], int, str]:
    """Return the members' ranks in the world, the communicator's number among those with the same members, and its name."""
    members = tuple(world_ranks(user))
    # The numbers agree, since collective calls have the same order on all members.
    number = _counts[members] = _counts.get(members, 0) + 1
    if user == _base:
        return members, number, "world"
    listed = str(list(members)) if len(members) <= 8 else f"[{members[0]}, {members[1]}, ... {members[-1]}]"
    return members, number, f"communicator {number} of ranks {listed}"


def set_base(comm: Comm) -> None:
    """Set the library's own communicator of the ranks that use the library."""
    global _base
    _base = comm


def base() -> Comm:
    """Return the communicator of the ranks that use the library; before the start, COMM_WORLD."""
    return _base


def world_ranks(comm: Comm, world: Comm = None) -> list[int]:
    """Return the ranks in the world of a communicator's members, negative for those that don't belong to the world."""
    group, whole = comm.Get_group(), (_base if world is None else world).Get_group()
    ranks = group.Translate_ranks(None, whole)
    group.Free()
    whole.Free()
    return ranks


class _Unusable:
    """Placeholder for a duplicate or request that can't be used."""

    def __init__(self, reason: str):
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        raise CommunicatorError(self._reason)


# An adjoint or a program may still refer to the channel.
_FREED = (
    "a communicator was freed before the reverse pass that runs its communication backwards, or before a call of a "
    "compiled function that communicates on it. Free it after the gradient and the last call."
)


def on_any_rank(comm: Comm, here: bool) -> bool:
    """Return whether `here` is true on any rank; collective."""
    mine, every = np.array(here, dtype=np.int32), np.empty((), dtype=np.int32)
    comm.Allreduce(mine, every, MPI.MAX)
    return bool(every)


def live_channels() -> list[Channel]:
    """Return the open channels in the order of their creation, which agrees between ranks for the channels they share."""
    return [found for reference in _live.valuerefs() if (found := reference()) is not None]


# A forked process has copies of the channels, but MPI knows only the rank: both would take messages from the same queues.
FORKED = (
    "this process was forked from a rank, and can't communicate: MPI would mix its messages with those of the rank. "
    "Communicate in the rank; forked processes, such as those of a pool, may only compute."
)
_is_fork = False


def is_fork() -> bool:
    """Return whether this process was forked from a rank."""
    return _is_fork


def _refuse_in_child() -> None:
    global _is_fork
    _is_fork = True
    for channel in live_channels():
        channel.refuse_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_refuse_in_child)
