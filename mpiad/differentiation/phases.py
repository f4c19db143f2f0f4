"""When a program runs forwards under a tape, and when backwards: told to observers, while calls are noted.

The functions that begin and end the two are swapped, as those of operations are (see `transport.calls`): what nobody
asks for costs nothing.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol

from mpiad.differentiation import backward
from mpiad.differentiation.tape import OrderedTape
from mpiad.transport import calls


class PhaseObserver(Protocol):
    """What is told of every phase; `key` says which end belongs to which beginning."""

    def phase_began(self, key: object, name: str) -> None:
        """Take note of the start of a phase, "forward" or "backward"."""

    def phase_ended(self, key: object) -> None:
        """Take note of its end, whether or not by an exception; its start may have been before the noting."""


observers: list[PhaseObserver] = []
# Taken at import, before anyone can have swapped them.
_bare_sweep, _bare_enter, _bare_exit = backward.sweep, OrderedTape.__enter__, OrderedTape.__exit__


def _noted_sweep(*args: Any) -> None:
    key = object()
    _tell_began(key, "backward")
    try:
        _bare_sweep(*args)
    finally:
        _tell_ended(key)


def _noted_enter(self: OrderedTape) -> Any:
    _tell_began(self, "forward")
    return _bare_enter(self)


def _noted_exit(
    self: OrderedTape, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    try:
        _bare_exit(self, kind, error, trace)
    finally:
        _tell_ended(self)


def _tell_began(key: object, name: str) -> None:
    for observer in tuple(observers):
        observer.phase_began(key, name)


def _tell_ended(key: object) -> None:
    for observer in tuple(observers):
        observer.phase_ended(key)


def _switch(on: bool) -> None:
    backward.sweep = _noted_sweep if on else _bare_sweep
    OrderedTape.__enter__ = _noted_enter if on else _bare_enter  # type: ignore[method-assign]
    OrderedTape.__exit__ = _noted_exit if on else _bare_exit  # type: ignore[method-assign]


calls.register(_switch)
