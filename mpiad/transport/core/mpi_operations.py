"""MPI's own reductions: their names, and the dtypes for which they are defined."""

from __future__ import annotations

from mpi4py import MPI

from mpiad._typing import Op

_INTEGER = ("SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR")
_NAMES = (*_INTEGER, "MINLOC", "MAXLOC", "REPLACE", "NO_OP", "OP_NULL")
_OF_KIND = {
    "b": ("LAND", "LOR", "LXOR"),
    "i": _INTEGER,
    "u": _INTEGER,
    "f": ("SUM", "PROD", "MAX", "MIN"),
    "c": ("SUM", "PROD"),
}


def defined_for(kind: str) -> tuple[str, ...]:
    """Return the names of the reductions for a dtype's `kind`; all names if it isn't a number."""
    return _OF_KIND.get(kind, _NAMES)


def name_of(op: Op) -> str | None:
    """Return the name of one of MPI's own reductions, None for a user's reduction."""
    return next((name for name in _NAMES if op == getattr(MPI, name)), None)
