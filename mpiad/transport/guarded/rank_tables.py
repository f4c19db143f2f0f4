"""Ranks as people read them: lists ("0-6, 8"), and tables with one line for those of many that say the same."""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN = 8


def rank_ranges(ranks: Sequence[int]) -> str:
    """Return ranks, which rise, as "0-6, 8"; of thousands that don't adjoin the first few and their number."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    more = f", ... ({len(ranks)} ranks)" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


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
