"""`mpi_map`: independent items, distributed dynamically to free ranks.

The file has three parts: messages and workers, the group of ranks, and the root's scheduler.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import length_hint
from typing import Any, NamedTuple

import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Comm, Function, Rank
from mpiad.errors import RemoteError, WorkerError
from mpiad.primitives.checks import positive_count, root_of
from mpiad.primitives.operation import suspended
from mpiad.progress import progress_bar
from mpiad.pytrees import flatten
from mpiad.transport import Channel, channel
from mpiad.transport.core.agreement import FAILURES, Failure
from mpiad.transport.core.fault_tolerance import FAULT_TOLERANT, is_interruption, is_process_failure, lost_ranks
from mpiad.transport.core.polling import Backoff, Mailbox, packed, pause_until, wait_for_message
from mpiad.transport.core.tracing import restoring_state
from mpiad.transport.exits.recovery import ranks_within, recover, recoverable

TASK, RESULT, STOP, STOPPED = range(1, 5)  # kinds of messages; a worker replies to STOP with STOPPED

Batch = list[tuple[int, Any]]
"""A list of pairs of an item's index and the item."""


class Failed(NamedTuple):
    """An exception that was raised while an item was evaluated."""

    failure: Failure
    rank: Rank  # in the user's communicator
    index: int

    def error(self) -> WorkerError:
        """Return the WorkerError that all ranks raise, or that is stored among the results."""
        text = f"mpi_map: rank {self.rank} raised {self.failure.summary} at item {self.index}."
        return WorkerError(text, self.rank, self.failure.trace, self.index, self.failure.exit_code)


class EvaluatedBatch(NamedTuple):
    """An evaluated batch: results or failures with their indices, and the duration of the evaluation."""

    results: list[tuple[int, Any]]
    seconds: float


class _Settings(NamedTuple):
    """The arguments of `mpi_map` that are the same on all ranks."""

    root: Rank
    everywhere: bool
    return_exceptions: bool
    batch: int


class Outcome(NamedTuple):
    """The outcome of a map: the failure that all ranks raise, or the results on the ranks that get them."""

    failed: Failed | None
    results: list[Any] | None


def evaluated(fun: Function, batch: Batch, keep_failures: bool, rank: Rank) -> EvaluatedBatch:
    """Evaluate a batch, up to the first failure unless `keep_failures` is set."""
    results: list[tuple[int, Any]] = []
    start = time.perf_counter()
    for index, item in batch:
        try:
            # Communication in `fun` isn't recorded, since only the tape of this rank would contain it.
            with restoring_state(), suspended():
                result = fun(item)
            require_plain(result, "fun returned")
        except FAILURES as error:  # raised again on all ranks
            result = Failed(Failure.of(error), rank, index)
        results.append((index, result))
        if isinstance(result, Failed) and not keep_failures:
            break
    return EvaluatedBatch(results, time.perf_counter() - start)


def require_plain(value: object, source: str) -> None:
    """Raise a TypeError for a traced value, whose trace exists on this rank only."""
    if any(map(isbox, flatten(value)[0])):
        raise TypeError(
            f"mpi_map: {source} a traced value, but items are evaluated without derivatives. Pass mpiad.stop_gradient(x), "
            "differentiate inside fun, or use mpi_scatter and mpi_gather."
        )


def work(mailbox: Mailbox, root: Rank, fun: Function, keep_failures: bool, rank: Rank) -> Outcome:
    """Evaluate batches until the root, `root` in the map's communicator, stops `rank` of the user's; return the outcome."""
    waiting: deque[Batch] = deque()
    outcome: Outcome | None = None
    has_failed = False
    while outcome is None:
        # All messages that have arrived are received before the next batch is evaluated.
        message = mailbox.take(root)
        if message is not None and message.kind == TASK:
            waiting.append(message.content)
        elif message is not None:
            outcome = message.content  # if another rank has failed, `waiting` may not be empty: these batches are dropped
        elif not waiting:
            wait_for_message(lambda: mailbox.comm.Iprobe(root), mailbox.comm, root)
        elif has_failed:
            waiting.clear()  # after a failure, batches are discarded until the root sends STOP
        else:
            ended = evaluated(fun, waiting.popleft(), keep_failures, rank)
            has_failed = not keep_failures and isinstance(ended.results[-1][1], Failed)
            mailbox.post(root, RESULT, _packed(ended, rank))
    # The root waits for this message, so that no message is active when the communicator is freed.
    mailbox.post(root, STOPPED, packed(None))
    pause_until(mailbox.is_quiet)
    return outcome


def _packed(ended: EvaluatedBatch, rank: Rank) -> np.ndarray:
    """Pack the results; results that can't be packed are replaced by failures."""
    try:
        return packed(ended)
    except FAILURES:  # pickle may raise anything
        # Each result is packed separately: if a result can't be pickled, only the item of this result fails.
        results = list(ended.results)
        for k, (index, result) in enumerate(results):
            try:
                packed(result)
            except FAILURES as error:
                results[k] = index, Failed(Failure.of(error), rank, index)
        return packed(ended._replace(results=results))


_log = logging.getLogger("mpiad")


class WorkerGroup:
    """The ranks of one map, without ranks whose processes have died, and a communicator of these ranks."""

    def __init__(self, user_channel: Channel):
        self._user_channel = user_channel
        self._survives = FAULT_TOLERANT and user_channel.size > 1  # whether the map continues after a process has died
        self.comm = self._assembled()
        self.user_ranks = ranks_within(user_channel, self.comm)
        self.mailbox = Mailbox(self.comm, user_channel)
        self._reported: set[Rank] = set()

    def _assembled(self) -> Comm:
        # If a process dies during the first `derive`, recovery records this and raises a RemoteError. The communicator then
        # consists of the surviving ranks, as in all later calls.
        user_channel = self._user_channel
        if self._survives and not user_channel.lost:
            try:
                return recoverable("mpi_map", user_channel.user)(user_channel.derive)()
            except RemoteError:
                if not user_channel.lost:
                    raise
        return user_channel.derive(survivors=bool(user_channel.lost))

    def newly_lost(self) -> list[Rank]:
        """Return the ranks in `comm` that have died since the last call, and log them."""
        if not self._survives:
            return []
        found = [rank for rank in lost_ranks(self.comm) if rank not in self._reported]
        if found:
            self._reported.update(found)
            # Without this, each receive from any rank would fail again because of the same loss.
            self.comm.Ack_failed()
        for rank in found:
            _log.warning("mpi_map: the process of rank %d has died; other ranks evaluate its items.", self.user_ranks[rank])
        return found

    def close(self) -> None:
        """Free the communicator, and record which ranks have died; collective over the remaining ranks."""
        if not self._survives:
            self._user_channel.drop(self.comm)
            return
        # `Shrink` succeeds even if a process has died; all remaining ranks get the same list.
        remaining = self.comm.Shrink()
        alive = ranks_within(self._user_channel, remaining)
        remaining.Free()
        self._user_channel.drop(self.comm)
        if len(alive) < self._user_channel.size:
            self._user_channel.lose(sorted(set(range(self._user_channel.size)) - set(alive)))


# The root sends batches and receives results. If there are few workers it evaluates batches, too: while it does so, other
# ranks may wait for it. With exponentially distributed times (`time.sleep`, 20 ms on average), this gained 27 % on 4 ranks,
# 6 % on 6, and 1 % on 8; with equal times, for which nobody waits, it gained on 6 and 8 ranks, too (about 50 %).
#
# A rank gets its next batch when it returns a result. If batches are short or the root evaluates batches, each worker has
# an additional batch in its queue, so that it needn't wait for the root. Otherwise long batches aren't queued, since
# another rank might evaluate them earlier.

_FEW_WORKERS = 3
_SHORT = 0.02  # seconds; much longer than a message to the root and its reply
_CHECK_EVERY = 0.05  # seconds between checks for lost ranks


class Scheduler:
    """The root's part of one map: it sends batches, receives results, and detects ranks that have died."""

    def __init__(
        self, group: WorkerGroup, items: Iterator[Any], fun: Function, batch: int, keep_failures: bool, progress: Any
    ):
        self._group, self._mailbox, self._fun = group, group.mailbox, fun
        self._items, self._batch, self._keep_failures, self._progress = items, batch, keep_failures, progress
        self._rank = group.user_ranks[group.comm.rank]
        workers = [rank for rank in range(group.comm.size) if rank != group.comm.rank]
        # Batches that were sent, stored until their results arrive, because the rank that evaluates them may die.
        self._batches: dict[Rank, deque[np.ndarray]] = {rank: deque() for rank in workers}
        self._resend: deque[np.ndarray] = deque()
        self._root_batch: np.ndarray | None = None  # the root's next batch
        self._item_count, self._exhausted = 0, False
        self._seconds: float | None = None  # exponentially weighted mean of the time per batch
        self._check_timer = Backoff()
        self.results: dict[int, Any] = {}
        self.failed: Failed | None = None

    def run(self) -> None:
        """Evaluate all items, up to the first failure unless `keep_failures` is set."""
        while self.failed is None:
            # Twice, since a probe may find a message only after an earlier probe has made MPI progress.
            while self._receive(RESULT) or self._receive(RESULT):
                pass
            self._send_batches()
            if self.failed is not None:  # after an exception in the iteration over items, no result may be due
                return
            if self._root_batch is not None:
                # Items and results are copies, as on the workers.
                batch, self._root_batch = pickle.loads(self._root_batch.data), None
                ended = evaluated(self._fun, batch, self._keep_failures, self._rank)
                self._store(pickle.loads(_packed(ended, self._rank).data))
            elif any(self._batches.values()):
                self._await(RESULT)
            elif self._exhausted and not self._resend:
                self._show()
                return
            elif not self._batches:
                # Batches in `_resend` are packed, since they were sent to a rank that died.
                batch = pickle.loads(self._resend.popleft().data) if self._resend else self._next_batch()
                if batch and self.failed is None:
                    self._store(evaluated(self._fun, batch, self._keep_failures, self._rank))

    def stop(self, outcome: Outcome) -> None:
        """Send the outcome to the other ranks, and wait until they have received it."""
        parcel, patience = packed(outcome), Backoff()
        for rank in list(self._batches):
            self._post(rank, STOP, parcel)
        while self._batches:
            # Results of batches that were active when the map failed are received and ignored.
            self._await(STOPPED)
        while not self._mailbox.is_quiet():
            self._check_for_losses()
            patience.pause()

    def _send_batches(self) -> None:
        evaluates = 0 < len(self._batches) <= _FEW_WORKERS
        max_batches = 2 if evaluates or (self._seconds is not None and self._seconds < _SHORT) else 1
        # First the ranks without a batch get one, then the root, and then, if `max_batches` is 2, the ranks with one batch.
        for number in range(max_batches):
            if number == 1 and evaluates:
                self._root_batch = self._next()
            for rank in list(self._batches):
                # A dead rank may have been removed from `_batches` since the list was made.
                if len(self._batches.get(rank, ())) == number:
                    parcel = self._next()
                    if parcel is None:
                        return
                    # Stored before it is sent: if the rank is dead, the send fails, and another rank gets the batch.
                    self._batches[rank].append(parcel)
                    self._post(rank, TASK, parcel)

    def _next(self) -> np.ndarray | None:
        if self._resend:
            return self._resend.popleft()
        batch = self._next_batch()
        if not batch:
            return None
        try:
            return packed(batch)
        except FAILURES as error:  # pickle may raise anything
            self.failed = self.failed or Failed(Failure.of(error), self._rank, batch[0][0])
            return None

    def _next_batch(self) -> Batch:
        batch: Batch = []
        while not self._exhausted and self.failed is None and len(batch) < self._batch:
            try:
                item = next(self._items)
                require_plain(item, "items hold")
            except StopIteration:
                self._exhausted = True
            except FAILURES as error:  # a generator is the user's code
                self.failed = Failed(Failure.of(error), self._rank, self._item_count)
            else:
                batch.append((self._item_count, item))
                self._item_count += 1
        return batch

    def _await(self, kind: int) -> None:
        """Call `_receive` until a message has arrived or a rank has died; polled, since MPI's wait would occupy a core."""
        count = len(self._batches)
        wait_for_message(lambda: self._receive(kind) or len(self._batches) < count, self._mailbox.comm)

    def _receive(self, kind: int) -> bool:
        """Receive a message of any kind, but ignore results unless `kind` is RESULT; return False if none has arrived."""
        try:
            message = self._mailbox.take()
        except Exception as error:  # noqa: BLE001 - raised again unless a process has died
            self._tolerate(error)
            return False
        if message is None:
            if self._check_timer.seconds > _CHECK_EVERY:
                self._check_for_losses()
            return False
        if message.kind == STOPPED:
            self._batches.pop(message.source, None)
        # A rank evaluates its batches in order, so this result belongs to the oldest batch.
        elif kind == RESULT and message.source in self._batches:
            self._batches[message.source].popleft()
            self._store(message.content)
        return True

    def _store(self, ended: EvaluatedBatch) -> None:
        self._seconds = ended.seconds if self._seconds is None else 0.5 * (self._seconds + ended.seconds)
        for index, result in ended.results:
            if isinstance(result, Failed) and not self._keep_failures:
                self.failed = self.failed or result
                return
            self.results[index] = result.error() if isinstance(result, Failed) else result
        self._show()

    def _show(self) -> None:
        if self._progress is not None:
            self._progress.total = self._item_count if self._exhausted else self._progress.total
            self._progress.update(len(self.results) - self._progress.n)

    def _post(self, rank: Rank, kind: int, parcel: np.ndarray) -> None:
        try:
            self._mailbox.post(rank, kind, parcel)
        except Exception as error:  # noqa: BLE001 - raised again unless a process has died
            self._tolerate(error)

    def _tolerate(self, error: Exception) -> None:
        if not is_process_failure(error):
            raise error
        self._check_for_losses()

    def _check_for_losses(self) -> None:
        self._check_timer.renew()
        for rank in self._group.newly_lost():
            # Messages posted to the lost rank are dropped, results from it are ignored, and other ranks get its batches.
            self._mailbox.settle(dead=rank)
            self._resend.extend(self._batches.pop(rank, ()))


def mpi_map(
    fun: Callable[[Any], Any],
    items: Iterable[Any] | None = None,
    *,
    root: Rank = 0,
    comm: Comm = None,
    everywhere: bool = False,
    return_exceptions: bool = False,
    batch: int = 1,
    progress: bool = False,
) -> list[Any] | None:
    """Evaluate a function of each item, dynamically on free ranks; return the results in the order of the items.

    Parameters
    ----------
    fun : callable
        ``fun(item)`` is called once for each item, on one rank. Communication on `comm` inside `fun` raises a
        CommunicatorError; use MPI.COMM_SELF instead. On up to four ranks the root evaluates items, too; on more ranks it
        only distributes them.
    items : iterable
        Used on the root only. A generator of unknown length is allowed; items are taken from it when they are sent. Items
        and results must support pickling; arrays of 64 KiB or more are sent without pickling.
    root : int
        The rank that has the items and gets the results.
    comm : mpi4py intracommunicator, optional
    everywhere : bool
        Whether all ranks get the results, instead of only the root.
    return_exceptions : bool
        Whether an exception in `fun` is stored among the results, as a WorkerError, instead of ending the map.
    batch : int
        The number of items per message. Use more than one for functions that take microseconds.
    progress : bool
        Whether the root shows on standard error the number of completed items and, if `items` has a length, the
        remaining time.

    Returns
    -------
    list or None
        The results on the root, and with `everywhere` on all ranks; otherwise None.

    Raises
    ------
    WorkerError
        On all ranks, if `fun` raises on any rank (unless `return_exceptions`), or the iteration over `items` raises on the
        root. The error has the attributes `rank`, `traceback` and the item's `index`. Other ranks first finish the
        batches that they have started; no further batches are sent.
    TypeError, ValueError
        On all ranks, if an argument is invalid on any rank, or differs between ranks.
    RemoteError
        On all remaining ranks, if the root's process dies and the MPI library survives this failure. If the process of
        another rank dies, the remaining ranks evaluate its items.

    Ranks
    -----
    All ranks of `comm` call it, with the same arguments except `fun` and `items`.

    Adjoint
    -------
    None: items must be plain values, and the results are constants in every trace.

    Examples
    --------
    >>> print(mpiad.mpi_map(lambda x: x**2, [1, 2, 3], everywhere=True))
    [1, 4, 9]
    """
    user_channel = channel(comm, "mpi_map", survivors=True)
    settings = _Settings(root, everywhere, return_exceptions, batch)
    try:
        group = WorkerGroup(user_channel)
        given = _agreed_items(group, user_channel, fun, items, settings)
        with user_channel.evaluating("an item of mpi_map"):
            outcome = _run(group, user_channel, fun, given, settings, progress)
        group.close()
    except Exception as error:
        if is_interruption(error):
            recover(user_channel, error, "mpi_map")
        raise
    if outcome.failed is not None:
        raise outcome.failed.error()
    return outcome.results


def _agreed_items(group: WorkerGroup, user_channel: Channel, fun: object, items: Any, settings: _Settings) -> Iterator[Any]:
    """Check the arguments on all ranks; return an iterator over the items, which is empty except on the root."""
    own_error, given = None, iter(())
    try:
        root = root_of(settings.root, user_channel, "mpi_map")
        if not callable(fun):
            raise TypeError(f"mpi_map: fun must be callable, but got {type(fun).__name__} {fun!r:.60}.")
        positive_count(settings.batch, "mpi_map: batch")
        if user_channel.rank == root:
            try:
                given = iter(items)
            except TypeError:
                got = f"{type(items).__name__} {items!r:.60}"
                raise TypeError(f"mpi_map: items must be iterable on the root, but got {got}.") from None
            except FAILURES as error:  # `items.__iter__` is the user's code
                given = _raising(error)
    except (TypeError, ValueError) as error:
        own_error = error
    # This uses the group's communicator, since the user's communicator doesn't work after a process has died.
    found = group.comm.allgather((tuple(settings), None if own_error is None else (type(own_error), str(own_error))))
    for rank, (other, problem) in zip(group.user_ranks, found):
        if problem is not None or other != found[0][0]:
            group.close()
            if problem is not None:
                kind, text = problem
                raise own_error or kind(f"{text} (raised on rank {rank})")
            raise own_error or ValueError(
                "mpi_map: all ranks must give the same root, everywhere, return_exceptions and batch, but rank "
                f"{group.user_ranks[0]} gave {found[0][0]} and rank {rank} gave {other}."
            )
    return given


def _raising(error: BaseException) -> Iterator[object]:
    """Return an iterator that raises at its first item: by then all ranks have entered the map, and they raise together."""
    yield from ()
    raise error


def _run(
    group: WorkerGroup, user_channel: Channel, fun: Function, items: Iterator[Any], settings: _Settings, progress: bool
) -> Outcome:
    # Exceptions of `fun` and of `items` are part of the outcome: all ranks must call `close` before they raise.
    root, everywhere, keep_failures, batch = settings
    if root not in group.user_ranks:
        raise RemoteError(f"mpi_map: the process of the root, rank {root}, has died.", root)
    if user_channel.rank != root:
        return work(group.mailbox, group.user_ranks.index(root), fun, keep_failures, user_channel.rank)
    bar = progress_bar("items", _count(items)) if progress else None
    scheduler = Scheduler(group, items, fun, batch, keep_failures, bar)
    scheduler.run()
    if bar is not None:
        bar.close()
    results = None if scheduler.failed is not None else [scheduler.results[k] for k in range(len(scheduler.results))]
    outcome = Outcome(scheduler.failed, results)
    scheduler.stop(outcome if everywhere else outcome._replace(results=None))
    return outcome


def _count(items: Iterator[object]) -> int | None:
    try:
        return length_hint(items) or None
    except FAILURES:  # the user's code
        return None
