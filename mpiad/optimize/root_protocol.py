"""The messages of a solve: the root's instructions to the other ranks, sums on the root, and the root's decisions.

An instruction is a broadcast of one number, for which the other ranks wait. Further broadcasts send the variables and, for
products, the direction. The last message is the pickled outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpiad._typing import Comm, Rank
from mpiad.errors import WorkerError
from mpiad.transport import MAX, SUM
from mpiad.transport.core.agreement import Failure
from mpiad.transport.core.polling import wait_gently

VALUE, GRADIENT, BOTH, PRODUCT, FINISH, RESIDUALS, FACTOR, TANGENT, COTANGENT, NOT_FINITE = range(10)
# Instructions with a second vector of the length of the variables.
_WITH_DIRECTION = (PRODUCT, TANGENT)


class Instructions:
    """Sends and receives instructions over the solve's communicator; `size` is the number of variables."""

    def __init__(self, comm: Comm, root: Rank, size: int):
        self.comm, self.root = comm, root
        self._kind, self._vector, self._direction = np.zeros(1, np.int64), np.empty(size), np.empty(size)

    def send(self, kind: int, vector: np.ndarray | None = None, direction: np.ndarray | None = None) -> None:
        """Send the next instruction to the other ranks; the root calls this."""
        if self.comm.size == 1:
            return
        self._kind[0] = kind
        self.comm.Ibcast(self._kind, self.root).Wait()  # nonblocking, to match the call in `serve`
        for array in (vector, direction if kind in _WITH_DIRECTION else None):
            if array is not None:
                self.comm.Bcast(np.ascontiguousarray(array, dtype=float), self.root)

    def serve(self, carry_out: Callable[[int, np.ndarray, np.ndarray | None], Any]) -> Any:
        """Execute the root's instructions, ``carry_out(kind, variables, direction)``, until the end; return the outcome."""
        while True:
            wait_gently(self.comm.Ibcast(self._kind, self.root))
            kind = int(self._kind[0])
            if kind == FINISH:
                return self.share_outcome()
            direction = self._direction if kind in _WITH_DIRECTION else None
            # The root sends these messages immediately, so the calls may block.
            for array in (self._vector, direction):
                if array is not None:
                    self.comm.Bcast(array, self.root)
            carry_out(kind, self._vector, direction)

    def share_outcome(self, outcome: object = None, cause: BaseException | None = None) -> Any:
        """Return the root's outcome on all ranks; raise it if it is an exception, on the root from `cause`."""
        outcome = self.comm.bcast(outcome, self.root)
        if isinstance(outcome, Exception):
            raise outcome from cause
        return outcome


def root_failure(error: BaseException, call: str, root: Rank) -> TypeError | ValueError | WorkerError:
    """Return an exception for all ranks that can be pickled, given one that the root raised outside of evaluations."""
    for kind in (TypeError, ValueError):
        if isinstance(error, kind):
            return kind(f"{error} (raised on the root, rank {root})")
    failure = Failure.of(error)
    text = f"{call}: the root, rank {root}, raised {failure.summary}"
    return WorkerError(text, root, failure.trace, exit_code=failure.exit_code)


def total_on_root(comm: Comm, root: Rank, part: np.ndarray) -> np.ndarray | None:
    """Return the sum of all ranks' parts on the root, and None on the other ranks; collective."""
    if comm.size == 1:
        return part
    whole = np.empty_like(part) if comm.rank == root else None
    comm.Reduce(part, whole, SUM, root)
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
        sums = np.empty_like(parts) if self.is_root else None
        self._comm.Reduce(parts, sums, SUM, self._root)
        if self.is_root:
            decision[:] = decide(sums)  # type: ignore[arg-type]
        self._comm.Bcast(decision, self._root)
        return decision

    def reduce(self, terms: list[float], largest: list[float], of_root: list[float]) -> list[float]:
        """Return the sums of `terms`, the maxima of `largest`, and the root's values `of_root`, as one list."""
        highest = np.array(largest)
        found = np.empty_like(highest) if self.is_root else None
        self._comm.Reduce(highest, found, MAX, self._root)
        size = len(terms) + len(largest) + len(of_root)
        reduced = self.decide_on_root(np.array(terms), size, lambda sums: np.concatenate([sums, found, of_root]))  # type: ignore[list-item]
        return reduced.tolist()
