"""Sums over all ranks for the root, and its decisions based on them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpiad._typing import Comm, Rank
from mpiad.transport import MAX, SUM


def total_on_root(comm: Comm, root: Rank, part: np.ndarray) -> np.ndarray | None:
    """Return the sum of all ranks' parts on the root, None elsewhere; all call it."""
    if comm.size == 1:
        return part
    whole = np.empty_like(part) if comm.rank == root else None
    comm.Reduce(part, whole, SUM, root)
    return whole


class Totals:
    """Sums and maxima over all ranks, bitwise the same everywhere: reduced to the root, which decides and broadcasts.

    An all-reduction may round differently on different ranks, so that one would stop while another continues.
    """

    def __init__(self, comm: Comm, root: Rank):
        self._comm, self._root = comm, root
        self.leads = comm.rank == root

    def decided(self, parts: np.ndarray, size: int, decide: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return on all ranks the root's ``decide(sums)``, an array of length `size`, for the sums of all ranks' parts."""
        decision = np.empty(size)
        sums = np.empty_like(parts) if self.leads else None
        self._comm.Reduce(parts, sums, SUM, self._root)
        if self.leads:
            decision[:] = decide(sums)  # type: ignore[arg-type]
        self._comm.Bcast(decision, self._root)
        return decision

    def of(self, terms: list[float], largest: list[float], told: list[float]) -> list[float]:
        """Return sums of `terms`, maxima of `largest`, and the root's own `told`, as one list."""
        highest = np.array(largest)
        found = np.empty_like(highest) if self.leads else None
        # Sums and maxima are two reductions, since MPI has no operation for both; the decision is one message.
        self._comm.Reduce(highest, found, MAX, self._root)
        size = len(terms) + len(largest) + len(told)
        packet = self.decided(np.array(terms), size, lambda sums: np.concatenate([sums, found, told]))  # type: ignore[list-item]
        return packet.tolist()
