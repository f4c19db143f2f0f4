"""The arguments of GPU kernels for a batch, as arrays on the device, and a small sample of the batch on the host."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from mpiad._typing import Array, Shape
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.compiled.traced_problem import TracedProblem
from mpiad.ensemble.settings import Settings
from mpiad.transport.devices.device_arrays import ArrayModule, arrays_of, is_device_array

_COLUMNS = 5  # number of trajectories in a sample


class Inputs(NamedTuple):
    """The arguments of kernels, in order; the reverse kernel takes only the arguments before `u0`.

    Initial states and tspans that all trajectories share have one column, and their stride along trajectories is zero.
    """

    # Parameters per trajectory, shape (varying, n), and shared parameters, shape (shared,).
    p: Array
    s: Array
    # Start and end of tspan: shape (n,), or (1,) if `by_span` is zero.
    start: Array
    stop: Array
    by_span: int  # stride of `start` and `stop`: 1, or 0 if all trajectories share one tspan
    times: Array  # shape (n_saved,) or (n, n_saved)
    n_saved: int
    by_row: int  # whether `times` has one row per trajectory: 1 or 0
    u0: Array  # shape (d, n) or (d, 1)
    # Strides of `u0` along components and along trajectories.
    u0_row: int
    u0_column: int
    atol: Array  # shape (d,)


def inputs_of(arrays: ArrayModule, batch: Batch, settings: Settings, traced: TracedProblem) -> Inputs:
    """Return the arguments on a device; small host arrays are copied in one transfer."""
    count, real, d = batch.size, batch.u0.dtype, len(batch.u0)
    packing = traced.packing
    varying = [_rows(arrays, batch.p.leaves[part.place], count, real) for part in packing.parts if part.varies]
    shared = [batch.p.leaves[part.place] for part in packing.parts if not part.varies]
    shared += [np.array(traced.numbers)] if traced.numbers else []
    times = np.asarray(settings.saveat, float)
    spans = [np.asarray(x, float) for x in (batch.start, batch.end)]
    same_span, same_start = all(map(_is_shared, spans)), _is_shared(batch.u0)
    on_host = {"times": times, "atol": np.broadcast_to(np.ravel(settings.atol), (d,)).astype(real)}
    if not any(map(is_device_array, shared)):
        on_host["s"] = np.concatenate([np.ravel(leaf) for leaf in shared] or [np.empty(0)]).astype(real)
    if same_span:
        on_host |= {"start": spans[0][:1], "stop": spans[1][:1]}
    if same_start:
        on_host["u0"] = batch.u0[:, :1]
    on_device = dict(zip(on_host, _copied_together(arrays, list(on_host.values()))))
    if "s" not in on_host:
        on_device["s"] = _concatenated(arrays, [device_rows(arrays, leaf, real).reshape(-1) for leaf in shared], (0,), real)
    if not same_span:
        on_device |= {name: device_rows(arrays, span, float) for name, span in zip(("start", "stop"), spans)}
    if not same_start:
        on_device["u0"] = device_rows(arrays, batch.u0, real)
    return Inputs(
        p=_concatenated(arrays, varying, (0, count), real), by_span=int(not same_span), n_saved=times.shape[-1],
        by_row=int(times.ndim > 1), u0_row=1 if same_start else count, u0_column=int(not same_start), **on_device,
    )  # fmt: skip


def _is_shared(x: Array) -> bool:
    """Return whether an array is on the host, and all trajectories share one column."""
    return not is_device_array(x) and x.size > 0 and x.strides[-1] == 0


def _copied_together(arrays: ArrayModule, parts: list[np.ndarray]) -> list[Array]:
    starts = [0, *accumulate(-(-part.nbytes // 8) * 8 for part in parts)]  # offsets are multiples of eight bytes
    buffer = np.zeros(starts[-1], np.uint8)
    for part, start in zip(parts, starts):
        buffer[start : start + part.nbytes] = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
    copy = arrays.to_device(buffer)
    return [copy[a : a + part.nbytes].view(part.dtype).reshape(part.shape) for part, a in zip(parts, starts)]


def device_rows(arrays: ArrayModule, x: Array, dtype: DTypeLike) -> Array:
    """Return a contiguous array of a dtype on the device, without a copy if possible."""
    if not is_device_array(x):
        return arrays.to_device(np.ascontiguousarray(x, dtype))
    return arrays.contiguous(x if x.dtype == dtype else x.astype(dtype))


def _rows(arrays: ArrayModule, leaf: Array, count: int, dtype: DTypeLike) -> Array:
    # Without trajectories the number of rows can't be inferred.
    return device_rows(arrays, leaf, dtype).reshape(math.prod(np.shape(leaf)[:-1]), count)


def _concatenated(arrays: ArrayModule, parts: list[Array], empty: tuple[int, ...], dtype: DTypeLike) -> Array:
    parts = [part for part in parts if part.size]
    if not parts:
        return arrays.empty(empty, dtype)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def sample_batch(batch: Batch) -> Batch:
    """Return a small batch on the host; states, and floats that vary or are on a device, are replaced by other numbers."""
    leaves = [_leaf(leaf, varies) for leaf, varies in zip(batch.p.leaves, batch.p.varies)]
    times = [np.full(_COLUMNS, x[0] if len(x) else value) for x, value in ((batch.start, 0.0), (batch.end, 1.0))]
    u0 = _arbitrary((len(batch.u0), _COLUMNS), batch.u0.dtype)
    return Batch(batch.f, batch.shape, u0, batch.p._replace(leaves=leaves), *times)


def _leaf(leaf: Array, varies: bool) -> Any:
    arrays = arrays_of(leaf)
    if not varies and arrays is None:
        return leaf
    shape = (*leaf.shape[:-1], _COLUMNS) if varies else leaf.shape
    if leaf.dtype.kind in "fc":
        return _arbitrary(shape, leaf.dtype)
    # f may branch on integers, so those of the first trajectories are used.
    return np.resize((leaf if arrays is None else arrays.to_host(leaf)).T, shape[::-1]).T


def _arbitrary(shape: Shape, dtype: DTypeLike) -> Array:
    """Return distinct numbers between 0.5 and 1.5."""
    return (1 + 0.5 * np.sin(1 + 2.3 * np.arange(math.prod(shape)))).reshape(shape).astype(dtype)
