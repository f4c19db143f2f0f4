"""First calls of f and of the functions of events, to check that they are written for columns (one per trajectory).

Wrong axes are detected, since no other axis has the same length as the axis of columns. A sum over all of u has the correct
shape, but couples the trajectories, as does p[0] if p has shape (n,). Both errors are detected by a second call, in which
the first trajectory is in another column and the other trajectories are perturbed. The result for the first trajectory
must be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial, wraps

import autograd.numpy as anp
import numpy as np

from mpiad._typing import Array, Tree
from mpiad.ensemble.batch import Batch, is_on_device, on_device_of
from mpiad.ensemble.derivative import COUPLED, Columns, derivative_of, locked
from mpiad.ensemble.event import Event, affected
from mpiad.ensemble.initialization import derivative_at
from mpiad.ensemble.linearization import Field, check_traceable
from mpiad.pytrees import flatten
from mpiad.transport.devices.device_arrays import arrays_of

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
            _check_uncoupled(lambda u, p, t: derivative_at(derivative, u, p, t, None), first, moved, "f")
            for event in events:
                if event.condition is not None:
                    _check_uncoupled(event.value, first, moved, "a condition of the events")
                if callable(event.times):
                    _check_uncoupled(partial(_times, event), first, moved, "times(p) of the events")
                if event.acts:
                    _check_uncoupled(partial(affected, event, batch), first, moved, "an affect of the events")
        if traced:
            return check_traceable(Field(batch), first[0], batch.p.chosen(numbers(width) % batch.size), first[2])
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


def _columns(batch: Batch, ids: Array) -> tuple[Array, Tree, Array]:
    u, real = batch.u0[:, ids], np.zeros(0, batch.u0.dtype).real.dtype
    t = on_device_of(batch.start, batch.u0)[ids].astype(real)
    return locked(u), batch.parameters(ids), locked(t)


def _perturbed_columns(batch: Batch, numbers: Array, p_and_t: bool) -> tuple[Array, Tree, Array]:
    """Return columns with the first trajectory last; u, and with `p_and_t` also p and t, of the others are perturbed."""
    ids = (numbers + 1) % len(numbers) % batch.size
    u, p, t = _columns(batch, ids)
    if p_and_t:
        varying = zip(batch.p.chosen(ids), batch.p.varies)
        p = batch.p.build([_perturbed(leaf, np.abs(leaf) + 1) if each else leaf for leaf, each in varying])
        t = _perturbed(t, on_device_of(batch.end, batch.u0)[ids].astype(t.dtype) - t)
    return _perturbed(u, np.abs(u) + 1), p, t


def _perturbed(x: Array, size: Array) -> Array:
    """Return columns of floats, perturbed by a fraction of `size`, except the last."""
    if x.dtype.kind not in "fc":
        return x
    xp = arrays_of(x)
    # With equal factors a sum over columns might not change.
    factors = np.abs(np.cos((np.arange if xp is None else xp.arange)(x.size).reshape(x.shape)))
    others = (x + _MOVED * size * factors).astype(x.dtype)
    others[..., -1] = x[..., -1]
    return locked(others)


def _times(event: Event, u: Array, p: Tree, t: Array) -> Array:
    """Return an event's given times, shape (m, n), except times of a wrong shape, which `GivenTimes` rejects."""
    due = [time for time in event.due(p) if np.shape(time) in ((), t.shape)]
    return np.array([np.broadcast_to(time, t.shape) for time in due]).reshape(len(due), t.size)


def _check_uncoupled(fun: Callable[..., Array], first: tuple, moved: list[Callable[[], tuple]], name: str) -> None:
    value, other = fun(*first), None
    for at in moved:
        with suppress(Exception):  # f may be undefined at the perturbed arguments
            other = fun(*at())
            break
    if other is None:
        return
    alone, shifted, xp = value[..., 0], other[..., -1], arrays_of(value)
    if xp is not None:  # one copy to the host
        value = xp.to_host(np.stack([alone, shifted, np.max(np.abs(value), axis=-1).astype(value.dtype)]))
        alone, shifted, other = value[0], value[1], value[:0]
    if alone.tobytes() == shifted.tobytes():
        return  # the usual case, without further arithmetic
    finite = [part[np.isfinite(part)] for part in (value, other)]
    largest = max((float(np.abs(part).max(initial=0.0)) for part in finite), default=0.0)
    rounding = _ROUNDINGS * float(np.finfo(first[0].dtype).eps) * largest
    if not np.allclose(alone, shifted, rtol=0, atol=rounding, equal_nan=True):
        raise ValueError(
            f"solve: {name} returns {alone.tolist()} for the first trajectory, but {shifted.tolist()} if the other "
            f"columns change: trajectories must not depend on each other. {COUPLED}"
        )
