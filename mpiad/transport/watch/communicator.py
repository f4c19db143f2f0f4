"""`Guarded`: communicators with those of mpi4py's methods that the library uses, each with a deadline.

Before a collective the ranks compare their calls, since MPI doesn't detect different lengths and would combine mismatched
data. Then the nonblocking form of the collective is polled until its deadline. Nonblocking reductions are compared when
they are waited for.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from mpiad._typing import Array, Buffer, Comm, Op, Status
from mpiad.transport.core.channels import Channel, live_channels
from mpiad.transport.watch.call_agreement import (
    Agreement,
    Description,
    caller,
    describe,
    fingerprint,
    lane_of,
    raise_mismatch,
    shown_arguments,
    where,
)
from mpiad.transport.watch.timed_waits import Departure, GuardedRequest, message_elsewhere, message_instead, poll, poll_for

T = TypeVar("T")


class _Wait:
    def __init__(self, comm: Comm):
        self.comm = comm
        self.name, site, call = caller()
        self.arguments, self.place = shown_arguments(call, comm.label), where(call, site)

    def give_up(self, reason: str) -> None:
        if (channel := self.comm.owner()) is not None:
            channel.mark(f"{reason.splitlines()[0].rstrip(':.')}.")

    def report(self) -> dict[str, object]:
        """Return the entries of a table of waits."""
        return {"call": self.name, "arguments": self.arguments, "place": self.place, "hint": ""}


class CollectiveWait(_Wait):
    """A wait in collective `number` of those counted under `key`; ranks with a lower count are missing."""

    def __init__(self, comm: Comm, key: str, number: int, description: Description | None = None):
        super().__init__(comm)
        self.key, self.number = key, number
        if description is not None:
            self.name, self.arguments, self.place = description.operation, description.arguments(), description.place

    def needs_departed(self, gone: dict[int, Departure], before: float) -> bool:
        """Return whether a member left without reaching this collective, and this was noticed before a time, `before`."""
        return any(
            rank in gone and gone[rank].noticed < before and gone[rank].counts.get(self.key, 0) < self.number
            for rank in self.comm.members
        )

    def report(self) -> dict[str, object]:
        """Return the entries of a table of waits."""
        return super().report() | {"key": self.key, "number": self.number, "members": self.comm.members}


class MessageWait(_Wait):
    """A wait at one end of a message; `peer`, `tag`: possibly wildcards."""

    def __init__(self, comm: Comm, sends: bool, peer: int, tag: int):
        super().__init__(comm)
        self.sends, self.peer, self.tag = sends, peer, tag

    def needs_departed(self, gone: dict[int, Departure], before: float) -> bool:
        """Return whether the other end left, for a receive without pending sends; `before`: as in `CollectiveWait`."""
        peers = self._peers()
        return bool(peers) and all(
            # A rank that has left receives nothing, but a long message from it may still be in flight.
            rank in gone and gone[rank].noticed < before and (self.sends or not gone[rank].sends)
            for rank in peers
        )

    def _peers(self) -> list[int]:
        members = self.comm.members
        return [rank for rank in members if rank != members[self.comm.rank]] if self.peer < 0 else [members[self.peer]]

    def report(self) -> dict[str, object]:
        """Return the entries of a table of waits."""
        partner = "any rank" if self.peer < 0 else f"rank {self.peer}"
        tag = "" if self.comm.reverse else " with any tag" if self.tag < 0 else f" with tag {self.tag}"
        direction = "to" if self.sends else "from"
        arguments = ", ".join(filter(None, [f"{direction} {partner}{tag}", self.arguments]))
        return super().report() | {"arguments": arguments, "hint": self._hint(), "peers": self._peers()}

    def _hint(self) -> str:
        """Return a sentence about a message that has arrived instead of the expected one."""
        if self.sends or self.comm.reverse:
            return ""
        channel, ranks, world = self.comm.owner(), range(self.comm.size), MPI.COMM_WORLD
        # The library's world is a duplicate.
        is_world = self.comm.label == "world" and len(ranks) == world.size
        programs = [world if is_world else channel.user] if channel is not None else []
        of_program = message_elsewhere(programs, self.peer, self.tag, ranks, "mpi4py")
        return of_program or message_instead(self.comm.bare, self.peer, self.tag, ranks)


_BYTES = 4096  # fixed length of a description, so that one nonblocking call exchanges them
_MOST_LETTERS = 128  # of each text in it, of at most four bytes each


class StartedReduction(GuardedRequest):
    """A pending reduction, with the descriptions of the ranks' calls."""

    def __init__(self, comm: Comm, array: Array, out: np.ndarray, op: Op | None):
        agreement: Agreement = comm.agreement
        lane = lane_of(comm.number)
        agreement.starts[lane] += 1
        comm.started += 1
        number = comm.started
        described = describe(comm.label, "Iallreduce", out, op, None)
        make = partial(CollectiveWait, comm, comm.label, number, described)
        super().__init__(comm, make, comm.bare.Iallreduce, array, out, op)
        self.caller = described.operation, described.place
        cut = [value[:_MOST_LETTERS] if isinstance(value, str) else value for value in described]
        packed = pickle.dumps((Description._make(cut), agreement.starts[lane])).ljust(_BYTES)
        self._mine, self._every = np.frombuffer(packed, np.uint8), np.empty((comm.size, _BYTES), np.uint8)
        self._unended = int(not lane)
        agreement.begun_later += self._unended
        exchanging = comm.metadata_comm if lane else agreement.later
        self._exchange = GuardedRequest(comm, make, exchanging.Iallgather, self._mine, self._every)
        self._agreement = agreement
        self._group = comm if lane else agreement  # determines the order of the descriptions

    def Wait(self, status: Status = None) -> None:
        """Wait for the descriptions, compare them, and wait for the sum."""
        self._exchange.Wait()
        self._agreement.ended_later += self._unended
        self._unended = 0
        described = [pickle.loads(every.tobytes()) for every in self._every]
        if len({(description.compared, starts) for description, starts in described}) > 1:
            # The reduction isn't released, since a sum of mismatched calls may never end, and MPI still uses its buffers.
            raise_mismatch(described, self._group)
        super().Wait(status)


def live() -> list[Guarded]:
    """Return the guarded communicators in use."""
    return [comm for channel in live_channels() for comm in channel.duplicates() if isinstance(comm, Guarded)]


def counts() -> dict[str, int]:
    """Return the numbers of collectives that this rank has begun, by the label of the communicator or agreement."""
    every = live()
    found = {comm.label: comm.started for comm in every}
    for agreement in {comm.agreement for comm in every if comm.agreement is not None}:
        found |= agreement.counts()
    return found


def _collective(name: str, compared: Callable[..., tuple[Array, Op | None, int | None]]) -> Callable[..., None]:
    """Return the guarded form of a collective; ``compared(*args)`` returns array, reduction and root for the comparison."""
    nonblocking = _nonblocking("I" + name.lower())

    def method(self: Guarded, *args: Any) -> None:
        self.agree(name, *compared(*args))
        request = nonblocking(self, *args)
        try:
            request.Wait()
        except BaseException:
            if (channel := self.owner()) is not None:
                channel.unended = True
            raise

    return method


def _contribution(send: Buffer, recv: Buffer) -> Buffer:
    return recv if send is MPI.IN_PLACE else send


def _nonblocking(name: str) -> Callable[..., GuardedRequest]:
    def method(self: Guarded, *args: Any) -> GuardedRequest:
        make = partial(CollectiveWait, self, self.label, self.started + 1)
        request = GuardedRequest(self, make, getattr(self.bare, name), *args)
        self.started += 1
        return request

    return method


_iallreduce = _nonblocking("Iallreduce")


class Guarded:
    """An mpi4py communicator under the watch (see `watch_settings`); `label` and `members` are equal on all ranks."""

    def __init__(
        self, bare: Comm, label: str, members: tuple[int, ...], agreement: Agreement | None = None,
        owner: Channel | None = None, number: int = 0, reverse: bool = False,
    ):  # fmt: skip
        # `members`: ranks in the world. `metadata_comm`: for descriptions of calls, and for headers of messages.
        self.bare, self.metadata_comm, self.label, self.members, self.agreement = bare, bare, label, members, agreement
        self.rank, self.size = bare.rank, bare.size
        self.number, self.reverse = number, reverse  # among channels with the same members; for messages of adjoints
        # The channel, which is marked as unusable when a wait is abandoned.
        self.owner: Callable[[], Channel | None] = weakref.ref(owner) if owner is not None else lambda: None
        self.started = self._duplicates = 0

    def agree(self, step: str, array: Array = None, op: Op | None = None, root: int | None = None) -> None:
        """Raise an error on all ranks if they are about to make different calls; `step`: the name of MPI's function."""
        agreement = self.agreement
        if agreement is None or self.size == 1:
            return
        array = array if hasattr(array, "dtype") else None
        arguments = (self.label, step, array, op, root)
        lane = lane_of(self.number)

        def make() -> CollectiveWait:
            # Called only after a moment of waiting, since `describe` inspects the stack.
            return CollectiveWait(self, *agreement.begun(lane), describe(*arguments))

        if not agreement.agree(fingerprint(*arguments), lane, make):
            mine = (describe(*arguments), agreement.starts[lane])
            raise_mismatch(agreement.descriptions(mine, lane, make), agreement)

    Allreduce = _collective("Allreduce", lambda send, recv, op=MPI.SUM: (_contribution(send, recv), op, None))
    Reduce = _collective("Reduce", lambda send, recv, op=MPI.SUM, root=0: (_contribution(send, recv), op, root))
    Scan = _collective("Scan", lambda send, recv, op=MPI.SUM: (_contribution(send, recv), op, None))
    Exscan = _collective("Exscan", lambda send, recv, op=MPI.SUM: (_contribution(send, recv), op, None))
    Reduce_scatter = _collective("Reduce_scatter", lambda send, recv, counts, op=MPI.SUM: (send, op, None))
    Bcast = _collective("Bcast", lambda array, root=0: (array, None, root))
    Allgather = _collective("Allgather", lambda send, recv: (send, None, None))
    Alltoall = _collective("Alltoall", lambda send, recv: (send, None, None))
    Alltoallv = _collective("Alltoallv", lambda send, recv: (None, None, None))
    # The ranks' lengths may differ, so arrays aren't compared.
    Allgatherv = _collective("Allgatherv", lambda send, recv: (None, None, None))
    Gatherv = _collective("Gatherv", lambda send, recv, root=0: (None, None, root))
    Scatterv = _collective("Scatterv", lambda send, recv, root=0: (None, None, root))
    Barrier = _collective("Barrier", lambda: (None, None, None))
    Ibcast = _nonblocking("Ibcast")

    def Iallreduce(self, array: Array, out: np.ndarray, op: Op = MPI.SUM) -> GuardedRequest:
        """Start to reduce; the ranks' calls are compared when it is waited for (see `StartedReduction`)."""
        start = _iallreduce if self.agreement is None else StartedReduction
        return start(self, array, out, op)

    def allgather(self, value: object) -> list[Any]:
        """Return every rank's value on all ranks."""
        mine = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
        lengths = np.empty(self.size, dtype=np.int64)
        self.Allgather(np.array([mine.size], dtype=np.int64), lengths)
        every = np.empty(int(lengths.sum()), dtype=np.uint8)
        self.Allgatherv(mine, [every, lengths.tolist()])
        return [pickle.loads(part.tobytes()) for part in np.split(every, np.cumsum(lengths)[:-1])]

    def gather(self, value: object, root: int = 0) -> list[Any] | None:
        """Return every rank's value on the root."""
        every = self.allgather(value)
        return every if self.rank == root else None

    def alltoall(self, values: list[T]) -> list[T]:
        """Return each rank's value for this one."""
        return [every[self.rank] for every in self.allgather(list(values))]

    def bcast(self, value: T, root: int = 0) -> T:
        """Return the root's value on all ranks."""
        return self.allgather(value if self.rank == root else None)[root]

    def Isend(self, array: Array, dest: int, tag: int) -> GuardedRequest:
        """Start to send."""
        return GuardedRequest(self, partial(MessageWait, self, True, dest, tag), self.bare.Isend, array, dest, tag)

    def Irecv(self, buffer: Buffer, source: int, tag: int) -> GuardedRequest:
        """Start to receive."""
        make = partial(MessageWait, self, False, source, tag)
        return GuardedRequest(self, make, self.bare.Irecv, buffer, source, tag, receives=True)

    def Recv(self, buffer: Buffer, source: int, tag: int, status: Status = None) -> None:
        """Receive."""
        self.Irecv(buffer, source, tag).Wait(status)

    def Probe(self, source: int, tag: int, status: Status = None) -> None:
        """Wait for a message."""
        poll(lambda: self.bare.Iprobe(source, tag, status), lambda: MessageWait(self, False, source, tag))

    def Mprobe(self, source: int, tag: int, status: Status = None) -> Any:
        """Wait for a message and match it, so that no other receive takes it."""
        return poll_for(lambda: self.bare.Improbe(source, tag, status), lambda: MessageWait(self, False, source, tag))

    def until(self, probe: Callable[[], bool], source: int) -> None:
        """Wait for a message without a deadline; deadlock reports show this wait."""
        poll(probe, lambda: MessageWait(self, False, source, MPI.ANY_TAG), endless=True)

    def Dup(self) -> Guarded:
        """Return a guarded duplicate whose collectives aren't compared."""
        self._together("Dup")
        self._duplicates += 1
        return Guarded(self.bare.Dup(), f"{self.label}, duplicate {self._duplicates}", self.members)

    def Split(self, color: int, key: int) -> Guarded:
        """Return a guarded communicator with the ranks in another order."""
        self._together("Split")
        made = self.bare.Split(color, key)
        order = made.allgather(self.members[self.rank])
        return Guarded(made, f"{self.label}, reordered", tuple(order), self.agreement, self.owner(), self.number)

    def _together(self, step: str) -> None:
        # MPI creates communicators in blocking calls, which don't wait if all ranks have arrived.
        if self.agreement is not None:
            self.agree(step)
        else:
            self.Barrier()

    def __eq__(self, other: object) -> bool:
        return self is other or (not isinstance(other, Guarded) and self.bare == other)

    def __hash__(self) -> int:
        return id(self)

    def __getattr__(self, name: str) -> Any:
        # Other methods don't wait. Before `bare` is set, its lookup would call this method recursively.
        if name == "bare":
            raise AttributeError(name)
        return getattr(self.bare, name)
