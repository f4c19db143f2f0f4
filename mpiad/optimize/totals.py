"""Sums over the ranks on the root, and the root's decisions, which are bitwise the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpiad._typing import Comm, Rank
from mpiad.transport import MAX, SUM, Op


def reduced_on_root(comm: Comm, root: Rank, part: np.ndarray, op: Op = SUM) -> np.ndarray | None:
    """Return the sum (or another reduction) of all ranks' parts on the root, and None on the other ranks; collective."""
    if comm.size == 1:
        return part
    whole = np.empty_like(part) if comm.rank == root else None
    comm.Reduce(part, whole, op, root)
    return whole


class Totals:
    """Sums and maxima from the root, so that they are bitwise the same on all ranks, unlike those of an all-reduction."""

    def __init__(self, comm: Comm, root: Rank):
        self._comm, self._root = comm, root
        self.is_root = comm.rank == root

    def sums(self, parts: np.ndarray) -> np.ndarray:
        """Return the sums of `parts` over all ranks, shape (n,)."""
        return self.decide_on_root(parts, len(parts), lambda sums: sums)

    def decide_on_root(self, parts: np.ndarray, size: int, decide: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return, on all ranks, the root's ``decide(sums)``, shape (size,), for the sums of `parts` over all ranks."""
        decision = np.empty(size)
        sums = reduced_on_root(self._comm, self._root, parts)
        if sums is not None:
            decision[:] = decide(sums)
        self._comm.Bcast(decision, self._root)
        return decision

    def reduce(self, terms: list[float], largest: list[float], of_root: list[float]) -> list[float]:
        """Return the sums of `terms`, the maxima of `largest`, and the root's values `of_root`, as one list."""
        found = reduced_on_root(self._comm, self._root, np.array(largest), MAX)
        size = len(terms) + len(largest) + len(of_root)
        return self.decide_on_root(np.array(terms), size, lambda sums: np.concatenate([sums, found, of_root])).tolist()  # type: ignore[list-item]
