"""The root's part: it hands out batches, takes results, and evaluates only where nobody else is there to do so.

A rank gets its next batch with its result. Where batches are short it has one more in hand, so that it needn't wait for
the root; where they are long that would only leave the last of them waiting behind another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from mpiad._typing import Rank
from mpiad.tasks.worker import BYE, RESULT, STOP, TASK, Batch, Ended, Failed, Outcome, evaluated, require_plain
from mpiad.tasks.worker_group import WorkerGroup
from mpiad.transport.agreement import Failure
from mpiad.transport.fault_tolerance import is_interruption, is_process_failure
from mpiad.transport.object_messages import Message, PackedObject
from mpiad.transport.polling import Backoff, wait_for_message

_SHORT = 0.02  # seconds, far above a message's way to the root and back
_LOOK_EVERY = 0.05  # seconds


class _Packed(NamedTuple):
    """A batch on its way, kept until its results are there: its rank may die."""

    indices: list[int]
    parcel: PackedObject


class Scheduler:
    """One map, seen from the root.

    `goes_on`: whether failures stand among the results. `progress`: a bar, updated after each batch, or None.
    """

    def __init__(
        self, group: WorkerGroup, items: Iterator[Any], fun: Callable[[Any], Any], batch: int, goes_on: bool,
        progress: Any,
    ):  # fmt: skip
        self._group, self._line, self._fun = group, group.line, fun
        self._items, self._batch, self._goes_on, self._progress = items, batch, goes_on, progress
        self._rank = group.names[group.comm.rank]
        workers = [rank for rank in range(group.comm.size) if rank != group.comm.rank]
        self._held: dict[Rank, deque[_Packed]] = {rank: deque() for rank in workers}
        self._again: deque[_Packed] = deque()
        self._taken, self._exhausted = 0, False
        self._seconds: float | None = None  # of the last batches
        self._looked = Backoff()
        self.results: dict[int, Any] = {}
        self.failed: tuple[Failed, int | None] | None = None

    def run(self) -> None:
        """Have all items evaluated, up to the first failure unless the map goes on."""
        while self.failed is None:
            self._hand_out()
            if self._exhausted and not self._again and not any(self._held.values()):
                self._tell()
                return
            if not self._held:
                self._work_alone()
            elif self.failed is None:  # nothing was handed out if the items raised
                self._await(RESULT)

    def stop(self, outcome: Outcome) -> None:
        """Tell the others how it ended, and wait until they have heard it."""
        # Lent: the results stay as they are until all have been sent, so large arrays needn't be copied.
        parcel, patience = PackedObject.of(outcome, lent=True), Backoff()
        for rank in list(self._held):
            self._to(rank, STOP, parcel)
        while self._held:
            # Results of batches that were under way when the map failed come here too, and are let go.
            self._await(BYE)
        while not self._line.is_quiet():
            self._look_for_the_lost()
            patience.pause()

    # ---- handing out

    def _hand_out(self) -> None:
        depth = 2 if self._seconds is not None and self._seconds < _SHORT else 1
        # Nobody gets a second batch while another rank has none.
        for full in range(depth):
            for rank in list(self._held):
                # A rank may have been found dead, and left the dict, since the list was made.
                if len(self._held.get(rank, ())) == full:
                    packed = self._next()
                    if packed is None:
                        return
                    # Held before it is sent: if the rank turns out to be dead in sending, the batch goes to another.
                    self._held[rank].append(packed)
                    self._to(rank, TASK, packed.parcel)

    def _next(self) -> _Packed | None:
        if self._again:
            return self._again.popleft()
        batch = self._next_batch()
        if not batch:
            return None
        try:
            return _Packed([index for index, _ in batch], PackedObject.of(batch))
        except Exception as error:  # noqa: BLE001 - pickle raises what it likes
            self._fail(Failed(Failure.of(error), self._rank), batch[0][0])
            return None

    def _next_batch(self) -> Batch:
        batch: Batch = []
        while not self._exhausted and self.failed is None and len(batch) < self._batch:
            try:
                item = next(self._items)
                require_plain(item, "items hold")
            except StopIteration:
                self._exhausted = True
            except Exception as error:  # noqa: BLE001 - a generator is the user's code
                self._fail(Failed(Failure.of(error), self._rank), self._taken)
            else:
                batch.append((self._taken, item))
                self._taken += 1
        return batch

    def _work_alone(self) -> None:
        # The root's own batches needn't be packed; only those of ranks that have died are.
        batch = self._again.popleft().parcel.opened() if self._again else self._next_batch()
        if batch and self.failed is None:
            self._note(evaluated(self._fun, batch, self._goes_on, self._rank))

    # ---- results

    def _await(self, kind: int) -> None:
        """Take one message, or find that a rank has died."""
        # By polling, not by MPI's own wait, which would take the core of a rank that evaluates.
        before = len(self._held)
        wait_for_message(lambda: self._receive(kind) or len(self._held) < before, self._line.comm)

    def _receive(self, kind: int) -> bool:
        """Take one message; tell whether there was any."""
        message = self._take()
        if message is None:
            return False
        if message.kind == BYE:
            self._held.pop(message.source, None)
        # A rank evaluates in the order in which it was handed, so this is the result of its oldest batch.
        elif kind == RESULT and message.source in self._held:
            self._held[message.source].popleft()
            self._note(message.content)
        return True

    def _note(self, ended: Ended) -> None:
        share = ended.seconds if self._seconds is None else 0.5 * (self._seconds + ended.seconds)
        self._seconds = share
        for index, result in ended.results:
            if isinstance(result, Failed) and not self._goes_on:
                self._fail(result, index)
                return
            self.results[index] = result.error(index) if isinstance(result, Failed) else result
        self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress.total = self._taken if self._exhausted else self._progress.total
            self._progress.update(len(self.results) - self._progress.n)

    def _fail(self, failed: Failed, index: int | None) -> None:
        if self.failed is None:
            self.failed = failed, index

    # ---- ranks that die

    def _take(self) -> Message | None:
        try:
            message = self._line.take()
        except Exception as error:  # noqa: BLE001 - raised again unless a process has died
            self._tolerate(error)
            return None
        if message is None and self._looked.seconds > _LOOK_EVERY:
            self._look_for_the_lost()
        return message

    def _to(self, rank: Rank, kind: int, parcel: PackedObject) -> None:
        try:
            self._line.post(rank, kind, parcel)
        except Exception as error:  # noqa: BLE001 - raised again unless a process has died
            self._tolerate(error)

    def _tolerate(self, error: Exception) -> None:
        if not is_interruption(error) or not is_process_failure(error):
            raise error
        self._look_for_the_lost()

    def _look_for_the_lost(self) -> None:
        self._looked.renew()
        for rank in self._group.newly_lost():
            # Nothing is waited for from it, and what it held is handed out again.
            self._line.forget(rank)
            self._again.extend(self._held.pop(rank, ()))
