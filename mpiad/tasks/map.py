"""`mpi_map`: independent items, distributed dynamically to free ranks.

The file has three parts: messages and workers, the group of ranks, and the root's scheduler.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import length_hint
from typing import Any, NamedTuple

from autograd.tracer import isbox

from mpiad._typing import Comm, Function, Rank
from mpiad.errors import RemoteError, WorkerError
from mpiad.primitives.checks import root_of
from mpiad.primitives.operation import suspended
from mpiad.progress import progress_bar
from mpiad.pytrees import flatten
from mpiad.transport import Channel, channel
from mpiad.transport.core.agreement import Failure
from mpiad.transport.core.fault_tolerance import FAULT_TOLERANT, is_interruption, is_process_failure, lost_ranks
from mpiad.transport.core.polling import Backoff, Line, Message, PackedObject, wait_for_message
from mpiad.transport.core.tracing import restoring_state
from mpiad.transport.exits.recovery import ranks_within, recover, recoverable

TASK, RESULT, STOP, STOPPED = range(1, 5)  # kinds of messages; a worker replies to STOP by STOPPED

Batch = list[tuple[int, Any]]
"""Items with their indices."""


class Failed(NamedTuple):
    """An exception at an item."""

    failure: Failure
    rank: Rank
    index: int

    def error(self) -> WorkerError:
        """Return the exception for a failed item, which all ranks raise, or which is stored among the results."""
        text = f"mpi_map: rank {self.rank} raised {self.failure.summary} at item {self.index}."
        return WorkerError(text, self.rank, self.failure.trace, self.index, self.failure.exit_code)


class Ended(NamedTuple):
    """An evaluated batch: results or failures by index, and its duration."""

    results: list[tuple[int, Any]]
    seconds: float


class Outcome(NamedTuple):
    """The end of a map: the failure that all ranks raise, or the results if all ranks get them."""

    failed: Failed | None
    results: list[Any] | None


def evaluated(fun: Function, batch: Batch, keep_failures: bool, rank: Rank) -> Ended:
    """Evaluate a batch, up to the first failure unless `keep_failures` is set."""
    results: list[tuple[int, Any]] = []
    start = time.perf_counter()
    for index, item in batch:
        try:
            # Communication of `fun` isn't recorded, since it would be on the tape of this rank only.
            with restoring_state(), suspended():
                result = fun(item)
            require_plain(result, "fun returned")
        # SystemExit is caught, too, since other ranks wait for this one.
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is raised on all ranks
            result = Failed(Failure.of(error), rank, index)
        results.append((index, result))
        if isinstance(result, Failed) and not keep_failures:
            break
    return Ended(results, time.perf_counter() - start)


def require_plain(value: object, source: str) -> None:
    """Raise a TypeError for a traced value, whose trace exists on this rank only."""
    if any(map(isbox, flatten(value)[0])):
        raise TypeError(
            f"mpi_map: {source} a traced value, but items are evaluated without derivatives. Pass mpiad.stop_gradient(x), "
            "differentiate inside fun, or use mpi_scatter and mpi_gather."
        )


def work(line: Line, root: Rank, fun: Function, keep_failures: bool, rank: Rank) -> Outcome:
    """Evaluate batches until `root`, a rank of the map's communicator, stops this rank; return the outcome."""
    waiting: deque[Batch] = deque()
    has_failed = False
    while True:
        outcome = _collect(line, root, waiting)
        if outcome is not None:
            break  # if another rank has failed, batches may be left
        batch = waiting.popleft()
        if has_failed:
            continue  # no further evaluations until the root's STOP
        ended = evaluated(fun, batch, keep_failures, rank)
        has_failed = not keep_failures and isinstance(ended.results[-1][1], Failed)
        line.post(root, RESULT, _packed(ended, rank))
    # The root waits for this message, so that none is active when the communicator is freed.
    line.post(root, STOPPED, PackedObject.of(None))
    patience = Backoff()
    while not line.is_quiet():
        patience.pause()
    return outcome


def _collect(line: Line, root: Rank, waiting: deque[Batch]) -> Outcome | None:
    """Receive all messages that have arrived, at least one if no batch is left; return the outcome after STOP."""
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
    """Pack the results, with failures in place of results that can't be packed."""
    try:
        return PackedObject.of(ended)
    except Exception:  # noqa: BLE001 - pickle may raise anything
        # Each result is packed separately: if one can't be pickled, only its own item fails.
        results = list(ended.results)
        for k, (index, result) in enumerate(results):
            try:
                PackedObject.of(result, shared=True)
            except Exception as error:  # noqa: BLE001 - as above
                results[k] = index, Failed(Failure.of(error), rank, index)
        return PackedObject.of(ended._replace(results=results))


_log = logging.getLogger("mpiad")


class WorkerGroup:
    """The ranks of one map, with a communicator of their own, without ranks whose processes have died."""

    def __init__(self, user_channel: Channel):
        self._used = user_channel
        self._survives = FAULT_TOLERANT and user_channel.size > 1
        self.comm = self._assembled()
        self.names = ranks_within(user_channel, self.comm)
        self.line = Line(self.comm, user_channel)
        self._known: set[Rank] = set()

    def _assembled(self) -> Comm:
        # While no process is known to be lost, a loss in `derive` is found by recovery. The communicator then has the
        # surviving ranks, as in all later calls.
        user_channel = self._used
        if self._survives and not user_channel.lost:
            try:
                return recoverable("mpi_map", user_channel.user)(user_channel.derive)()
            except RemoteError:
                if not user_channel.lost:
                    raise
        return user_channel.derive(survivors=bool(user_channel.lost))

    def place_of(self, root: Rank) -> Rank:
        """Return the rank in `comm` of a rank of the user's communicator; raise a RemoteError if its process has died."""
        if root not in self.names:
            raise RemoteError(f"mpi_map: the process of the root, rank {root}, has died.", root)
        return self.names.index(root)

    def newly_lost(self) -> list[Rank]:
        """Return the ranks in `comm` that have died since the last call, and log them."""
        if not self._survives:
            return []
        found = [rank for rank in lost_ranks(self.comm) if rank not in self._known]
        if found:
            self._known.update(found)
            # Without this, each receive from any rank would fail again because of the same loss.
            self.comm.Ack_failed()
        for rank in found:
            _log.warning("mpi_map: the process of rank %d has died; other ranks take its items.", self.names[rank])
        return found

    def close(self) -> None:
        """End the map; collective over the remaining ranks."""
        if not self._survives:
            self._used.drop(self.comm)
            return
        # `Shrink` succeeds even if a process has died; all remaining ranks get the same list.
        remaining = self.comm.Shrink()
        alive = ranks_within(self._used, remaining)
        remaining.Free()
        self._used.drop(self.comm)
        if len(alive) < self._used.size:
            self._used.lose(sorted(set(range(self._used.size)) - set(alive)))


# The root sends batches and receives results. It evaluates items itself only if there is no other rank.
#
# A rank gets its next batch when it returns a result. If batches are short, each rank has one more batch in its queue,
# so that it needn't wait for the root. If they are long, another rank might evaluate a queued batch earlier.

_SHORT = 0.02  # seconds; much longer than a message to the root and its reply
_CHECK_EVERY = 0.05  # seconds between checks for lost ranks


class _Packed(NamedTuple):
    """A batch that was sent; stored until its results arrive, because its rank may die."""

    indices: list[int]
    parcel: PackedObject


class Scheduler:
    """One map, on the root."""

    def __init__(
        self, group: WorkerGroup, items: Iterator[Any], fun: Function, batch: int, keep_failures: bool, progress: Any
    ):
        self._group, self._line, self._fun = group, group.line, fun
        self._items, self._batch, self._keep_failures, self._progress = items, batch, keep_failures, progress
        self._rank = group.names[group.comm.rank]
        workers = [rank for rank in range(group.comm.size) if rank != group.comm.rank]
        self._batches: dict[Rank, deque[_Packed]] = {rank: deque() for rank in workers}
        self._resend: deque[_Packed] = deque()
        self._taken, self._exhausted = 0, False
        self._seconds: float | None = None  # running mean of the time per batch
        self._since_check = Backoff()
        self.results: dict[int, Any] = {}
        self.failed: Failed | None = None

    def run(self) -> None:
        """Evaluate all items on the workers, up to the first failure unless exceptions are returned."""
        while self.failed is None:
            self._send_batches()
            if self._exhausted and not self._resend and not any(self._batches.values()):
                self._show()
                return
            if not self._batches:
                # The root evaluates items itself. Batches in `_resend` were sent to a rank that died, so they are packed.
                batch = self._resend.popleft().parcel.opened() if self._resend else self._next_batch()
                if batch and self.failed is None:
                    self._store(evaluated(self._fun, batch, self._keep_failures, self._rank))
            elif self.failed is None:  # otherwise no batch may be active, because the iteration over the items raised
                self._await(RESULT)

    def stop(self, outcome: Outcome) -> None:
        """Send the outcome to the other ranks, and wait until they have received it."""
        # The results don't change until all have been sent, so large arrays needn't be copied (`shared`).
        parcel, patience = PackedObject.of(outcome, shared=True), Backoff()
        for rank in list(self._batches):
            self._post(rank, STOP, parcel)
        while self._batches:
            # Late results, of batches that were active when the map failed, are received and ignored.
            self._await(STOPPED)
        while not self._line.is_quiet():
            self._check_for_losses()
            patience.pause()

    # ---- sending batches

    def _send_batches(self) -> None:
        most_batches = 2 if self._seconds is not None and self._seconds < _SHORT else 1
        # First the ranks without a batch get one, then, if `most_batches` is 2, the ranks with one batch.
        for full in range(most_batches):
            for rank in list(self._batches):
                # A dead rank may have been removed since the list was made.
                if len(self._batches.get(rank, ())) == full:
                    packed = self._next()
                    if packed is None:
                        return
                    # Stored before it is sent: if the rank is dead, the send fails, and another rank gets the batch.
                    self._batches[rank].append(packed)
                    self._post(rank, TASK, packed.parcel)

    def _next(self) -> _Packed | None:
        if self._resend:
            return self._resend.popleft()
        batch = self._next_batch()
        if not batch:
            return None
        try:
            return _Packed([index for index, _ in batch], PackedObject.of(batch))
        except Exception as error:  # noqa: BLE001 - pickle may raise anything
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
            except Exception as error:  # noqa: BLE001 - a generator is the user's code
                self.failed = Failed(Failure.of(error), self._rank, self._taken)
            else:
                batch.append((self._taken, item))
                self._taken += 1
        return batch

    # ---- results

    def _await(self, kind: int) -> None:
        """Receive one message, or find that a rank has died; polling, because MPI's wait would occupy a core."""
        before = len(self._batches)
        wait_for_message(lambda: self._receive(kind) or len(self._batches) < before, self._line.comm)

    def _receive(self, kind: int) -> bool:
        """Receive one message; return whether there was one."""
        message = self._take()
        if message is None:
            return False
        if message.kind == STOPPED:
            self._batches.pop(message.source, None)
        # A rank evaluates its batches in order, so this result belongs to the oldest one.
        elif kind == RESULT and message.source in self._batches:
            self._batches[message.source].popleft()
            self._store(message.content)
        return True

    def _store(self, ended: Ended) -> None:
        share = ended.seconds if self._seconds is None else 0.5 * (self._seconds + ended.seconds)
        self._seconds = share
        for index, result in ended.results:
            if isinstance(result, Failed) and not self._keep_failures:
                self.failed = self.failed or result
                return
            self.results[index] = result.error() if isinstance(result, Failed) else result
        self._show()

    def _show(self) -> None:
        if self._progress is not None:
            self._progress.total = self._taken if self._exhausted else self._progress.total
            self._progress.update(len(self.results) - self._progress.n)

    # ---- ranks that die

    def _take(self) -> Message | None:
        try:
            message = self._line.take()
        except Exception as error:  # noqa: BLE001 - raised again unless a process has died
            self._tolerate(error)
            return None
        if message is None and self._since_check.seconds > _CHECK_EVERY:
            self._check_for_losses()
        return message

    def _post(self, rank: Rank, kind: int, parcel: PackedObject) -> None:
        try:
            self._line.post(rank, kind, parcel)
        except Exception as error:  # noqa: BLE001 - raised again unless a process has died
            self._tolerate(error)

    def _tolerate(self, error: Exception) -> None:
        if not is_interruption(error) or not is_process_failure(error):
            raise error
        self._check_for_losses()

    def _check_for_losses(self) -> None:
        self._since_check.renew()
        for rank in self._group.newly_lost():
            # Messages of the lost rank aren't awaited, and other ranks get its batches.
            self._line.forget(rank)
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
    """Evaluate a function of each item, distributed dynamically to free ranks; return results in the order of the items.

    Parameters
    ----------
    fun : callable
        ``fun(item)`` is called once for each item, on one rank. Communication on `comm` inside it raises a
        CommunicatorError; use MPI.COMM_SELF instead. The root evaluates items only if there is no other rank.
    items : iterable
        Used on the root only. It may be a generator of unknown length; items are taken from it when they are sent. Items
        and results must support pickling; arrays of 64 KiB or more are sent without pickling.
    root : int
    comm : mpi4py intracommunicator, optional
    everywhere : bool
        Whether all ranks get the results, not only the root.
    return_exceptions : bool
        Whether an exception in `fun` is stored among the results, as a WorkerError, instead of ending the map.
    batch : int
        The number of items per message, for functions that take microseconds.
    progress : bool
        Whether the root shows on standard error the number of completed items, and if `items` has a length, the time
        left.

    Returns
    -------
    list or None
        The results, on the root; None on the others unless `everywhere`.

    Raises
    ------
    WorkerError
        On all ranks, if `fun` raises on any rank, or the iteration over `items` raises on the root. The error has that
        rank, the traceback and the item's `index`. Items that have been started are finished first; no others are started.
    TypeError, ValueError
        On all ranks, if an argument is invalid on any of them.
    RemoteError
        On all remaining ranks, if the root's process dies and the MPI library survives it. If the process of another rank
        dies, the others evaluate its items.

    Ranks
    -----
    All ranks of `comm` call it, with the same arguments except `fun` and `items`.

    Adjoint
    -------
    None: items are plain values, and results constants in every trace.

    Examples
    --------
    >>> print(mpiad.mpi_map(lambda x: x**2, [1, 2, 3], everywhere=True))
    [1, 4, 9]
    """
    user_channel = channel(comm, "mpi_map", survivors=True)
    settings = (root, everywhere, return_exceptions, batch)
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


def _agreed_items(group: WorkerGroup, user_channel: Channel, fun: object, items: Any, settings: tuple) -> Iterator[Any]:
    """Check the arguments on all ranks; return the root's items."""
    wrong, given = None, iter(())
    try:
        given = _checked(user_channel, fun, items, settings)
    except (TypeError, ValueError) as error:
        wrong = error
    # The user's communicator doesn't work after a process has died, so this is the group's.
    found = group.comm.allgather((settings, None if wrong is None else (type(wrong), str(wrong))))
    for name, (other, problem) in zip(group.names, found):
        if problem is not None or other != found[0][0]:
            group.close()
            if problem is not None:
                kind, text = problem
                raise wrong or kind(f"{text} (raised on rank {name})")
            raise wrong or ValueError(
                "mpi_map: all ranks must give the same root, everywhere, return_exceptions and batch, but rank "
                f"{group.names[0]} gave {found[0][0]} and rank {name} gave {other}."
            )
    return given


def _checked(user_channel: Channel, fun: object, items: Iterable, settings: tuple) -> Iterator[Any]:
    root, _, _, batch = settings
    root_of(root, user_channel, "mpi_map")
    if not callable(fun):
        raise TypeError(f"mpi_map: fun must be callable, but got {type(fun).__name__} {fun!r:.60}.")
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise ValueError(f"mpi_map: batch must be an integer above zero, but got {batch!r}.")
    if user_channel.rank != root:
        return iter(())
    try:
        return iter(items)
    except TypeError:
        got = f"{type(items).__name__} {items!r:.60}"
        raise TypeError(f"mpi_map: items must be iterable on the root, but got {got}.") from None
    except Exception as error:  # noqa: BLE001 - their `__iter__` is the user's code
        return _raising(error)


def _raising(error: Exception) -> Iterator[Any]:
    """Return an iterator that raises at its first item, when all ranks are in the map, so that all of them raise."""
    yield from ()
    raise error


def _run(
    group: WorkerGroup, user_channel: Channel, fun: Function, items: Iterator[Any], settings: tuple, progress: bool
) -> Outcome:
    # Exceptions of `fun` and of `items` are part of the outcome: all ranks must call `close` before they raise.
    root, everywhere, keep_failures, batch = settings
    place = group.place_of(root)
    if user_channel.rank != root:
        return work(group.line, place, fun, keep_failures, user_channel.rank)
    bar = progress_bar("items", _count(items)) if progress else None
    scheduler = Scheduler(group, items, fun, batch, keep_failures, bar)
    scheduler.run()
    if bar is not None:
        bar.close()
    results = None if scheduler.failed is not None else [scheduler.results[k] for k in range(len(scheduler.results))]
    outcome = Outcome(scheduler.failed, results)
    scheduler.stop(outcome if everywhere else outcome._replace(results=None))
    return outcome


def _count(items: Iterator[Any]) -> int | None:
    try:
        return length_hint(items) or None
    except Exception:  # noqa: BLE001 - the user's code
        return None
