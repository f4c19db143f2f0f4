"""`stencil`, `laplacian` and `correlate`: sums over the neighbors of each cell."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from itertools import islice
from math import factorial
from typing import TypeAlias

import numpy as np
from autograd import extend
from autograd.extend import primitive
from autograd.tracer import getval, isbox

from mpiad._typing import Array, Function, LocalArray, Shape
from mpiad.domain.boundary import Boundary, Sides, check_values, homogeneous, sides_of
from mpiad.domain.decomposition import Decomposition, check_reflection, checked_block, listed, per_dimension
from mpiad.domain.halo import TAG, Halo, complete, fill_halo, fill_local, fold_halo, fold_in_place, post
from mpiad.domain.routes import AT_ONCE, BY_AXIS, FACES_ONLY
from mpiad.extend import custom_operator, defjvp, defvjp
from mpiad.primitives.cotangents import spec_like, tangent_of
from mpiad.transport.core.tracing import tracing
from mpiad.transport.devices.device_arrays import empty_like, zeros_like


class Stencil:
    """A stencil on a domain; created by `Domain.stencil` and `Domain.laplacian`.

    Attributes
    ----------
    weights : array
        The weights of the neighbors, an odd number along each dimension; the center is the weight of the cell itself.
    radius : tuple of int
        Largest offset along each dimension.
    """

    def __init__(self, domain: Decomposition, sums: StencilSums):
        self._domain, self.sums, self.weights, self.radius = domain, sums, sums.weights, sums.radius

    def __call__(self, u: LocalArray) -> LocalArray:
        """Apply the stencil to a field.

        Parameters
        ----------
        u : float or complex array of shape (..., *local_shape)

        Returns
        -------
        array of the shape of `u`
            In cell i the sum over k of ``weights[k] * u[i + k - radius]``.

        Raises
        ------
        TypeError, ValueError
            If `u` isn't an array of this kind and shape, or is real and a boundary value is complex.

        Ranks
        -----
        All ranks of the domain call it.

        Adjoint
        -------
        The stencil with reversed weights along each dimension; cotangents of halo cells are added to the cells they copy.
        """
        field = getval(checked_block(self._domain, u, "Stencil"))
        if field.dtype.kind not in "fc":
            kind = f"{type(field).__name__} of {field.dtype}"
            raise TypeError(f"Stencil: expected an array of floats or complex numbers, but got {kind}. Convert it.")
        check_values(self.sums.sides, field.dtype, "Stencil")
        is_compiled = tracing.recorder is not None and 0 < np.count_nonzero(self.weights) <= _MOST_WEIGHTS
        return _in_slices(u, self.sums) if is_compiled else apply_stencil(u, self.sums)

    def __repr__(self) -> str:
        return f"Stencil(radius={self.radius}, {np.count_nonzero(self.weights)} weights)"


def stencil(domain: Decomposition, weights: Array, boundary: Boundary) -> Stencil:
    """See `Domain.stencil`."""
    call = "Domain.stencil"
    array = np.asarray(weights)
    if isbox(weights) or array.dtype.kind not in "fiu":
        raise TypeError(
            f"{call}: weights must be an array of real numbers, untraced, but got {type(weights).__name__} of dtype "
            f"{array.dtype}. For derivatives with respect to weights use Domain.correlate."
        )
    sides = sides_of(boundary, len(domain.shape), call)
    _require_untraced(sides, call)
    return Stencil(domain, StencilSums(array.astype(float), _halo_for(domain, array.shape, sides, call), sides))


def laplacian(domain: Decomposition, spacing: float | Sequence[float], order: int, boundary: Boundary) -> Stencil:
    """See `Domain.laplacian`."""
    ndim = len(domain.shape)
    if order not in range(2, 42, 2):
        raise ValueError(f"Domain.laplacian: order must be even, from 2 to 40, but got {order!r}.")
    m = order // 2
    # The closed form of the coefficients in table 1 of Fornberg (see `Domain.laplacian`). All weights add up to zero.
    side = [
        2.0 * (-1) ** (k + 1) * factorial(m) ** 2 / (k**2 * factorial(m - k) * factorial(m + k)) for k in range(1, m + 1)
    ]
    line_weights = np.array([*side[::-1], -2 * sum(side), *side])
    weights = np.zeros((order + 1,) * ndim)
    for axis, step in enumerate(per_dimension(spacing, ndim, "spacing")):
        if not float(step) > 0:
            raise ValueError(f"Domain.laplacian: spacing must be positive along each dimension, but got {spacing!r}.")
        np.moveaxis(weights, axis, -1)[(m,) * (ndim - 1)] += line_weights / float(step) ** 2
    return stencil(domain, weights, boundary)


def correlate(domain: Decomposition, u: LocalArray, weights: LocalArray, boundary: Boundary) -> LocalArray:
    """See `Domain.correlate`."""
    call = "Domain.correlate"
    ndim, u = len(domain.shape), checked_block(domain, u, call)
    shape = np.shape(getval(weights))
    if len(shape) != 2 * ndim or shape[ndim:] != domain.local_shape:
        raise ValueError(
            f"{call}: the shape of weights must be {ndim} odd lengths, followed by the block's shape, "
            f"({listed(domain.local_shape)}), but is {shape}."
        )
    sides = sides_of(boundary, ndim, call)
    halo = _halo_for(domain, shape[:ndim], sides, call)
    # Only the ranks with a physical side use the values, but all ranks raise.
    _require_untraced(sides, call)
    check_values(sides, u.dtype, call)
    return derivative(None, weights, fill_halo(u, halo, sides, BY_AXIS), ndim)


def _require_untraced(sides: Sides, call: str) -> None:
    if any(isbox(side.value) for pair in sides for side in pair):
        raise TypeError(f"{call}: a boundary value can't be traced here. Use Domain.exchange and slices.")


def _halo_for(domain: Decomposition, lengths: tuple[int, ...], sides: Sides, call: str) -> Halo:
    """Return the halo that is needed by weights with these lengths along the dimensions."""
    if len(lengths) != len(domain.shape) or any(length % 2 == 0 for length in lengths):
        raise ValueError(
            f"{call}: weights must have an odd length along each of {len(domain.shape)} dimensions, but have {lengths}."
        )
    radius = tuple(length // 2 for length in lengths)
    for axis, (n, p, r) in enumerate(zip(domain.shape, domain.dims, radius)):
        if n // p < r:
            raise ValueError(
                f"{call}: the weights have radius {r} along dimension {axis}, but the smallest of the {p} blocks "
                f"of {n} cells has {n // p} cells. Use fewer ranks along this dimension, or a larger grid."
            )
    check_reflection(domain, sides, call, radius)
    return domain.halo_of(radius)


# The operator S E of a stencil: E exchanges the halo, and S computes the sums.
#
# The operator is one node on the tape, and saves no arrays. Communication overlaps with the sums in the interior. The
# transpose is Eᵀ Sᵀ: Sᵀ adds the cotangent of a cell, times the weights, to its neighbors, in the halo, too, and Eᵀ adds
# the sums in the halo to the cells of which they are copies.
#
# In a compiled program, E and S are separate: an exchange, and slices that a loop adds. Some ranks may run the program
# while others interpret the function. So the operators have the messages and names of E and Eᵀ, and their adjoints take
# several cotangents at once, as those do.

# The maximum number of nonzero weights for slices in compiled programs. A loop with more terms takes long to compile.
_MOST_WEIGHTS = 32

Terms: TypeAlias = tuple[tuple[float, tuple[tuple[int, ...], ...]], ...]
"""Pairs of a weight and all offsets with this weight, which are counted from the lowest corner of the stencil."""
Box: TypeAlias = tuple[slice, ...]


class StencilSums:
    """The operator of a stencil with odd lengths; `halo` is as wide as the radius of the weights."""

    def __init__(self, weights: np.ndarray, halo: Halo, sides: Sides):
        self.weights, self.radius, self.halo, self.sides, self.comm = weights, halo.widths, halo, sides, halo.comm
        self.terms: Terms = terms_of(weights)
        offset_axes = np.argwhere(weights) != np.array(self.radius)
        # Star stencils, whose offsets are nonzero along one dimension only, need no corners.
        self.scheme = FACES_ONLY if (offset_axes.sum(axis=1) <= 1).all() else AT_ONCE
        (self.stage,) = halo.stages(self.scheme)
        self.interior, self.boundary_boxes = _parts_of(halo) if self.stage.routes else (None, [_all_of(halo.shape)])

    @cached_property
    def homogeneous(self) -> StencilSums:
        """The linear part of the operator: boundary values are zero."""
        sides = homogeneous(self.sides)
        return self if sides == self.sides else StencilSums(self.weights, self.halo, sides)

    @cached_property
    def mirrored_terms(self) -> Terms:
        """The terms of the stencil with reversed weights."""
        return terms_of(np.flip(self.weights))

    def shifted(self, padded: LocalArray, offset: tuple[int, ...]) -> LocalArray:
        """Return the view of an array with halo that contains the neighbor at an offset (see `Terms`) of each cell."""
        return padded[(..., *[slice(o, o + n) for o, n in zip(offset, self.halo.shape)])]


def terms_of(weights: np.ndarray) -> Terms:
    """Return the terms of a stencil, sorted by the number of offsets, the largest first."""
    groups: dict[float, list[tuple[int, ...]]] = {}
    for offset in np.argwhere(weights):
        groups.setdefault(weights[tuple(offset)].item(), []).append(tuple(offset.tolist()))
    return tuple((weight, tuple(offsets)) for weight, offsets in sorted(groups.items(), key=lambda item: -len(item[1])))


def weighted_sum(source: LocalArray, terms: Terms, out: LocalArray, box: Box) -> None:
    """Compute the sums in a box of cells: ``out[i]`` is the sum of ``weight * source[i + offset]``."""
    target = out[(..., *box)]
    if not terms:
        target[...] = 0
    if not target.size:
        return
    scratch = empty_like(out, target.shape)
    for number, (weight, offsets) in enumerate(terms):
        shifted = [[slice(cells.start + o, cells.stop + o) for cells, o in zip(box, offset)] for offset in offsets]
        parts, part = [source[(..., *index)] for index in shifted], scratch if number else target
        # Values of equal weight are added first and multiplied once.
        if len(parts) == 1:
            np.multiply(parts[0], weight, out=part)
        else:
            np.add(parts[0], parts[1], out=part)
            for next_part in islice(parts, 2, None):
                part += next_part
            if weight != 1:
                part *= weight
        if number:
            target += scratch


@custom_operator
def apply_stencil(u: LocalArray, stencil: StencilSums) -> LocalArray:
    """Return the stencil's sums: S E u. See `Stencil`."""
    halo, terms = stencil.halo, stencil.terms
    padded = empty_like(u, u.shape[: u.ndim - len(halo.shape)] + halo.padded)
    padded[halo.interior] = u
    out = empty_like(u, u.shape)
    # Cells whose neighbors are all in the block are summed during the exchange.
    pending = post(padded, stencil.stage.routes, False, TAG, halo.comm)
    if stencil.interior is not None:
        weighted_sum(padded, terms, out, stencil.interior)
    complete(padded, pending, False)
    fill_local(padded, halo.local(stencil.sides, stencil.scheme)[0], stencil.sides)
    for box in stencil.boundary_boxes:
        weighted_sum(padded, terms, out, box)
    return out


@custom_operator
def apply_transpose(g: LocalArray, stencil: StencilSums) -> LocalArray:
    """Apply the transpose of the linear part of `apply_stencil`: return Eᵀ Sᵀ g."""
    halo, radius, lead = stencil.halo, stencil.radius, g.shape[: g.ndim - len(stencil.halo.shape)]
    # Sums are also computed in the halo, so g is padded with 2 * radius layers of zeros on each side.
    padded_g = empty_like(g, lead + tuple(n + 4 * r for n, r in zip(halo.shape, radius)))
    block = [slice(2 * r, 2 * r + n) for n, r in zip(halo.shape, radius)]
    for axis, part in enumerate(block):
        for layers in (slice(0, part.start), slice(part.stop, None)):
            padded_g[(..., *[slice(None)] * axis, layers, *block[axis + 1 :])] = 0
    padded_g[(..., *block)] = g
    total = empty_like(g, lead + halo.padded)
    weighted_sum(padded_g, stencil.mirrored_terms, total, _all_of(halo.padded))
    fold_in_place(total, halo, stencil.sides, stencil.scheme)
    return total[halo.interior]


apply_stencil.spec_of = apply_transpose.spec_of = lambda u, _: spec_like(u)
apply_stencil.__name__, apply_transpose.__name__ = fill_halo.__name__, fold_halo.__name__
apply_stencil.batched_adjoint = apply_transpose.batched_adjoint = True
# S E is affine, because of the values beyond the sides; its derivative is the same stencil with zeros beyond the sides.
defvjp(apply_stencil, lambda ans, u, stencil: lambda g: apply_transpose(g, stencil))
defjvp(apply_stencil, lambda du, ans, u, stencil: apply_stencil(du, stencil.homogeneous))
defvjp(apply_transpose, lambda ans, g, stencil: lambda v: apply_stencil(v, stencil.homogeneous))
defjvp(apply_transpose, lambda dg, ans, g, stencil: apply_transpose(dg, stencil))


def _in_slices(u: LocalArray, stencil: StencilSums) -> LocalArray:
    """Return the sums as an exchange and slices."""
    padded = fill_halo(u, stencil.halo, stencil.sides, stencil.scheme)
    total = None
    for weight, (first, *others) in stencil.terms:
        part = stencil.shifted(padded, first)
        for offset in others:
            part = part + stencil.shifted(padded, offset)
        part = part if weight == 1 else weight * part
        total = part if total is None else total + part
    return total


def _all_of(shape: Shape) -> Box:
    return tuple(slice(0, n) for n in shape)


def _parts_of(halo: Halo) -> tuple[Box | None, list[Box]]:
    """Return the box of cells whose sums need no halo, or None, and boxes that cover the other cells."""
    interior, boxes = list(_all_of(halo.shape)), []
    for axis, (n, r) in enumerate(zip(halo.shape, halo.widths)):
        # If a block isn't longer than the halos of both sides together, every sum needs halo cells.
        if n <= 2 * r:
            return None, [_all_of(halo.shape)]
        if r:
            boxes += [(*interior[:axis], cells, *interior[axis + 1 :]) for cells in (slice(0, r), slice(n - r, n))]
            interior[axis] = slice(r, n - r)
    return tuple(interior), boxes


# Stencils with different weights in each cell.
#
# Let T(y, w, u) be the sum over k of ⟨y, w_k u_k⟩, with the weights w_k at offset k, and the parts u_k of a padded field
# that are shifted by k. The weighted sums Σ_k w_k u_k are the derivative of T with respect to y. T is linear in each
# factor, so the derivatives of its derivatives are again derivatives of T.


@primitive
def derivative(y: LocalArray, w: LocalArray, u: LocalArray, ndim: int) -> LocalArray:
    """Return the derivative of T with respect to the factor that is None, for a grid of `ndim` dimensions.

    The factors have the shapes (..., *cells), (*lengths, *cells) and (..., *padded).
    """
    first, second = (factor for factor in (y, w, u) if factor is not None)
    like = first[:0].astype(np.result_type(first.dtype, second.dtype))
    cells = w.shape[ndim:] if y is None else y.shape[y.ndim - ndim :]
    if w is None:
        lengths = tuple(m - n + 1 for m, n in zip(u.shape[u.ndim - ndim :], cells))
        found = empty_like(like, lengths + cells)
    else:
        lengths, padded = w.shape[:ndim], tuple(n + length - 1 for n, length in zip(cells, w.shape))
        lead = u.shape[: u.ndim - ndim] if y is None else y.shape[: y.ndim - ndim]
        found, scratch = zeros_like(like, lead + (cells if y is None else padded)), empty_like(like, lead + cells)
    for offset in np.ndindex(lengths):
        part = (..., *[slice(o, o + n) for o, n in zip(offset, cells)])
        if w is None:
            # The fields along leading axes share the weights, so the contributions of the fields are added.
            found[offset] = (y * u[part]).reshape(-1, *cells).sum(axis=0)
        else:
            np.multiply(u[part] if y is None else y, w[offset], out=scratch)
            found[... if y is None else part] += scratch
    return found


def _adjoint(k: int, ans: LocalArray, *args: Array) -> Function:
    """Return the function from the cotangent of the result, which replaces the factor None, to that of factor k."""

    def vjp(g: LocalArray) -> LocalArray:
        factors = [g if factor is None else factor for factor in args[:3]]
        factors[k] = None
        return tangent_of(args[k], derivative(*factors, args[3]))

    return vjp


extend.defvjp(derivative, *[partial(_adjoint, k) for k in range(3)])
extend.defjvp(derivative, "same", "same", "same")
