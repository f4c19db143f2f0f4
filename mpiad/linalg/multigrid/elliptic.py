"""`Elliptic`: the operator -∇·(κ∇u) + c u on a domain, differentiable with respect to u, κ and c.

The flux between two points is κ on the face between them, times the difference of u, divided by the spacing h. With a
condition α, g on a side, the flux out of the domain is w (α u - g), for u at the nearest point and κ on the side:

- u = g at the distance d from the nearest point: α = 1, w = κ / d;
- κ ∂u/∂n + α u = g at the distance h / 2: the flux 2 κ (u - v) / h from the point to the side, with the value v, is equal
  to α v - g. Elimination of v gives w = 2 κ / (2 κ + h α); α = 0 is a given flux.

The coefficient h w α of the outermost face, with u = 0 beyond it, gives the flux w α u. So all points have the same
formula: the sum of the fluxes through their faces. The terms w g belong to the right-hand side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array, LocalArray
from mpiad.device.assembly import concatenate
from mpiad.domain import Domain
from mpiad.domain.boundary import pairs_of
from mpiad.domain.decomposition import per_dimension
from mpiad.linalg.vectors import on_host, require_together
from mpiad.primitives import stop_gradient
from mpiad.transport import channel
from mpiad.transport.core.agreement import alike_on_all
from mpiad.transport.devices.device_arrays import arrays_of

_ALLOWED = (
    '"dirichlet", "neumann", {"dirichlet": g}, {"neumann": q} or {"robin": (alpha, g)}; or, in a tuple, one of these or a '
    "pair (before, after) for each dimension"
)

Coefficient = Any
"""κ: a number; an array of shape local_shape or (dimensions, *local_shape); or a list of arrays on faces."""


class Side(NamedTuple):
    """The condition on a side of the grid; its numbers or arrays may be traced."""

    kind: str
    alpha: Array
    value: Array = None  # g or q; None for zero


class Sides(NamedTuple):
    """The spacing and boundary conditions of a grid."""

    spacing: tuple[float, ...]  # distance between neighboring points along each dimension
    pairs: list[tuple[Side, Side]]  # for each dimension, the conditions before the first point, and after the last point
    centred: bool  # whether sides with prescribed values are half a spacing beyond the outermost points, instead of one


def sides_of(domain: Domain, spacing: object, boundary: object, centred: bool, call: str) -> Sides:
    """Return the sides of a domain; raise a TypeError or ValueError if an argument of `Elliptic` is invalid."""
    ndim = len(domain.shape)
    try:
        steps = tuple(float(step) for step in per_dimension(spacing, ndim, "spacing"))
    except TypeError:
        raise TypeError(f"{call}: spacing must be a number, or one for each dimension, but got {spacing!r}.") from None
    if not all(0 < step < math.inf for step in steps):
        raise ValueError(f"{call}: spacing must be positive and finite, but got {spacing!r}.")
    pairs = [tuple(_side(entry, call) for entry in pair) for pair in pairs_of(boundary, ndim, _ALLOWED, call)]
    for axis, pair in enumerate(pairs):
        shape = tuple(1 if other == axis else n for other, n in enumerate(domain.local_shape))
        for side, rank in zip(pair, domain.neighbours[axis]):
            if rank is None:
                _check_values(side, shape, call)
    return Sides(steps, pairs, bool(centred))  # type: ignore[arg-type]


def _side(entry: object, call: str) -> Side:
    kind, value = next(iter(entry.items())) if isinstance(entry, dict) and len(entry) == 1 else (entry, None)
    if isinstance(kind, str) and kind == "robin" and isinstance(value, (tuple, list)) and len(value) == 2:
        return Side(kind, *value)
    if not isinstance(kind, str) or kind not in ("dirichlet", "neumann"):
        raise ValueError(f"{call}: boundary must be {_ALLOWED}, but got {entry!r}.")
    return Side(kind, 1.0 if kind == "dirichlet" else 0.0, value)


def _check_values(side: Side, shape: tuple[int, ...], call: str) -> None:
    for name, value in (("alpha", side.alpha), ("the given value", 0.0 if side.value is None else side.value)):
        array = np.asarray(on_host(stop_gradient(value)))
        # Values may have leading axes, for several right-hand sides.
        fits = all(n in (1, m) for n, m in zip(array.shape[::-1], shape[::-1]))
        fits &= name != "alpha" or array.ndim <= len(shape)
        if array.dtype.kind not in "fiu" or not fits:
            raise ValueError(
                f"{call}: {name} of a side must be a real number or an array that broadcasts to this rank's part of the "
                f"side, {shape}, but has dtype {array.dtype} and shape {array.shape}."
            )
        if not np.isfinite(array).all() or (name == "alpha" and (array < 0).any()):
            raise ValueError(f"{call}: {name} of a side must be finite (alpha: and zero or more), but got {value!r}.")


class Elliptic:
    """The operator -∇·(κ∇u) + c u on the blocks of a domain.

    The operator is linear: values and fluxes that are given on sides are in `source`, to be added to the right-hand side.

    Parameters
    ----------
    domain : Domain
    spacing : float, or one per dimension
        Distance between neighboring points.
    boundary : {"dirichlet", "neumann"}, dict or tuple
        Conditions on physical sides. "dirichlet" is u = 0, and "neumann" is no flux. ``{"dirichlet": g}`` is u = g,
        ``{"neumann": q}`` is the flux κ ∂u/∂n = q into the domain, for the outer normal n, and ``{"robin": (alpha, g)}`` is
        κ ∂u/∂n + α u = g with α ≥ 0. The values are numbers, or arrays that broadcast to this rank's part of the side,
        which has length 1 along the side's dimension; they may be traced. g and q may have the leading axes of several
        right-hand sides. A tuple contains a condition, or a pair (before, after), per dimension. Periodic
        dimensions have no sides.
    centred : bool
        Whether points are centers of cells, as in `Domain.coordinates`. If True, sides with given u are half a spacing
        beyond the outermost points, otherwise one spacing. All other sides are half a spacing beyond the outermost points.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if an argument is invalid or differs between ranks.

    Ranks
    -----
    All ranks of the domain call the constructor, with the same arguments, and the operator.

    Examples
    --------
    >>> from mpiad.linalg import Elliptic
    >>> domain = mpiad.Domain((8, 8))
    >>> y, x = domain.coordinates(1 / 9, 1 / 9)
    >>> u = np.sin(np.pi * x) * np.sin(np.pi * y)
    >>> applied = Elliptic(domain, spacing=1 / 9)(u, kappa=1.0)
    >>> eigenvalue = 2 * (2 * 9 * np.sin(np.pi / 18)) ** 2
    >>> print(np.allclose(applied, eigenvalue * u))
    True
    """

    def __init__(
        self,
        domain: Domain,
        *,
        spacing: float | Sequence[float] = 1.0,
        boundary: str | Sequence = "dirichlet",
        centred: bool = False,
    ):
        if not isinstance(domain, Domain):
            raise TypeError(f"Elliptic: domain must be an mpiad.Domain, but got {type(domain).__name__} {domain!r}.")
        self.sides = alike_on_all(
            channel(domain.comm, "Elliptic"),
            lambda: sides_of(domain, spacing, boundary, centred, "Elliptic"),
            lambda sides: [f"{sides._replace(pairs=[[side.kind for side in pair] for pair in sides.pairs])}"],
            "Elliptic",
        )
        # The same domain with a halo of one point.
        self.domain = Domain(domain.shape, periodic=domain.periodic, dims=domain.dims, comm=domain.comm)

    def __call__(self, u: LocalArray, kappa: LocalArray, c: LocalArray | float = 0.0) -> LocalArray:
        """Return this rank's block of -∇·(κ∇u) + c u.

        Parameters
        ----------
        u : float or complex array of shape (..., *local_shape)
        kappa : number, array of shape local_shape or (dimensions, *local_shape), or list of arrays
            The coefficient at the points; its mean at two adjacent points is κ on the face between them. With a leading
            axis, it is the diagonal of a tensor. A list contains, for each dimension, κ on the faces before and after this
            rank's points along this dimension, whose number is one more than that of the points. A face between two
            ranks is in the arrays of both, with the same value.
        c : array of shape local_shape, or number
            All arrays are on the host, or all on one device.

        Returns
        -------
        array of the shape of `u`

        Raises
        ------
        TypeError
            If arrays are on different devices, `u` isn't an array of floats or complex numbers, or only `kappa` is complex.

        Ranks
        -----
        All ranks of the domain call it.

        Adjoint
        -------
        u gets the operator's product with the cotangent, since the operator is symmetric; κ and c get the
        transposes of the product's derivatives with respect to κ and c, times the cotangent.
        """
        plain = stop_gradient(u)
        given = isinstance(kappa, (list, tuple))
        require_together("linalg.Elliptic", u=plain, kappa=stop_gradient(kappa[0] if given else kappa), c=stop_gradient(c))
        if given:
            return self.product(u, c, self.faces(kappa))
        kappa = self.field(kappa, plain)
        _check_kinds(plain, [kappa])
        padded, padded_kappa = self.domain.exchange([u, _cast(kappa, plain.dtype)], corners=False)
        return self.product(u, c, self._with_sides(self._means(padded_kappa), kappa), padded)

    def faces(self, kappa: Coefficient) -> list[LocalArray]:
        """Return, for each dimension, the coefficients of the fluxes through the faces before and after the points.

        Parameters
        ----------
        kappa
            As in the call.

        Returns
        -------
        list of array
            κ on the faces, and on physical sides the coefficient that results from the side's condition.

        Ranks
        -----
        All ranks of the domain call it.

        Adjoint
        -------
        At a point, κ gets the mean of the cotangents of its faces; κ and α also get the derivatives of the coefficients of
        sides.
        """
        if isinstance(kappa, (list, tuple)):
            return self._with_sides(list(kappa), kappa)
        kappa = self.field(kappa, stop_gradient(kappa))
        return self._with_sides(self._means(self.domain.exchange(kappa, corners=False)), kappa)

    def source(self, kappa: Coefficient) -> LocalArray | float:
        """Return the contribution of the values and fluxes on sides to the right-hand side; zero if none are given.

        Parameters
        ----------
        kappa
            As in the call.

        Ranks
        -----
        Each rank calls it independently.

        Adjoint
        -------
        The given values, κ on sides, and α get the derivatives of the fluxes through the sides.
        """
        total: Array = 0.0
        for axis, end, side, weight in self._own_sides(kappa):
            if side.value is not None:
                n, rest = self.domain.local_shape[axis], (1,) * (len(self.sides.spacing) - axis - 1)
                nearest = (np.arange(n) == (n - 1) * end).astype(float).reshape(n, *rest)
                flux = weight * side.value / self.sides.spacing[axis]
                xp = arrays_of(stop_gradient(flux))
                total = total + flux * (nearest if xp is None else xp.to_device(nearest))
        return total

    def product(
        self, u: LocalArray, c: LocalArray | float, faces: Sequence[LocalArray], padded: LocalArray | None = None
    ) -> LocalArray:
        """Return this rank's block of the product, given the result of `faces`, and u with its halo if it is known."""
        _check_kinds(stop_gradient(u), faces)
        total, ndim, dtype = c * u, len(self.sides.spacing), stop_gradient(u).dtype
        padded = self.domain.exchange(u, corners=False) if padded is None else padded
        for axis, (step, kappa) in enumerate(zip(self.sides.spacing, faces)):
            of_u = layers_of(padded, axis, ndim)
            flux = _cast(kappa, dtype) * (of_u(1, None) - of_u(0, -1)) * (1.0 / step**2)
            of_flux = layers_of(flux, axis, ndim, cut=False)
            total = total + of_flux(0, -1) - of_flux(1, None)
        return total

    def field(self, kappa: Coefficient, like: Array) -> LocalArray:
        """Return a number as an array of shape local_shape, on the host or device of `like`; return arrays unchanged."""
        if np.shape(stop_gradient(kappa)):
            return kappa
        xp = arrays_of(like)
        return kappa * (np.ones(self.domain.local_shape) if xp is None else xp.full(self.domain.local_shape, 1, np.float64))

    def _means(self, padded: LocalArray) -> list[LocalArray]:
        ndim, means = len(self.sides.spacing), []
        for axis in range(ndim):
            of_kappa = layers_of(padded[axis] if padded.ndim > ndim else padded, axis, ndim)
            means.append(0.5 * (of_kappa(1, None) + of_kappa(0, -1)))
        return means

    def _own_sides(self, kappa: Coefficient) -> Iterator[tuple[int, int, Side, LocalArray]]:
        """Yield dimension, end (0 or 1), condition and weight w of each physical side of this rank."""
        ndim, given = len(self.sides.spacing), isinstance(kappa, (list, tuple))
        for axis, (step, pair) in enumerate(zip(self.sides.spacing, self.sides.pairs)):
            for end, side in enumerate(pair):
                if self.domain.neighbours[axis][end] is None:
                    field = kappa[axis] if given or np.ndim(stop_gradient(kappa)) > ndim else kappa
                    of_side = field
                    if np.ndim(stop_gradient(field)):
                        of_side = layers_of(field, axis, ndim, cut=False)(-end, None if end else 1)
                    if side.kind == "dirichlet":
                        yield axis, end, side, of_side * ((2.0 if self.sides.centred else 1.0) / step)
                    else:
                        yield axis, end, side, 2.0 * of_side / (2.0 * of_side + step * side.alpha)

    def _with_sides(self, faces: list[LocalArray], kappa: Coefficient) -> list[LocalArray]:
        """Return the faces with the coefficients of sides in the outermost layers."""
        for axis, end, side, weight in self._own_sides(kappa):
            layers = layers_of(faces[axis], axis, len(faces), cut=False)
            new = self.sides.spacing[axis] * side.alpha * weight
            faces[axis] = concatenate([layers(0, -1), new] if end else [new, layers(1, None)], axis=axis)
        return faces


def _check_kinds(u: Array, kappa: Sequence[LocalArray]) -> None:
    """Raise a TypeError if coefficients, which are converted to the dtype of u, lose digits or imaginary parts."""
    if u.dtype.kind not in "fc":
        raise TypeError(f"linalg.Elliptic: u must have floats or complex numbers, but has dtype {u.dtype}. Convert it.")
    if u.dtype.kind == "f" and any(stop_gradient(part).dtype.kind == "c" for part in kappa):
        raise TypeError(f"linalg.Elliptic: kappa is complex, but u has dtype {u.dtype}. Convert u to complex numbers.")


def _cast(x: LocalArray, dtype: np.dtype) -> LocalArray:
    return x if stop_gradient(x).dtype == dtype else x.astype(dtype)


def layers_of(array: LocalArray, axis: int, ndim: int, cut: bool = True) -> Callable[[int, int | None], LocalArray]:
    """Return a function that returns layers of an array along a dimension, without the halo of other dimensions."""
    rest = slice(1, -1) if cut else slice(None)

    def layers(start: int, stop: int | None) -> LocalArray:
        return array[(..., *[slice(start, stop) if other == axis else rest for other in range(ndim)])]

    return layers
