"""First calls of f and of the functions of events, to check that they are written for columns (one per trajectory).

Wrong axes are detected, since no other axis has the same length as the axis of columns. A sum over all of u has the correct
shape, but couples the trajectories, as does p[0] if p has shape (n,). Such errors are detected by further calls:

- The first trajectory is in another column, beside perturbed trajectories.
- At the end of tspan, or at a given time of the event, columns of several trajectories are compared with copies of the
  first one and of the last one. This detects a maximum and integers, too, and what depends on time.

The results for a trajectory must be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial, wraps
from typing import NamedTuple, TypeVar

import autograd.numpy as anp
import numpy as np

from mpiad._typing import Array, Function, Tree
from mpiad.ensemble.batch import Batch, is_on_device, on_device_of
from mpiad.ensemble.derivative import COUPLED, Columns, derivative_of, locked
from mpiad.ensemble.event import DoseTable, Event, affected
from mpiad.ensemble.initialization import derivative_at
from mpiad.ensemble.linearization import check_traceable
from mpiad.pytrees import flatten
from mpiad.transport.devices.device_arrays import arrays_of

T = TypeVar("T")

# Relative size of the perturbation; bound on relative rounding errors, in units of the machine precision.
_MOVED, _ROUNDINGS = 0.01, 1e4


def try_once(batch: Batch, events: Sequence[Event], traced: bool) -> int:
    """Call f and the functions of events with plain arrays; if `traced`, also trace f, and return its number of operations.

    A TypeError or ValueError is raised if a function isn't written for columns, or f can't be traced.
    """
    if not batch.size:
        return 0
    if not len(batch.u0):
        raise ValueError(f"solve: u0 must have at least one component, but has shape {batch.shape}.")
    width, other_width = _widths(batch)
    xp = arrays_of(batch.u0)
    numbers = np.arange if xp is None else xp.arange
    derivative = derivative_of(batch.f, batch.shape)
    with np.errstate(all="ignore"):
        first = _columns(batch, numbers(width) % batch.size)
        derivative.check(*first)
        if len(batch.shape) < 2:  # f is called with one matrix at a time
            moved = [cache(partial(_perturbed_columns, batch, numbers(other_width), p_and_t)) for p_and_t in (True, False)]
            ends = [0, min(width, batch.size) - 1] if batch.size > 1 else []
            beside = cache(partial(_columns, batch, numbers(width) % batch.size, True))
            alone = {k: cache(partial(_columns, batch, numbers(other_width) * 0 + k, True)) for k in ends}
            check = partial(_check_uncoupled, first=first, moved=moved, beside=beside, alone=alone)
            check(lambda u, p, t: derivative_at(derivative, u, p, t, None), name="f")
            for event in events:
                if event.condition is not None:
                    check(event.value, name="a condition of the events")
                if callable(event.times):
                    check(partial(_given, event.due), name="times(p) of the events")
                if event.acts:
                    check(partial(_affected_when_due, event, batch), name="an affect of the events")
                table = getattr(event.affect, "__self__", None)
                if isinstance(table, DoseTable) and callable(table.amount):
                    check(partial(_given, table.amount), name="amounts(p) of Event.doses")
        if traced:
            return check_traceable(batch, first[0], batch.p.chosen(numbers(width) % batch.size), first[2])
    return 0


def with_plain_numbers(batch: Batch) -> Batch:
    """Return a batch whose f is called with one trajectory at a time, if f can't be called with columns."""
    if len(batch.shape) > 1 or is_on_device(batch.plain()):
        return batch
    f, (_, varies, build) = batch.f, batch.p

    @wraps(f)
    def one_by_one(u: Array, p: Tree, t: Array) -> Array:
        column = Columns(flatten(p)[0], varies, build).column
        return anp.stack([anp.array(f(u[..., j], column(j), t[j])) for j in range(len(t))], axis=-1)

    for candidate in (batch, batch._replace(f=one_by_one)):
        with suppress(Exception):
            try_once(candidate.plain(), (), False)
            return candidate
    return batch  # the solve will raise the error


def _widths(batch: Batch) -> list[int]:
    """Return two numbers of columns that differ from the lengths of all other axes."""
    lengths = {len(batch.u0), *batch.shape}
    for leaf, varies in zip(batch.p.leaves, batch.p.varies):
        lengths.update(np.shape(leaf)[:-1] if varies else np.shape(leaf))
    return [n for n in range(2, len(lengths) + 4) if n not in lengths][:2]


def _columns(batch: Batch, ids: Array, at_end: bool = False) -> tuple[Array, Tree, Array]:
    u, real = batch.u0[:, ids], np.zeros(0, batch.u0.dtype).real.dtype
    t = on_device_of(batch.end if at_end else batch.start, batch.u0)[ids].astype(real)
    return locked(u), batch.parameters(ids), locked(t)


def _perturbed_columns(batch: Batch, numbers: Array, p_and_t: bool) -> tuple[Array, Tree, Array]:
    """Return columns with the first trajectory last; u, and with `p_and_t` also p and t, of the others are perturbed."""
    ids = (numbers + 1) % len(numbers) % batch.size
    u, p, t = _columns(batch, ids)
    if p_and_t:
        varying = zip(batch.p.chosen(ids), batch.p.varies)
        p = batch.p.build([perturbed(leaf, np.abs(leaf) + 1) if each else leaf for leaf, each in varying])
        span = on_device_of(batch.end, batch.u0)[ids].astype(t.dtype) - t
        t = perturbed(t, span, both_ways=False)  # not before the start
    return perturbed(u, np.abs(u) + 1), p, t


def perturbed(x: Array, size: Array, both_ways: bool = True) -> Array:
    """Return columns of floats, all but the last perturbed by a fraction of `size`, in turn up and down.

    Without `both_ways` all are perturbed in the direction of `size`. Integers and booleans are returned as they are.
    """
    if x.dtype.kind not in "fc":
        return x
    xp = arrays_of(x)
    # With equal factors a sum over columns might not change. Both signs change a minimum and a maximum.
    numbers = (np.arange if xp is None else xp.arange)(x.size).reshape(x.shape)
    factors = np.abs(np.cos(numbers)) * (1 - 2 * (numbers % x.shape[-1] % 2) if both_ways else 1)
    others = (x + _MOVED * size * factors).astype(x.dtype)
    others[..., -1] = x[..., -1]
    return locked(others)


def _given(numbers: Function, u: Array, p: Tree, t: Array) -> Array:
    """Return times or amounts, shape (m, n), except those of a wrong shape or dtype, which `GivenTimes` rejects."""
    dtype = lambda row: (row if hasattr(row, "dtype") else np.asarray(row)).dtype  # noqa: E731
    fit = (row for row in numbers(p) if np.shape(row) in ((), t.shape) and dtype(row).kind in "biufc")
    rows = [np.broadcast_to(row, t.shape) for row in fit]
    return np.array(rows).reshape(len(rows), t.size)


def _affected_when_due(event: Event, batch: Batch, u: Array, p: Tree, t: Array) -> Array:
    """Return the states after an event, at the last of its given times instead of t, if any."""
    if event.times is not None:
        due = _given(event.due, u, p, t)[-1:]
        t = locked(np.where(np.isfinite(due), due, t)[0].astype(t.dtype)) if len(due) else t
    return affected(event, batch, u, p, t)


def _check_uncoupled(
    fun: Callable[..., Array],
    name: str,
    first: tuple,
    moved: Sequence[Callable[[], tuple]],
    beside: Callable[[], tuple],
    alone: Mapping[int, Callable[[], tuple]],
) -> None:
    """Raise a ValueError if a trajectory's value depends on other columns.

    `first`, `moved`: columns that begin with the first trajectory, and such that end with it, beside others. `beside`,
    `alone`: columns, and for some of them only copies of this one.
    """
    value, pairs = fun(*first), list[_Pair]()
    if (other := first_defined(lambda at=at: fun(*at()) for at in moved)) is not None:
        pairs.append(_Pair(value, 0, other, -1))
    if alone and (together := first_defined([lambda: fun(*beside())])) is not None:
        copies = {k: first_defined([lambda at=at: fun(*at())]) for k, at in alone.items()}
        pairs += [_Pair(together, k, other, 0) for k, other in copies.items() if other is not None]
    xp = arrays_of(value)
    if xp is not None and pairs:  # one copy to the host
        rows: Array = np.moveaxis(xp.to_host(np.stack([row for pair in pairs for row in pair.rows()])), 0, -1)
        parts = [rows[..., k : k + 3] for k in range(0, rows.shape[-1], 3)]
        pairs = [_Pair(part, 0, part, 1) for part in parts]
    for pair in pairs:
        pair.require_same(name)


def first_defined(calls: Iterable[Callable[[], T]]) -> T | None:
    """Return the first result that can be computed, None if there is none: functions may be undefined at some arguments."""
    for call in calls:
        with suppress(Exception):
            return call()
    return None


class _Pair(NamedTuple):
    """Two values, shapes (..., n) and (..., m), in whose columns k and j is the same trajectory."""

    value: Array
    k: int
    other: Array
    j: int

    def rows(self) -> list[Array]:
        """Return both columns, and the largest absolute values of the first value."""
        one, same = self.value[..., self.k], self.other[..., self.j]
        return [one, same, np.max(np.abs(self.value), axis=-1).astype(one.dtype)]

    def require_same(self, name: str) -> None:
        """Raise a ValueError if both columns differ by more than rounding errors."""
        one, same = self.value[..., self.k], self.other[..., self.j]
        if one.tobytes() == same.tobytes():
            return  # the usual case, without further arithmetic
        largest = max(float(np.abs(x[np.isfinite(x)]).max(initial=0.0)) for x in (self.value, self.other))
        rounding = _ROUNDINGS * float(np.finfo(np.result_type(one, np.float32)).eps) * largest
        if not np.allclose(one, same, rtol=0, atol=rounding, equal_nan=True):
            raise ValueError(
                f"solve: {name} returns {one.tolist()} for a trajectory, but {same.tolist()} if the other columns change: "
                f"trajectories must not depend on each other. {COUPLED}"
            )
