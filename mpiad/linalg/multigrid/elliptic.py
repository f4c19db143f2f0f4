"""`Elliptic`: the operator -∇·(κ∇u) + c u on a domain, differentiable with respect to u, κ and c."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import LocalArray
from mpiad.device.transfer import Constants
from mpiad.domain import Domain
from mpiad.domain.boundary import pairs_of
from mpiad.domain.decomposition import per_dimension
from mpiad.linalg.vectors import require_together
from mpiad.primitives import stop_gradient
from mpiad.transport import channel
from mpiad.transport.core.agreement import alike_on_all
from mpiad.transport.devices.device_arrays import arrays_of

_KINDS = ("dirichlet", "neumann")
_ALLOWED = '"dirichlet" or "neumann"; or, in a tuple, one of these or a pair (before, after) for each dimension'


class Sides(NamedTuple):
    """The spacing and boundary conditions of a grid."""

    spacing: tuple[float, ...]  # distance between neighboring points along each dimension
    # For each dimension, whether u is prescribed on the side before the first point, and after the last point.
    fixed: tuple[tuple[bool, bool], ...]
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
    pairs = pairs_of(boundary, ndim, _ALLOWED, call)
    if any(kind not in _KINDS for pair in pairs for kind in pair):
        raise ValueError(f"{call}: boundary must be {_ALLOWED}, but got {boundary!r}.")
    # Periodic dimensions have no sides.
    fixed = [
        (not wraps and low == _KINDS[0], not wraps and high == _KINDS[0])
        for (low, high), wraps in zip(pairs, domain.periodic)
    ]
    return Sides(steps, tuple(fixed), bool(centred))


class Elliptic:
    """The operator -∇·(κ∇u) + c u on the blocks of a domain; κ on a face is its mean at the two adjacent points.

    Parameters
    ----------
    domain : Domain
    spacing : float, or one per dimension
        Distance between neighboring points.
    boundary : {"dirichlet", "neumann"} or a tuple
        Conditions on physical sides: u = 0 ("dirichlet") or no flux. A tuple contains a name, or a pair of names
        (before, after), per dimension. Periodic dimensions have no sides.
    centred : bool
        Whether points are centers of cells, as in `Domain.coordinates`. If True, sides with u = 0 are half a spacing
        beyond the outermost points, otherwise one spacing. Sides without flux are always half a spacing beyond
        the outermost points.

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
        settings = [f"spacing={spacing!r}, boundary={boundary!r}, centred={centred!r}"]
        self.sides = alike_on_all(
            channel(domain.comm, "Elliptic"),
            lambda: sides_of(domain, spacing, boundary, centred, "Elliptic"),
            lambda _: settings,
            "Elliptic",
        )
        # The same domain with a halo of one point.
        self.domain = Domain(domain.shape, periodic=domain.periodic, dims=domain.dims, comm=domain.comm)
        self.walls = _walls(self.domain, self.sides)
        self._walls = Constants(self.walls)

    def __call__(self, u: LocalArray, kappa: LocalArray, c: LocalArray | float = 0.0) -> LocalArray:
        """Return this rank's block of -∇·(κ∇u) + c u.

        Parameters
        ----------
        u : array of shape (..., *local_shape)
        kappa : array of shape local_shape, or number
        c : array of shape local_shape, or number
            All arrays are on the host, or all on one device.

        Returns
        -------
        array of the shape of `u`

        Raises
        ------
        TypeError
            If arrays are on different devices.

        Ranks
        -----
        All ranks of the domain call it.

        Adjoint
        -------
        u gets the operator's product with the cotangent, since the operator is symmetric; κ and c get the
        transposes of the product's derivatives with respect to κ and c, times the cotangent.
        """
        require_together("linalg.Elliptic", u=stop_gradient(u), kappa=stop_gradient(kappa), c=stop_gradient(c))
        xp = arrays_of(stop_gradient(u))
        if np.shape(stop_gradient(kappa)) == ():
            shape = self.domain.local_shape
            kappa = kappa * (np.ones(shape) if xp is None else xp.full(shape, 1, np.float64))
        if stop_gradient(kappa).dtype != stop_gradient(u).dtype:
            kappa = kappa.astype(stop_gradient(u).dtype)
        # The flux through a side with u = 0 is κ u at the nearest point, divided by that point's distance to the side.
        (walls,) = self._walls.on(xp)
        total = (walls.astype(stop_gradient(u).dtype) * kappa + c) * u
        # With "edge", u is constant across all physical sides; sides with u = 0 contribute through `walls`.
        padded, padded_kappa = self.domain.exchange([u, kappa], "edge", corners=False)
        ndim = len(self.sides.spacing)
        for axis, step in enumerate(self.sides.spacing):
            of_u, of_kappa = _layers(padded, axis, ndim), _layers(padded_kappa, axis, ndim)
            # The mean of κ at the two adjacent points, times the difference of u, divided by the square of the spacing.
            flux = (of_kappa(1, None) + of_kappa(0, -1)) * (of_u(1, None) - of_u(0, -1)) * (0.5 / step**2)
            faces = _layers(flux, axis, ndim, cut=False)
            total = total + faces(0, -1) - faces(1, None)
        return total

    def couplings(self, kappa: LocalArray) -> list[tuple[LocalArray, LocalArray]]:
        """Return, for each dimension, the couplings of each point with the previous and with the next point.

        Parameters
        ----------
        kappa : array of shape local_shape
            Not traced.

        Ranks
        -----
        All ranks of the domain call it.
        """
        padded_kappa, couplings = self.domain.exchange(kappa, "edge", corners=False), []
        ndim = len(self.sides.spacing)
        for axis, (step, pair) in enumerate(zip(self.sides.spacing, self.domain.neighbours)):
            of_kappa = _layers(padded_kappa, axis, ndim)
            faces = (of_kappa(1, None) + of_kappa(0, -1)) * (0.5 / step**2)
            of_faces = _layers(faces, axis, ndim, cut=False)
            # There is no coupling across physical sides; a side with u = 0 contributes to the diagonal.
            for layer, rank in zip((slice(0, 1), slice(-1, None)), pair):
                if rank is None:
                    of_faces(layer.start, layer.stop)[...] = 0.0
            couplings.append((of_faces(0, -1), of_faces(1, None)))
        return couplings


def _layers(array: LocalArray, axis: int, ndim: int, cut: bool = True) -> Any:
    """Return a function that returns layers of an array along a dimension, without the halo of other dimensions."""
    rest = slice(1, -1) if cut else slice(None)

    def layers(start: int, stop: int | None) -> LocalArray:
        return array[(..., *[slice(start, stop) if other == axis else rest for other in range(ndim)])]

    return layers


def _walls(domain: Domain, sides: Sides) -> np.ndarray:
    """Return, for each point, the factor of κ in the diagonal that is due to adjacent sides with u = 0."""
    walls = np.zeros(domain.local_shape)
    for axis, (step, pair, fixed) in enumerate(zip(sides.spacing, domain.neighbours, sides.fixed)):
        layers = _layers(walls, axis, len(sides.spacing), cut=False)
        for start, stop_, rank, is_fixed in zip((0, -1), (1, None), pair, fixed):
            if rank is None and is_fixed:
                # At half the distance to the side, the difference quotient is twice as large.
                layers(start, stop_)[...] += (2.0 if sides.centred else 1.0) / step**2
    return walls
