"""What a rank is about to do, in a form that ranks can compare: a fingerprint of what must be the same on all of them.

Shapes and dtypes are compared where MPI needs them to be equal. The line is compared where no rank leads: calls with a
root are often written as ``if rank == root: ... else: ...``.
"""

from __future__ import annotations

import hashlib
import sys
from typing import NamedTuple

import numpy as np

from mpiad._typing import Op
from mpiad.transport import calls
from mpiad.transport.calls import Call, Site
from mpiad.transport.mpi_operations import name_of

__all__ = ["Description", "caller", "describe", "fingerprint", "shown_arguments", "where"]

# Calls that lead one rank, or that the end of the program makes: their lines may differ.
_ROOTED = frozenset(
    (
        "mpi_bcast", "mpi_scatter", "mpi_sum", "mpi_reduce", "mpi_gather", "mpi_print", "minimize", "mpi_init", "reset",
        "the end of the program", "comm.Free",
    )
)  # fmt: skip


class Description(NamedTuple):
    """One rank's call, in words: what is compared, then what is shown."""

    operation: str
    communicator: str
    root: int | None
    reduction: str | None
    shape: tuple[int, ...] | None
    dtype: str | None
    line: str | None
    step: str
    given: str
    place: str

    @property
    def compared(self) -> tuple:
        """What must be the same on all ranks."""
        return self[: len(COMPARED)]

    def arguments(self, sums: bool = False) -> str:
        """Return the arguments in words; sums are named where other ranks reduce otherwise."""
        root = None if self.root is None else f"root={self.root}"
        op = f"op={self.reduction}" if self.reduction is not None and (sums or self.reduction != "SUM") else None
        return ", ".join(filter(None, (root, op, self.given)))


COMPARED = ("operation", "communicator", "root", "reduction", "shape", "dtype", "line", "step")


def caller() -> tuple[str, Site, Call | None]:
    """Return name, line and record of the call that is running."""
    call = calls.current()
    if call is not None:
        return call.described, call.forward_site or call.site, call
    # An exchange of the library's own, as of lengths before a gather: the public function is on the stack.
    site = calls.site_of(sys._getframe(1))
    return site.entry or "the end of the program", site, None


def _op_name(op: Op | None) -> str | None:
    return None if op is None else name_of(op) or "user-defined"


def describe(
    label: str, step: str, array: np.ndarray | None, op: Op | None, root: int | None, call_sites: bool
) -> Description:
    """Return the description of the call that is running; `step` is MPI's function."""
    name, site, call = caller()
    rooted = (call.forward_name or call.name if call is not None else name) in _ROOTED
    shape = None if array is None else array.shape
    dtype = None if array is None else str(array.dtype)
    line = None if rooted or not call_sites or site.line == 0 else site.text
    return Description(
        name, label, root, _op_name(op), shape, dtype, line, step, shown_arguments(call, label), where(call, site),
    )  # fmt: skip


def shown_arguments(call: Call | None, label: str) -> str:
    """Return shape and communicator in words: the shape of what the user gave, not of what the library sends."""
    parts = []
    if call is not None and call.arguments.shape is not None:
        given = call.arguments
        parts.append(f"shape {given.shape}, {given.dtype}{', on a device' if call.on_device else ''}")
    if label != "world":
        parts.append(f"on {label}")
    return ", ".join(parts)


def where(call: Call | None, site: Site) -> str:
    """Return the line in words."""
    if call is None or call.direction == "forward" or call.site is site:
        return site.text
    return f"{site.text} (run by {call.site.text})"


_known: dict[tuple, int] = {}
_MOST = 20000


def fingerprint(label: str, step: str, array: np.ndarray | None, op: Op | None, root: int | None, call_sites: bool) -> int:
    """Return a number that is the same on ranks whose descriptions agree in all that is compared."""
    call = calls.current()
    if call is not None:
        who = call.name, call.direction, call.forward_name, call.forward_site or call.site
    else:
        site = calls.site_of(sys._getframe(1))
        who = site.entry, site
    handle = None if op is None else op.handle
    form = None if array is None else (array.shape, array.dtype.num)
    key = (label, step, form, handle, root, call_sites, who)
    found = _known.get(key)
    if found is None:
        # Emptied whole: a program with so many shapes makes new ones all the time, and to order them would cost each call.
        if len(_known) > _MOST:
            _known.clear()
        compared = describe(label, step, array, op, root, call_sites).compared
        digest = hashlib.blake2b(repr(compared).encode(), digest_size=8).digest()
        found = _known[key] = int.from_bytes(digest, "little") >> 2  # leaves room for a count to be added
    return found
