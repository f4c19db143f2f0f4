"""Tables of ranks: aligned columns, and of many ranks one line for those that say the same."""

from __future__ import annotations

from mpiad.transport.rank_ranges import rank_ranges

__all__ = ["columns", "table_of_ranks"]

_EACH = 16  # ranks have a line of their own
Row = tuple[str, ...]


def table_of_ranks(head: Row, rows: list[Row]) -> str:
    """Return a table whose first column is the rank; thousands of lines would hide the one that matters."""
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
