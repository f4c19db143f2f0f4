"""`Batch`: the trajectories of one solve, as columns of arrays; and the times at which states are saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from autograd.tracer import getval, isbox

from mpiad._typing import Array, Function, Index, Shape, Tree
from mpiad.compiling.arguments import real_dtype
from mpiad.compiling.closure import with_values_of_variables
from mpiad.device import to_host
from mpiad.device.transfer import array_to_device
from mpiad.differentiation.forward import BundleNode, TangentNode
from mpiad.ensemble.derivative import Columns, locked
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.pytrees import is_variable, named_leaves
from mpiad.transport.devices.device_arrays import arrays_of, is_device_array


def same_for_all(x: Array) -> bool:
    """Return whether all trajectories have the same number in an array of shape (N,)."""
    # An array that was broadcast from one number has a stride of zero.
    return len(x) < 2 or x.strides == (0,) or bool((x == x[0]).all())


def repeated(column: np.ndarray, count: int) -> np.ndarray:
    """Return an array of shape (d, count) whose columns share the memory of one copy of a column, shape (d,) or (d, 1)."""
    # `np.broadcast_to` takes six times as long, and the copy can't be changed.
    return np.ndarray((len(column), count), column.dtype, column.tobytes(), 0, (column.itemsize, 0))


def on_device_of(values: np.ndarray, like: Array) -> Array:
    """Copy a host array, which has one number per trajectory, to the device of `like`."""
    xp = arrays_of(like)
    if xp is None:
        return values
    if same_for_all(values) and len(values):
        return xp.full(values.shape, values.dtype.type(values[0]), values.dtype)
    return xp.to_device(np.ascontiguousarray(values))


class Parameters(NamedTuple):
    """The parameters of all trajectories."""

    leaves: list[Any]  # the arrays and numbers of the pytree
    varies: list[bool]  # per leaf: whether its last axis counts trajectories; other leaves are passed to f unchanged
    build: Callable[[Any], Tree]  # returns the pytree with given leaves

    def promoted(self, u: Array) -> Parameters:
        """Return the parameters, which may be traced, with numbers of less precision than the states u in theirs."""
        # A kernel computes with one precision, and derivative rules of f are programs, too.
        leaves, real = list(self.leaves), real_dtype(u.dtype)
        for place, leaf in enumerate(leaves):
            dtype = getattr(leaf, "dtype", real)
            if dtype != real and is_variable(leaf) and (promoted := np.result_type(dtype, real)) != dtype:
                leaves[place] = leaf.astype(promoted)
        return self._replace(leaves=leaves)

    def chosen(self, which: Index, leaves: Sequence[Any] | None = None) -> list[Any]:
        """Return the leaves, by default `self.leaves`, with an index `which` on the axis of trajectories."""
        leaves = self.leaves if leaves is None else leaves
        return [leaf[..., which] if varies else leaf for leaf, varies in zip(leaves, self.varies)]

    def columns(self, ids: Array, one_by_one: bool = False) -> Tree:
        """Return the parameters of some trajectories as f takes them; `one_by_one`: whether f is called per trajectory."""
        taken = [locked(leaf) if varies else leaf for leaf, varies in zip(self.taken(ids), self.varies)]
        return self.of_columns(taken, one_by_one)

    def taken(self, ids: Array) -> list[Any]:
        """Return the leaves of some trajectories; leaves that vary are copied, in C order."""
        return [np.take(leaf, ids, axis=-1) if varies else leaf for leaf, varies in zip(self.leaves, self.varies)]

    def of_columns(self, leaves: Sequence[Any], one_by_one: bool) -> Tree:
        """Return the parameters of some trajectories as f takes them, given their leaves."""
        return Columns(leaves, self.varies, self.build) if one_by_one and any(self.varies) else self.build(leaves)

    def add_cotangents(self, totals: dict[int, Array], parts: Mapping[int, Array], which: Index) -> None:
        """Add cotangents (None: zeros) by leaf index to `totals`, for leaves that vary at the trajectories `which`."""
        for place, part in parts.items():
            if part is None:
                continue
            if self.varies[place]:
                totals[place][..., which] += part
            else:
                totals[place] = totals[place] + part


class Batch(NamedTuple):
    """N initial value problems with one f."""

    f: Function
    shape: Shape  # of one state
    u0: Array  # shape (d, N); the flattened initial states
    p: Parameters
    start: Array  # shape (N,)
    end: Array  # shape (N,)
    sparsity: Any = None  # the user's pattern of the Jacobian of f: see `ODEProblem.jac_sparsity`

    @property
    def size(self) -> int:
        """The number of trajectories."""
        return self.u0.shape[1]

    @property
    def one_span(self) -> bool:
        """Whether tspan was given once for all trajectories; `start` and `end` then have a stride of zero."""
        return self.size > 0 and self.start.strides == self.end.strides == (0,)

    def parameters(self, ids: Array) -> Tree:
        """Return the parameters of some trajectories as f takes them."""
        return self.p.columns(ids, len(self.shape) > 1)

    def both_ends(self) -> Array:
        """Return start and end of tspan, shape (2,) if all trajectories have the same tspan, else (N, 2)."""
        start, end = self.start, self.end
        if self.size and same_for_all(start) and same_for_all(end):
            return np.array([start[0], end[0]])
        return np.stack([start, end], axis=1)

    @property
    def traced(self) -> bool:
        """Whether any array of the batch is traced."""
        return any(map(isbox, self._inputs()))

    @property
    def forward(self) -> bool:
        """Whether arrays of the batch are traced in forward mode, and none in reverse mode."""
        return all(isinstance(x._node, TangentNode) for x in self._inputs() if isbox(x))

    def tangents(self) -> dict[int, Array] | None:
        """Return the tangents of the inputs (u0, start, end, leaves) that are traced, with directions along the first axis.

        None unless all of them are traced in forward mode only, and their values and tangents are host arrays.
        """
        result = {}
        for k, x in enumerate(self._inputs()):
            if isbox(x):
                tangents = x._node.g if isinstance(x._node, BundleNode) else [getattr(x._node, "g", None)]
                zeros = np.zeros_like(x._value) if type(x._value) in (np.ndarray, np.float64, float) else None
                if not isinstance(x._node, TangentNode) or zeros is None or any(map(isbox, tangents)):
                    return None
                result[k] = np.stack([zeros if g is None else conform(g, *spec_like(zeros)) for g in tangents])
        return result

    def _inputs(self) -> tuple[Array, ...]:
        return self.u0, self.start, self.end, *self.p.leaves

    def snapshot(self) -> Batch:
        """Return the batch with copies of what the user may change: shared parameters, and variables that f reads."""
        leaves = [leaf.copy() if type(leaf) is np.ndarray and not varies else leaf for leaf, varies in zip(*self.p[:2])]
        return self._replace(f=with_values_of_variables(self.f), p=self.p._replace(leaves=leaves))

    def plain(self) -> Batch:
        """Return the batch with the values of traced arrays."""
        if not self.traced:
            return self
        u0, start, end, *leaves = map(getval, self._inputs())
        return self._replace(u0=u0, p=self.p._replace(leaves=leaves), start=start, end=end)

    def on_host(self) -> Batch:
        """Return the batch of plain arrays with copies of device arrays on the host."""
        u0, *leaves = (to_host(x) if is_device_array(x) else x for x in (self.u0, *self.p.leaves))
        return self._replace(u0=u0, p=self.p._replace(leaves=leaves))

    def share(self, rows: slice | Array) -> Batch:
        """Return some of the trajectories, copies if `rows` isn't a slice."""
        u0, start, end = self.u0[:, rows], self.start[rows], self.end[rows]
        if not isinstance(rows, slice) and self.one_span:
            start, end = (np.broadcast_to(t[:1], len(start)) for t in (self.start, self.end))
        return self._replace(u0=u0, p=self.p._replace(leaves=self.p.chosen(rows)), start=start, end=end)


_MOST_SEARCHED = 1000


def not_finite_entry(batch: Batch, k: int) -> str:
    """Return the entry of u0 or p of the trajectory k that isn't finite, as text: "u0[1] is nan"; "" if all are finite."""
    p = batch.p.build(batch.p.chosen(k))
    for name, leaf in [("u0", batch.u0[:, k].reshape(batch.shape)), *named_leaves(p, "p")]:
        values = np.asarray(to_host(leaf))
        if values.dtype.kind in "fc" and not np.isfinite(values).all():
            place = np.argwhere(~np.isfinite(values))[0].tolist()
            return f"{name}{place or ''} is {values[tuple(place)]}"
    return ""


def not_finite_entries(batch: Batch, ids: Array, first: int) -> dict[int, str]:
    """Return the first entry that isn't finite among those of some trajectories, by the index of the trajectory.

    `first`: the index of the batch's first trajectory in the ensemble.
    """
    # The message names one trajectory; the search is short if all of them fail for another reason.
    entries = ((first + k, entry) for k in ids[:_MOST_SEARCHED].tolist() if (entry := not_finite_entry(batch, k)))
    return dict(islice(entries, 1))


def save_times(saveat: Array | None, batch: Batch, first: int = 0) -> Array:
    """Return the times of a checked `saveat`, (n_saved,) or (N, n_saved), if in tspan; `first`: the first trajectory."""
    if saveat is None:
        return batch.both_ends()
    start, end, count = batch.start, batch.end, batch.size
    saveat = saveat[first : first + count] if np.ndim(saveat) == 2 else saveat
    if batch.one_span:
        start, end = start[:1], end[:1]
    times = np.asarray(saveat, float)
    if times.ndim == 0:
        return _multiples(float(times), start, end)
    _check_times(times, start, end)
    return times


def _multiples(interval: float, start: Array, end: Array) -> Array:
    if not (np.isfinite(interval) and interval > 0):
        raise ValueError(f"solve: saveat as an interval must be above zero, but got {interval!r}.")
    if not len(start):
        return np.empty(0)
    if (start != start[0]).any() or (end != end[0]).any():
        rows = [_multiples(interval, start[i : i + 1], end[i : i + 1]) for i in range(len(start))]
        times = np.full((len(rows), max(map(len, rows))), np.nan)
        for row, multiples in zip(times, rows):
            row[: len(multiples)] = multiples
        return times
    span = float(end[0] - start[0])
    # The last multiple of the interval may differ from the end by rounding.
    count = int(np.floor(abs(span) / interval * (1 + 1e-12)))
    times = start[0] + np.copysign(interval, span) * np.arange(count + 1)
    if abs(times[-1] - end[0]) <= 1e-9 * min(interval, abs(span)):
        times = times[:-1]
    return np.append(times, end[0])


def _check_times(times: Array, start: Array, end: Array) -> None:
    rows = np.atleast_2d(times)
    low, high = np.minimum(start, end)[:, None], np.maximum(start, end)[:, None]
    outside = ~((rows >= low) & (rows <= high))
    if outside.any():
        i, j = np.argwhere(outside)[0]
        time, row = np.broadcast_to(rows, outside.shape)[i, j], min(i, len(start) - 1)  # a shared tspan has one row
        raise ValueError(f"solve: saveat must lie in tspan, but {time} lies outside of ({start[row]}, {end[row]}).")
    unsorted = (rows[:, 1:] - rows[:, :-1]) * np.where(end < start, -1, 1)[:, None] < 0
    if unsorted.any():
        i, j = np.argwhere(unsorted)[0]
        earlier, later = np.broadcast_to(rows, (len(unsorted), rows.shape[1]))[i, j : j + 2]
        order = "in the order of the solve, from the start of tspan to its end"
        raise ValueError(f"solve: saveat must be {order}, but got {later} after {earlier}. Sort the times.")


def times_of(t: Array, count: int | None) -> Array:
    """Return the times of `sol(t)` as an array, shape (n,) or (N, n); `count` is N, or None for one solution."""
    refuse_traced_times("sol(t): t", t)
    times = np.asarray(t)
    if times.dtype.kind not in "iuf":
        raise TypeError(f"sol(t): t must be a number or numbers, but got {t!r}.")
    if times.ndim > (1 if count is None else 2) or (times.ndim == 2 and len(times) != count):
        rows = "" if count is None else f", or (N, n) with N = {count}"
        raise ValueError(f"sol(t): t must be a number, or have shape (n,){rows}, but has shape {times.shape}.")
    return np.atleast_1d(times.astype(float))


def refuse_traced_times(what: str, times: Array) -> None:
    """Raise a NotImplementedError if times at which states are requested are traced; `what` begins the message."""
    if any(map(isbox, times if isinstance(times, (list, tuple)) else [times])):
        raise NotImplementedError(
            f"{what} is traced, but derivatives with respect to saved times aren't supported. Apply "
            "mpiad.stop_gradient, or end tspan at the traced time: u_end has a derivative with respect to the end of tspan."
        )


def is_on_device(batch: Batch) -> bool:
    """Return whether the states or parameters of a batch of plain arrays are device arrays."""
    return is_device_array(batch.u0) or any(map(is_device_array, batch.p.leaves))


def with_states_on_device(batch: Batch) -> Batch:
    """Return a batch, which may be traced, with the states on the device of the parameters, if these are on a device."""
    modules = [arrays_of(getval(leaf)) for leaf in batch.p.leaves]
    xp = next(filter(None, modules), None)
    return batch if xp is None or is_device_array(getval(batch.u0)) else batch._replace(u0=array_to_device(batch.u0, xp))


def check_place(batch: Batch) -> None:
    """Raise a TypeError if the parameters and the states aren't on the same device."""
    xp = arrays_of(batch.u0)
    for place, leaf in enumerate(batch.p.leaves):
        # A number may be on the host.
        if (is_device_array(leaf) or np.ndim(leaf)) and arrays_of(leaf) != xp:
            raise TypeError(
                f"solve: u0 is {_device_of(batch.u0)}, but part {place} of p is {_device_of(leaf)}, of shape "
                f"{np.shape(leaf)}. Apply mpiad.device.to_device or mpiad.device.to_host."
            )


def _device_of(x: Array) -> str:
    arrays = arrays_of(x)
    return "on the host" if arrays is None else f"on device {arrays.device} ({arrays.name})"


def two_at_least(count: int) -> Array:
    """Return the indices of `count` columns, or a single column's index twice (`controller` explains the reason)."""
    return np.arange(count) if count > 1 else np.zeros(2, int)
