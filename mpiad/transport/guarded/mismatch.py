"""The table of ranks that were about to do different things, with a sentence on what differs and what to do."""

from __future__ import annotations

from typing import NoReturn

from mpiad.errors import CommunicationMismatch
from mpiad.transport.agreement import Group, agreed
from mpiad.transport.guarded.descriptions import COMPARED, Description
from mpiad.transport.guarded.rank_tables import table_of_ranks

__all__ = ["raise_mismatch"]

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
    "step": "This is a mistake in the library unless one rank's call differs from the others' above.",
    _STARTS: "Start nonblocking reductions at the same place among the other calls on all ranks.",
}
_NAMES = ("operation", "communicator", "root", "reduction", "shape", "dtype", "call site", "step")


def raise_mismatch(said: list[tuple[Description, int]], group: Group) -> NoReturn:
    """Raise what all ranks of a group raise, from what each of them has said."""
    rows = sorted(zip(group.members, said))
    descriptions = [description for _, (description, _) in rows]
    different = [
        name
        for name, field in zip(_NAMES, COMPARED)
        if len({getattr(description, field) for description in descriptions}) > 1
    ]
    if len({starts for _, (_, starts) in rows}) > 1:
        different.append(_STARTS)
    table = table_of_ranks(
        ("operation", "arguments", "where"),
        [(str(rank), d.operation, _arguments(d, starts, different), d.place) for rank, (d, starts) in rows],
    )
    # Where operations differ, all that follows differs too, and says nothing.
    name = different[0] if different else "step"
    others = f" ({', '.join(different[1:])} too)" if len(different) > 1 and name != "operation" else ""
    error = CommunicationMismatch(
        f"the ranks were about to communicate in different calls: the {name} differs{others}. {_ADVICE[name]}\n{table}",
        table,
        tuple(sorted(group.members)),
    )
    raise agreed(group, error)


def _arguments(description: Description, starts: int, different: list[str]) -> str:
    shown = description.arguments(sums="reduction" in different and "operation" not in different)
    after = f"after {starts} mpi_iallreduce" if _STARTS in different else ""
    return ", ".join(filter(None, (shown, after))) or "-"
