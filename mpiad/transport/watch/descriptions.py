"""Descriptions of calls, and fingerprints of the properties that must be equal on all ranks.

Shapes and dtypes are compared if MPI requires equal ones. In debug mode lines are compared, too, except for calls with
a root, which are often written as ``if rank == root: ... else: ...``, and a few others (`_ROOTED`). If the calls differ,
the error contains a table of the calls, the differences and advice.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import numpy as np

from mpiad._typing import Op
from mpiad.errors import CommunicationMismatchError
from mpiad.transport.core import calls
from mpiad.transport.core.agreement import Group, agreed
from mpiad.transport.core.agreement import fingerprint as hash_of
from mpiad.transport.core.calls import Call, Site
from mpiad.transport.core.collectives import name_of

_SHOWN = 8


def rank_ranges(ranks: Sequence[int]) -> str:
    """Return sorted ranks as "0-6, 8"; for many ranges only the first ones and the number of ranks."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    more = f", ... ({len(ranks)} ranks)" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


_EACH = 16  # maximum number of ranks with separate lines
Row = tuple[str, ...]


def table_of_ranks(head: Row, rows: list[Row]) -> str:
    """Return a table whose first column is the rank; in long tables ranks with equal entries share a line."""
    if len(rows) > _EACH:
        alike: dict[Row, list[int]] = {}
        for rank, *rest in rows:
            alike.setdefault(tuple(rest), []).append(int(rank))
        rows = [(rank_ranges(ranks), *rest) for rest, ranks in alike.items()]
    return columns(("rank", *head), rows)


def columns(head: Row, rows: list[Row]) -> str:
    """Return lines of aligned columns."""
    lines = [head, *rows]
    widths = [max(len(line[k]) for line in lines) for k in range(len(head))]
    return "\n".join("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


# Calls whose lines may differ between ranks: those with a root, at the start or end of the program, and after an exception.
_ROOTED = frozenset(
    (
        "mpi_bcast", "mpi_scatter", "mpi_sum", "mpi_reduce", "mpi_gather", "mpi_print", "minimize", "mpi_init", "reset",
        "the end of the program", "comm.Free",
    )
)  # fmt: skip


class Description(NamedTuple):
    """One rank's call, as text: first the compared fields, then `given` and `place`, which are only shown."""

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
        """The fields that must be equal on all ranks."""
        return self[: len(_NAMES)]

    def arguments(self, sums: bool = False) -> str:
        """Return the arguments as text; sums are named if other ranks use another reduction."""
        root = None if self.root is None else f"root={self.root}"
        op = f"op={self.reduction}" if self.reduction is not None and (sums or self.reduction != "SUM") else None
        return ", ".join(filter(None, (root, op, self.given)))


_NAMES = ("operation", "communicator", "root", "reduction", "shape", "dtype", "call site", "step")  # of the compared fields


def caller() -> tuple[str, Site, Call | None]:
    """Return name, line and record of the current call."""
    call = calls.current()
    if call is not None:
        return call.described, call.forward_site or call.site, call
    # For communication outside of a recorded call, the public function is found on the stack.
    site = calls.site_of(sys._getframe(1))
    return site.entry or "the end of the program", site, None


def name_and_place() -> tuple[str, str]:
    """Return name and line of the current call as text."""
    name, site, call = caller()
    return name, where(call, site)


def describe(
    label: str, step: str, array: np.ndarray | None, op: Op | None, root: int | None, call_sites: bool
) -> Description:
    """Return the description of the current call; `step`: the name of MPI's function."""
    name, site, call = caller()
    rooted = (call.forward_name or call.name if call is not None else name) in _ROOTED
    reduction = None if op is None else name_of(op) or "user-defined"
    shape, dtype = (None, None) if array is None else (array.shape, str(array.dtype))
    line = None if rooted or not call_sites or site.line == 0 else site.text
    return Description(
        name, label, root, reduction, shape, dtype, line, step, shown_arguments(call, label), where(call, site),
    )  # fmt: skip


def shown_arguments(call: Call | None, label: str) -> str:
    """Return the shape of the user's array, and the communicator, as text."""
    parts = []
    if call is not None and call.arguments.shape is not None:
        given = call.arguments
        parts.append(f"shape {given.shape}, {given.dtype}{', on a device' if call.on_device else ''}")
    if label != "world":
        parts.append(f"on {label}")
    return ", ".join(parts)


def where(call: Call | None, site: Site) -> str:
    """Return the line as text."""
    if call is None or call.direction == "forward" or call.site is site:
        return site.text
    return f"{site.text} (run by {call.site.text})"


_known: dict[tuple, int] = {}
_MOST = 20000


def fingerprint(label: str, step: str, array: np.ndarray | None, op: Op | None, root: int | None, call_sites: bool) -> int:
    """Return a hash of the compared properties of a call."""
    name, site, _ = caller()
    handle = None if op is None else op.handle
    form = None if array is None else (array.shape, array.dtype.num)
    key = (label, step, form, handle, root, call_sites, name, site)
    found = _known.get(key)
    if found is None:
        # Cleared completely, since a record of the order of use would slow down each call.
        if len(_known) > _MOST:
            _known.clear()
        compared = describe(label, step, array, op, root, call_sites).compared
        found = _known[key] = hash_of(compared) >> 2  # `Agreement.agree` adds a number of calls, without overflow
    return found


_STARTS = "number of mpi_iallreduce calls before"
_ADVICE = {
    "operation": "All ranks must make the same calls in the same order: look for a branch on the rank, an early return or "
    "exit, or a loop of different length.",
    "communicator": "Pass the same communicator on all ranks.",
    "root": "Pass the same root on all ranks.",
    "reduction": "Pass the same op on all ranks.",
    "shape": "Pass arrays of the same shape on all ranks; pieces of different lengths belong in mpi_gather or "
    "mpi_allgather with axis=.",
    "dtype": "Convert x to the same dtype on all ranks (1 is an integer, 1.0 is not).",
    "call site": "If different lines are meant to meet here, allow it with mpiad.debug.checked(call_sites=False) or "
    "MPIAD_DEBUG_SITES=0.",
    "step": "This is a mistake in the library unless one rank's call differs from the others' in the table.",
    _STARTS: "Start nonblocking reductions at the same place among the other calls on all ranks.",
}


def raise_mismatch(described: list[tuple[Description, int]], group: Group) -> NoReturn:
    """Raise the error for different descriptions, on all ranks of a group."""
    rows = sorted(zip(group.members, described))
    descriptions = [description for _, (description, _) in rows]
    compared = zip(*(description.compared for description in descriptions))
    different = [name for name, values in zip(_NAMES, compared) if len(set(values)) > 1]
    if len({starts for _, (_, starts) in rows}) > 1:
        different.append(_STARTS)
    table = table_of_ranks(
        ("operation", "arguments", "where"),
        [(str(rank), d.operation, _arguments(d, starts, different), d.place) for rank, (d, starts) in rows],
    )
    # If the operations differ, other differences don't help.
    name = different[0] if different else "step"
    others = f" ({', '.join(different[1:])} too)" if len(different) > 1 and name != "operation" else ""
    error = CommunicationMismatchError(
        f"the ranks were about to communicate in different calls: the {name} differs{others}. {_ADVICE[name]}\n{table}",
        table,
        tuple(sorted(group.members)),
    )
    raise agreed(group, error)


def _arguments(description: Description, starts: int, different: list[str]) -> str:
    shown = description.arguments(sums="reduction" in different and "operation" not in different)
    after = f"after {starts} mpi_iallreduce" if _STARTS in different else ""
    return ", ".join(filter(None, (shown, after))) or "-"
