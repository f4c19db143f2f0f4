"""The recorder of a rank's communications and phases: each is recorded with its times when it ends."""

from __future__ import annotations

import threading
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple

from mpiad.differentiation import backward
from mpiad.differentiation.tape import OrderedTape
from mpiad.transport import calls
from mpiad.transport.calls import Arguments, Call

# Forward and backward phases are reported to active recorders.
#
# While a recorder is active, the functions that run phases are replaced by ones that report them, as for operations (see
# `transport.calls`). So without a recorder there is no overhead.


_active: list[Recorder] = []
# Saved at import, before they are replaced.
_bare_sweep, _bare_enter, _bare_exit = backward.sweep, OrderedTape.__enter__, OrderedTape.__exit__


def _noted_sweep(*args: Any) -> None:
    key = object()
    _begin_phase(key, "backward")
    try:
        _bare_sweep(*args)
    finally:
        _end_phase(key)


def _noted_enter(self: OrderedTape) -> Any:
    _begin_phase(self, "forward")
    return _bare_enter(self)


def _noted_exit(
    self: OrderedTape, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    try:
        _bare_exit(self, kind, error, trace)
    finally:
        _end_phase(self)


def _begin_phase(key: object, name: str) -> None:
    for recorder in tuple(_active):
        recorder.phase_began(key, name)


def _end_phase(key: object) -> None:
    for recorder in tuple(_active):
        recorder.phase_ended(key)


def _switch(on: bool) -> None:
    backward.sweep = _noted_sweep if on else _bare_sweep
    OrderedTape.__enter__ = _noted_enter if on else _bare_enter  # type: ignore[method-assign]
    OrderedTape.__exit__ = _noted_exit if on else _bare_exit  # type: ignore[method-assign]


calls.register(_switch)


MOST = 500_000  # events of a few hundred bytes each
_NOTHING = Arguments()
_WAITS = ("mpi_wait", "mpi_waitall")


class Message(NamedTuple):
    """A message between two ranks; equal on both, except for `outgoing`."""

    outgoing: bool
    communicator: str
    # `source`, `dest`: ranks in the world.
    source: int
    dest: int
    # `tag`, `number`: the user's tag, and the index of the message among those with that tag.
    tag: int
    number: int
    reverse: bool  # whether it belongs to an adjoint


class Event(NamedTuple):
    """A communication or a phase."""

    thread: int  # 0 is the main thread
    # `began`, `ended`: times of this rank's `time.perf_counter()`.
    began: float
    ended: float
    name: str  # for example "mpi_bcast", "adjoint of mpi_bcast", "forward"
    called: str  # `name` with the library function that the user called, for example "adjoint of exchange"
    operation: str  # the operation executed, which in an adjoint may differ from the forward one; "" for a phase
    direction: str  # {"forward", "adjoint", "tangent", "phase"}
    # `innermost`: whether it contains no other communication. `outermost`: whether no other communication contains it.
    innermost: bool
    outermost: bool
    site: str  # the line of the user's program
    forward_site: str  # for an adjoint, the line of the forward call; else ""
    arguments: Arguments
    messages: tuple[Message, ...]  # started or completed by the communication


class _Stacks(threading.local):
    """The open events of each thread: key, time, whether they contain a communication, and a phase's name."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.open: list[list[Any]] = []


class Recorder:
    """Records events between `start` and `stop`.

    `dropped`: the number of events beyond the maximum. `since`, `until`: times of `start` and `stop`. `threads`: names of
    the threads, by number.
    """

    def __init__(self) -> None:
        self._noted: list[tuple] = []
        self.dropped = 0
        self.since = self.until = 0.0
        self.threads: list[str] = []
        self._stacks, self._lock = _Stacks(), threading.Lock()

    def start(self) -> None:
        """Begin to record."""
        # First, so that this thread, the program's main one, has number 0.
        self._number()
        self.since = perf_counter()
        calls.observers.append(self)
        _active.append(self)
        calls.note(self)

    def stop(self) -> None:
        """Stop recording."""
        calls.forget(self)
        calls.observers.remove(self)
        _active.remove(self)
        self.until = perf_counter()

    @property
    def elapsed(self) -> float:
        """The duration of the recording in seconds."""
        return (self.until or perf_counter()) - self.since

    @property
    def events(self) -> list[Event]:
        """The recorded events, in the order of their ends."""
        return [_event(*noted) for noted in self._noted]

    def began(self, call: Call) -> None:
        """Begin a communication; all open events contain it."""
        opened = self._stacks.open
        # Open events aren't innermost: they contain this one.
        for entry in opened:
            entry[2] = True
        opened.append([call, call.began, False, ""])

    def ended(self, call: Call) -> None:
        """Close a communication."""
        entry = self._closed(call)
        if entry is not None:
            # Most attributes are evaluated later, in `events`, so that this function is fast: it runs in every call.
            self._note((self._number(), call, call.began, call.ended, not entry[2], call.arguments))

    def phase_began(self, key: object, name: str) -> None:
        """Open a phase, "forward" or "backward"; `key` identifies it."""
        self._stacks.open.append([key, perf_counter(), False, name])

    def phase_ended(self, key: object) -> None:
        """Close a phase; it isn't recorded if it began before the recording."""
        entry = self._closed(key)
        if entry is not None:
            self._note((self._number(), entry[3], entry[1], perf_counter(), False, _NOTHING))

    def _note(self, noted: tuple) -> None:
        if len(self._noted) < MOST:
            self._noted.append(noted)
        else:
            self.dropped += 1

    def _closed(self, key: object) -> list[Any] | None:
        """Close an event and all inner ones that an exception left open; return it, None if its start wasn't recorded."""
        opened = self._stacks.open
        for place in range(len(opened) - 1, -1, -1):
            if opened[place][0] is key:
                found = opened[place]
                del opened[place:]
                return found
        return None

    def _number(self) -> int:
        number = self._stacks.number
        if number is None:
            with self._lock:
                number = self._stacks.number = len(self.threads)
                self.threads.append(threading.current_thread().name)
        return number


def _event(thread: int, what: Call | str, began: float, ended: float, innermost: bool, given: Arguments) -> Event:
    if isinstance(what, str):
        return Event(thread, began, ended, what, what, "", "phase", False, True, "", "", given, ())
    names = what.described, what.called, what.name, what.direction
    sites = what.site.text, what.forward_site.text if what.forward_site else ""
    messages = _messages(what.name, given) if innermost else ()
    return Event(thread, began, ended, *names, innermost, what.outer is None, *sites, given, messages)


def _messages(operation: str, given: Arguments) -> tuple[Message, ...]:
    """Return the messages that a communication sent from, or received on, this rank."""
    if operation == "mpi_irecv":
        return ()  # counted in the wait that completes it
    found = []
    for envelope in given.envelopes:
        # The wait for a send sends nothing.
        if envelope.number is None or (operation in _WAITS and envelope.outgoing):
            continue
        channel = envelope.channel
        here, there = channel.members[channel.rank], channel.members[envelope.peer]
        ends = (here, there) if envelope.outgoing else (there, here)
        found.append(Message(envelope.outgoing, channel.label, *ends, envelope.tag, envelope.number, envelope.reverse))
    return tuple(found)
