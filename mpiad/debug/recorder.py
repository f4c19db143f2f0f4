"""The recorder of a rank's communication calls and phases, with start and end times."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple

from mpiad.differentiation import backward
from mpiad.differentiation.tape import OrderedTape
from mpiad.transport.core import calls
from mpiad.transport.core.calls import Arguments, Call

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
_WAITS = ("mpi_wait", "mpi_waitall")


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
        if envelope.number is None or (operation in _WAITS and envelope.outgoing):
            continue
        channel = envelope.channel
        own, peer = channel.members[channel.rank], channel.members[envelope.peer]
        ends = (own, peer) if envelope.outgoing else (peer, own)
        messages.append(Message(envelope.outgoing, channel.label, *ends, envelope.tag, envelope.number, envelope.reverse))
    return tuple(messages)
