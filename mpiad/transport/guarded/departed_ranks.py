"""Which ranks have left the program: told to all others at once, since who waits for one of them waits in vain."""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

from mpiad.transport.departure import farewell

__all__ = ["Departure", "departed", "left", "note_departure", "note_leaving"]


class Departure(NamedTuple):
    """A rank's end of the program."""

    counts: dict[str, int]  # how many collectives it had begun by then
    sends: bool  # whether messages of its own were still under way: long ones take their time
    how: str
    place: str
    heard: float  # when it was heard here


_leaving_since: float | None = None
_departed: dict[int, Departure] = {}


def note_leaving() -> None:
    """Note that this rank leaves the program."""
    global _leaving_since
    _leaving_since = _leaving_since or perf_counter()


def left() -> tuple[str, str, float] | None:
    """Return how, where from and when this rank left, None while it is there."""
    return None if _leaving_since is None else (*farewell(), _leaving_since)


def note_departure(rank: int, told: tuple[dict[str, int], bool, str, str]) -> None:
    """Note that another rank has left, and what it tells of it."""
    _departed[rank] = Departure(*told, perf_counter())


def departed() -> dict[int, Departure]:
    """Return what is known of other ranks that have left, by rank in the world."""
    return _departed
