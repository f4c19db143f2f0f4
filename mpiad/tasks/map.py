"""`mpi_map`: independent items, handed to whichever rank is free.

`scheduler` is the root's part, `worker` that of the others and what they send each other, `worker_group` who they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import length_hint
from typing import Any

from mpiad._typing import Comm, Rank
from mpiad.primitives.checks import root_of
from mpiad.progress import progress_bar
from mpiad.tasks.scheduler import Scheduler
from mpiad.tasks.worker import Outcome, work
from mpiad.tasks.worker_group import WorkerGroup
from mpiad.transport import Channel, channel
from mpiad.transport.fault_tolerance import is_interruption
from mpiad.transport.recovery import recover


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
    """Evaluate a function of each item, on whichever rank is free, with the results in the items' order.

    Parameters
    ----------
    fun : callable
        ``fun(item)`` is called once for each item, on one rank; it mustn't communicate on `comm`, which raises a
        CommunicatorError inside it: MPI.COMM_SELF serves what would. The root evaluates only where no other rank is there.
    items : iterable
        Counts on the root only. It may be a generator of unknown length, and is read no further than is handed out.
        Items and results are anything that can be pickled; arrays of 64 KiB or more travel without being.
    root : int
    comm : mpi4py intracommunicator, optional
    everywhere : bool
        Whether all ranks get the results, and not the root alone.
    return_exceptions : bool
        Whether an exception in `fun` stands among the results, as a WorkerError, instead of ending the map.
    batch : int
        How many items are handed out at a time, for functions that take microseconds.
    progress : bool
        Whether the root shows on standard error how many items are done, and how long the rest takes where `items` has a
        length.

    Returns
    -------
    list or None
        The results, on the root; None on the others unless `everywhere`.

    Raises
    ------
    WorkerError
        On all ranks, where `fun` raises on any, or `items` on the root: with that rank, its traceback and the item's
        `index`. Items under way are finished first, no others are begun.
    TypeError, ValueError
        On all ranks, where an argument is wrong on any of them.
    RemoteError
        On all ranks that are left, where the root's process dies and the MPI survives it. Where another rank's dies, the
        others evaluate its items.

    Ranks
    -----
    All ranks of `comm` call it, with the same arguments but for `fun` and `items`.

    Adjoint
    -------
    None: items are plain values, and results constants in every trace.

    Examples
    --------
    >>> print(mpiad.mpi_map(lambda x: x**2, [1, 2, 3], everywhere=True))
    [1, 4, 9]
    """
    used = channel(comm, "mpi_map", survivors=True)
    settings = (root, everywhere, return_exceptions, batch)
    try:
        group = WorkerGroup(used)
        given = _agreed_items(group, used, fun, items, settings)
        with used.evaluating("an item of mpi_map"):
            outcome = _run(group, used, fun, given, settings, progress)
        group.close()
    except Exception as error:
        if is_interruption(error):
            recover(used, error, "mpi_map")
        raise
    if outcome.failed is not None:
        raise outcome.failed.error(outcome.index)
    return outcome.results


def _agreed_items(group: WorkerGroup, used: Channel, fun: object, items: Any, settings: tuple) -> Iterator[Any]:
    """Check the arguments on all ranks; return the root's items."""
    wrong, given = None, iter(())
    try:
        given = _checked(used, fun, items, settings)
    except (TypeError, ValueError) as error:
        wrong = error
    # On the group's own communicator: on the user's nothing arrives any more where a process has died.
    found = group.comm.allgather((settings, None if wrong is None else (type(wrong), str(wrong))))
    for name, (other, said) in zip(group.names, found):
        problem = said or (other != found[0][0] and (
            ValueError,
            "mpi_map: all ranks must give the same root, everywhere, return_exceptions and batch, but rank "
            f"{group.names[0]} gave {found[0][0]} and rank {name} gave {other}.",
        ))  # fmt: skip
        if problem:
            group.close()
            kind, text = problem
            raise wrong or kind(f"{text} (raised on rank {name})" if said else text)
    return given


def _checked(used: Channel, fun: object, items: Iterable, settings: tuple) -> Iterator[Any]:
    root, _, _, batch = settings
    root_of(root, used, "mpi_map")
    if not callable(fun):
        raise TypeError(f"mpi_map: fun must be callable, but got {type(fun).__name__} {fun!r:.60}.")
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise ValueError(f"mpi_map: batch must be an integer above zero, but got {batch!r}.")
    if used.rank != root:
        return iter(())
    try:
        return iter(items)
    except TypeError:
        got = f"{type(items).__name__} {items!r:.60}"
        raise TypeError(f"mpi_map: items must be iterable on the root, but got {got}.") from None
    except Exception as error:  # noqa: BLE001 - their `__iter__` is the user's code
        return _raising(error)


def _raising(error: Exception) -> Iterator[Any]:
    """Return items that raise when the first one is asked for: by then all ranks are there to hear of it."""
    yield from ()
    raise error


def _run(
    group: WorkerGroup, used: Channel, fun: Callable[[Any], Any], items: Iterator[Any], settings: tuple, progress: bool
) -> Outcome:
    # Exceptions of `fun` and of items are in the outcome: `close` is collective, so nobody leaves before it.
    root, everywhere, goes_on, batch = settings
    place = group.place_of(root)
    if used.rank != root:
        return work(group.line, place, fun, goes_on, used.rank)
    bar = progress_bar("items", _count(items)) if progress else None
    scheduler = Scheduler(group, items, fun, batch, goes_on, bar)
    scheduler.run()
    if bar is not None:
        bar.close()
    failed, index = scheduler.failed or (None, None)
    # In the items' order, whichever rank was done first.
    results = None if failed is not None else [scheduler.results[k] for k in range(len(scheduler.results))]
    scheduler.stop(Outcome(failed, index, results if everywhere else None))
    return Outcome(failed, index, results)


def _count(items: Iterator[Any]) -> int | None:
    try:
        return length_hint(items) or None
    except Exception:  # noqa: BLE001 - the user's code; how many there are shows at the end
        return None
