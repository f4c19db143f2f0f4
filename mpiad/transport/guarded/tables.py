"""Tables of ranks: aligned columns, and of many ranks one line for those that say the same."""

from __future__ import annotations

__all__ = ["columns", "table_of_ranks"]

_EACH = 16  # ranks have a line of their own
_SHOWN = 8
Row = tuple[str, ...]


def table_of_ranks(head: Row, rows: list[Row]) -> str:
    """Return a table whose first column is the rank; thousands of lines would hide the one that matters."""
    if len(rows) > _EACH:
        alike: dict[Row, list[int]] = {}
        for rank, *rest in rows:
            alike.setdefault(tuple(rest), []).append(int(rank))
        rows = [(_listed(ranks), *rest) for rest, ranks in alike.items()]
    return columns(("rank", *head), rows)


def _listed(ranks: list[int]) -> str:
    """Return numbers in rising order as "0-6, 8"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    more = f", ... ({len(ranks)} ranks)" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


def columns(head: Row, rows: list[Row]) -> str:
    """Return lines of aligned columns."""
    lines = [head, *rows]
    widths = [max(len(line[k]) for line in lines) for k in range(len(head))]
    return "\n".join("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)
