"""A few trajectories on the host that stand for those on a device, so that f can be tried before it is compiled.

Their numbers are made up: to look at those on the device would be a copy in each solve.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiad._typing import Array, Shape
from mpiad.ensemble.batch import Batch
from mpiad.transport.device_arrays import arrays_of, is_device_array

__all__ = ["lives_on_device", "sample_batch"]

_COLUMNS = 5


def lives_on_device(batch: Batch) -> bool:
    """Tell whether initial states or parameters of a batch of plain arrays are device arrays."""
    return any(map(is_device_array, (batch.u0, *batch.p.leaves)))


def sample_batch(batch: Batch) -> Batch:
    """Return a batch of host arrays with the same f and the same shapes, of a few trajectories.

    Parameters
    ----------
    batch : Batch
        Of plain arrays; what all trajectories share is taken as it is where it lives on the host.
    """
    leaves = [_leaf(leaf, varies) for leaf, varies in zip(batch.p.leaves, batch.p.varies)]
    times = [np.full(_COLUMNS, x[0] if len(x) else value) for x, value in ((batch.start, 0.0), (batch.end, 1.0))]
    u0 = _made_up((len(batch.u0), _COLUMNS), batch.u0.dtype)
    return Batch(batch.f, batch.shape, u0, batch.p._replace(leaves=leaves), *times)


def _leaf(leaf: Any, varies: bool) -> Any:
    arrays = arrays_of(leaf)
    if not varies and arrays is None:
        return leaf
    shape = (*leaf.shape[:-1], _COLUMNS) if varies else leaf.shape
    if leaf.dtype.kind in "fc":
        return _made_up(shape, leaf.dtype)
    # By integers f may count and choose, so they must be the true ones.
    return np.resize(leaf if arrays is None else arrays.to_host(leaf), shape)


def _made_up(shape: Shape, dtype: Any) -> Array:
    """Return numbers between a half and three halves, none like another."""
    return (1 + 0.5 * np.sin(1 + 2.3 * np.arange(int(np.prod(shape, dtype=int))))).reshape(shape).astype(dtype)
