"""Recordings of the communication of all ranks, during a block of the program or the whole program."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpiad._typing import Comm
from mpiad.checkpoint_files import create_part
from mpiad.differentiation import backward
from mpiad.differentiation.tape import OrderedTape
from mpiad.environment_variables import path
from mpiad.transport import channel, world
from mpiad.transport.core import calls
from mpiad.transport.core.calls import Arguments, Call
from mpiad.transport.exits.abort import before_abort

# The recorder of a rank's communication calls and phases, with start and end times.
#
# While calls are recorded (see `calls.note`), the functions that run forward and backward passes are replaced by functions
# that also report the passes to the active recorders; `transport.core.calls` reports operations. Otherwise there is no
# overhead.

_active: list[Recorder] = []
# The original functions, which recording replaces.
_original_sweep, _original_enter, _original_exit = backward.sweep, OrderedTape.__enter__, OrderedTape.__exit__


def _recorded_sweep(*args: Any) -> None:
    key = object()
    _begin_phase(key, "backward")
    try:
        _original_sweep(*args)
    finally:
        _end_phase(key)


def _recorded_enter(self: OrderedTape) -> OrderedTape:
    _begin_phase(self, "forward")
    return _original_enter(self)


def _recorded_exit(
    self: OrderedTape, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    try:
        _original_exit(self, kind, error, trace)
    finally:
        _end_phase(self)


def _begin_phase(key: object, name: str) -> None:
    for recorder in calls.reported_to(_active):
        recorder.phase_began(key, name)


def _end_phase(key: object) -> None:
    for recorder in calls.reported_to(_active):
        recorder.phase_ended(key)


def _switch(on: bool) -> None:
    backward.sweep = _recorded_sweep if on else _original_sweep
    OrderedTape.__enter__ = _recorded_enter if on else _original_enter  # type: ignore[method-assign]
    OrderedTape.__exit__ = _recorded_exit if on else _original_exit  # type: ignore[method-assign]


calls.register(_switch)


MAX_EVENTS = 500_000  # maximum number of recorded events; each takes a few hundred bytes
_NO_ARGUMENTS = Arguments()
WAITS = ("mpi_wait", "mpi_waitall")


class Message(NamedTuple):
    """A message between two ranks; all fields except `outgoing` are the same on the sender and the receiver."""

    outgoing: bool
    communicator: str
    source: int  # `source`, `dest`: ranks in the world
    dest: int
    tag: int  # the user's tag
    number: int  # index of the message among those between these ranks with this tag
    reverse: bool  # whether an adjoint sent it


class Event(NamedTuple):
    """A communication call or a phase of a derivative."""

    thread: int  # number of the thread; 0 is the thread that started the recording
    began: float  # `began`, `ended`: times of this rank's `time.perf_counter()`
    ended: float
    name: str  # for example "mpi_bcast", "adjoint of mpi_bcast", "forward"
    called: str  # like `name`, but of the library function that the user called, for example "adjoint of exchange"
    # The operation; for an adjoint, that of the forward call; for an event inside an adjoint, its own; "" for a phase.
    operation: str
    direction: str  # {"forward", "adjoint", "tangent", "phase"}
    innermost: bool  # whether the event contains no other communication; False for a phase
    outermost: bool  # whether no other communication contains the event; True for a phase
    site: str  # the line of the user's program
    forward_site: str  # for an adjoint or tangent, the line of the forward call; else ""
    arguments: Arguments
    messages: tuple[Message, ...]  # messages that the communication started or completed


@dataclass(slots=True)
class _Span:
    """A communication, whose `Call` is the key, or a phase; most fields of its `Event` are computed later."""

    key: object  # None after the end of a phase
    began: float
    name: str = ""  # of a phase
    contains_communication: bool = False
    thread: int = 0
    ended: float = 0.0
    arguments: Arguments = _NO_ARGUMENTS


class _Stacks(threading.local):
    """Each thread's number, and its open events."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.open: list[_Span] = []


class Recorder:
    """Records the events between `start` and `stop`."""

    def __init__(self) -> None:
        self._records: list[_Span] = []
        self.dropped = 0  # number of events beyond the maximum
        self.start_time = self.stop_time = 0.0  # times of `start` and `stop`
        self.threads: list[str] = []  # names of the threads, by number
        self._stacks, self._lock = _Stacks(), threading.Lock()

    def start(self) -> None:
        """Start recording."""
        # The thread that starts the recording, usually the main thread, gets number 0.
        self._thread_number()
        self.start_time = perf_counter()
        calls.observers.append(self)
        _active.append(self)
        calls.note(self)

    def stop(self) -> None:
        """Stop recording."""
        calls.forget(self)
        calls.observers.remove(self)
        _active.remove(self)
        self.stop_time = perf_counter()

    @property
    def elapsed(self) -> float:
        """The duration of the recording in seconds."""
        return (self.stop_time or perf_counter()) - self.start_time

    @property
    def events(self) -> list[Event]:
        """The recorded events, in the order of their ends."""
        return [_event(record) for record in self._records]

    def began(self, call: Call) -> None:
        """Open a communication."""
        opened = self._stacks.open
        # All open events contain the new event, so these events aren't innermost.
        for entry in opened:
            entry.contains_communication = True
        opened.append(_Span(call, call.began))

    def ended(self, call: Call) -> None:
        """Close a communication and record it."""
        entry = self._close(call)
        if entry is not None:
            # Most attributes are computed later, in `events`, because this function runs in every communication.
            entry.ended, entry.arguments = call.ended, call.arguments
            self._store(entry)

    def phase_began(self, key: object, name: str) -> None:
        """Open a phase, "forward" or "backward"; `key` identifies the phase in `phase_ended`."""
        self._stacks.open.append(_Span(key, perf_counter(), name))

    def phase_ended(self, key: object) -> None:
        """Close a phase; a phase that began before the recording isn't recorded."""
        entry = self._close(key)
        if entry is not None:
            entry.ended, entry.key = perf_counter(), None  # the key may be a tape, whose memory would be held
            self._store(entry)

    def _store(self, record: _Span) -> None:
        record.thread = self._thread_number()
        if len(self._records) < MAX_EVENTS:
            self._records.append(record)
        else:
            self.dropped += 1

    def _close(self, key: object) -> _Span | None:
        """Close an event, and inner events that an exception left open; return the event, or None if it isn't open."""
        opened = self._stacks.open
        if not any(entry.key is key for entry in opened):
            return None
        while (entry := opened.pop()).key is not key:
            pass
        return entry

    def _thread_number(self) -> int:
        number = self._stacks.number
        if number is None:
            with self._lock:
                number = self._stacks.number = len(self.threads)
                self.threads.append(threading.current_thread().name)
        return number


def _event(span: _Span) -> Event:
    call, common = span.key, (span.thread, span.began, span.ended)
    if not isinstance(call, Call):
        return Event(*common, span.name, span.name, "", "phase", False, True, "", "", span.arguments, ())
    return Event(
        *common,
        name=call.described,
        called=call.called,
        operation=call.name,
        direction=call.direction,
        innermost=not span.contains_communication,
        outermost=call.outer is None,
        site=call.site.text,
        forward_site=call.forward_site.text if call.forward_site else "",
        arguments=span.arguments,
        messages=_messages(call.name, span.arguments) if not span.contains_communication else (),
    )


def _messages(operation: str, arguments: Arguments) -> tuple[Message, ...]:
    """Return the messages that a communication sent from, or received on, this rank."""
    if operation == "mpi_irecv":
        return ()  # a receive is counted in the wait that completes it
    messages = []
    for envelope in arguments.envelopes:
        # A send is counted when it starts, not in the wait that completes it.
        if envelope.number is None or (operation in WAITS and envelope.outgoing):
            continue
        channel = envelope.channel
        own, peer = channel.members[channel.rank], channel.members[envelope.peer]
        ends = (own, peer) if envelope.outgoing else (peer, own)
        messages.append(Message(envelope.outgoing, channel.label, *ends, envelope.tag, envelope.number, envelope.reverse))
    return tuple(messages)


_START, _END = "start of the recording", "end of the recording"


class Place(NamedTuple):
    """The code between two communications, or inside a library function that communicates several times."""

    # {"forward", "backward", "outside"}: the pass of a derivative, or "outside" of derivatives. Inside a library function,
    # the phase is "backward" for an adjoint, and otherwise "forward", even outside of derivatives.
    phase: str
    # `after`, `until`: the lines of the communications before and after the code; for an adjoint or tangent the line of
    # the forward call. In a loop around one communication, the two are equal. Inside a library function, both contain
    # the function's name.
    after: str
    until: str


class Computation(NamedTuple):
    """The time of each rank's computation at one place of the program."""

    place: Place
    seconds: np.ndarray  # shape (number of ranks,)


def computed(recorder: Recorder, events: Iterable[Event]) -> dict[Place, float]:
    """Return the seconds of a rank's computation at each place, in the main thread only: other threads may be waiting."""
    main_events = [event for event in events if event.thread == 0]
    seconds_at: dict[Place, float] = defaultdict(float)
    for began, ended, place in gaps(recorder, main_events):
        seconds_at[place] += ended - began
    for event, seconds in _inside_calls(main_events):
        # Computation inside a library function, such as a solve, is listed under the name of the function.
        name = f"inside {event.called}"
        seconds_at[Place("backward" if event.direction == "adjoint" else "forward", name, name)] += seconds
    return dict(seconds_at)


def gaps(recorder: Recorder, events: list[Event]) -> Iterator[tuple[float, float, Place]]:
    """Yield start, end and place of the intervals between a thread's communications and the starts and ends of phases."""
    phases: list[str] = []
    pending: list[tuple[float, float, str]] = []  # start, end and phase of intervals since the last communication
    at, after = recorder.start_time, _START

    # Time, order at this time, and mark: a communication, the name of a starting phase, or "" at its end.
    marks: list[tuple[float, int, Event | str | None]] = []
    for event in events:
        if event.direction == "phase":
            marks += [(event.began, 1, event.name), (event.ended, 0, "")]
        elif event.outermost:
            marks.append((event.began, 2, event))
    end = recorder.start_time + recorder.elapsed, 0, None
    for time, _, mark in [*sorted(marks, key=itemgetter(0, 1)), end]:
        if time > at:  # otherwise `time` is inside a communication
            pending.append((at, time, phases[-1] if phases else "outside"))
        at = max(at, time)
        if isinstance(mark, Event) or mark is None:
            until = _END if mark is None else mark.forward_site or mark.site
            yield from [(began, ended, Place(phase, after, until)) for began, ended, phase in pending]
            pending.clear()
            at, after = at if mark is None else mark.ended, until
        elif mark:
            phases.append(mark)
        elif phases:
            phases.pop()


def _inside_calls(events: list[Event]) -> Iterable[tuple[Event, float]]:
    """Yield the outermost communications that contain others, and the computing time in each."""
    inner = 0.0
    for event in events:  # sorted by end time: inner events come first
        if event.direction == "phase":
            continue
        if event.innermost:
            inner += event.ended - event.began
        if event.outermost:
            if not event.innermost:
                yield event, max(event.ended - event.began - inner, 0.0)
            inner = 0.0


# One clock for all ranks: the offset of rank 0's clock from each rank's clock is measured at the start and at the end.
#
# A round trip consists of a message and a reply. The message bounds the offset from below, and the reply from above.
# The fastest round trip gives the best estimate between the bounds. On a busy machine most round trips are slow, since
# a process waits for a core. Therefore the bounds of several round trips are combined until the bounds stop improving.
# Processes on one machine share a clock, so zero is used if it is within the bounds. Between the two measurements the
# offset is assumed to change linearly (clock drift).

_ROUND_TRIPS, _MAX_ROUND_TRIPS = 10, 200  # number of round trips between two checks of the bounds, and maximum total number


class Reading(NamedTuple):
    """A measurement of the offset between this rank's clock and rank 0's clock."""

    time: float  # on this rank's clock
    difference: float  # rank 0's time minus this rank's time


Clock: TypeAlias = Callable[[float], float]
"""A function that converts this rank's times to rank 0's clock."""


def clock_of(first: Reading, last: Reading) -> Clock:
    """Return the clock with these offsets at the start and at the end."""
    passed = last.time - first.time
    drift = (last.difference - first.difference) / passed if passed > 0 else 0.0
    return lambda time: time + first.difference + drift * (time - first.time)


def read_clock(comm: Comm) -> Reading:
    """Compare this rank's clock with rank 0's clock; collective."""
    if comm.rank == 0:
        # The ranks are measured one after another, since simultaneous messages would delay each other.
        for rank in range(1, comm.size):
            comm.Send(np.array([0.0, _difference(comm, rank)]), rank)
        return Reading(perf_counter(), 0.0)
    request, reply = np.empty(2), np.empty(1)
    while True:
        comm.Recv(request, 0)
        reply[0] = perf_counter()
        if not request[0]:
            return Reading(float(reply[0]), float(request[1]))
        comm.Send(reply, 0)


def _difference(comm: Comm, rank: int) -> float:
    """Return the offset of rank 0's clock from the clock of another rank."""
    request, theirs = np.ones(2), np.empty(1)
    low, high, fastest = -np.inf, np.inf, (np.inf, 0.0)
    for count in range(_ROUND_TRIPS, _MAX_ROUND_TRIPS + 1, _ROUND_TRIPS):
        width = high - low
        for _ in range(_ROUND_TRIPS):
            start = perf_counter()
            comm.Send(request, rank)
            comm.Recv(theirs, rank)
            end = perf_counter()
            low, high = max(low, start - theirs[0]), min(high, end - theirs[0])
            fastest = min(fastest, (end - start, (start + end) / 2 - float(theirs[0])))
        if count > _ROUND_TRIPS and high - low > 0.9 * width:
            break
    return 0.0 if low <= 0 <= high else float(np.clip(fastest[1], low, high))


# The trace file: the events of all ranks, written atomically in Chrome's trace event format, which Perfetto reads.
#
# In this format each rank is a process, and its events are "complete" events. Times on one clock are rounded
# to nanoseconds, so that nested events remain nested, and written in microseconds. The time between two communications is
# an event "computation".

_EVENTS_PER_WRITE = 4096  # about a megabyte
_HEADER = '{"displayTimeUnit": "ms", "otherData": {"ranks": %d, "events that were too many": %d}, "traceEvents": [\n'
_FOOTER = "\n]}\n"
_SHORTEST = 1000  # nanoseconds; shorter computations are omitted


def _write_atomically(path: Path, header: str, pieces: Iterator[str]) -> str | None:
    """Write header, pieces and footer to a file atomically; return the text of an error, or None."""
    temporary = None
    try:
        temporary, raw_file = create_part(path)
        with io.TextIOWrapper(raw_file, encoding="utf-8") as file:
            file.write(header)
            for k, piece in enumerate(pieces):
                file.write((",\n" if k else "") + piece)
            file.write(_FOOTER)
            file.flush()
            os.replace(temporary, path)  # before closing the file, which releases the lock taken by `create_part`
    except (OSError, ValueError) as write_error:
        for _ in pieces:
            pass  # the remaining pieces are received, since their senders wait
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        return str(write_error)
    return None


def _pieces(events: Iterator[str]) -> Iterator[str]:
    return iter(lambda: ",\n".join(islice(events, _EVENTS_PER_WRITE)), "")


def _rank_events(recorder: Recorder, rank: int, clock: Clock, zero: float) -> Iterator[str]:
    """Yield a rank's events as JSON texts; times are relative to the time `zero` of the common clock."""

    def tick(time: float) -> int:
        return round(1e9 * (clock(time) - zero))

    yield _metadata(rank, 0, "process_name", name=f"rank {rank} ({socket.gethostname()})")
    yield _metadata(rank, 0, "process_sort_index", sort_index=rank)
    events = recorder.events
    for number, name in enumerate(recorder.threads):
        yield _metadata(rank, number, "thread_name", name=name)
        spans = [(tick(e.began), tick(e.ended), e) for e in events if e.thread == number]
        # An outer event must precede its inner events, which begin later or end earlier. If both times are equal, the
        # event that was recorded later is the outer event.
        spans.reverse()
        spans.sort(key=lambda span: (span[0], -span[1]))
        for start, end, event in spans:
            yield _complete(rank, number, start, end, event)
            for message in event.messages:
                # Perfetto draws an arrow between two events with the same id. Sender and receiver compute the id from the
                # fields of the message. Python's hash of strings isn't used, since it differs between processes.
                key = int.from_bytes(hashlib.blake2b(repr(message[1:]).encode(), digest_size=6).digest(), "big")
                fields = {"pid": rank, "tid": number, "id": key, "name": "message", "cat": "message"}
                ends = {"ph": "s", "ts": start / 1000} if message.outgoing else {"ph": "f", "bp": "e", "ts": end / 1000}
                yield json.dumps(fields | ends)
        # Between two calls, other threads may be waiting instead of computing.
        for began, ended, _ in gaps(recorder, [event for _, _, event in spans]) if number == 0 else ():
            start, end = tick(began), tick(ended)
            if end - start >= _SHORTEST:
                yield _complete(rank, number, start, end, None)


def _metadata(rank: int, thread: int, kind: str, **args: object) -> str:
    return json.dumps({"ph": "M", "pid": rank, "tid": thread, "name": kind, "args": args})


def _complete(rank: int, thread: int, start: int, end: int, event: Event | None) -> str:
    fields = {"ph": "X", "pid": rank, "tid": thread, "ts": start / 1000, "dur": (end - start) / 1000}
    args: dict[str, object] = {}
    if event is None or event.direction == "phase":
        name, category = ("computation", "computation") if event is None else (event.name, "phase")
    else:
        # An adjoint executes other operations; each of these inner events is named after its operation.
        name, category = event.called if event.outermost else event.operation, event.direction
        arguments = event.arguments
        args |= {"site": event.site, "forward site": event.forward_site}
        args |= {name: getattr(arguments, name) for name in ("communicator", "root", "peer", "tag", "reduction")}
        args["dtype"] = None if arguments.dtype is None else str(arguments.dtype)
        args |= {"shape": arguments.shape and list(arguments.shape), "bytes": arguments.nbytes}
    args = {key: value for key, value in args.items() if value not in (None, "")}
    return json.dumps(fields | {"name": name, "cat": category, "args": args})


_log = logging.getLogger("mpiad")


class Recording:
    """The events of this rank between the constructor, which is collective on the world, and `stop`."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        with _own_communicator() as comm:
            self.rank = comm.rank
            self._first = read_clock(comm)
        self.recorder.start()

    def stop(self) -> None:
        """End the recording on this rank; recorded events remain available."""
        if not self.recorder.stop_time:
            self.recorder.stop()

    @contextmanager
    def exchange(self) -> Iterator[tuple[Comm, Clock]]:
        """Enter a context with a communicator to exchange events, and a clock that is common to all ranks; collective."""
        with _own_communicator() as comm:
            yield comm, clock_of(self._first, read_clock(comm))

    def write(self, path: Path) -> None:
        """Write the trace of all ranks; collective. Raise an OSError on all ranks if rank 0 can't write the file."""
        with self.exchange() as (comm, clock):
            starts, dropped = zip(*comm.allgather((clock(self.recorder.start_time), self.recorder.dropped)))
            pieces = _pieces(_rank_events(self.recorder, comm.rank, clock, min(starts)))
            error = None
            if comm.rank == 0:
                # Rank 0 receives and writes the pieces one at a time, since all events may not fit into its memory.
                received = [iter(partial(comm.recv, source=rank), None) for rank in range(1, comm.size)]
                error = _write_atomically(path, _HEADER % (comm.size, sum(dropped)), chain(pieces, *received))
            else:
                for piece in chain(pieces, [None]):  # None is the end of the pieces
                    comm.send(piece, 0)
            error = comm.bcast(error, 0)
        if error is not None:
            raise OSError(f"the trace of {len(starts)} ranks can't be written to {path}: {error}")

    def write_part(self, path: Path) -> Path:
        """After a failure, write this rank's events to a file next to `path`; return the file's path."""
        self.stop()
        # A second reading of the clock would require the other ranks, so the first reading is also used for the end.
        clock, part = clock_of(self._first, self._first), path.with_name(f"{path.name}.rank{self.rank}")
        events = _rank_events(self.recorder, self.rank, clock, clock(self.recorder.start_time))
        error = _write_atomically(part, _HEADER % (1, self.recorder.dropped), _pieces(events))
        if error is not None:
            raise OSError(f"the trace of rank {self.rank} can't be written to {part}: {error}")
        return part


@contextmanager
def _own_communicator() -> Iterator[Comm]:
    """Enter a context with a duplicate of the world, so that messages don't match those of the program; collective."""
    group = channel(None, "mpiad.debug")
    # In debug mode this barrier detects ranks that don't call this function; Dup has no such check.
    group.data.Barrier()
    comm = group.user.Dup()
    yield comm
    comm.Free()  # collective, so it mustn't be called after an exception


_latest: Recording | None = None


def latest() -> Recording | None:
    """Return the active recording, or the last recording if none is active; None if there was none."""
    return _latest


@contextmanager
def recorded() -> Iterator[None]:
    """Record the communication of a block, for `report`.

    Ranks
    -----
    All ranks of the world enter and leave the block.

    Examples
    --------
    >>> import io
    >>> with mpiad.debug.recorded():
    ...     total = mpiad.mpi_allreduce(1.0)
    >>> print(mpiad.debug.report(file=io.StringIO()).rows[0].operation)
    mpi_allreduce
    """
    with _recording():
        yield


@contextmanager
def traced(path: str | os.PathLike) -> Iterator[None]:
    """Record a block of the program, and write its timeline to a file for Perfetto or chrome://tracing.

    Parameters
    ----------
    path : path
        Path of the file, which rank 0 writes atomically. A rank that leaves the block with an exception writes its events
        to a separate file, whose path ends with ``.rank`` and the rank's number.

    Raises
    ------
    OSError
        On all ranks, if the file can't be written.

    Ranks
    -----
    All ranks of the world enter and leave the block.

    Examples
    --------
    >>> import os, tempfile
    >>> rank = mpiad.mpi_rank()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with mpiad.debug.traced(f"{folder}/timeline.json"):
    ...         total = mpiad.mpi_allreduce(1.0)
    ...     print(os.path.exists(f"{folder}/timeline.json") == (rank == 0))
    True
    """
    with _recording() as recording:
        try:
            yield
        except BaseException:
            recording.write_part(Path(path))
            raise
        recording.stop()
        recording.write(Path(path))


@contextmanager
def _recording() -> Iterator[Recording]:
    global _latest
    recording = _latest = Recording()
    try:
        yield recording
    finally:
        recording.stop()


def record_program(folder: str) -> None:
    """Record until the program ends, and write MPIAD_TRACE's file, relative to the initial `folder`; collective."""
    global _latest
    with _own_communicator() as comm:
        name = path("MPIAD_TRACE")
        named = next(filter(None, comm.allgather(name and str(Path(folder, name)))))
        file = Path(named)
        if comm.rank == 0 and not os.access(file.parent, os.W_OK):
            _log.warning("MPIAD_TRACE=%s: %s isn't writable; there will be no trace.", named, file.parent)
    recording = _latest = Recording()
    world.at_end(lambda: _finish(recording, file))
    # If an exception aborts the job, this is called instead of `_finish`.
    before_abort.append(partial(recording.write_part, file))


def _finish(recording: Recording, file: Path) -> None:
    recording.stop()
    try:
        recording.write(file)
    except OSError as error:
        if recording.rank == 0:  # only a warning: the program itself has succeeded
            _log.warning("mpiad: %s", error)
