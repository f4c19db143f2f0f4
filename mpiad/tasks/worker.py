"""Batches of items: what ranks send each other, how any rank evaluates one, and a rank that does so until told to stop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from autograd.tracer import isbox

from mpiad._typing import Rank
from mpiad.errors import WorkerError
from mpiad.primitives.operation import suspended
from mpiad.pytrees import flatten
from mpiad.transport.agreement import Failure
from mpiad.transport.object_messages import Line, PackedObject
from mpiad.transport.polling import Backoff, wait_for_message
from mpiad.transport.tracing import restoring_state

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
            with restoring_state(), suspended():
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
            "mpiad.stop_gradient(x) gives its plain value; take derivatives inside fun, or use mpi_scatter and mpi_gather."
        )


def work(line: Line, root: Rank, fun: Callable[[Any], Any], goes_on: bool, rank: Rank) -> Outcome:
    """Evaluate batches until the end, and return how it ended.

    `root` is a rank on the line, `rank` this one in the user's communicator, for messages; `goes_on` says whether failures
    stand among the results.
    """
    waiting: deque[Batch] = deque()
    has_failed = False
    while True:
        outcome = _collect(line, root, waiting)
        if outcome is not None:
            break  # also where batches wait: another rank has failed
        batch = waiting.popleft()
        if has_failed:
            continue  # the end is on its way
        ended = evaluated(fun, batch, goes_on, rank)
        has_failed = not goes_on and isinstance(ended.results[-1][1], Failed)
        line.post(root, RESULT, _packed(ended, rank))
    # The root waits for this, so that no message is under way when the communicator is freed.
    line.post(root, BYE, PackedObject.of(None))
    patience = Backoff()
    while not line.is_quiet():
        patience.pause()
    return outcome


def _collect(line: Line, root: Rank, waiting: deque[Batch]) -> Outcome | None:
    """Take all that has come; wait where there is nothing to do."""
    while True:
        message = line.take(root)
        if message is None:
            if waiting:
                return None
            wait_for_message(lambda: line.comm.Iprobe(root), line.comm, root)
        elif message.kind == TASK:
            waiting.append(message.content)
        else:
            return message.content


def _packed(ended: Ended, rank: Rank) -> PackedObject:
    """Pack the results, with failures in the place of those that can't be."""
    try:
        return PackedObject.of(ended)
    except Exception:  # noqa: BLE001 - pickle raises what it likes
        # Each by itself: one result that can't be pickled costs its item, and not the batch.
        results = [(index, _sendable(result, rank)) for index, result in ended.results]
        return PackedObject.of(ended._replace(results=results))


def _sendable(result: object, rank: Rank) -> Any:
    try:
        PackedObject.of(result, lent=True)
    except Exception as error:  # noqa: BLE001 - as above
        return Failed(Failure.of(error), rank)
    return result
