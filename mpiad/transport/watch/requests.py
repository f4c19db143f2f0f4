"""Requests whose waits have deadlines. Nonblocking reductions are compared when they are waited for."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import starmap
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiad._typing import Array, Comm, Op, Request, Status
from mpiad.transport.core import calls
from mpiad.transport.core.channels import cancel
from mpiad.transport.watch import watch_settings
from mpiad.transport.watch.call_agreement import Agreement, lane_of
from mpiad.transport.watch.descriptions import Description, caller, describe, raise_mismatch, shown_arguments, where
from mpiad.transport.watch.timed_waits import Awaited, Departure, poll


class _Wait:
    def __init__(self, comm: Comm):
        self.comm = comm
        self.name, site, call = caller()
        self.arguments, self.place = shown_arguments(call, comm.label), where(call, site)

    def give_up(self, reason: str) -> None:
        self.comm.give_up(reason)


class Gathering(_Wait):
    """A wait in a collective.

    `key`: the label under which collectives are counted. `number`: the count including this collective; ranks with a lower
    count are missing.
    """

    def __init__(self, comm: Comm, key: str, number: int, description: Description | None = None):
        super().__init__(comm)
        self.key, self.number = key, number
        if description is not None:
            self.name, self.arguments, self.place = description.operation, description.arguments(), description.place

    def in_vain(self, gone: dict[int, Departure], before: float) -> bool:
        """Return whether a member left the program without reaching this collective."""
        return any(
            # A rank that left after reaching it isn't missing.
            rank in gone and gone[rank].heard < before and gone[rank].counts.get(self.key, 0) < self.number
            for rank in self.comm.members
        )

    def report(self) -> dict[str, Any]:
        """Return the entries of a table of waits."""
        return {
            "call": self.name, "arguments": self.arguments, "place": self.place, "key": self.key, "number": self.number,
            "members": self.comm.members, "hint": "",
        }  # fmt: skip


class Letter(_Wait):
    """A wait at one end of a message; `peer`, `tag`: possibly wildcards."""

    def __init__(self, comm: Comm, sends: bool, peer: int, tag: int):
        super().__init__(comm)
        self.sends, self.peer, self.tag = sends, peer, tag

    def in_vain(self, gone: dict[int, Departure], before: float) -> bool:
        """Return whether the other end has left the program, and has no pending sends."""
        peers = self._peers()
        return bool(peers) and all(
            # A rank that has left receives nothing, but a long message from it may still be in flight.
            rank in gone and gone[rank].heard < before and (self.sends or not gone[rank].sends)
            for rank in peers
        )

    def _peers(self) -> list[int]:
        members = self.comm.members
        anyone = [rank for rank in members if rank != members[self.comm.rank]]
        return anyone if self.peer < 0 else [members[self.peer]]

    def report(self) -> dict[str, Any]:
        """Return the entries of a table of waits."""
        partner = "any rank" if self.peer < 0 else f"rank {self.peer}"
        tag = "" if self.comm.reverse else " with any tag" if self.tag < 0 else f" with tag {self.tag}"
        direction = "to" if self.sends else "from"
        arguments = ", ".join(filter(None, [f"{direction} {partner}{tag}", self.arguments]))
        return {
            "call": self.name, "arguments": arguments, "place": self.place, "peers": self._peers(), "hint": self._hint(),
        }  # fmt: skip

    def _hint(self) -> str:
        """Return a sentence about a message that has arrived instead of the expected one."""
        if self.sends or self.comm.reverse:
            return ""
        status = MPI.Status()
        for source, tag in ((self.peer, MPI.ANY_TAG), (MPI.ANY_SOURCE, self.tag), (MPI.ANY_SOURCE, MPI.ANY_TAG)):
            if self.comm.bare.Iprobe(source, tag, status):
                size = status.Get_count(MPI.BYTE)
                return f"a message from rank {status.source} with tag {status.tag} ({size} bytes) is there instead"
        return ""


# Pending operations: communicator, request, arguments of MPI's call, and whether it is a receive. Abandoned operations are
# kept, since MPI may still use their buffers.
_started: dict[int, tuple[Comm, list[Request], tuple, bool]] = {}


def begin(comm: Comm, call: Callable[..., Request], *args: Any, receives: bool = False) -> list[Request]:
    """Start an operation of a guarded communicator; return a list with its request, to be passed to `release`.

    As in `Channel.begin`, an interrupt neither frees memory that MPI uses nor loses the request.
    """
    requests: list[Request] = []
    _started[id(requests)] = comm, requests, args, receives
    try:
        requests.extend(starmap(call, (args,)))
    except Exception:
        release(requests)
        raise
    return requests


def release(requests: list[Request]) -> None:
    """Release the buffers of an operation that has ended."""
    _started.pop(id(requests), None)


def cancel_receives(comm: Comm) -> None:
    """Cancel the receives of a communicator, including those that an interrupt has left behind."""
    for owner, requests, _, receives in list(_started.values()):
        if owner is comm and receives:
            for request in requests:
                cancel(request)
            release(requests)


class GuardedRequest:
    """An mpi4py request that is polled; `requests`: the result of `begin`; `make`: describes the wait."""

    def __init__(self, requests: list[Request], make: Callable[[], Awaited], receives: bool = False):
        self._requests, self.request, self._make, self._receives = requests, requests[0], make, receives

    def Test(self, status: Status = None) -> bool:
        """Return whether it is complete."""
        ended = self.request.Test(status)
        if ended:
            release(self._requests)
        return ended

    def Wait(self, status: Status = None) -> None:
        """Wait until it is complete."""
        try:
            poll(lambda: self.Test(status), self._make)
        except MPI.Exception:  # the request is complete
            release(self._requests)
            raise
        except BaseException:  # the deadline, or an interrupt
            # A later message mustn't be received into the buffers, which the caller drops.
            if self._receives:
                self.Cancel()
                release(self._requests)
            raise

    def Cancel(self) -> None:
        """Cancel it, and wait for its end."""
        cancel(self.request)


_BYTES = 1024  # fixed length of a description, so that one nonblocking call is enough


class StartedReduction(GuardedRequest):
    """A pending reduction, with the descriptions of the ranks' calls."""

    def __init__(self, comm: Comm, array: Array, out: np.ndarray, op: Op | None):
        agreement: Agreement = comm.agreement
        lane = lane_of(comm.number)
        agreement.starts[lane] += 1
        comm.started += 1
        number = comm.started
        described = _described(comm, out, op)
        super().__init__(
            begin(comm, comm.bare.Iallreduce, array, out, op), lambda: Gathering(comm, comm.label, number, described)
        )
        self.caller = described.operation, described.place
        self._mine, self._every = np.zeros(_BYTES, np.uint8), np.zeros((comm.size, _BYTES), np.uint8)
        packed = _packed(described, agreement.starts[lane])
        self._mine[: packed.size] = packed
        self._unended = int(not lane)
        agreement.begun_later += self._unended
        saying = begin(comm, agreement.later(lane, comm.post).Iallgather, self._mine, self._every)
        self._saying = GuardedRequest(saying, self._make)
        self._agreement = agreement
        self._group = comm if lane else agreement  # determines the order of the descriptions

    def Wait(self, status: Status = None) -> None:
        """Wait for the descriptions, compare them, and wait for the sum."""
        poll(self._saying.Test, self._make)
        self._agreement.ended_later += self._unended
        self._unended = 0
        described = [pickle.loads(every.tobytes()) for every in self._every]
        if len({(description.compared, starts) for description, starts in described}) > 1:
            # The buffers are kept, since the sum of mismatched calls may never end.
            raise_mismatch(described, self._group)
        super().Wait(status)


def _described(comm: Comm, out: np.ndarray, op: Op | None) -> Description:
    own, call = describe(comm.label, "Iallreduce", out, op, None, watch_settings.present().compares_lines), calls.current()
    # If an array is summed in chunks, the description has the shape of the whole array.
    return own if call is None or call.arguments.shape is None else own._replace(shape=call.arguments.shape)


def _packed(described: Description, starts: int) -> np.ndarray:
    """Return a description in at most `_BYTES` bytes; long names are cut in the same way on all ranks."""
    packed, width = pickle.dumps((described, starts)), 256
    while len(packed) > _BYTES:
        cut = [value[:width] if isinstance(value, str) else value for value in described]
        packed, width = pickle.dumps((Description._make(cut), starts)), width // 2
    return np.frombuffer(packed, np.uint8)
