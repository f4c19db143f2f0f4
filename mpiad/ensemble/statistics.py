"""Statistics over the trajectories of an ensemble."""

from __future__ import annotations

from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval, isbox

from mpiad._typing import Array
from mpiad.device import to_host
from mpiad.transport.device_arrays import is_device_array

__all__ = ["mean", "quantile", "root", "spread", "squared_distance", "summary"]


def mean(u: Array) -> Array:
    """Return the mean over the first axis, of what isn't NaN."""
    if isbox(u) or is_device_array(u):
        known = ~np.isnan(getval(u))
        return anp.sum(anp.where(known, u, 0.0), axis=0) / known.sum(axis=0)
    return np.nanmean(u, axis=0) if len(u) else np.full(u.shape[1:], np.nan)


def spread(u: Array) -> Array:
    """Return the standard deviation over the first axis, of what isn't NaN."""
    if isbox(u) or is_device_array(u):
        return root(mean(squared_distance(u, mean(u))))
    return np.nanstd(u, axis=0) if len(u) else np.full(u.shape[1:], np.nan)


def squared_distance(u: Array, center: Array) -> Array:
    """Return |u - center|², NaN where u is: there no derivative flows to the center."""
    known = ~np.isnan(getval(u))
    # NaN are taken out inside as well: the derivative of what is dropped outside is multiplied by zero, and stays NaN.
    return anp.where(known, anp.abs(anp.where(known, u, 0.0) - anp.where(known, center, 0.0)) ** 2, np.nan)


def root(x: Array) -> Array:
    """Return the square root; its derivative is taken as 0 where x is 0: there all trajectories are the same."""
    still = getval(x) == 0
    # Of a one where x is 0: the root's derivative at 0 is infinite, and times zero it would be NaN.
    return anp.where(still, 0.0, anp.sqrt(anp.where(still, 1.0, x)))


def quantile(u: Array, q: float | list[float]) -> Array:
    """Return quantiles over the first axis, of what isn't NaN.

    Raises
    ------
    NotImplementedError
        Where the states are device arrays.

    Adjoint
    -------
    To the two trajectories that a quantile lies between, by how near it is to each; which ones these are is taken as fixed.
    """
    if is_device_array(u):
        raise NotImplementedError(
            "quantile: the states are device arrays, of which there are no quantiles without NaN. Take them of "
            "mpiad.device.to_host(sol.u)."
        )
    if isbox(u) and len(u):
        return _between(u, np.asarray(q, float))
    return np.nanquantile(u, q, axis=0) if len(u) else np.full((*np.shape(q), *u.shape[1:]), np.nan)


def _between(u: Array, q: np.ndarray) -> Array:
    """Return quantiles of traced states: NumPy's "linear" ones."""
    if q.size and not (q.min() >= 0 and q.max() <= 1):
        raise ValueError(f"quantile: q must lie between 0 and 1, but got {q.tolist()}.")
    values = getval(u)
    if np.iscomplexobj(values):
        raise TypeError(f"quantile: the states must be real, but are {values.dtype}: complex numbers have no order.")
    columns = values.reshape(len(values), -1)
    order = np.argsort(columns, axis=0)  # NaN come last
    known = np.sum(~np.isnan(columns), axis=0)
    place = np.multiply.outer(q.ravel(), np.maximum(known - 1, 0))
    below = np.floor(place).astype(int)
    above = np.minimum(below + 1, np.maximum(known - 1, 0))
    each, rows = np.arange(columns.shape[1]), anp.reshape(u, columns.shape)
    lower, upper = (rows[np.take_along_axis(order, chosen, 0), each] for chosen in (below, above))
    return anp.reshape(lower + (upper - lower) * (place - below), (*q.shape, *values.shape[1:]))


def summary(sol: Any) -> str:
    """Describe a solution: its survivors, how others failed, its steps, its final states."""
    alive = sol.survivors
    names, counts = np.unique(sol.retcode, return_counts=True)
    codes = ", ".join(f"{count} {name}" for name, count in zip(names, counts))
    lines = [f"{len(sol)} trajectories: {codes}" if codes else "0 trajectories"]
    if len(sol):
        lines.append(
            f"accepted steps {sol.naccept.min()} to {sol.naccept.max()}, in the mean {sol.naccept.mean():.1f}; "
            f"rejected in the mean {sol.nreject.mean():.1f}"
        )
    if alive.any():
        ends = to_host(getval(sol.u_end))[alive]
        lines.append(f"final state over {len(ends)}: mean {_numbers(mean(ends))}, std {_numbers(spread(ends))}")
    return "\n".join(lines)


def _numbers(values: Array) -> str:
    return np.array2string(np.asarray(values), precision=6, threshold=8)
