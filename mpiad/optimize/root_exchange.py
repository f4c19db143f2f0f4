"""How vectors get from the root to all ranks, and the sum of all ranks' gradients back to it.

By messages; or, where the ranks share a node and the vectors are long, through memory that they have in common. There an
instruction says that the variables lie ready, and the agreement at the end of a stage that the gradients do, so no further
message is needed. A place is written again only after an agreement, or after an instruction, that all its readers came to
when they had read it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpiad._typing import Array, Comm, Rank
from mpiad.transport import MAX, SUM
from mpiad.transport.shared_memory import shared_vectors

# Shorter ones are sent faster than memory is set up.
_LONG = 4096


class ByMessages:
    """Broadcasts and reductions.

    `comm`: the solve's own.
    """

    def __init__(self, comm: Comm, root: Rank):
        self.comm, self._root = comm, root
        self._leads = comm.rank == root

    def lay_out(self, *vectors: np.ndarray) -> None:
        """Put down what the next instruction is about, before it is given; the root calls this."""

    def send(self, *vectors: np.ndarray) -> None:
        """Send what the instruction was about that was just given; the root calls this."""
        for vector in vectors:
            self.comm.Bcast(np.ascontiguousarray(vector, dtype=float), self._root)

    def receive(self, *into: np.ndarray) -> None:
        """Write there what an instruction is about; the others call this."""
        for vector in into:
            self.comm.Bcast(vector, self._root)

    def hand_in(self, part: np.ndarray) -> np.ndarray:
        """Return this rank's part for `total`; called in the stage that makes it, before its agreement."""
        return part

    def total(self, part: np.ndarray) -> np.ndarray | None:
        """Return the sum of all ranks' parts on the root; all call it, after the agreement."""
        if self.comm.size == 1:
            return part
        whole = np.empty_like(part) if self._leads else None
        self.comm.Reduce(part, whole, SUM, self._root)
        return whole


class ThroughMemory(ByMessages):
    """Vectors in memory that all ranks share.

    Two ranks' parts are added up on the root. Of more, each rank adds up a stretch, in the order of the ranks: the sum
    depends on nobody's pace.

    `vectors`, of shape (places(comm), n): in shared memory: the variables, a direction, and the ranks' parts.
    """

    def __init__(self, comm: Comm, root: Rank, vectors: np.ndarray):
        super().__init__(comm, root)
        self._given, self._parts = vectors[:2], vectors[2:]
        size = vectors.shape[1]
        self._stretch = slice(size * comm.rank // comm.size, size * (comm.rank + 1) // comm.size)
        # With two ranks the root's own part stays where it is.
        self._place = (None if self._leads else 0) if comm.size == 2 else comm.rank

    @staticmethod
    def places(comm: Comm) -> int:
        """Return how many vectors must be shared."""
        return 3 if comm.size == 2 else 2 + comm.size

    def lay_out(self, *vectors: np.ndarray) -> None:
        """Put down what the next instruction is about, before it is given; the root calls this."""
        for place, vector in zip(self._given, vectors):
            np.copyto(place, vector)

    def send(self, *vectors: np.ndarray) -> None:
        """Send nothing: it lies ready."""

    def receive(self, *into: np.ndarray) -> None:
        """Copy what an instruction is about: the function may change what it gets, or keep it."""
        for place, vector in zip(self._given, into):
            np.copyto(vector, place)

    def hand_in(self, part: np.ndarray) -> np.ndarray:
        """Put this rank's part where the others find it."""
        if self._place is not None:
            np.copyto(self._parts[self._place], part)
        return part

    def total(self, part: np.ndarray) -> np.ndarray | None:
        """Return the sum of all ranks' parts on the root; all call it, after the agreement."""
        if self.comm.size == 2:
            return part + self._parts[0] if self._leads else None
        first, *others = self._parts[:, self._stretch]
        for other in others:
            np.add(first, other, out=first)
        self.comm.Barrier()  # nobody fails between the agreement and here
        return self._parts[0].copy() if self._leads else None


def exchange_of(comm: Comm, root: Rank, size: int) -> ByMessages:
    """Return the faster exchange that all ranks of a solve can have; collective over them."""
    if comm.size == 1 or size < _LONG:
        return ByMessages(comm, root)
    vectors = shared_vectors(comm, ThroughMemory.places(comm), size)
    return ByMessages(comm, root) if vectors is None else ThroughMemory(comm, root, vectors)


class OwnParts:
    """In place of an exchange, where each rank's part of the gradient is its own."""

    def hand_in(self, part: Array) -> Array:
        """Return the part."""
        return part

    def total(self, part: Array) -> Array:
        """Return the part."""
        return part


class Totals:
    """Sums and maxima over all ranks, the same bits everywhere: reduced to the root, which decides and tells.

    An all-reduction may round differently on different ranks, so that one would stop where another goes on.
    """

    def __init__(self, comm: Comm, root: Rank):
        self._comm, self._root = comm, root
        self.leads = comm.rank == root

    def decided(self, parts: np.ndarray, size: int, decide: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return on all ranks what the root makes of the sums of all ranks' parts: ``decide(sums)``, of so many numbers."""
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
        # Sums and maxima are two reductions, since MPI has no operation for both; all that is decided goes back in one
        # message.
        self._comm.Reduce(highest, found, MAX, self._root)
        size = len(terms) + len(largest) + len(told)
        packet = self.decided(np.array(terms), size, lambda sums: np.concatenate([sums, found, told]))  # type: ignore[list-item]
        return packet.tolist()
