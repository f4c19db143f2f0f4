"""A batch as the kernels take it, rows of numbers on a device; and a few trajectories on the host that stand for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from mpiad._typing import Array, Shape
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.compiled.parameter_packing import ParameterPacking
from mpiad.ensemble.settings import Settings
from mpiad.transport.device_arrays import ArrayModule, arrays_of, is_device_array

_COLUMNS = 5


class Inputs(NamedTuple):
    """What all kernels of a solve are given, in the order of their arguments."""

    # `u0`, `p`, `s`: shapes (d, n), (varying, n), (shared,).
    u0: Array
    p: Array
    s: Array
    # `start`, `stop`: shape (n,).
    start: Array
    stop: Array
    times: Array  # shape (n_saved,) or (n, n_saved)
    n_saved: int
    by_row: int

    @property
    def count(self) -> int:
        """How many trajectories there are."""
        return self.u0.shape[1]


def inputs_of(arrays: ArrayModule, batch: Batch, settings: Settings, packing: ParameterPacking) -> Inputs:
    """Return the arguments on a device, to which host arrays are copied: one copy for each that isn't one number."""
    count, real = batch.size, batch.u0.dtype
    own = [_rows(arrays, batch.p.leaves[part.place], count, real) for part in packing.parts if part.varies]
    times = np.asarray(settings.saveat, float)
    return Inputs(
        _columns(arrays, batch.u0, real), _together(arrays, own, (0, count), real), _shared(arrays, batch, packing, real),
        _columns(arrays, batch.start, float), _columns(arrays, batch.end, float), placed(arrays, times, float),
        times.shape[-1], int(times.ndim > 1),
    )  # fmt: skip


def placed(arrays: ArrayModule, x: Array, dtype: DTypeLike) -> Array:
    """Return an array on the device, contiguous and of a dtype: itself where it is so already."""
    if not is_device_array(x):
        return arrays.to_device(np.ascontiguousarray(x, dtype))
    return arrays.contiguous(x if x.dtype == dtype else x.astype(dtype))


def _columns(arrays: ArrayModule, x: Array, dtype: DTypeLike) -> Array:
    """Return an array whose last axis counts trajectories; what is the same for all of them travels once."""
    if is_device_array(x) or x.strides[-1] or not x.size:
        return placed(arrays, x, dtype)
    if x.ndim == 1:
        return arrays.full(x.shape, x[0].item(), dtype)
    return arrays.copy(np.broadcast_to(placed(arrays, x[:, :1], dtype), x.shape))


def _rows(arrays: ArrayModule, leaf: Array, count: int, dtype: DTypeLike) -> Array:
    leaf = leaf if is_device_array(leaf) else np.asarray(leaf)
    # The number of rows is said, or it couldn't be told without trajectories.
    rows = int(np.prod(leaf.shape[:-1], dtype=int))
    return placed(arrays, leaf, dtype).reshape(rows, count)


def _shared(arrays: ArrayModule, batch: Batch, packing: ParameterPacking, dtype: DTypeLike) -> Array:
    leaves = [batch.p.leaves[part.place] for part in packing.parts if not part.varies]
    if not any(map(is_device_array, leaves)):
        flat = np.concatenate([np.ravel(leaf) for leaf in leaves]) if leaves else np.empty(0)
        return placed(arrays, flat, dtype) if flat.size else arrays.empty((0,), dtype)
    return _together(arrays, [placed(arrays, leaf, dtype).reshape(-1) for leaf in leaves], (0,), dtype)


def _together(arrays: ArrayModule, parts: list[Array], empty: tuple[int, ...], dtype: DTypeLike) -> Array:
    parts = [part for part in parts if part.size]
    if not parts:
        return arrays.empty(empty, dtype)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def sample_batch(batch: Batch) -> Batch:
    """Return a batch of host arrays with the same f and the same shapes, of a few trajectories.

    What all trajectories share is taken as it is where it lives on the host.
    """
    leaves = [_leaf(leaf, varies) for leaf, varies in zip(batch.p.leaves, batch.p.varies)]
    times = [np.full(_COLUMNS, x[0] if len(x) else value) for x, value in ((batch.start, 0.0), (batch.end, 1.0))]
    u0 = _made_up((len(batch.u0), _COLUMNS), batch.u0.dtype)
    return Batch(batch.f, batch.shape, u0, batch.p._replace(leaves=leaves), *times)


def _leaf(leaf: Array, varies: bool) -> Any:
    arrays = arrays_of(leaf)
    if not varies and arrays is None:
        return leaf
    shape = (*leaf.shape[:-1], _COLUMNS) if varies else leaf.shape
    if leaf.dtype.kind in "fc":
        return _made_up(shape, leaf.dtype)
    # By integers f may count and choose, so they must be the true ones: those of the first trajectories, again and again.
    return np.resize((leaf if arrays is None else arrays.to_host(leaf)).T, shape[::-1]).T


def _made_up(shape: Shape, dtype: DTypeLike) -> Array:
    """Return numbers between a half and three halves, none like another."""
    return (1 + 0.5 * np.sin(1 + 2.3 * np.arange(int(np.prod(shape, dtype=int))))).reshape(shape).astype(dtype)
