"""The program's own calls of mpi4py, which take part in the watch: communicators and requests that record their calls.

`watched` returns a communicator of a subclass of mpi4py's class. While one of its methods may wait, a `ProgramCall` is
the thread's current wait. Nothing but the counts of `deadlock_proof` is computed from it before a report, so a
call takes 1 to 2 µs longer, a receive from any rank 2 to 3 µs. Constructors return watched communicators, and nonblocking
calls return watched requests, which keep the call that started them.

`Waitall` and `Sendrecv` wait for one request after the other. So the operation of a wait is incomplete.

Not watched are intercommunicators, windows, files, partitioned messages, `Idup`, `Create_group`, `Create_from_group`,
`mpi4py.util.pkl5`, and libraries that receive the handle of a communicator. Tests and probes that don't wait aren't
waits: a program that repeats them computes.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache, wraps
from itertools import repeat
from math import nan
from threading import get_ident
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from mpiad._typing import Buffer, Comm, Function, Rank, Request, Status
from mpiad.transport.core.agreement import fingerprint
from mpiad.transport.core.calls import site_of
from mpiad.transport.core.channels import live_channels, named
from mpiad.transport.core.collectives import name_of
from mpiad.transport.watch import deadlock_proof as proof
from mpiad.transport.watch import watch_settings
from mpiad.transport.watch.call_agreement import Agreement, Description, lane_of, raise_mismatch
from mpiad.transport.watch.deadlock_proof import COLLECTIVE, RECEIVE, SEND, Counter, Operation, Stream, is_open
from mpiad.transport.watch.timed_waits import (
    Departure,
    Waiting,
    message_elsewhere,
    message_instead,
    present_waits,
    waits_by_thread,
)

T = TypeVar("T")

_PROC_NULL = MPI.PROC_NULL
_CONSTRUCTORS = (
    "Dup Dup_with_info Clone Create Split Split_type Create_cart Create_graph Create_dist_graph "
    "Create_dist_graph_adjacent Sub"
).split()
_ARRAY_COLLECTIVES = (
    "Barrier Bcast Gather Gatherv Scatter Scatterv Allgather Allgatherv Alltoall Alltoallv Alltoallw Reduce Allreduce "
    "Reduce_scatter Reduce_scatter_block Scan Exscan Neighbor_allgather Neighbor_allgatherv Neighbor_alltoall "
    "Neighbor_alltoallv Neighbor_alltoallw"
).split()
_COLLECTIVES = {*_CONSTRUCTORS, *_ARRAY_COLLECTIVES, "Free", "Disconnect"}
_COLLECTIVES |= {f"{start}{name.lower()}" for name in _ARRAY_COLLECTIVES for start in ("", "I")}
_DIFFERENT = {"Iprobe", "iprobe", "Psend_init", "Precv_init", "Sendrecv", "sendrecv"}  # not watched, or by other calls
# Collectives whose counts and types MPI requires to be equal on all ranks, except after `MPI.IN_PLACE`, and the argument.
_COMPARED = {"Bcast": "buf", "Scatter": "recvbuf"} | dict.fromkeys(("Gather", "Allgather", "Alltoall"), "sendbuf")
_COMPARED |= dict.fromkeys(("Reduce", "Allreduce", "Scan", "Exscan"), "sendbuf")


class _Method:
    """A method of mpi4py's communicators; `ends`: place, name and default of its parameters for partners and tags."""

    def __init__(self, function: Function, name: str):
        self.function, self.name, self.signature = function, name, inspect.signature(function)
        places = enumerate(list(self.signature.parameters.values())[1:])
        parameters = {each.name: (place, each.name, each.default) for place, each in places}
        self.ends = [
            (kind, *parameters[peer], *parameters[tag if tag in parameters else "tag"])
            for kind, peer, tag in ((SEND, "dest", "sendtag"), (RECEIVE, "source", "recvtag"))
            if peer in parameters
        ]
        self.probes, self.status_place = "probe" in name.lower(), parameters.get("status", (0,))[0]
        self.is_persistent, self.constructs = name.endswith("_init"), name in _CONSTRUCTORS
        self.starts = self.is_persistent or (name[0] in "Ii" and not self.probes)  # and returns a request


class ProgramCall(Waiting):
    """A call of mpi4py on a communicator, which may be the wait of a thread, or may have started a request."""

    __slots__ = ("arguments", "comm", "keywords", "method", "number", "unknown")
    endless, error, any_suffices = True, None, False

    def __init__(self, comm: Comm, method: _Method, arguments: tuple, keywords: dict[str, Any]):
        self.unknown: Stream | None = None  # in which a receive is counted whose message isn't known
        self.comm, self.method, self.arguments, self.keywords = comm, method, arguments, keywords
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
    def name(self) -> str:
        """The name of mpi4py's method."""
        return self.method.name

    def begin(self) -> None:
        """Count the operation, before it starts."""
        counter, method, arguments, keywords = self.comm.counter, self.method, self.arguments, self.keywords
        if not method.ends:
            self.number = counter.collective(method.name)
        given = len(arguments)
        try:
            for kind, peer_place, peer_name, peer, tag_place, tag_name, tag in method.ends:
                peer = arguments[peer_place] if peer_place < given else keywords.get(peer_name, peer)
                if peer == _PROC_NULL:
                    continue
                stream = peer, arguments[tag_place] if tag_place < given else keywords.get(tag_name, tag)
                if kind is SEND:
                    self.number = counter.count(counter.sends, stream)
                    continue
                self.number = counter.count(counter.receives, stream)
                if is_open(stream):
                    self.number, self.unknown = counter.requests, stream
                elif method.probes:
                    self.unknown = stream
                else:
                    counter.requests += method.starts
        except TypeError:  # an argument that MPI rejects, or an array with a number
            counter.is_ordered = False

    def ends(self) -> list[tuple[str, Rank, int]]:
        """Return kind, partner and tag for each end of a message of this call."""
        arguments = self.by_name()
        every = [(kind, arguments[peer], arguments[tag]) for kind, _, peer, _, _, tag, _ in self.method.ends]
        return [end for end in every if end[1] != MPI.PROC_NULL]

    def operations(self) -> list[Operation]:
        """Return the operations without which the call can't end."""
        comm, members = self.comm, self.comm.members
        if not self.method.ends:
            taking_part = comm.neighbors if "eighbor" in self.name else members
            return [Operation(COLLECTIVE, self.name, comm.key, taking_part, self.number)]
        if not (ends := self.ends()):
            return []
        kind, peer, tag = ends[-1]  # if the call also receives, the send may have ended, since MPI has buffered the message
        peers = members if peer == MPI.ANY_SOURCE else (members[peer],)
        return [Operation(kind, self.name, comm.key, peers, self.number, tag, kind is RECEIVE and is_open((peer, tag)))]

    def by_name(self) -> dict[str, Buffer]:
        """Return the arguments by parameter."""
        bound = self.method.signature.bind(self.comm, *self.arguments, **self.keywords)
        bound.apply_defaults()
        return bound.arguments

    def described(self, with_root: bool = True) -> str:
        """Return partners, tags, root, sizes and communicator as text."""
        arguments, members = self.by_name(), self.comm.members
        parts = [
            f"{'to' if kind == SEND else 'from'} {'any rank' if peer == MPI.ANY_SOURCE else f'rank {members[peer]}'}"
            f" with {'any tag' if tag == MPI.ANY_TAG else f'tag {tag}'}"
            for kind, peer, tag in self.ends()
        ]
        parts += [f"root={arguments['root']}"] if "root" in arguments and with_root else []
        parts += list(filter(None, (_size(arguments.get(name)) for name in ("buf", "sendbuf", "recvbuf"))))[:1]
        return ", ".join([*parts, *([f"on {self.comm.label}"] if self.comm.label != "world" else [])])

    def report(self) -> dict[str, object]:
        """Return the entries of a table of waits; the waits of all threads, and whether these are all threads."""
        waits = {thread: wait.what for thread, wait in present_waits().items() if isinstance(wait.what, ProgramCall)}
        here = next((thread for thread, call in waits.items() if call is self), 0)
        texts = [call.described() if call is self else f"{call.name} {call.described()}" for call in self.calls]
        hints = [_hint(call) for call in self.calls]
        threads = {thread.ident: thread for thread in threading.enumerate() if not thread.name.startswith("mpiad-")}
        thread_waits = [call.wait(threads[thread]) for thread, call in waits.items() if thread in threads]
        text = {"call": self.name, "arguments": "; ".join(texts), "hint": next(filter(None, hints), "")}
        text["place"] = site_of(sys._current_frames().get(here)).text
        return {**text, "threads": thread_waits, "all_wait": threads.keys() <= waits.keys()}

    def give_up(self, reason: str) -> None:
        """Do nothing: the program's communicators aren't marked."""

    def needs_departed(self, gone: dict[int, Departure], before: float) -> bool:
        """Return False, since `status` examines the calls of the program."""
        return False

    def wait(self, thread: threading.Thread) -> proof.ThreadWait:
        """Return the wait of a thread."""
        operations = [operation for call in self.calls for operation in call.operations()]
        return proof.ThreadWait(self.began, _cpu_time(thread), self.any_suffices, operations)


class RequestWait(ProgramCall):
    """A wait, by the method `name`, for the requests that some calls have started."""

    __slots__ = ("any_suffices", "calls", "name")

    def __init__(self, name: str, calls: list[ProgramCall], any_suffices: bool = False):
        self.name, self.calls, self.any_suffices, self.began = name, calls, any_suffices, perf_counter()  # type: ignore[misc]


def _size(buffer: Buffer) -> str:
    array = buffer[0] if isinstance(buffer, (list, tuple)) and buffer else buffer
    return f"shape {array.shape}, {array.dtype}" if isinstance(array, np.ndarray) else ""


def _hint(call: ProgramCall) -> str:
    comm = call.comm
    with _freeing:
        ends = call.ends() if comm.bare else []
        members, alike = comm.members, [channel for channel in live_channels() if channel.members == comm.members]
        duplicates = [getattr(channel.data, "bare", channel.data) for channel in alike]
        receives = [
            message_elsewhere(duplicates, peer, tag, members, "mpiad") or message_instead(comm.bare, peer, tag, members)
            for kind, peer, tag in ends
            if kind == RECEIVE
        ]
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
_counters: dict[int, tuple[Counter, tuple[Rank, ...]]] = {}  # by the key of the communicator, with its members
_freeing = threading.Lock()  # held while another thread uses a communicator, which the program could free


def counts() -> dict[int, proof.Counts]:
    """Return the numbers of this rank's calls by communicator."""
    return {key: counter.counts(members) for key, (counter, members) in _counters.copy().items()}


def _during(wait: ProgramCall, call: Callable[..., T], *args: object, **keywords: object) -> T:
    thread = get_ident()
    before = waits_by_thread.get(thread)
    waits_by_thread[thread] = wait
    try:
        return call(*args, **keywords)
    finally:
        waits_by_thread[thread] = before


class _ProgramRequest:
    """The methods of watched requests, before those of mpi4py's class."""

    call: ProgramCall | None = None  # that has started the request

    def Start(self) -> None:
        """Start a persistent request."""
        self.Startall([self])

    @classmethod
    def Startall(cls, requests: list[Request]) -> None:
        """Start persistent requests."""
        for request in requests:
            if call := getattr(request, "call", None):
                call.begin()
        _Prequest.Startall(requests)

    def Cancel(self) -> None:
        """Cancel the request, so that the order of the messages isn't known."""
        if self.call is not None:
            self.call.comm.counter.is_ordered = False
        _Request.Cancel(self)  # type: ignore[arg-type]

    cancel = Cancel


def _wait_for(name: str, request: Request, function: Callable[..., T], status: Status = None) -> T:
    call = getattr(request, "call", None)
    if call is None or not request:
        return function(request, status)
    if status is None and call.unknown:
        status = call.comm.counter.status
    result = _during(RequestWait(name, [call]), function, request, status)
    if call.unknown:
        call.comm.counter.move(call.unknown, status)
        call.unknown = None
    return result


def _waits(name: str) -> Function | staticmethod:
    """Return a method of watched requests that waits for one, all or some of them."""
    bare, one = getattr(_Request, name), getattr(_Request, name[:4])

    def for_one(self: Request, status: Status = None) -> object:
        return _wait_for(name, self, one, status)

    def for_all(requests: Sequence[Request], statuses: list[Status] | None = None) -> object:
        if statuses is not None:
            statuses += [MPI.Status() for _ in requests[len(statuses) :]]
        results = [_wait_for(name, *each) for each in zip(requests, repeat(one), statuses or repeat(None))]
        return all(results) if name == "Waitall" else results

    def for_some(requests: Sequence[Request], *args: object, **keywords: object) -> object:
        calls = [getattr(request, "call", None) for request in requests if request]
        # A call that also waits for other requests may end at any time, so it isn't described.
        if None in calls:
            return bare(requests, *args, **keywords)
        return _during(RequestWait(name, calls, True), bare, requests, *args, **keywords)  # type: ignore[arg-type]

    method = {"": for_one, "all": for_all}.get(name[4:], for_some)
    return wraps(bare)(method) if method is for_one else staticmethod(wraps(bare)(method))


class _AnyRequest(type):
    """The class of request classes, which replace mpi4py's: requests of the latter are instances, too."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__mro__[2])


_WAITS = {name: _waits(name) for name in "Wait Waitall Waitany Waitsome wait waitall waitany waitsome".split()}
_MEMBERS = _WAITS | {"__module__": "mpi4py.MPI"}
_REQUESTS: dict[type, type] = {
    bare: _AnyRequest(bare.__name__, (_ProgramRequest, bare), _MEMBERS) for bare in (_Request, _Prequest)
}


def _watched_request(request: Request, call: ProgramCall) -> Request:
    found = _REQUESTS[type(request)](request)
    found.call = call
    return found


class _Communicator:
    """The methods of watched communicators, before those of mpi4py's class."""

    bare: Comm  # of mpi4py's class; the null communicator once the program frees this one
    members: tuple[Rank, ...]  # ranks in the world
    neighbors: tuple[Rank, ...]  # those of the process topology
    key: int
    label: str
    counter: Counter
    agreement: Agreement | None  # compares the ranks' collectives in debug mode
    receives_array: Callable[..., None]
    receives_object: Callable[..., Any]

    def __reduce__(self) -> str | tuple:
        return "COMM_WORLD" if self is MPI.COMM_WORLD else self.bare.__reduce__()

    def Sendrecv(
        self, sendbuf: Buffer, dest: int, sendtag: int = 0, recvbuf: Buffer = None, source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG, status: Status = None,
    ) -> None:  # fmt: skip
        """Send and receive, by separate calls, so that a report shows whether the message has been received."""
        send = self.Isend(sendbuf, dest, sendtag)  # type: ignore[attr-defined]
        self.receives_array(recvbuf, source, recvtag, status)
        send.Wait()

    def sendrecv(
        self, sendobj: object, dest: int, sendtag: int = 0, recvbuf: Buffer = None, source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG, status: Status = None,
    ) -> object:  # fmt: skip
        """Send and receive objects; see `Sendrecv`."""
        send = self.isend(sendobj, dest, sendtag)  # type: ignore[attr-defined]
        received = self.receives_object(recvbuf, source, recvtag, status)
        send.wait()
        return received


def _compare(call: ProgramCall) -> None:
    """Raise an error on all ranks, in debug mode, if their collectives differ in name, root, reduction, count or type."""
    agreement, arguments, lane = call.comm.agreement, call.by_name(), lane_of(0)
    array, op = arguments.get(_COMPARED.get(call.name, "")), arguments.get("op")
    shape, dtype = ((array.size,), str(array.dtype)) if isinstance(array, np.ndarray) else (None, None)
    reduction = None if op is None else name_of(op) or "user-defined"
    place = site_of(sys._getframe(1)).text
    described = (call.name, call.comm.label, arguments.get("root"), reduction, shape, dtype, None, call.name)
    mine = Description(*described, call.described(with_root=False), place)
    if not agreement.agree(fingerprint(mine.compared) >> 2, lane, lambda: call):
        every = agreement.descriptions((mine, 0), lane, lambda: call)
        if any(description.shape is None for description, _ in every):  # unknown, as for buffers with derived types
            every = [(description._replace(shape=None, dtype=None), starts) for description, starts in every]
        if len({description.compared for description, _ in every}) > 1:
            raise_mismatch(every, agreement)


def _watched_method(method: _Method) -> Function:
    function, starts, is_persistent = method.function, method.starts, method.is_persistent
    is_collective, frees, place = not method.ends, method.name in ("Free", "Disconnect"), method.status_place
    waits_for_all, probes, constructs = is_collective and not starts, method.probes, method.constructs

    def watched_call(self: Comm, *args: object, **keywords: object) -> object:
        call = ProgramCall(self, method, args, keywords)
        if is_persistent:
            return _watched_request(function(self, *args, **keywords), call)
        call.begin()
        if waits_for_all and self.agreement is not None:
            _compare(call)
        if frees:
            with _freeing:
                self.bare = MPI.COMM_NULL
        if call.unknown and not starts:
            status = args[place] if len(args) > place else keywords.get("status")
            if status is None:
                keywords["status"] = status = self.counter.status
                call.arguments = args = args[:place]
        thread = get_ident()
        before = waits_by_thread.get(thread)
        waits_by_thread[thread] = call
        try:
            result = function(self, *args, **keywords)
        except BaseException:
            self.counter.is_ordered &= is_collective
            raise
        finally:
            waits_by_thread[thread] = before
        if starts:
            return _watched_request(result, call)
        if call.unknown:
            self.counter.move(call.unknown, None if probes and result in (None, True) else status)
        if frees:
            _counters.pop(self.key, None)
        return watched(result) if constructs else result

    return wraps(function)(watched_call)


@cache
def _class_of(bare: type) -> type:
    found = {name: getattr(bare, name) for name in dir(bare) if name not in _DIFFERENT}
    every = {
        name: _Method(function, name) for name, function in found.items() if inspect.isroutine(function) and name[0] != "_"
    }
    methods = {name: _watched_method(method) for name, method in every.items() if method.ends or name in _COLLECTIVES}
    methods["receives_array"] = _watched_method(_Method(bare.Recv, "Sendrecv"))
    methods["receives_object"] = _watched_method(_Method(bare.recv, "sendrecv"))
    return type(bare.__name__, (_Communicator, bare), methods | {"__module__": "mpi4py.MPI", "bare_class": bare})


@cache
def _attribute() -> int:
    return MPI.Comm.Create_keyval()


def watched(comm: Comm, label: str | None = None) -> Comm:
    """Return a watched communicator with the same handle; return the null communicator and other objects unchanged."""
    bare = getattr(type(comm), "bare_class", type(comm))
    if not isinstance(comm, MPI.Intracomm) or not comm:
        return comm
    found = _class_of(bare)(comm)
    found.bare, found.agreement = bare(comm), None
    if (common := found.bare.Get_attr(_attribute())) is None:
        members, number, name = named(found.bare)
        edges = found.bare.inoutedges if isinstance(comm, MPI.Topocomm) else ()
        neighbors = tuple({members[rank] for ranks in edges for rank in ranks if rank != MPI.PROC_NULL})
        common = {"members": members, "neighbors": neighbors, "key": fingerprint(members, number), "counter": Counter()}
        found.bare.Set_attr(_attribute(), common | {"label": label or name})
        _counters[common["key"]] = common["counter"], members
    vars(found).update(found.bare.Get_attr(_attribute()))
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
