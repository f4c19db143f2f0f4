"""A rank that evaluates what the root hands it, until it is told to stop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from mpiad._typing import Rank
from mpiad.tasks.task import BYE, RESULT, TASK, Batch, Ended, Failed, Outcome, evaluated
from mpiad.transport.agreement import Failure
from mpiad.transport.object_messages import Line, PackedObject
from mpiad.transport.polling import Backoff

__all__ = ["work"]


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
    patience = Backoff()
    while True:
        message = line.take(root)
        if message is None:
            if waiting:
                return None
            patience.pause()
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
