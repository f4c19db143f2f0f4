"""Lists of ranks as people read them: "0-6, 8"."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["rank_ranges"]

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
