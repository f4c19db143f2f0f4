"""Groups of trajectories that were solved apart, put one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.device.numpy import concatenate
from mpiad.ensemble.dense_parts import JoinedOutput
from mpiad.ensemble.solution import EnsembleSolution

__all__ = ["check_alike", "joined", "joined_times", "widened"]


def joined(parts: list[EnsembleSolution]) -> EnsembleSolution:
    """Return the solution of several batches, one after the other."""
    if len(parts) == 1:
        return parts[0]
    # Batches without trajectories say nothing of the states' shape.
    check_alike([(part.u_end.shape[1:], part.u_end.dtype) for part in parts if len(part)], "batches")
    events, offset = {}, 0
    for part in parts:
        events.update({i + offset: found for i, found in part.events.items()})
        offset += len(part)
    # With every step saved, batches have rows of different lengths.
    width = max(part.u.shape[1] for part in parts)
    times = joined_times([part.t for part in parts], [len(part) for part in parts], width)
    names = ("u_end", "retcode", "t_reached", "naccept", "nreject", "nf")
    rest: Any = {name: concatenate([getattr(part, name) for part in parts]) for name in names}
    u = concatenate([widened(part.u, width) for part in parts])
    dense = JoinedOutput([(part.dense, len(part)) for part in parts]) if all(part.dense for part in parts) else None
    codes = np.concatenate([part.codes for part in parts])
    return EnsembleSolution(u, times, events=events, dense=dense, _codes=codes, **rest)


def check_alike(kinds: list[tuple[Any, Any]], groups: str) -> None:
    """Raise where groups of trajectories, solved apart, have states of different shapes or dtypes.

    Parameters
    ----------
    kinds : list of (tuple of int, dtype)
        Of the groups.
    groups : str
        What they are.

    Raises
    ------
    ValueError
    """
    for shape, dtype in kinds[1:]:
        if (shape, dtype) != kinds[0]:
            raise ValueError(
                f"solve: all trajectories must have u0 of one shape and dtype, but {groups} have {kinds[0][1]} of shape "
                f"{kinds[0][0]} and {dtype} of shape {shape}."
            )


def joined_times(times: list[Array], counts: list[int], width: int) -> Array:
    """Return the saved times of several groups of trajectories: one row where they are the same for all."""
    if all(t.ndim == 1 and np.array_equal(t, times[0]) for t in times):
        return times[0]
    rows = [t if t.ndim == 2 else np.broadcast_to(t, (count, len(t))) for t, count in zip(times, counts)]
    return np.concatenate([widened(row, width) for row in rows])


def widened(array: Array, width: int) -> Array:
    """Return an array of shape (N, n, …) with its second axis filled up with NaN to a width."""
    missing = width - array.shape[1]
    if not missing:
        return array
    shape = (len(array), missing, *array.shape[2:])
    return concatenate([array, np.full_like(getval(array), np.nan, shape=shape)], axis=1)
