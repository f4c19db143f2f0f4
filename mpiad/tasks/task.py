"""A batch of items: its evaluation on any rank, and what it gives."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from autograd.tracer import isbox

from mpiad._typing import Rank
from mpiad.differentiation.trees import flatten
from mpiad.errors import WorkerError
from mpiad.primitives.operation import suspended
from mpiad.transport.agreement import Failure

__all__ = ["BYE", "RESULT", "STOP", "TASK", "Batch", "Ended", "Failed", "Outcome", "evaluated", "require_plain"]

TASK, RESULT, STOP, BYE = range(1, 5)  # the messages' kinds

Batch = list[tuple[int, Any]]
"""Items with their indices."""


class Failed(NamedTuple):
    """An exception at an item."""

    failure: Failure
    rank: Rank

    def error(self, index: int | None) -> WorkerError:
        """Return what all ranks raise, or what stands among the results."""
        where = "" if index is None else f" at item {index}"
        text = f"mpi_map: rank {self.rank} raised {self.failure.summary}{where}."
        return WorkerError(text, self.rank, self.failure.trace, index, self.failure.exit_code)


class Ended(NamedTuple):
    """An evaluated batch: results or failures by index, and how long it took."""

    results: list[tuple[int, Any]]
    seconds: float


class Outcome(NamedTuple):
    """How the map ended: what all ranks raise, or the results where all are to have them."""

    failed: Failed | None
    index: int | None
    results: list[Any] | None


def evaluated(fun: Callable[[Any], Any], batch: Batch, goes_on: bool, rank: Rank) -> Ended:
    """Evaluate a batch, up to its first failure unless it `goes_on`."""
    results: list[tuple[int, Any]] = []
    start = time.perf_counter()
    for index, item in batch:
        try:
            # What `fun` communicates (on other communicators) isn't recorded: other ranks' tapes know nothing of it.
            with suspended():
                result = fun(item)
            require_plain(result, "fun returned")
        # sys.exit too: a rank that left here would be waited for.
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is raised on all ranks
            result = Failed(Failure.of(error), rank)
        results.append((index, result))
        if isinstance(result, Failed) and not goes_on:
            break
    return Ended(results, time.perf_counter() - start)


def require_plain(value: object, source: str) -> None:
    """Raise a TypeError for a value of a derivative's trace, which means nothing on another rank."""
    if any(map(isbox, flatten(value)[0])):
        raise TypeError(
            f"mpi_map: {source} a value of a derivative that is being taken, but items are evaluated without derivatives. "
            "mpiad.stop(x) gives its plain value; take derivatives inside fun, or use mpi_scatter and mpi_gather."
        )
