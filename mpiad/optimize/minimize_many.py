"""`minimize_many`: starting points are divided over groups of ranks, and each group minimises from its own in turn.

The groups know nothing of each other until the end, so a start that takes long or fails keeps no other group waiting. Then
the results travel to all ranks.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy

from mpiad._typing import Comm, Function, Tree
from mpiad.errors import DeadlockError, WorkerError
from mpiad.optimize.checkpoint import as_checkpoint
from mpiad.optimize.minimize import minimize
from mpiad.optimize.packing import require_tellable
from mpiad.optimize.root_start import as_given, own_home, require_roots
from mpiad.optimize.scipy_methods import is_sharded
from mpiad.pytrees import fetched, flatten, leaf_on_device, named_leaves, put
from mpiad.transport import Channel, channel
from mpiad.transport.agreement import raise_together, raising_together, require_same
from mpiad.transport.channels import make_communicator
from mpiad.transport.device_arrays import ArrayModule, arrays_of, is_device_array
from mpiad.transport.fault_tolerance import is_interruption

_CALL = "minimize_many"
_ADVICE = "Give them on the root only, or draw them by the same seed on all ranks."
_OF_GROUPS = {"fun", "x0", "root", "comm", "progress"}
_KEYWORDS = [name for name in inspect.signature(minimize).parameters if name not in _OF_GROUPS]


class Minima(NamedTuple):
    """What came of all starts, the same on all ranks.

    Attributes
    ----------
    best : scipy.optimize.OptimizeResult or None
        The one of the lowest finite value, whether it has converged or not; the first of several. None where there is none.
    results : list of scipy.optimize.OptimizeResult
        One for each start, in their order. A start whose evaluation raised has a `fun` of NaN, its start as `x`, status
        -1, and the WorkerError as `error`.

    Examples
    --------
    >>> found = mpiad.optimize.minimize_many(lambda x: np.sum((x**2 - 1.0) ** 2), [np.array([0.5]), np.array([2.0])])
    >>> print(len(found.results), found.best.x.round(4), found.best.fun < 1e-8)
    2 [1.] True
    """

    best: scipy.optimize.OptimizeResult | None
    results: list[scipy.optimize.OptimizeResult]


def minimize_many(
    fun: Function, starts: Sequence[Tree] | None = None, *, group_size: int = 1, comm: Comm = None, **settings: Any
) -> Minima:
    """Minimise from many starting points, which groups of ranks divide among themselves.

    Parameters
    ----------
    fun : callable
        As in `minimize`, on the ranks of a group. Where it has a parameter named `comm`, it gets the group's communicator
        by that name, and everything that it communicates must go through that; so do `jac` and `hessp`.
    starts : sequence of nests of arrays
        Counts on rank 0 only: others give None or the same. An array's rows are as many starts. Those on a device travel by
        the host, and each group puts them on its own: that of `args`, or of what the rank gives as starts, else the current
        one.
    group_size : int
        Ranks that evaluate together. Ranks that are left over, and groups beyond the number of starts, have nothing to do.
    comm : mpi4py intracommunicator, optional
    **settings
        Further arguments of `minimize`, but `root` and `progress`, for each start. With a `checkpoint` the k-th start
        has a file of its own, ``run.start<k>.npz``.

    Returns
    -------
    Minima
        `best` and all `results`.

    Raises
    ------
    TypeError, ValueError
        On all ranks, where an argument of any is wrong, or starts aren't rank 0's. What one group finds out alone is raised
        once all groups have come to the end of their starts; of other kinds, its own there and one of Python's nearest kind
        elsewhere.

    Ranks
    -----
    All ranks of `comm` call it, with the same group_size. Group g takes the starts g, g + G, g + 2G and so on of G
    groups. An exception in an evaluation is the end of that start, and of no other, where it can be raised on all ranks
    of its group: see `minimize`.

    Adjoint
    -------
    None: the result is a constant in every trace.

    Examples
    --------
    >>> found = mpiad.optimize.minimize_many(lambda x: np.sum((x**2 - 1.0) ** 2), [np.array([0.5]), np.array([-2.0])])
    >>> print(np.round(np.abs(found.best.x), 4))
    [1.]
    """
    used = channel(comm, _CALL)
    points, home = _agree_on_arguments(used, fun, starts, group_size, settings)
    groups = max(1, min(used.size // group_size, len(points)))
    mine = used.rank // group_size
    # Of the user's own communicator, since `fun` gets a part of it: our duplicate may be under watch. All have just met.
    # Ranks without a group make one of their own: a split takes all.
    group = make_communicator(used.user.Split, min(mine, groups), used.rank)
    found, wrong = {}, None
    try:
        if mine < groups:
            found = _minima(fun, points, range(mine, len(points), groups), group, home, settings)
    except Exception as error:  # noqa: BLE001 - the other groups wait in the next agreement, whatever it is
        if isinstance(error, DeadlockError) or is_interruption(error):
            raise  # the other ranks have left their waits as well, or are about to, and come to no agreement
        wrong = error
    finally:
        leads = group.rank == 0
        group.Free()
    raise_together(used, wrong)
    return _gathered(used, found if leads else {}, points, home)


def _agree_on_arguments(
    used: Channel, fun: Function, starts: Sequence[Tree] | None, group_size: int, settings: dict[str, Any]
) -> tuple[list[Start], ArrayModule | None]:
    """Check the arguments on all ranks; return rank 0's starts, and the device that this rank puts them on."""
    with raising_together(used, Exception):
        _check(used, fun, group_size, settings)
        points = starts_of(starts) if used.rank == 0 else []  # type: ignore[arg-type]
        if used.rank == 0 and not points:
            raise ValueError(f"{_CALL}: there must be one starting point at least, but got {starts!r:.60}.")
        require_tellable([start.nest for start in points], _CALL, "starts are")
    require_same(used, f"group_size={group_size}", _CALL)
    points = used.data.bcast(points, 0)
    with raising_together(used, ImportError):
        home = home_of(points, starts, settings.get("args", ()))
    own = None if starts is None or used.rank == 0 else _leaves_of(starts)
    roots = _leaves_of([point.nest for point in points])
    require_roots(used, 0, own, roots, f"{_CALL}: starts count on the root only", _ADVICE)
    return points, home


def _leaves_of(starts: Tree) -> list[tuple[str, Any]]:
    try:
        starts = [as_given(start.nest) for start in starts_of(starts)]
    except Exception:  # noqa: BLE001, S110 - it is no sequence, and the root's is: that is what differs
        pass
    return named_leaves(starts, "starts")


def _check(used: Channel, fun: Function, group_size: int, settings: dict[str, Any]) -> None:
    if not callable(fun):
        raise TypeError(f"{_CALL}: fun must be callable, but got {type(fun).__name__} {fun!r:.60}.")
    if not isinstance(group_size, (int, np.integer)) or not 1 <= group_size <= used.size:
        raise ValueError(f"{_CALL}: group_size must be an integer from 1 to the {used.size} ranks, but got {group_size!r}.")
    as_checkpoint(settings.get("checkpoint"), _CALL, writes=used.rank % group_size == 0)  # the root of a group
    unknown = [name for name in settings if name not in _KEYWORDS]
    if unknown:
        raise TypeError(f"{_CALL}: {unknown[0]!r} is no argument of it. Those of minimize that it takes: {_KEYWORDS}.")
    if group_size > 1 and is_sharded(settings.get("method", "L-BFGS")):
        raise ValueError(
            f"{_CALL}: a sharded method has pieces of its own on each rank, but got group_size={group_size}, and "
            "starts that count on rank 0. Call minimize on communicators of your own."
        )


def _minima(
    fun: Function, points: list[Start], mine: range, group: Comm, home: ArrayModule | None, settings: dict[str, Any]
) -> dict[int, scipy.optimize.OptimizeResult]:
    """Return the results of this group's starts."""
    settings = {**settings, "comm": group}
    checkpoint = as_checkpoint(settings.get("checkpoint"), _CALL, writes=group.rank == 0)
    for name in ("jac", "hessp"):
        settings[name] = _on(group, settings.get(name))
    found = {}
    for k in mine:
        if checkpoint is not None:
            file = checkpoint.file
            settings["checkpoint"] = checkpoint._replace(path=file.with_name(f"{file.stem}.start{k}{file.suffix}"))
        try:
            found[k] = minimize(_on(group, fun), points[k].at(home), **settings)
        except WorkerError as error:
            found[k] = scipy.optimize.OptimizeResult(
                x=points[k].at(home), fun=math.nan, success=False, status=-1, nit=0, nfev=0, message=str(error),
                # Without the cause, which may not be pickled.
                error=WorkerError(str(error), error.rank, exit_code=error.exit_code),
            )  # fmt: skip
    return found


def _on(group: Comm, function: Function | None) -> Any:
    """Return a function of the user's with the group's communicator put in, where it has a place for it."""
    if not callable(function) or not _has_place(function):
        return function
    return lambda *args: function(*args, comm=group)


def _has_place(function: Function) -> bool:
    try:
        return "comm" in inspect.signature(function).parameters
    except ValueError:  # some builtins don't say
        return False


def _gathered(
    used: Channel, found: dict[int, scipy.optimize.OptimizeResult], points: list[Start], home: ArrayModule | None
) -> Minima:
    """Return the results of all groups, on all ranks."""
    # Only the first rank of each group sends: the results are the same on all ranks of it.
    found = found if home is None else {k: result_on_host(result) for k, result in found.items()}
    every = {k: result for of_rank in used.data.allgather(found) for k, result in of_rank.items()}
    results = [every[k] for k in range(len(points))]
    if home is not None:
        results = [result_at(result, start, home) for result, start in zip(results, points)]
    finite = [result for result in results if math.isfinite(result.fun)]
    return Minima(min(finite, key=lambda result: result.fun, default=None), results)


class Start(NamedTuple):
    """A starting point on the host."""

    nest: Tree
    away: list[bool]  # which of its leaves belong on a device

    def at(self, home: ArrayModule | None) -> Tree:
        """Return the nest with those leaves on a device."""
        return self.like(self.nest, home) if any(self.away) else self.nest

    def like(self, nest: Tree, home: ArrayModule | None) -> Tree:
        """Return a nest of the same form with those leaves on a device."""
        leaves, build = flatten(nest)
        return build(put(leaves, [home if away else None for away in self.away]))


def starts_of(given: Sequence[Tree]) -> list[Start]:
    """Return starting points; an array's rows are as many."""
    if is_device_array(given):
        home: Any = arrays_of(given)
        return [Start(row, [True]) for row in home.to_host(given)]
    return [Start(_on_host(nest), [arrays_of(leaf) is not None for leaf in flatten(nest)[0]]) for nest in given]


def _on_host(nest: Tree) -> Tree:
    """Return a nest with arrays of the host's for those on a device."""
    leaves, build = flatten(nest)
    # A nest that is all on the host stays the object that it is.
    return build(fetched(leaves)) if leaf_on_device(nest) is not None else nest


def home_of(starts: list[Start], *given: Any) -> ArrayModule | None:
    """Return this rank's device (see `own_home`); None where all starts are on the host."""
    return own_home(*given) if any(any(start.away) for start in starts) else None


def result_on_host(result: scipy.optimize.OptimizeResult) -> scipy.optimize.OptimizeResult:
    """Return a result as it can be sent."""
    return _with(result, _on_host)


def result_at(result: scipy.optimize.OptimizeResult, start: Start, home: ArrayModule) -> scipy.optimize.OptimizeResult:
    """Return a result with variables and gradient where the start was."""
    return _with(result, lambda nest: start.like(nest, home))


def _with(result: scipy.optimize.OptimizeResult, move: Function) -> scipy.optimize.OptimizeResult:
    moved = {name: move(result[name]) for name in ("x", "jac") if result.get(name) is not None}
    return scipy.optimize.OptimizeResult({**result, **moved})
