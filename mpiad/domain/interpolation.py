"""Coordinates of cells, owners of points, and interpolation at points between cells and its transpose.

The cells of a grid represent points with equal spacing. Along each dimension, a user's point lies between a cell and
the next cell. The rank that owns the surrounding cell which comes first along all dimensions also owns the point.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
from functools import reduce
from typing import NamedTuple

import autograd.numpy as anp
import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array, LocalArray, Shape
from mpiad.device.assembly import concatenate
from mpiad.device.transfer import Constants, array_to_device, to_host
from mpiad.differentiation import make_vjp
from mpiad.domain.boundary import sides_of
from mpiad.domain.decomposition import Decomposition, checked_block, per_dimension
from mpiad.domain.halo import fill_halo, fold_halo
from mpiad.domain.partition import Partition
from mpiad.primitives import mpi_allreduce, mpi_alltoall, stop_gradient
from mpiad.transport import Channel, Spec
from mpiad.transport.core.agreement import agreed, alike_on_all, raising_together
from mpiad.transport.core.replication import require_replicated
from mpiad.transport.core.tracing import checked_on_replay, tracing
from mpiad.transport.devices.device_arrays import arrays_of, is_array, named
from mpiad.transport.watch import watch_settings

_ROUNDING = 1e-9  # tolerance for points at the ends of the grid, as a fraction of the spacing


class Lattice(NamedTuple):
    """Positions of the cells of a grid."""

    firsts: np.ndarray  # coordinate of cell 0 along each dimension
    steps: np.ndarray  # distance from one cell to the next


def lattice_of(domain: Decomposition, spacing: object, origin: object, extent: Array, centred: bool) -> Lattice:
    """Return the positions of cells from the arguments of `Domain.coordinates`; raise a ValueError if one is invalid."""
    ndim = len(domain.shape)
    if extent is None:
        distances = np.array(per_dimension(spacing, ndim, "spacing"), float)
        return Lattice(np.array(per_dimension(origin, ndim, "origin"), float) + centred * distances / 2, distances)
    firsts, steps = [], []
    extents = per_dimension(extent, ndim, "extent (lengths, or pairs (low, high))")
    for n, wraps, ends in zip(domain.shape, domain.periodic, extents):
        low, high = map(float, (0.0, ends) if np.ndim(ends) == 0 else ends)
        if not high > low:
            raise ValueError(f"Domain.coordinates: extent must have ends low < high, but got ({low}, {high}).")
        # The upper end of a periodic dimension coincides with the first cell, so there are as many steps as cells.
        step = (high - low) / (n if centred or wraps else max(1, n - 1))
        firsts.append(low + step / 2 if centred else low)
        steps.append(step)
    return Lattice(np.array(firsts), np.array(steps))


class Location(NamedTuple):
    """The owners of points, their cells, and their positions between cells."""

    owner: Array  # int array of shape (...); the rank that owns the cell
    # Int array of shape (..., dimensions): the index, in the whole grid, of the last cell at or before the point; for a
    # point at the end of a dimension that isn't periodic, of the cell before the last.
    cell: Array
    fraction: Array  # shape (..., dimensions); the distance from that cell, from 0 to 1 (the next cell)


def located(points: Array, lattice: Lattice, partition: Partition, call: str) -> Location:
    """Return the location of points; raise a TypeError or ValueError if `points` aren't points of the grid."""
    ndim, plain = len(partition.shape), np.asarray(stop_gradient(points))
    if plain.dtype.kind not in "fiu":
        raise TypeError(f"{call}: points must be an array of numbers, but got {type(points).__name__} of {plain.dtype}.")
    if plain.shape[-1:] != (ndim,):
        raise ValueError(
            f"{call}: points must have shape (..., {ndim}), one coordinate for each dimension of the grid, but have "
            f"{plain.shape}."
        )
    # The distance from cell 0, in units of the spacing.
    position = ((points if isbox(points) else plain) - lattice.firsts) / lattice.steps
    _require_inside(plain, np.asarray(stop_gradient(position)), lattice, partition, call)
    base = np.floor(np.asarray(stop_gradient(position))).astype(np.intp)
    # For a point at the last cell, the preceding cell and the fraction one are returned, so no cell beyond it is needed.
    last = np.maximum(np.array(partition.shape) - 2, 0)
    base = np.where(np.array(partition.periodic), base, np.clip(base, 0, last))
    fraction = position - base
    cell = base % np.array(partition.shape)
    return Location(partition.owners(cell), cell, fraction)


def _require_inside(points: np.ndarray, position: np.ndarray, lattice: Lattice, partition: Partition, call: str) -> None:
    last = np.array(partition.shape) - 1
    inside = np.array(partition.periodic) & np.isfinite(position)
    # The condition is negated, so that NaN counts as outside.
    outside = ~(inside | ((position >= -_ROUNDING) & (position <= last + _ROUNDING)))
    if not outside.any():
        return
    *index, axis = np.argwhere(outside)[0].tolist()
    first, step = lattice.firsts[axis], lattice.steps[axis]
    point = tuple(points[tuple(index)].tolist())
    raise ValueError(
        f"{call}: point {index[0] if len(index) == 1 else tuple(index)} at {point} is outside of the grid along dimension "
        f"{axis}, whose {partition.shape[axis]} cells lie from {first:g} to {first + step * int(last[axis]):g}"
        f"{' (periodic, but the coordinate is not finite)' if partition.periodic[axis] else ''}. "
        f"{int(outside.any(axis=-1).sum())} of {max(1, points.size // points.shape[-1])} points are outside."
    )


# Interpolation weights are computed on the host.
#
# The weights are cached in a table, so that a program that evaluates a field at the same points in each step locates these
# points only once. For a field on a device, the table is copied to the device once, and the interpolation runs on the
# device. The weights of traced points are traced; each call computes and copies them.

_MAX_TABLES = 8  # maximum number of cached tables


class PointTable(NamedTuple):
    """The cells and weights of a set of points on one rank."""

    # The cells around each of the p points that this rank owns, shape (2**dimensions, p), in the flattened padded block.
    corners: Constants
    order: Constants  # for each point, its index in a list that contains first the points of this rank, then all others
    owned: Constants  # for each point, 1.0 if this rank owns it and 0.0 otherwise, in the dtype of the weights
    weights: Array  # weights of the cells in `corners`: Constants, or a traced array
    shape: Shape  # shape of the array of points, without its last axis


class PointTables:
    """The tables of the most recently used sets of points, for blocks with a halo of one cell."""

    def __init__(self, domain: Decomposition):
        # The halo has one layer, regardless of the domain's halo, since interpolation uses the cell after the last cell
        # of the block.
        self.halo = domain.halo_of((1,) * len(domain.shape))
        self._partition, self._rank = domain._partition, domain._channel.rank
        # The index, in the whole grid, of the first cell of the padded block (the block with this halo).
        self._starts = np.array([cells.start for cells in domain.owned]) - 1
        self._tables: dict[tuple, PointTable] = {}

    def table(self, points: Array, lattice: Lattice, dtype: np.dtype, call: str) -> PointTable:
        """Return the table of host points (..., dimensions), which may be traced; raise the exceptions of `located`."""
        # The weights of traced points belong to this trace and aren't cached.
        if isbox(points):
            return self._table_of(located(points, lattice, self._partition, call), dtype)
        plain: Array = np.ascontiguousarray(points)
        # The key contains a hash of the values, since a program may write other points into the same array.
        content = hashlib.blake2b(plain, digest_size=16).digest(), plain.shape, plain.dtype.str
        key = (*content, *lattice.firsts, *lattice.steps, dtype.char)
        table = self._tables.pop(key, None) or self._table_of(located(plain, lattice, self._partition, call), dtype)
        self._tables[key] = table  # at the end, so that the first table is the least recently used one
        if len(self._tables) > _MAX_TABLES:
            del self._tables[next(iter(self._tables))]
        return table

    def _table_of(self, location: Location, dtype: np.dtype) -> PointTable:
        ndim, owners = len(self._starts), location.owner.reshape(-1)
        own = np.flatnonzero(owners == self._rank)
        corner = (location.cell.reshape(-1, ndim)[own] - self._starts).T
        fraction = anp.reshape(location.fraction, (-1, ndim))[own].astype(dtype)
        steps = list(itertools.product((0, 1), repeat=ndim))
        corners = [np.ravel_multi_index(tuple(corner + np.array(step)[:, None]), self.halo.padded) for step in steps]
        # The weight of a corner is the product of its weights along all dimensions.
        factors = [(1.0 - fraction[:, axis], fraction[:, axis]) for axis in range(ndim)]
        weights = anp.stack([reduce(operator.mul, map(operator.getitem, factors, step)) for step in steps])
        order = np.argsort(np.concatenate([own, np.flatnonzero(owners != self._rank)]))
        stored_weights = weights if isbox(weights) else Constants(weights)
        owned = Constants((owners == self._rank).astype(dtype))
        return PointTable(Constants(np.stack(corners)), Constants(order), owned, stored_weights, location.owner.shape)


def interpolated(padded: LocalArray, table: PointTable, ndim: int) -> LocalArray:
    """Return a field's values at this rank's points, and zeros at all other points, on the host or device of `padded`."""
    namespace, weights = arrays_of(stop_gradient(padded)), table.weights
    lead, cells = padded.shape[: padded.ndim - ndim], math.prod(padded.shape[padded.ndim - ndim :])
    if isinstance(weights, Constants):
        (weights,) = weights.on(namespace)
    elif namespace is not None:
        weights = array_to_device(weights, namespace)
    (corners,) = table.corners.on(namespace)
    # Corners are added one by one, so that rounding doesn't depend on the number of points that a rank owns.
    terms = anp.reshape(padded, (*lead, cells))[..., corners] * weights
    values = reduce(operator.add, [terms[..., k, :] for k in range(len(corners))])
    count, owned_count = math.prod(table.shape), corners.shape[-1]
    if owned_count < count:
        zeros = Spec((*lead, count - owned_count), values.dtype, namespace).zeros()
        # A permutation of values and zeros can be differentiated, unlike assignments to elements of an array.
        values = concatenate([values, zeros], axis=-1)[..., table.order.on(namespace)[0]]
    return anp.reshape(values, (*lead, *table.shape))


_SAME_POINTS = 'with result="all" and "share" points must be the same on all ranks'
_REMEDY = 'Draw them with the same seed on all ranks, or broadcast them. Use result="own" for different points.'


def coordinates(domain: Decomposition, lattice: Lattice, halo: bool) -> tuple[LocalArray, ...]:
    """See `Domain.coordinates`."""
    widths = domain.halo if halo else (0,) * len(domain.shape)
    axes = [
        first + step * np.arange(cells.start - width, cells.stop + width)
        for cells, width, first, step in zip(domain.owned, widths, lattice.firsts, lattice.steps)
    ]
    return tuple(np.meshgrid(*axes, indexing="ij", sparse=True))


def locate(domain: Decomposition, points: Array, lattice: Lattice) -> Location:
    """See `Domain.locate`."""
    location = located(to_host(points), lattice, domain._partition, "Domain.locate")
    namespace = arrays_of(stop_gradient(points))
    return location if namespace is None else Location(*[array_to_device(part, namespace) for part in location])


def interpolate(
    domain: Decomposition, tables: PointTables, u: LocalArray, points: Array, lattice: Lattice, result: str
) -> Array:
    """See `Domain.interpolate`."""
    call = "Domain.interpolate"
    if result not in ("all", "share", "own"):
        raise ValueError(f'{call}: result must be one of "all", "share" or "own", but got {result!r}.')
    u = checked_block(domain, u, call)
    _end_trace(points, call)
    if result == "own":
        return _interpolate_own(domain, tables, u, points, lattice, call)
    _require_same_device(u, points, call)
    points = to_host(points)
    if watch_settings.debug():
        named_points = [("points", np.asarray(stop_gradient(points)))]
        checked_on_replay(require_replicated, domain._channel, named_points, f"{call}: {_SAME_POINTS}", _REMEDY)
    share, table = _share(domain, tables, u, points, lattice, call)
    if result == "share":
        return share
    # The same reduction counts the owners of each point. If a count isn't one, the points differ between ranks.
    (owned,) = table.owned.like(share)
    flat = anp.reshape(share, (-1,))
    total = mpi_allreduce(concatenate([flat, owned.astype(stop_gradient(share).dtype)]), comm=domain.comm)
    checked_on_replay(_require_one_owner, stop_gradient(total)[stop_gradient(flat).size :], domain._channel, call)
    return anp.reshape(total[: stop_gradient(flat).size], share.shape)


def _share(
    domain: Decomposition, tables: PointTables, u: LocalArray, points: Array, lattice: Lattice, call: str
) -> tuple[LocalArray, PointTable]:
    """Return the values at the points that this rank owns, with zeros at all other points, and the table of the points."""
    # Values beyond physical sides have weight zero, but must be finite.
    sides = sides_of("edge", len(domain.shape), call)
    # Points are located before the exchange, so that no rank waits in the exchange for a rank that raises.
    dtype = np.zeros(0, u.dtype).real.dtype if u.dtype.kind in "fc" else np.dtype(float)
    table = tables.table(points, lattice, dtype, call)
    return interpolated(fill_halo(u, tables.halo, sides), table, len(domain.shape)), table


def _interpolate_own(
    domain: Decomposition, tables: PointTables, u: LocalArray, points: Array, lattice: Lattice, call: str
) -> LocalArray:
    # If any rank has a point outside the grid, all ranks raise before the points are sent.
    with raising_together(domain._channel):
        _require_same_device(u, points, call)
        owners = located(to_host(points), lattice, domain._partition, call).owner
    order, (sent, received), arrived = _sent(domain, points, owners)
    share, _ = _share(domain, tables, u, arrived, lattice, call)
    own = mpi_alltoall(share, received, -1, comm=domain.comm, received=sent)[..., np.argsort(order)]
    return anp.reshape(own, share.shape[:-1] + owners.shape)


def deposit(domain: Decomposition, tables: PointTables, points: Array, values: Array, lattice: Lattice) -> LocalArray:
    """See `Domain.deposit`."""
    call, ndim, given = "Domain.deposit", len(domain.shape), stop_gradient(values)
    _end_trace(points, call)

    def checked() -> tuple[np.ndarray, Shape]:
        owners = located(to_host(points), lattice, domain._partition, call).owner
        if not is_array(given) or given.dtype.kind not in "fc" or given.shape[given.ndim - owners.ndim :] != owners.shape:
            kind = f"dtype {given.dtype} and shape {given.shape}" if is_array(given) else type(given).__name__
            raise ValueError(
                f"{call}: values must be an array of floats of shape (..., *{owners.shape}), one per point, but got {kind}."
            )
        return owners, given.shape[: given.ndim - owners.ndim]

    describe = lambda result: [f"values of dtype {given.dtype} with leading axes {result[1]}"]  # noqa: E731
    owners, lead = alike_on_all(domain._channel, checked, describe, call)
    order, (sent, received), arrived = _sent(domain, points, owners)
    flat = anp.reshape(values, (*lead, owners.size))
    own = mpi_alltoall(flat[..., order], sent, -1, comm=domain.comm, received=received)
    table = tables.table(arrived, lattice, given.real.dtype, call)
    spec = Spec((*flat.shape[:-1], *tables.halo.padded), given.dtype, arrays_of(given))
    # The transpose of the interpolation, of which the halo is the last part.
    pull, _ = make_vjp(lambda padded: interpolated(padded, table, ndim))(spec.zeros())
    return fold_halo(pull(own), tables.halo, sides_of("edge", ndim, call))


def _sent(domain: Decomposition, points: Array, owners: np.ndarray) -> tuple[np.ndarray, list[np.ndarray], Array]:
    """Return the points' order by owner, the numbers sent to and received from each rank, and this rank's points."""
    order, counts = np.argsort(owners, axis=None, kind="stable"), np.bincount(owners.flat, minlength=domain._channel.size)
    received = mpi_alltoall(counts, comm=domain.comm)
    # Points are converted to floats, since all ranks must send the same dtype, and some may pass integers.
    flat = anp.reshape(to_host(points), (-1, len(domain.shape))) * 1.0
    return order, [counts, received], mpi_alltoall(flat[order], counts, comm=domain.comm, received=received)


def _require_one_owner(counts: Array, channel: Channel, call: str) -> None:
    """Raise on all ranks unless all entries of `counts`, the numbers of owners, are one."""
    counts = to_host(counts)
    if (counts == 1.0).all():
        return
    wrong = np.flatnonzero(counts != 1.0)
    text = (
        f"{call}: {_SAME_POINTS}, but they differ: {wrong.size} of {counts.size} points aren't owned by exactly one rank. "
        f"For example, point {wrong[0]} is owned by {counts[wrong[0]].real:.0f} ranks. {_REMEDY}"
    )
    raise agreed(channel, ValueError(text))


def _end_trace(points: Array, call: str) -> None:
    """End the trace of a compiled function if the points depend on its arguments, since their owners are values."""
    namespace = arrays_of(stop_gradient(points))
    if tracing.recorder is not None and namespace is not None and namespace.takes_host_arrays:
        tracing.recorder.refuse(
            f"it calls {call} with points that depend on its arguments; only constant points are compiled"
        )


def _require_same_device(u: LocalArray, points: Array, call: str) -> None:
    """Raise a TypeError if points are on a device and the field isn't on the same device."""
    namespace = arrays_of(stop_gradient(points))
    if namespace is not None and namespace != arrays_of(stop_gradient(u)):
        raise TypeError(
            f"{call}: points must be on the host or on the device of u, but points are {named(stop_gradient(points))} and "
            f"u is {named(stop_gradient(u))}. Copy one of them with mpiad.device.to_device or to_host."
        )
