"""First calls of f and of the events' conditions, which show whether they are written for columns.

A wrong axis is found by a number of columns that no other axis has. A sum over all of u has the right shape and would
couple the trajectories without a word: it is found because the first column's value changes with those beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.derivative import COUPLED, Derivative, derivative_of
from mpiad.ensemble.events import Event
from mpiad.ensemble.field import Field
from mpiad.ensemble.linearization import check_traceable

__all__ = ["MOVED", "require_uncoupled", "try_once"]

# By how much the other columns are moved, relative to u or to 1, and what of the largest value is rounding.
MOVED, _ROUNDINGS = 0.01, 1e4


def try_once(batch: Batch, events: Sequence[Event], traced: bool) -> None:
    """Call f and the conditions of events before the solve.

    Parameters
    ----------
    batch : Batch
        Of plain arrays.
    events : sequence of Event
    traced : bool
        Whether f will be differentiated.

    Raises
    ------
    TypeError, ValueError
        Where they aren't written for columns, or f for traces.
    """
    if not batch.size:
        return
    if not len(batch.u0):
        raise ValueError(f"solve: u0 must have one component at least, but has shape {batch.shape}.")
    width, more = _widths(batch)
    derivative = derivative_of(batch.f, batch.shape)
    with np.errstate(all="ignore"):
        first = _columns(batch, np.resize(np.arange(batch.size), width))
        derivative.check(*first)
        if len(batch.shape) < 2:  # matrices are handed to f one by one
            moved = _moved(*_columns(batch, np.zeros(more, int)))
            _check_uncoupled(lambda *at: _written(derivative, *at), first, moved, "f")
            for event in events:
                _check_uncoupled(event.value, first, moved, "a condition of the events")
        if traced:
            ids = np.resize(np.arange(batch.size), width)
            leaves = [leaf[..., ids] if varies else leaf for leaf, varies in zip(batch.p.leaves, batch.p.varies)]
            check_traceable(Field(batch), first[0], leaves, first[2])


def _widths(batch: Batch) -> list[int]:
    """Return two numbers of columns that no other axis has."""
    taken = {len(batch.u0), *batch.shape}
    for leaf, varies in zip(batch.p.leaves, batch.p.varies):
        taken.update(np.shape(leaf)[:-1] if varies else np.shape(leaf))
    return [n for n in range(2, len(taken) + 4) if n not in taken][:2]


def _columns(batch: Batch, ids: Array) -> tuple[Array, Any, Array]:
    u, t = batch.u0[:, ids], batch.start[ids].astype(batch.u0.real.dtype)
    u.flags.writeable = t.flags.writeable = False
    return u, batch.p.columns(ids, len(batch.shape) > 1), t


def _moved(u: Array, p: Any, t: Array) -> tuple[Array, Any, Array]:
    """Return the columns with all but the first at other places, each component its own way."""
    way = np.cos(np.arange(u.size).reshape(u.shape))
    others = (u + MOVED * (1 + np.abs(u)) * way).astype(u.dtype)
    others[:, 0] = u[:, 0]
    others.flags.writeable = False
    return others, p, t


def _written(derivative: Derivative, u: Array, p: Any, t: Array) -> Array:
    out = np.empty_like(u)
    derivative.write(out, u, p, t)
    return out


def _check_uncoupled(fun: Callable[..., Array], first: tuple, moved: tuple, name: str) -> None:
    value = fun(*first)
    try:
        other = fun(*moved)
    except Exception:  # noqa: BLE001 the moved states may lie where it isn't defined
        return
    alone, beside = value[..., 0], other[..., 0]
    if alone.tobytes() == beside.tobytes():
        return  # nearly always, and each solve comes here
    known = [part[np.isfinite(part)] for part in (value, other)]
    largest = max((float(np.abs(part).max(initial=0.0)) for part in known), default=0.0)
    require_uncoupled(alone, beside, largest, float(np.finfo(first[0].dtype).eps), name)


def require_uncoupled(alone: Array, beside: Array, largest: float, eps: float, name: str) -> None:
    """Look at the first trajectory's values beside some columns and beside others.

    Parameters
    ----------
    alone, beside : array
        On the host.
    largest : float
        The largest value among all columns.
    eps : float
        The distance from one to the next number in the precision of the states.
    name : str
        What gave the values, for the message of the error.

    Raises
    ------
    ValueError
        Where they differ by more than rounding.
    """
    if not np.allclose(alone, beside, rtol=0, atol=_ROUNDINGS * eps * largest, equal_nan=True):
        raise ValueError(
            f"solve: {name} gives the first trajectory {alone.tolist()} beside some columns, but {beside.tolist()} beside "
            f"others: trajectories must not depend on each other. {COUPLED}"
        )
