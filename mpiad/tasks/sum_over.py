"""`sum_over`: a differentiable sum of a function over items, which are distributed to groups of ranks.

Each group records its items on the current tapes, as in a direct call of the function. At the end one reduction
collects the values of all items, which are added in the order of the items, independently of the groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import takewhile
from typing import Any, NamedTuple

import autograd.numpy as anp
from autograd.tracer import getval

from mpiad._typing import Comm, Scalar
from mpiad.device import to_host
from mpiad.differentiation.advice import explain
from mpiad.differentiation.objective import check_objective, problem_with, weight_of
from mpiad.errors import ConvergenceError, NotFiniteError, WorkerError
from mpiad.primitives import mpi_allreduce
from mpiad.transport import Channel, channel
from mpiad.transport.core.agreement import FAILURES, Failure, agreed, alike_on_all
from mpiad.transport.core.polling import SharedCounter, threads_may_communicate
from mpiad.transport.core.rank_groups import RankGroups, rank_groups
from mpiad.transport.devices.device_arrays import is_device_array
from mpiad.transport.exits.user_failures import StageFailures

_CALL = "tasks.sum_over"
_REASON = (
    f"an item of {_CALL} is evaluated by one group of ranks (in fun, communicate on its argument comm), and the other "
    "ranks take no part"
)


class _Failed(NamedTuple):
    """The index of an item that failed in this rank's group, and the exception if this rank raised it."""

    item: int
    error: BaseException | None


def sum_over(
    items: Iterable[Any],
    fun: Callable[[Any, Any], Scalar | None],
    *,
    groups: RankGroups | int,
    schedule: str = "static",
    objective: str = "root",
    comm: Comm = None,
) -> Scalar:
    """Sum a function over items, such as shots, load cases or wells; one group of ranks evaluates each item.

    Parameters
    ----------
    items : sequence
        The items. Their number must be the same on all ranks.
    fun : callable
        ``fun(item, comm)`` returns a real number. The ranks of a group call it together, and communicate on the group's
        communicator `comm`, for example in a `Domain`; if there are several groups, communication among all ranks in
        `fun` raises a CommunicatorError. `fun` may use traced values of the enclosing function.
    groups : RankGroups or int
        The groups, or the number of groups. For a number, the groups are constructed at the first call and cached.
    schedule : str
        ``"static"``: for G groups, group g evaluates the items g, g + G, g + 2 G and so on. ``"dynamic"``: a group takes
        the next item when it has finished an item, which is faster if the times of items differ a lot. The result is the
        same. The static schedule is always used if MPI doesn't support calls from several threads.
    objective : str
        The value of an item, as in `value_and_grad`. "root": the number that the group's first rank returns. "sum" or
        "mean": the sum or the mean of the numbers that all ranks of the group return.
    comm : mpi4py intracommunicator, optional
        The ranks of all groups, if `groups` is a number.

    Returns
    -------
    float
        The sum in the order of the items, on all ranks. If the results of `fun` don't depend on the number of groups, the
        sum is bitwise the same for any number.

    Raises
    ------
    WorkerError
        On all ranks, if `fun` raises on any rank. The error has the attributes `rank`, `traceback` and the item's `index`.
        If `fun` raised a ConvergenceError, all ranks raise a ConvergenceError, so that `minimize` shortens its step. With a
        dynamic schedule no items are started afterwards.
    TypeError, ValueError
        On all ranks, if an argument is invalid on any rank, or differs between ranks.

    Ranks
    -----
    All ranks call it, with the same arguments; only the contents of items and the function `fun` may differ.

    Adjoint
    -------
    Each rank gets the derivatives of the items of its group; the adjoint of the communication in `fun` runs within the
    group. For a variable that all ranks share (``shared=True``) the derivatives of all ranks are summed to the whole
    gradient. The recorded operations of all items of a group are stored until the reverse pass;
    ``scan(checkpoints=...)`` inside an item reduces this memory.

    Examples
    --------
    >>> loss = lambda x: mpiad.tasks.sum_over([1.0, 2.0, 3.0], lambda a, comm: (x - a) ** 2, groups=1)
    >>> print(mpiad.value_and_grad(loss, shared=True)(1.0))
    (np.float64(5.0), np.float64(-6.0))
    """
    division = rank_groups(groups, comm)
    whole, group = channel(division.whole, _CALL), channel(division.comm, _CALL)

    def checked() -> list:
        check_objective(objective, _CALL)
        if not callable(fun):
            raise TypeError(f"{_CALL}: fun must be callable, but got {type(fun).__name__} {fun!r:.60}.")
        if schedule not in ("static", "dynamic"):
            raise ValueError(f"{_CALL}: schedule must be 'static' or 'dynamic', but got {schedule!r:.60}.")
        return list(items)

    settings = f"{division.count} groups, schedule={schedule!r:.60}, objective={objective!r:.60}"
    given = alike_on_all(whole, checked, lambda given: [f"{len(given)} items, {settings}"], _CALL)
    weight = weight_of(objective, group, 0)
    if schedule == "static" or not threads_may_communicate():
        values, error = _run(fun, given, range(division.index, len(given), division.count), division, weight, None)
    else:
        with SharedCounter(whole.user) as counter:
            taken = iter(lambda: group.data.bcast(counter.take() if group.rank == 0 else None), None)
            values, error = _run(fun, given, takewhile(lambda k: k < len(given), taken), division, weight, counter)
    if error is not None:
        raise error
    terms = [values.get(k, 0.0) for k in range(len(given))]
    return anp.sum(mpi_allreduce(anp.array(terms, dtype=float), comm=division.whole))


def _run(
    fun: Callable, items: list, indices: Iterable[int], division: RankGroups, weight: float, counter: SharedCounter | None
) -> tuple[dict[int, Any], Exception | None]:
    """Return the values of the items that this rank's group computed, and the exception that all ranks raise."""
    whole, group = channel(division.whole, _CALL), channel(division.comm, _CALL)
    # A separate communicator, because a failed rank may start an agreement while other ranks communicate in `fun`.
    comm = group.derive()
    failures = StageFailures(comm, _CALL, "mpiad.tasks", explain)
    values, failed = dict[int, Any](), None
    try:
        with whole.refusing(_REASON) if division.count > 1 else nullcontext():
            for k in indices:
                values[k], failed = _evaluated(fun, items[k], k, division.comm, weight, failures)
                if failed is not None:
                    break
    finally:
        failures.close()
    group.drop(comm)
    if failed is not None and counter is not None:
        counter.take(len(items))  # no group starts further items
    return values, _agreed_error(whole, failed)


def _evaluated(
    fun: Callable, item: Any, index: int, comm: Comm, weight: float, failures: StageFailures
) -> tuple[Any, _Failed | None]:
    """Evaluate an item on this rank's group; return this rank's term of its value, or the failure of a rank."""
    own_error: BaseException | None = None

    def stage() -> Any:
        nonlocal own_error
        try:
            value = fun(item, comm)
            problem = problem_with(value, weight, _CALL)
            if problem is not None:
                raise problem.kind(problem.text)
        except FAILURES as error:
            own_error = error
            raise
        # This rank's term of the sum is a double-precision number without axes, on the host.
        if not weight:
            return 0.0
        value = to_host(value) if is_device_array(getval(value)) else value
        return weight * (anp.reshape(value, ()).astype(float) if hasattr(value, "astype") else float(value))

    try:
        return failures.run(stage), None
    except WorkerError as error:
        if error is own_error:
            raise  # if waiting ranks can be interrupted, the failed rank raises immediately
        return None, _Failed(index, own_error)


def _agreed_error(channel: Channel, failed: _Failed | None) -> Exception | None:
    """Return the exception that all ranks raise, that of the first item that failed; None if no item failed."""
    found = channel.data.allgather(None if failed is None else (failed.item, failed.error is None))
    first = min([(*entry, rank) for rank, entry in enumerate(found) if entry is not None], default=None)
    if first is None:
        return None
    item, _, rank = first
    cause = failed.error if failed is not None and channel.rank == rank else None
    failure: Failure = channel.data.bcast(None if cause is None else Failure.of(cause), rank)  # type: ignore[assignment]
    text = f"{_CALL}: item {item} failed on rank {rank} with {failure.summary}"
    error: Exception = WorkerError(text, rank, failure.trace, item, failure.exit_code)
    if failure.builtin in (ConvergenceError.__name__, NotFiniteError.__name__):
        error = ConvergenceError(text, getattr(cause, "history", None))
    error.__cause__ = cause
    return agreed(channel, error)
