"""The program's own calls of mpi4py, which take part in the watch: communicators and requests that record their calls.

`watched` returns a communicator of a subclass of mpi4py's class. While one of its methods may wait, a `ProgramCall` is
the thread's current wait. Nothing is computed from it before a report, so a call takes less than 2 µs longer.
Constructors return watched communicators, and nonblocking calls return watched requests, which keep the call that started
them. So reports contain the operations that each thread waits for, and those that are pending.

`Waitall` and `Sendrecv` wait for one request after the other. So the operation of a wait is incomplete, and MPI can be
asked which of the others are.

Not watched are intercommunicators, windows, files, partitioned messages, `Idup`, `Create_group`, `Create_from_group`,
`mpi4py.util.pkl5`, and libraries that receive the handle of a communicator. Tests and probes that don't wait aren't
waits: a program that repeats them computes.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from math import nan
from threading import get_ident
from time import perf_counter
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from mpi4py import MPI

from mpiad._typing import Comm, Rank, Request, Status
from mpiad.transport.core.agreement import fingerprint
from mpiad.transport.core.calls import site_of
from mpiad.transport.core.channels import cancel, named
from mpiad.transport.core.collectives import name_of
from mpiad.transport.watch import watch_settings
from mpiad.transport.watch.call_agreement import Agreement, Description, lane_of, raise_mismatch
from mpiad.transport.watch.timed_waits import Departure, Waiting, message_instead, restore_wait, waits_by_thread

COLLECTIVE, SEND, RECEIVE = "collective", "send", "receive"


class Operation(NamedTuple):
    """An operation of MPI on one rank. `peers`: the ranks in the world that may take part.

    `comm`: a number that is equal on all ranks of the communicator. `tag`: of a collective its number on the communicator.
    """

    kind: str  # {"collective", "send", "receive"}
    name: str
    comm: int
    peers: tuple[Rank, ...]
    tag: int

    @property
    def family(self) -> str:
        """The name of the collective, the same for calls that MPI may match."""
        return self.name.lower().rstrip("vw").replace("clone", "dup")

    def meets(self, rank: Rank, other: Operation, other_rank: Rank) -> bool:
        """Return whether this operation of `rank` and another rank's operation are the two ends of a message."""
        if self.kind == RECEIVE:
            return other.kind == SEND and other.meets(other_rank, self, rank)
        are_ends = self.kind == SEND and other.kind == RECEIVE and self.comm == other.comm
        return are_ends and other_rank in self.peers and rank in other.peers and other.tag in (MPI.ANY_TAG, self.tag)


class ThreadWait(NamedTuple):
    """The wait of a thread for all operations, or for any one of them; `cpu`: seconds that the thread has computed."""

    began: float
    cpu: float
    any_suffices: bool
    operations: list[Operation]


class ProgramCall(Waiting):
    """A call of mpi4py on a communicator, which may be the wait of a thread, or may have started a request."""

    __slots__ = ("arguments", "began", "comm", "keywords", "method", "number")
    endless, error, is_sent = True, None, False

    def __init__(self, comm: Any, method: Callable[..., Any], arguments: tuple, keywords: dict[str, Any], number: int):
        self.comm, self.method, self.arguments, self.keywords = comm, method, arguments, keywords
        self.number = number  # of a collective on the communicator, otherwise 0
        self.began = perf_counter()

    @property
    def what(self) -> ProgramCall:  # type: ignore[override]
        """The description of the wait."""
        return self

    @property
    def calls(self) -> list[ProgramCall]:
        """The calls whose operations the thread waits for."""
        return [self]

    @property
    def any_suffices(self) -> bool:
        """Whether the wait may end before all of the operations, since some of them may already have ended."""
        return not self.number and len(self.ends()) > 1

    @property
    def name(self) -> str:
        """The name of mpi4py's method."""
        return self.method.__name__

    def bound(self) -> dict[str, Any]:
        """Return the arguments by parameter."""
        bound = _signature(self.method).bind(self.comm, *self.arguments, **self.keywords)
        bound.apply_defaults()
        return bound.arguments

    def ends(self) -> list[tuple[str, Rank, int]]:
        """Return kind, partner and tag for each end of a message of this call."""
        bound = self.bound()
        ends = [(SEND, "dest", "sendtag"), (RECEIVE, "source", "recvtag")]
        found = [
            (kind, bound[peer], bound[tag] if tag in bound else bound["tag"]) for kind, peer, tag in ends if peer in bound
        ]
        return [end for end in found if end[1] != MPI.PROC_NULL and not (self.is_sent and end[0] == SEND)]

    def operations(self) -> list[Operation]:
        """Return the operations of the call."""
        comm, members = self.comm, self.comm.members
        if self.number:
            taking_part = comm.neighbors if "eighbor" in self.name else members
            return [Operation(COLLECTIVE, self.name, comm.key, taking_part, self.number)]
        return [
            Operation(kind, self.name, comm.key, members if peer == MPI.ANY_SOURCE else (members[peer],), tag)
            for kind, peer, tag in self.ends()
        ]

    def described(self, with_root: bool = True) -> str:
        """Return partners, tags, root, sizes and communicator as text."""
        bound, members = self.bound(), self.comm.members
        parts = [
            f"{'to' if kind == SEND else 'from'} {'any rank' if peer == MPI.ANY_SOURCE else f'rank {members[peer]}'}"
            f" with {'any tag' if tag == MPI.ANY_TAG else f'tag {tag}'}"
            for kind, peer, tag in self.ends()
        ]
        parts += [f"root={bound['root']}"] if "root" in bound and with_root else []
        names = ("recvbuf",) if self.is_sent else ("buf", "sendbuf", "recvbuf")
        parts += list(filter(None, (_size(bound.get(name)) for name in names)))[:1]
        return ", ".join([*parts, *([f"on {self.comm.label}"] if self.comm.label != "world" else [])])

    def report(self) -> dict[str, Any]:
        """Return the entries of a table of waits; the waits of all threads, and whether these are all threads."""
        waits = {thread: wait.what for thread, wait in waits_by_thread.copy().items() if isinstance(wait.what, ProgramCall)}
        here = next((thread for thread, call in waits.items() if call is self), 0)
        texts = [call.described() if call is self else f"{call.name} {call.described()}" for call in self.calls]
        hints = [_hint(call) for call in self.calls]
        threads = {thread.ident: thread for thread in threading.enumerate() if not thread.name.startswith("mpiad-")}
        return {
            "call": self.name, "arguments": "; ".join(texts), "hint": next(filter(None, hints), ""),
            "place": site_of(sys._current_frames().get(here)).text,
            "threads": [call.wait(threads[thread]) for thread, call in waits.items() if thread in threads],
            "all_wait": threads.keys() <= waits.keys(),
        }  # fmt: skip

    def give_up(self, reason: str) -> None:
        """Do nothing: the program's communicators aren't marked."""

    def needs_departed(self, gone: dict[int, Departure], before: float) -> bool:
        """Return False, since `status` examines the calls of the program."""
        return False

    def wait(self, thread: threading.Thread) -> ThreadWait:
        """Return the wait of a thread."""
        operations = [operation for call in self.calls for operation in call.operations()]
        return ThreadWait(self.began, _cpu_time(thread), self.any_suffices, operations)


class RequestWait(ProgramCall):
    """A wait for requests, which a call `name` makes."""

    __slots__ = ("for_any", "name", "requests")

    def __init__(self, name: str, requests: list[Request], for_any: bool = False):
        self.requests, self.for_any, self.number = requests, for_any, 0
        self.name = name  # type: ignore[misc]
        self.began = perf_counter()

    @property
    def any_suffices(self) -> bool:
        """Whether one of the operations suffices, or some of them may already have ended."""
        return self.for_any or any(call.any_suffices for call in self.calls)

    @property
    def calls(self) -> list[ProgramCall]:
        """The calls that have started the requests."""
        return [request.call for request in self.requests]


class _Exchange(ProgramCall):
    """A call of `Sendrecv`; `is_sent`: whether the message has been sent."""

    __slots__ = ("is_sent",)

    def complete(self, send: Request, receive: Request, status: Status) -> None:
        """Wait for both."""
        send.Wait()
        self.is_sent = True
        receive.Wait(status)


_SENDRECV = MPI.Comm.Sendrecv


@cache
def _signature(method: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(method)


def _neighbors(comm: Comm) -> tuple[Rank, ...]:
    return tuple({rank for ranks in comm.inoutedges for rank in ranks if rank != MPI.PROC_NULL})


def _size(buffer: Any) -> str:
    array = buffer[0] if isinstance(buffer, (list, tuple)) and buffer else buffer
    return f"shape {array.shape}, {array.dtype}" if isinstance(array, np.ndarray) else ""


def _hint(call: ProgramCall) -> str:
    comm = call.comm
    with _reading:
        ends = call.ends() if comm.bare and not call.number else []
        receives = [message_instead(comm.bare, peer, tag, comm.members) for kind, peer, tag in ends if kind == RECEIVE]
    return next(filter(None, receives), "")


_HAS_CLOCKS = os.path.exists("/proc/self/schedstat")


def _cpu_time(thread: threading.Thread) -> float:
    # Without such a clock, the duration of a wait is the only sign that the thread has received what has arrived.
    if not _HAS_CLOCKS:
        return perf_counter()
    try:
        with open(f"/proc/self/task/{thread.native_id}/schedstat", encoding="ascii") as file:
            return int(file.read().split()[0]) * 1e-9
    except OSError:  # the thread has ended
        return nan


_Request, _Prequest = MPI.Request, MPI.Prequest
_collectives: Counter[int] = Counter()  # by communicator: the number of collectives that this rank has begun
_requests: WeakValueDictionary[int, Any] = WeakValueDictionary()
# Held while another thread uses requests and communicators, which a call of the program could free.
_reading = threading.Lock()


def counts() -> dict[int, int]:
    """Return the numbers of collectives that this rank has begun, by communicator."""
    return dict(_collectives)


def pending() -> list[Operation]:
    """Return the operations that aren't complete, and for which no thread waits."""
    with _reading:
        found = [request for reference in _requests.valuerefs() if (request := reference()) is not None]
        calls = [request.call for request in found if request and not request.is_busy and not _Request.Get_status(request)]
    return [operation for call in calls for operation in call.operations()]


def _during(wait: ProgramCall, call: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    thread = get_ident()
    before = waits_by_thread.get(thread)
    waits_by_thread[thread] = wait
    try:
        return call(*args, **keywords)
    finally:
        restore_wait(thread, before)


class _ProgramRequest:
    """The methods of watched requests, before those of mpi4py's class."""

    call: ProgramCall | None = None  # that has started the request
    is_busy = False  # whether a thread waits for it

    def Wait(self, status: Status = None) -> bool:
        """Wait until the request is complete."""
        return _wait_for("Wait", [self], _Request.Wait, self, status)

    def wait(self, status: Status = None) -> Any:
        """Wait until the request is complete; return the received object."""
        return _wait_for("wait", [self], _Request.wait, self, status)

    @classmethod
    def Waitall(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> bool:
        """Wait until all requests are complete."""
        for request, status in zip(requests, _statuses(requests, statuses)):
            _wait_for("Waitall", [request], _Request.Wait, request, status)
        return True

    @classmethod
    def waitall(cls, requests: Sequence[Request], statuses: list[Status] | None = None) -> list[Any]:
        """Wait until all requests are complete; return the received objects."""
        pairs = zip(requests, _statuses(requests, statuses))
        return [_wait_for("waitall", [request], _Request.wait, request, status) for request, status in pairs]


def _statuses(requests: Sequence[Request], statuses: list[Status] | None) -> Sequence[Status]:
    if statuses is None:
        return [None] * len(requests)
    statuses += [MPI.Status() for _ in requests[len(statuses) :]]
    return statuses


def _wait_for(name: str, requests: Sequence[Any], call: Callable[..., Any], *args: Any, for_any: bool = False) -> Any:
    with _reading:
        # Persistent requests are complete or inactive if they have a status.
        active = [
            found for found in requests if found and not (isinstance(found, _Prequest) and _Request.Get_status(found))
        ]
        known: list[Any] = [request for request in active if getattr(request, "call", None)]
        for request in known:
            request.is_busy = True
    try:
        # A call that also waits for other requests may end at any time, so it isn't described.
        return _during(RequestWait(name, known, for_any), call, *args) if len(known) == len(active) else call(*args)
    finally:
        for request in known:
            request.is_busy = False


def _waits_for_any(name: str) -> Any:
    bare = getattr(_Request, name)

    def method(requests: Sequence[Request], *args: Any, **keywords: Any) -> Any:
        return _wait_for(name, requests, partial(bare, requests, *args, **keywords), for_any=True)

    return staticmethod(wraps(bare)(method))


def _holds_lock(bare: Callable[..., Any]) -> Any:
    def method(*args: Any, **keywords: Any) -> Any:
        with _reading:
            return bare(*args, **keywords)

    return staticmethod(method) if inspect.ismethod(bare) else method


class _AnyRequest(type):
    """The class of request classes, which replace mpi4py's: requests of the latter are instances, too."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__mro__[2])


_LOCKED = "Test test Testall testall Testany testany Testsome testsome Free free Cancel cancel Start Startall".split()


def _class_of_requests(bare: type) -> type:
    methods = {name: _waits_for_any(name) for name in ("Waitany", "waitany", "Waitsome", "waitsome")}
    methods |= {name: _holds_lock(getattr(bare, name)) for name in _LOCKED if hasattr(bare, name)}
    return _AnyRequest(bare.__name__, (_ProgramRequest, bare), methods | {"__module__": "mpi4py.MPI"})


_REQUESTS = {bare: _class_of_requests(bare) for bare in (_Request, _Prequest)}


def _watched_request(request: Request, call: ProgramCall) -> Request:
    found = _REQUESTS[type(request)](request)
    found.call = call
    _requests[id(found)] = found
    return found


class _Communicator:
    """The methods of watched communicators, before those of mpi4py's class."""

    bare: Comm  # of mpi4py's class; the null communicator once the program frees this one
    members: tuple[Rank, ...]  # ranks in the world
    neighbors: tuple[Rank, ...]  # those of the process topology
    key: int
    label: str
    agreement: Agreement | None  # compares the ranks' collectives in debug mode

    def __reduce__(self) -> Any:
        return "COMM_WORLD" if self is MPI.COMM_WORLD else self.bare.__reduce__()

    def Sendrecv(
        self, sendbuf: Any, dest: int, sendtag: int = 0, recvbuf: Any = None, source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG, status: Status = None,
    ) -> None:  # fmt: skip
        """Send and receive, by nonblocking calls, so that a report shows whether the message has been sent."""
        call = _Exchange(self, _SENDRECV, (sendbuf, dest, sendtag, recvbuf, source, recvtag, status), {}, 0)
        call.is_sent = False
        receive = self.bare.Irecv(recvbuf, source, recvtag)
        try:
            send = self.bare.Isend(sendbuf, dest, sendtag)
        except Exception:
            cancel(receive)
            raise
        _during(call, call.complete, send, receive, status)

    def sendrecv(
        self, sendobj: Any, dest: int, sendtag: int = 0, recvbuf: Any = None, source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG, status: Status = None,
    ) -> Any:  # fmt: skip
        """Send and receive objects; see `Sendrecv`."""
        send = self.isend(sendobj, dest, sendtag)  # type: ignore[attr-defined]
        received = self.recv(recvbuf, source, recvtag, status)  # type: ignore[attr-defined]
        send.wait()
        return received


_COLLECTIVES = (
    "Barrier Bcast Gather Gatherv Scatter Scatterv Allgather Allgatherv Alltoall Alltoallv Alltoallw Reduce Allreduce "
    "Reduce_scatter Reduce_scatter_block Scan Exscan Neighbor_allgather Neighbor_allgatherv Neighbor_alltoall "
    "Neighbor_alltoallv Neighbor_alltoallw"
).split()
_CONSTRUCTORS = "Dup Dup_with_info Clone Create Split Split_type Create_cart Create_graph Create_dist_graph".split()
_CONSTRUCTORS += ["Create_dist_graph_adjacent", "Sub"]
_WAITING = "Send Bsend Ssend Rsend send bsend ssend Recv recv Probe probe Mprobe mprobe Sendrecv_replace".split()
_STARTING = "Isend Ibsend Issend Irsend isend ibsend issend Irecv irecv Send_init Bsend_init Ssend_init Rsend_init".split()
_STARTING += ["Recv_init", "Isendrecv", "Isendrecv_replace"]


# Collectives whose counts and types MPI requires to be equal on all ranks, except after `MPI.IN_PLACE`, and the argument.
_COMPARED = {"Bcast": "buf", "Scatter": "recvbuf"} | dict.fromkeys(("Gather", "Allgather", "Alltoall"), "sendbuf")
_COMPARED |= dict.fromkeys(("Reduce", "Allreduce", "Scan", "Exscan"), "sendbuf")


def _compare(call: ProgramCall) -> None:
    """Raise an error on all ranks, in debug mode, if their collectives differ in name, root, reduction, count or type."""
    agreement, bound, lane = call.comm.agreement, call.bound(), lane_of(0)
    array, op = bound.get(_COMPARED.get(call.name, "")), bound.get("op")
    shape, dtype = ((array.size,), str(array.dtype)) if isinstance(array, np.ndarray) else (None, None)
    reduction = None if op is None else name_of(op) or "user-defined"
    place = site_of(sys._getframe(1)).text
    described = (call.name, call.comm.label, bound.get("root"), reduction, shape, dtype, None, call.name)
    mine = Description(*described, call.described(with_root=False), place)
    if not agreement.agree(fingerprint(mine.compared) >> 2, lane, lambda: call):
        every = agreement.descriptions((mine, 0), lane, lambda: call)
        if any(description.shape is None for description, _ in every):  # unknown, as for buffers with derived types
            every = [(description._replace(shape=None, dtype=None), starts) for description, starts in every]
        if len({description.compared for description, _ in every}) > 1:
            raise_mismatch(every, agreement)


def _call_of_communicator(bare: Callable[..., Any], collective: bool, starts: bool) -> Callable[..., Any]:
    frees = bare.__name__ in ("Free", "Disconnect")

    def method(self: Any, *args: Any, **keywords: Any) -> Any:
        number = 0
        if collective:
            number = _collectives[self.key] = _collectives[self.key] + 1
        call = ProgramCall(self, bare, args, keywords, number)
        if starts:
            return _watched_request(bare(self, *args, **keywords), call)
        if collective and self.agreement is not None:
            _compare(call)
        if frees:
            with _reading:
                self.bare = MPI.COMM_NULL
        return _during(call, bare, self, *args, **keywords)

    return wraps(bare)(method)


def _constructs(method: Callable[..., Any]) -> Callable[..., Any]:
    return wraps(method)(lambda self, *args, **keywords: watched(method(self, *args, **keywords)))


@cache
def _class_of(bare: type) -> type:
    methods = {}
    of_objects = [name.lower() for name in _COLLECTIVES]
    nonblocking = [f"I{name}" for name in of_objects]
    for name in [*_COLLECTIVES, *of_objects, *_CONSTRUCTORS, "Free", "Disconnect", *_WAITING, *_STARTING, *nonblocking]:
        if (found := getattr(bare, name, None)) is not None:
            starts = name in _STARTING or name in nonblocking
            method = _call_of_communicator(found, name not in _WAITING and name not in _STARTING, starts)
            methods[name] = _constructs(method) if name in _CONSTRUCTORS else method
    return type(bare.__name__, (_Communicator, bare), methods | {"__module__": "mpi4py.MPI", "bare_class": bare})


def watched(comm: Comm, label: str | None = None) -> Comm:
    """Return a watched communicator with the same handle; return the null communicator and other objects unchanged."""
    bare = getattr(type(comm), "bare_class", type(comm))
    if not isinstance(comm, MPI.Intracomm) or not comm:
        return comm
    found = _class_of(bare)(comm)
    found.bare = bare(comm)
    found.members, number, name = named(found.bare)
    found.key, found.label, found.agreement = fingerprint(found.members, number), label or name, None
    edges = _neighbors(found.bare) if isinstance(comm, MPI.Topocomm) else ()
    found.neighbors = tuple(found.members[rank] for rank in edges)
    if watch_settings.debug() and found.size > 1:
        found.agreement = Agreement(found.bare.Dup(), found.members, f"{found.label}, program")
        found.agreement.open()
    return found


def watch_program(comm: Comm) -> Comm:
    """Return a watched communicator; it replaces mpi4py's if it is `MPI.COMM_WORLD`."""
    found = watched(comm, "world")
    MPI.Request, MPI.Prequest = _REQUESTS.values()
    MPI.Init, MPI.Init_thread = lambda: None, lambda required=MPI.THREAD_MULTIPLE: MPI.Query_thread()  # MPI is initialized
    if comm == MPI.COMM_WORLD:
        MPI.COMM_WORLD = found
    return found
