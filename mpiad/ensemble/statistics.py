"""Statistics over the trajectories of an ensemble, as numbers, texts and plots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval, isbox

from mpiad._typing import Array
from mpiad.device import to_host
from mpiad.device.numpy import stack
from mpiad.transport.device_arrays import arrays_of, is_device_array

if TYPE_CHECKING:
    from mpiad.ensemble.solution import EnsembleSolution


def mean(u: Array) -> Array:
    """Return the mean over the first axis, ignoring NaN."""
    if isbox(u) or is_device_array(u):
        known = ~np.isnan(getval(u))
        return anp.sum(anp.where(known, u, 0.0), axis=0) / known.sum(axis=0)
    return np.nanmean(u, axis=0) if len(u) else np.full(u.shape[1:], np.nan)


def spread(u: Array) -> Array:
    """Return the standard deviation over the first axis, ignoring NaN."""
    if isbox(u) or is_device_array(u):
        return root(mean(squared_distance(u, mean(u))))
    return np.nanstd(u, axis=0) if len(u) else np.full(u.shape[1:], np.nan)


def squared_distance(u: Array, center: Array) -> Array:
    """Return |u - center|², NaN if u is; no derivative flows from there to the center."""
    known = ~np.isnan(getval(u))
    # NaN are replaced inside as well: otherwise the outer derivative, zero, times NaN would remain NaN.
    return anp.where(known, anp.abs(anp.where(known, u, 0.0) - anp.where(known, center, 0.0)) ** 2, np.nan)


def root(x: Array) -> Array:
    """Return the square root; its derivative is defined as 0 at x = 0, when all trajectories are equal."""
    still = getval(x) == 0
    # The root of one for x = 0: the root's derivative at 0 is infinite, and times zero it would be NaN.
    return anp.where(still, 0.0, anp.sqrt(anp.where(still, 1.0, x)))


def quantile(u: Array, q: float | list[float]) -> Array:
    """Return quantiles over the first axis, ignoring NaN.

    The adjoint flows to the two trajectories next to a quantile, with their interpolation weights; the choice of these
    trajectories is taken as fixed.
    """
    if (isbox(u) or is_device_array(u)) and len(u):
        return _between(u, np.asarray(q, float))
    return np.nanquantile(u, q, axis=0) if len(u) else np.full((*np.shape(q), *u.shape[1:]), np.nan)


def _between(u: Array, q: np.ndarray) -> Array:
    """Return "linear" quantiles, as NumPy defines them, of states that are traced or on a device."""
    if q.size and not (q.min() >= 0 and q.max() <= 1):
        raise ValueError(f"quantile: q must lie between 0 and 1, but got {q.tolist()}.")
    values = getval(u)
    if values.dtype.kind == "c":
        raise TypeError(f"quantile: the states must be real, but are {values.dtype}: complex numbers have no order.")
    columns = values.reshape(len(values), -1)
    order = np.argsort(columns, axis=0)  # NaN come last
    known = np.sum(~np.isnan(columns), axis=0)
    last, rows = np.maximum(known - 1, 0), anp.reshape(u, columns.shape)
    arrays = arrays_of(values)
    each = np.arange(columns.shape[1]) if arrays is None else arrays.arange(columns.shape[1])
    found = []
    for part in q.ravel().tolist():  # one by one: numbers can be passed to any call on a device, arrays must be copied
        place = part * last
        below = np.floor(place).astype(int)
        ends = (np.take_along_axis(order, end[None], 0)[0] for end in (below, np.minimum(below + 1, last)))
        lower, upper = (rows[end, each] for end in ends)
        found.append(lower + (upper - lower) * (place - below).astype(values.dtype))
    return anp.reshape(stack(found), (*q.shape, *values.shape[1:]))


def summary(sol: EnsembleSolution) -> str:
    """Describe a solution: its survivors, the return codes of the others, its steps, its final states."""
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


def draw(sol: EnsembleSolution, ax: Any, component: int, band: tuple[float, float], lines: int) -> Any:
    """Draw mean, band and single trajectories; see `EnsembleSolution.plot`."""
    if sol.t.ndim != 1:
        raise ValueError(
            "EnsembleSolution.plot: trajectories have saved times of their own, so they have no common mean and band. "
            f"Solve with one saveat for all (sol.t has shape {sol.t.shape})."
        )
    if ax is None:
        import matplotlib.pyplot as plt

        ax = plt.gca()
    single = sol.u.ndim == 2  # the state is one number
    statistics = (*to_host(sol.quantile(list(band))), to_host(sol.mean()))
    low, high, mean = (x[:, None] if single else x for x in statistics)
    drawn = to_host(sol.u[: min(lines, len(sol))])
    filled = ax.fill_between(sol.t, low[:, component], high[:, component], alpha=0.25, label=f"{band[0]:g} to {band[1]:g}")
    for u in drawn:
        ax.plot(sol.t, u if single else u[:, component], color="0.6", linewidth=0.6, zorder=1)
    colour = filled.get_facecolor()[0][:3]
    ax.plot(sol.t, mean[:, component], color=colour, label=f"mean of {int(sol.survivors.sum())}")
    ax.set_xlabel("t")
    ax.legend()
    return ax
