"""Points between the cells: coordinates, owners of points, and values there.

The cells of a grid represent points with equal spacing. A user's point lies between a cell and the next one along
each dimension; it belongs to the rank that owns the lower of them.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property, reduce
from typing import Any, NamedTuple

import autograd.numpy as anp
import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array, LocalArray, Rank, Shape
from mpiad.device.assembly import concatenate
from mpiad.device.transfer import Constants, array_to_device, array_to_host
from mpiad.domain.boundary import sides_of
from mpiad.domain.coordinates import Lattice, Location, lattice_of, located
from mpiad.domain.decomposition import Decomposition
from mpiad.domain.halo import Halo, fill_halo
from mpiad.domain.partition import Partition
from mpiad.primitives import mpi_allgather, mpi_allreduce, mpi_reduce_scatter, stop_gradient
from mpiad.transport import Channel, Spec
from mpiad.transport.agreement import agreed, raising_together
from mpiad.transport.device_arrays import arrays_of, named
from mpiad.transport.guarded import watch_settings
from mpiad.transport.replication import require_replicated
from mpiad.transport.tracing import settled

# Interpolation between cells: the cells and their weights are computed on the host.
#
# They are kept as a table: a program that evaluates a field at the same receivers in each step locates them once. For a
# field on a device the table is copied there, once, and the gather and its sums run there. Weights of traced points are
# traced themselves: they are computed, and copied, by each call.


_KEPT = 8  # tables: a program has a few sets of receivers


class PointTable(NamedTuple):
    """The cells and weights of a set of points on one rank."""

    # `places`: for the points that this rank owns, the corners of their cells, shape (2**dimensions, p), as indices into
    # the flattened block with its halo. `order`: the index of each point among those of this rank followed by the others.
    places: Constants
    order: Constants
    owned: Constants  # for all points, 1.0 for those of this rank and 0.0 for others, in the weights' dtype
    weights: Any  # of the corners; Constants, or an array if it is traced
    shape: Shape  # of the points


class PointTables:
    """The tables of the most recently used sets of points.

    `starts`, of shape (dimensions,): cell of the whole grid that is the first of the block with its halo.
    `padded`: the shape of that block.
    """

    def __init__(self, partition: Partition, rank: Rank, starts: np.ndarray, padded: Shape):
        self._partition, self._rank, self._starts, self._padded = partition, rank, starts, padded
        self._kept: OrderedDict[tuple, PointTable] = OrderedDict()

    def table(self, points: Array, lattice: Lattice, dtype: np.dtype, call: str) -> PointTable:
        """Return the table of points (..., dimensions), which are on the host, traced or not, with weights of this dtype.

        It raises as `located` does.
        """
        # Nothing is kept of points that are traced: their weights belong to this trace.
        if isbox(points):
            return self._found(located(points, lattice, self._partition, call), dtype)
        plain: Any = np.ascontiguousarray(points)
        # By their values: a program may write other points into the same array.
        held = hashlib.blake2b(plain, digest_size=16).digest(), plain.shape, plain.dtype.str
        key = (*held, *lattice.firsts, *lattice.steps, dtype.char)
        if key not in self._kept:
            self._kept[key] = self._found(located(plain, lattice, self._partition, call), dtype)
            if len(self._kept) > _KEPT:
                # Drop the least recently used table: moving points would fill the memory otherwise.
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _found(self, where: Location, dtype: np.dtype) -> PointTable:
        ndim, owners = len(self._starts), where.owner.reshape(-1)
        mine = np.flatnonzero(owners == self._rank)
        corner = (where.cell.reshape(-1, ndim)[mine] - self._starts).T
        fraction = anp.reshape(where.fraction, (-1, ndim))[mine].astype(dtype)  # the field keeps its precision
        steps = list(itertools.product((0, 1), repeat=ndim))
        places = [np.ravel_multi_index(tuple(corner + np.array(step)[:, None]), self._padded) for step in steps]
        weights = anp.stack([_corner_weight(fraction, step) for step in steps])
        order = np.argsort(np.concatenate([mine, np.flatnonzero(owners != self._rank)]))
        kept = weights if isbox(weights) else Constants(weights)
        owned = Constants((owners == self._rank).astype(dtype))
        return PointTable(Constants(np.stack(places)), Constants(order), owned, kept, where.owner.shape)


def _corner_weight(fraction: Array, step: tuple[int, ...]) -> Array:
    """Return the weight of one corner of a cell: the product of those along each dimension."""
    weight = 1.0
    for axis, s in enumerate(step):
        weight = weight * (fraction[:, axis] if s else 1.0 - fraction[:, axis])
    return weight


def interpolated(padded: LocalArray, table: PointTable, ndim: int) -> LocalArray:
    """Return a field's values at this rank's points, zeros at those of others, on the device of its padded block."""
    home, weights = arrays_of(stop_gradient(padded)), table.weights
    lead, cells = padded.shape[: padded.ndim - ndim], math.prod(padded.shape[padded.ndim - ndim :])
    if isinstance(weights, Constants):
        (weights,) = weights.on(home)
    elif home is not None:
        weights = array_to_device(weights, home)
    (places,) = table.places.on(home)
    # Corner after corner, so that rounding doesn't depend on the number of points that a rank owns.
    terms = anp.reshape(padded, (*lead, cells))[..., places] * weights
    values = reduce(operator.add, [terms[..., k, :] for k in range(len(places))])
    count, known = math.prod(table.shape), places.shape[-1]
    if known < count:
        zeros = Spec((*lead, count - known), values.dtype, home).zeros()
        # By a permutation of the known values and zeros, which has an adjoint; writing into an array of zeros has none.
        values = concatenate([values, zeros], axis=-1)[..., table.order.on(home)[0]]
    return anp.reshape(values, (*lead, *table.shape))


_SAME = 'with result="all" and "share" points must be the same on all ranks'
_HOW_TO_AGREE = 'Draw them with one seed on all ranks, or broadcast them; result="own" is for points of each rank\'s own.'


class Points(Decomposition):
    """Operations of a domain on points in space."""

    def coordinates(
        self,
        spacing: float | Sequence[float] = 1.0,
        origin: float | Sequence[float] = 0.0,
        *,
        extent: float | Sequence | None = None,
        centred: bool = False,
        halo: bool = False,
    ) -> tuple[LocalArray, ...]:
        """Return the coordinates of this rank's cells, one array for each dimension, in shapes that broadcast.

        Parameters
        ----------
        spacing, origin : float or one for each dimension
            Cell i lies at ``origin + i * spacing``.
        extent : float, or a length or pair (low, high) for each dimension, optional
            Instead of both: the interval that the whole grid covers; its first and last cells lie on the ends.
        centred : bool
            Whether cells lie half a spacing further, at the center of equal parts.
        halo : bool
            Whether to include the cells of the halo.

        Returns
        -------
        tuple of array
            In two dimensions of shape (n, 1) and (1, m).

        Raises
        ------
        ValueError
            If the number of an argument's entries isn't the number of the grid's dimensions.

        Examples
        --------
        >>> domain = mpiad.Domain(12)
        >>> (x,) = domain.coordinates(0.5)
        >>> print(domain.min(x), domain.max(x))
        0.0 5.5
        """
        firsts, steps = lattice_of(self.shape, self.periodic, spacing, origin, extent, centred)
        widths = self.halo if halo else (0,) * len(self.shape)
        along = [
            first + step * np.arange(cells.start - width, cells.stop + width)
            for cells, width, first, step in zip(self.owned, widths, firsts, steps)
        ]
        return tuple(np.meshgrid(*along, indexing="ij", sparse=True))

    def locate(
        self,
        points: Array,
        spacing: float | Sequence[float] = 1.0,
        origin: float | Sequence[float] = 0.0,
        *,
        extent: float | Sequence | None = None,
        centred: bool = False,
    ) -> Location:
        """Return the owners of points, their cells, and their positions between cells.

        Parameters
        ----------
        points : array of shape (..., dimensions)
            Coordinates; on periodic dimensions any number counts.
        spacing, origin, extent, centred
            Positions of the cells, as in `coordinates`.

        Returns
        -------
        Location
            ``owner`` of shape (...): the rank that owns ``cell``. ``cell`` of shape (..., dimensions): the cell before the
            point along each dimension, as index of the whole grid. ``fraction`` of the shape of `points`: the distance
            from that cell, from 0 to 1 (the next cell); differentiable. Points on a device are copied to the host and
            located there, and the three arrays are copied to the device.

        Raises
        ------
        ValueError
            If a point lies outside of the grid, before its first cell or beyond its last one.
        TypeError
            If points aren't numbers.

        Ranks
        -----
        Any rank may call it; nothing is sent.

        Adjoint
        -------
        The cotangent of `fraction`, divided by the spacing, goes to `points`.
        """
        lattice = lattice_of(self.shape, self.periodic, spacing, origin, extent, centred)
        # On the host, also for points on a device: their positions determine how arrays are indexed.
        found = located(_on_host(points), lattice, self._partition, "Domain.locate")
        home = arrays_of(stop_gradient(points))
        return found if home is None else Location(*[array_to_device(part, home) for part in found])

    def interpolate(
        self,
        u: LocalArray,
        points: Array,
        spacing: float | Sequence[float] = 1.0,
        origin: float | Sequence[float] = 0.0,
        *,
        extent: float | Sequence | None = None,
        centred: bool = False,
        result: str = "all",
    ) -> Array:
        """Return the values of a field at points, linear between cells along each dimension.

        Parameters
        ----------
        u : array of shape (..., *local_shape)
        points : array of shape (..., dimensions)
            Coordinates; with ``result="own"`` each rank's own points, otherwise the same on all ranks. For a field on a
            device they may be on the host, where they are located: the resulting table is copied to the device once per
            set of points. Points on a device are copied to the host by each call.
        spacing, origin, extent, centred
            Positions of the cells, as in `coordinates`.
        result : {"all", "share", "own"}
            "all": every rank gets the values at all points. "share": a rank gets those at the points that it owns, and
            zeros at the others, so that the sum over ranks is "all"; this saves reductions if many steps are added up
            first. "own": each rank gets the values at its own points.

        Returns
        -------
        array
            The leading dimensions of `u`, then those of `points`.

        Raises
        ------
        ValueError
            If a point lies outside of the grid (the text gives its position), or `result` is unknown; with "own" on all
            ranks. With "all" on all ranks, if points differ between ranks such that one has no owner, or several.
        ReplicationError
            A ValueError on all ranks, under ``MPIAD_DEBUG=1``, if points differ between ranks in any bit, with "all" or
            "share".
        TypeError
            If `u` or `points` isn't a supported array; if points are on a device and `u` isn't.

        Ranks
        -----
        All ranks call it. With "own" all points pass through every rank: it is meant for receivers and probes, not for
        as many particles as there are cells.

        Adjoint
        -------
        Each value's cotangent goes to the cells around the point, on their owners, by the weights with which they made the
        value; and to the point's coordinates by the slopes between these cells.

        Examples
        --------
        >>> domain = mpiad.Domain(12)
        >>> (x,) = domain.coordinates()
        >>> print(domain.interpolate(x**2, [[1.0], [2.5]]))
        [1.  6.5]
        """
        call = "Domain.interpolate"
        if result not in ("all", "share", "own"):
            raise ValueError(f'{call}: result must be one of "all", "share" or "own", but got {result!r}.')
        u = self._checked(u, self.local_shape, call)
        lattice = lattice_of(self.shape, self.periodic, spacing, origin, extent, centred)
        if result == "own":
            return self._interpolate_own(u, points, lattice, call)
        _require_place(u, points, call)
        points = _on_host(points)
        if watch_settings.debug():
            named_points = [("points", np.asarray(stop_gradient(points)))]
            settled(require_replicated, self._channel, named_points, f"{call}: {_SAME}", _HOW_TO_AGREE)
        share, table = self._share(u, points, lattice, call)
        if result == "share":
            return share
        # Together with the values sum up the owners of each point: points that differ between ranks have none, or several.
        (owned,) = table.owned.beside(share)
        flat = anp.reshape(share, (-1,))
        total = mpi_allreduce(concatenate([flat, owned.astype(stop_gradient(share).dtype)]), comm=self.comm)
        settled(_require_one_owner, stop_gradient(total)[stop_gradient(flat).size :], self._channel, call)
        return anp.reshape(total[: stop_gradient(flat).size], share.shape)

    def _share(self, u: LocalArray, points: Array, lattice: Lattice, call: str) -> tuple[LocalArray, PointTable]:
        """Return the values at the points that this rank owns, and zeros at the others; and their table."""
        # With its own edge beyond physical sides: those values have weight zero, but must be finite.
        sides = sides_of("edge", len(self.shape), call)
        # Locate points before the exchange, so that no rank waits for one that raises.
        table = self._tables.table(points, lattice, np.zeros(0, u.dtype).real.dtype, call)
        return interpolated(fill_halo(u, self._beside, sides), table, len(self.shape)), table

    def _interpolate_own(self, u: LocalArray, points: Array, lattice: Lattice, call: str) -> LocalArray:
        # Each rank has other points; all raise for one outside before the points are sent.
        with raising_together(self._channel):
            _require_place(u, points, call)
            points = _on_host(points)
            located(points, lattice, self._partition, call)
        ndim, shape = len(self.shape), np.shape(stop_gradient(points))[:-1]
        # As floats, even if some ranks give integers: gathered arrays have one dtype.
        flat = anp.reshape(points, (-1, ndim)) * 1.0
        counts = [int(n) for n in mpi_allgather(np.array([math.prod(shape)]), axis=0, comm=self.comm)]
        # All points go to all ranks, since none knows whose neighbors they have; values are returned to their ranks only.
        everywhere = mpi_allgather(flat, axis=0, comm=self.comm)
        share, _ = self._share(u, everywhere, lattice, call)
        # Each point has a value on its owner and zeros elsewhere: the sum is that value; each rank gets its points only.
        mine = mpi_reduce_scatter(anp.moveaxis(share, -1, 0), axis=0, counts=counts, comm=self.comm)
        return anp.reshape(anp.moveaxis(mine, 0, -1), u.shape[: u.ndim - ndim] + shape)

    @cached_property
    def _beside(self) -> Halo:
        """A halo of one cell, whatever that of the domain is: the cell after the block's last one."""
        return Halo(self._partition, self._channel.rank, (1,) * len(self.shape), self.comm)

    @cached_property
    def _tables(self) -> PointTables:
        first = np.array([cells.start for cells in self.owned]) - 1  # of the block with that halo
        return PointTables(self._partition, self._channel.rank, first, self._beside.padded)


def _on_host(points: Array) -> Array:
    """Return points on the host, where they are located; traced points stay traced."""
    return points if arrays_of(stop_gradient(points)) is None else array_to_host(points)


def _require_one_owner(counts: Array, channel: Channel, call: str) -> None:
    """Raise on all ranks unless each point has one owner; the counts are sums over all ranks."""
    home = arrays_of(counts)
    counts = counts if home is None else home.to_host(counts)
    if (counts == 1.0).all():
        return
    wrong = np.flatnonzero(counts != 1.0)
    raise agreed(channel, ValueError(
        f"{call}: {_SAME}, but {wrong.size} of {counts.size} points aren't owned by one rank: of point {wrong[0]}, at each "
        f"rank's coordinates, {counts[wrong[0]].real:.0f} ranks are the owner. {_HOW_TO_AGREE}"
    ))  # fmt: skip


def _require_place(u: LocalArray, points: Array, call: str) -> None:
    """Raise a TypeError if points are on a device and the field isn't on the same one."""
    home = arrays_of(stop_gradient(points))
    if home is not None and home != arrays_of(stop_gradient(u)):
        raise TypeError(
            f"{call}: points must be on the host, or where u is, but points are {named(stop_gradient(points))} and u is "
            f"{named(stop_gradient(u))}. Nothing is copied unasked: see mpiad.device.to_device and to_host."
        )
