"""Values between cells: from which cells, and by which weights, is found on the host.

What was found is kept as a table: a program that takes a field's values at the same receivers in each step looks for them
once. For a field on a device the table is copied there, once, and the gather and its sums run there. Weights of traced
points are traced themselves: they are found, and copied, by each call.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
from collections import OrderedDict
from functools import reduce
from typing import Any, NamedTuple

import autograd.numpy as anp
import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array, LocalArray, Rank, Shape
from mpiad.device.assembly import concatenate
from mpiad.device.constants import Constants
from mpiad.device.transfer import array_to_device
from mpiad.domain.coordinates import Lattice, Location, located
from mpiad.domain.partition import Partition
from mpiad.primitives import stop_gradient
from mpiad.transport import Spec
from mpiad.transport.device_arrays import arrays_of

_KEPT = 8  # tables: a program has a few sets of receivers


class PointTable(NamedTuple):
    """What a rank must know of points."""

    # `places`, `order`: of the points that this rank owns the corners of their cells, shape (2**dimensions, p): places in
    # the flat block with its halo. And where each point is among those of this rank followed by the others.
    places: Constants
    order: Constants
    owned: Constants  # of all points, 1.0 for those of this rank and 0.0 for others, in the weights' dtype
    weights: Any  # Constants or array; of the corners; an array where it is traced
    shape: Shape  # of the points


class PointTables:
    """The tables of the sets of points that a domain has met last.

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
        # By what they hold: a program may write other points into the same array.
        held = hashlib.blake2b(plain, digest_size=16).digest(), plain.shape, plain.dtype.str
        key = (*held, *lattice.firsts, *lattice.steps, dtype.char)
        if key not in self._kept:
            self._kept[key] = self._found(located(plain, lattice, self._partition, call), dtype)
            if len(self._kept) > _KEPT:
                # The one that was asked for longest ago: points that move would fill the memory otherwise.
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
    """Return a field's values at this rank's points, zeros at those of others, where its padded block lives."""
    home, weights = arrays_of(stop_gradient(padded)), table.weights
    lead, cells = padded.shape[: padded.ndim - ndim], math.prod(padded.shape[padded.ndim - ndim :])
    if isinstance(weights, Constants):
        (weights,) = weights.on(home)
    elif home is not None:
        weights = array_to_device(weights, home)
    (places,) = table.places.on(home)
    # Corner after corner, so that a value's digits don't depend on how many points a rank owns.
    terms = anp.reshape(padded, (*lead, cells))[..., places] * weights
    values = reduce(operator.add, [terms[..., k, :] for k in range(len(places))])
    count, known = math.prod(table.shape), places.shape[-1]
    if known < count:
        zeros = Spec((*lead, count - known), values.dtype, home).zeros()
        # By a permutation of what is known and zeros, which has an adjoint; writing into zeros hasn't.
        values = concatenate([values, zeros], axis=-1)[..., table.order.on(home)[0]]
    return anp.reshape(values, (*lead, *table.shape))
