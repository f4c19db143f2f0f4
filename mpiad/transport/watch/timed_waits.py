"""Waits with a deadline, by polling: first at full speed, then with pauses.

A wait of more than a millisecond or so is described by a `Waiting`. `status` sends this description to ranks that ask, and
stores an exception (`error`) in it if another rank has found that the wait will never end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import starmap
from time import perf_counter
from typing import Any, NamedTuple, Protocol, TypeVar

from mpi4py import MPI

from mpiad._typing import Comm, Rank, Request, Status
from mpiad.transport.core.channels import cancel
from mpiad.transport.core.polling import Backoff
from mpiad.transport.watch import watch_settings

T = TypeVar("T")

_SPINS = 150
_YIELDS_FOR = 1e-3
_IN_FLIGHT = 0.5  # seconds


class Departure(NamedTuple):
    """Another rank's end of the program, after which waits for that rank raise an error."""

    counts: dict[Any, Any]  # the numbers of collectives that it had begun
    sends: bool  # whether messages from it were still in flight
    how: str  # the call that ended the program, or the exception
    place: str  # the line of this call
    noticed: float  # when this rank received the notice of it


departed: dict[int, Departure] = {}  # by rank in the world


class Awaited(Protocol):
    """Describes a wait."""

    def give_up(self, reason: str) -> None:
        """Mark the channel as unusable, since the operation is abandoned."""

    def needs_departed(self, gone: dict[int, Departure], before: float) -> bool:
        """Return whether the wait needs ranks that left the program before that time."""
        ...

    def report(self) -> dict[str, object]:
        """Return the entries for this wait in a deadlock report."""
        ...


class Waiting:
    """A thread's wait. If `endless`, reports show it, but it has no deadline, and `error` isn't set."""

    __slots__ = ("began", "endless", "error", "what")

    def __init__(self, what: Awaited, endless: bool = False):
        self.what, self.began, self.endless = what, perf_counter(), endless
        self.error: Exception | None = None


waits_by_thread: dict[int, Waiting | None] = {}  # the current wait of each thread, None between two of them
# Installed by the module that makes deadlock reports.
_expire: Callable[[Waiting], Exception] | None = None
_answer: Callable[[], None] | None = None


def set_reporter(expire: Callable[[Waiting], Exception] | None, answer: Callable[[], None] | None) -> None:
    """Set the functions that return the error at the deadline (without it, there is none) and that answer other ranks."""
    global _expire, _answer
    _expire, _answer = expire, answer


def poll(test: Callable[[], bool], make: Callable[[], Awaited], endless: bool = False) -> None:
    """Return when `test` is true; raise a DeadlockError unless `endless`. ``make()`` describes a wait that takes longer."""
    for _ in range(_SPINS):
        if test():
            return
    _wait(test, Waiting(make(), endless))


def poll_for(find: Callable[[], T | None], make: Callable[[], Awaited]) -> T:
    """Return the result of `find` when it isn't None; for `make` and the exceptions see `poll`."""
    found: T | None = None

    def is_found() -> bool:
        nonlocal found
        found = find()
        return found is not None

    poll(is_found, make)
    return found  # type: ignore[return-value]


def _wait(test: Callable[[], bool], waiting: Waiting) -> None:
    thread = threading.get_ident()
    # Waits may be nested: if no thread answers other ranks, a waiting rank does, and may wait until the answer is sent.
    before = waits_by_thread.get(thread)
    try:
        try:
            waits_by_thread[thread] = waiting
            _nap_until(test, waiting)
        finally:
            waits_by_thread[thread] = before
    finally:  # repeated, since an interrupt may prevent the first statement
        waits_by_thread[thread] = before


def present_waits() -> dict[int, Waiting]:
    """Return the current waits by thread."""
    return {thread: wait for thread, wait in waits_by_thread.copy().items() if wait is not None}


def _nap_until(test: Callable[[], bool], waiting: Waiting) -> None:
    patience = Backoff(_YIELDS_FOR)
    while not test():
        # Most messages arrive soon, so nothing else is tested before the first pause.
        if patience.nap:
            if waiting.error is not None:
                waiting.what.give_up(str(waiting.error))
                raise waiting.error
            if _answer is not None:
                _answer()
            if not waiting.endless and _expire is not None and _is_over(waiting):
                waiting.error = _expire(waiting)
                continue
        patience.pause()


def _is_over(waiting: Waiting) -> bool:
    limit, elapsed = watch_settings.present().timeout, perf_counter() - waiting.began
    if limit is not None and elapsed > limit:
        return True
    # Earlier messages of a rank that has left may still be in flight.
    return bool(departed) and elapsed > _IN_FLIGHT and waiting.what.needs_departed(departed, perf_counter() - _IN_FLIGHT)


def set_error(began: float, error: Exception) -> None:
    """Raise an exception in the wait that began at this time, if it still runs."""
    for waiting in present_waits().values():
        if waiting.began == began and not waiting.endless:
            waiting.error = error


def message_instead(comm: Comm, source: int, tag: int, members: Sequence[Rank]) -> str:
    """Return a sentence about a message that has arrived instead of the expected one; `members`: the ranks to name."""
    status = MPI.Status()
    for peer, any_tag in ((source, MPI.ANY_TAG), (MPI.ANY_SOURCE, tag), (MPI.ANY_SOURCE, MPI.ANY_TAG)):
        if comm.Iprobe(peer, any_tag, status):
            size = status.Get_count(MPI.BYTE)
            return f"a message from rank {members[status.source]} with tag {status.tag} ({size} bytes) is there instead"
    return ""


ONE_LIBRARY = "both ends of a message must be calls of mpiad, or both of mpi4py"


def message_elsewhere(comms: Iterable[Comm], source: int, tag: int, members: Sequence[Rank], sender: str) -> str:
    """Return a sentence about the expected message on other communicators: those of `sender`, mpiad or mpi4py."""
    status = MPI.Status()
    if not any(comm and comm.Iprobe(source, tag, status) for comm in comms):
        return ""
    message = f"the message from rank {members[status.source]} with tag {status.tag}"
    return f"{message} was sent by {sender}, on another communicator: {ONE_LIBRARY}"


class GuardedRequest:
    """An operation of MPI, ``call(*args)``, which is started here and then polled; `make`: describes the wait."""

    def __init__(
        self, owner: Any, make: Callable[[], Awaited], call: Callable[..., Request], *args: Any, receives: bool = False
    ):
        # As in `Channel.begin`, an interrupt neither frees memory that MPI uses nor loses the request. An abandoned
        # operation is kept, since MPI may still use its buffers.
        self.owner, self.receives, self.arguments, self._make = owner, receives, args, make
        self._requests: list[Request] = []
        pending[id(self)] = self
        try:
            self._requests.extend(starmap(call, (args,)))
        except Exception:
            self.release()
            raise

    def release(self) -> None:
        """Release the buffers, since the operation has ended."""
        pending.pop(id(self), None)

    def Test(self, status: Status = None) -> bool:
        """Return whether it is complete."""
        ended = self._requests[0].Test(status)
        if ended:
            self.release()
        return ended

    def Wait(self, status: Status = None) -> None:
        """Wait until it is complete."""
        try:
            poll(partial(self.Test, status), self._make)
        except MPI.Exception:  # the request is complete
            self.release()
            raise
        except BaseException:  # the deadline, or an interrupt
            # A later message mustn't be received into the buffers, which the caller drops.
            if self.receives:
                self.Cancel()
            raise

    def Cancel(self) -> None:
        """Cancel a receive, and wait for its end."""
        for request in self._requests:  # none if an interrupt came before its start
            cancel(request)
        self.release()


pending: dict[int, GuardedRequest] = {}  # operations that haven't ended, by id


def cancel_receives(owner: object) -> None:
    """Cancel the receives of an object's communicator, including those that an interrupt has left behind."""
    for found in list(pending.values()):
        if found.owner is owner and found.receives:
            GuardedRequest.Cancel(found)
