"""A grid, its blocks, and the position of this rank's block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn, TypeAlias

from autograd.tracer import getval

from mpiad._typing import Array, Comm, LocalArray, Shape
from mpiad.domain.boundary import Sides
from mpiad.domain.halo import Halo
from mpiad.domain.partition import Partition, choose_dims, lengths
from mpiad.domain.root_copies import require_own_block
from mpiad.primitives.checks import integer_of
from mpiad.transport import channel
from mpiad.transport.core.agreement import alike_on_all
from mpiad.transport.devices.device_arrays import is_array


class Decomposition:
    """A grid divided among the ranks; see `Domain` for arguments and attributes."""

    def __init__(
        self,
        shape: int | Sequence[int],
        *,
        halo: int | Sequence[int] = 1,
        periodic: bool | Sequence[bool] = False,
        dims: Sequence[int] | None = None,
        comm: Comm = None,
    ):
        group = channel(comm, "Domain")
        arguments = [f"shape={shape!r}, halo={halo!r}, periodic={periodic!r}, dims={dims!r}"]
        partition, self.halo = alike_on_all(
            group, lambda: _partition(group.size, shape, halo, periodic, dims), lambda _: arguments, "Domain"
        )
        self.comm, self._channel, self._partition = comm, group, partition
        self.shape, self.dims, self.periodic = partition.shape, partition.dims, partition.periodic
        self.position = partition.position(group.rank)
        self.neighbours = partition.neighbours(group.rank)
        self.owned = partition.block(group.rank)
        self.local_shape = lengths(self.owned)
        self._halos: dict[tuple[int, ...], Halo] = {}
        self._halo = self.halo_of(self.halo)
        self.padded_shape = self._halo.padded
        self.interior = self._halo.interior[1:]  # without the leading ellipsis

    def halo_of(self, widths: tuple[int, ...]) -> Halo:
        """Return the halo with these widths; all operators with the same widths share one `Halo`."""
        if widths not in self._halos:
            self._halos[widths] = Halo(self._partition, self._channel.rank, widths, self.comm)
        return self._halos[widths]

    @property
    def arguments(self) -> dict[str, tuple]:
        """The arguments except the communicator: ``Domain(**domain.arguments, comm=comm)`` makes an equal domain."""
        return {"shape": self.shape, "halo": self.halo, "periodic": self.periodic, "dims": self.dims}

    def __copy__(self) -> Decomposition:
        """Return the domain itself, which doesn't change."""
        return self

    def __deepcopy__(self, memo: object) -> Decomposition:
        """Return the domain itself, which doesn't change."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A Domain can't be pickled, since it contains a communicator, and all ranks make it together. Pickle "
            "domain.arguments instead; then Domain(**arguments, comm=comm) on all ranks makes an equal domain."
        )

    def __repr__(self) -> str:
        return f"Domain({self.shape}, halo={self.halo}, periodic={self.periodic}, dims={self.dims})"


def checked_block(domain: Decomposition, u: Array, call: str, shape: Shape | None = None) -> LocalArray:
    """Return u; raise a TypeError or ValueError if its shape isn't (..., *shape), by default (..., *local_shape)."""
    shape = domain.local_shape if shape is None else shape
    block = getval(u)
    if not is_array(block):
        raise TypeError(f"{call}: expected an array of shape (..., {listed(shape)}), but got {type(block).__name__}.")
    if block.shape[max(0, block.ndim - len(shape)) :] != shape:
        raise ValueError(
            f"{call}: expected an array of shape (..., {listed(shape)}), but got {block.shape} on rank "
            f"{domain._channel.rank}, which owns {domain.local_shape} of {domain.shape} cells."
        )
    require_own_block(u, domain.local_shape, domain._channel.size, domain._channel.rank, call)
    return u


def check_reflection(domain: Decomposition, sides: Sides, call: str, widths: tuple[int, ...]) -> None:
    """Raise a ValueError if the grid has too few cells for a reflection at its sides."""
    for axis, (n, p, h, pair) in enumerate(zip(domain.shape, domain.dims, widths, sides)):
        needed = h + max((side.extra_cells for side in pair if side.extra_cells is not None), default=-h)
        if p == 1 and n < needed and not domain.periodic[axis]:
            raise ValueError(
                f"{call}: a halo of {h} can't be reflected along dimension {axis}, which has {n} cells: "
                f"at least {needed} are needed."
            )


def listed(shape: Shape) -> str:
    """Return a shape as text, without parentheses."""
    return ", ".join(map(str, shape))


PerDimension: TypeAlias = "int | Sequence[int]"
"""A number for all dimensions, or one number per dimension."""


def _partition(
    size: int, shape: PerDimension, halo: PerDimension, periodic: bool | Sequence[bool], dims: PerDimension | None
) -> tuple[Partition, tuple[int, ...]]:
    """Return the partition and the halo's widths; arguments and exceptions as in `Domain`."""
    cells = tuple(_integers(shape if isinstance(shape, Sequence) else [shape], "shape", 1))
    if not 1 <= len(cells) <= 3:
        raise ValueError(f"Domain: shape must have 1, 2 or 3 dimensions, but got {shape!r}.")
    ndim = len(cells)
    widths = tuple(_integers(per_dimension(halo, ndim, "halo"), "halo", 0))
    wraps = tuple(map(bool, per_dimension(periodic, ndim, "periodic")))
    ranks = choose_dims(cells, size, widths, wraps) if dims is None else _checked_dims(size, cells, widths, dims)
    if ranks is None:
        raise ValueError(
            f"Domain: {cells} cells can't be divided among {size} ranks so that each block has at least one cell, and is "
            f"no smaller than the halo of {widths} along each dimension. Use fewer ranks, a larger grid or a smaller halo."
        )
    return Partition(cells, ranks, wraps), widths


def per_dimension(value: Array, ndim: int, argument: str) -> list[Array]:
    """Return a list with one entry per dimension; raise a ValueError if `value` is a sequence of another length."""
    if isinstance(value, str) or not hasattr(value, "__len__"):
        return [value] * ndim
    if len(value) != ndim:
        raise ValueError(f"Domain: {argument} must have one entry for each of {ndim} dimensions, but got {value!r}.")
    return list(value)


def _integers(values: Sequence[object], argument: str, minimum: int) -> list[int]:
    integers = [integer_of(value, "Domain", argument, "an integer or a tuple of integers") for value in values]
    if integers and min(integers) < minimum:
        raise ValueError(f"Domain: {argument} must be {minimum} or more along each dimension, but got {tuple(integers)}.")
    return integers


def _checked_dims(size: int, cells: Shape, widths: tuple[int, ...], dims: PerDimension) -> tuple[int, ...]:
    ranks = tuple(_integers(per_dimension(dims, len(cells), "dims"), "dims", 1))
    if math.prod(ranks) != size:
        raise ValueError(
            f"Domain: dims {ranks} make {math.prod(ranks)} blocks, but the communicator has {size} ranks. "
            "The product of dims must be the number of ranks; with dims=None the numbers are chosen automatically."
        )
    for axis, (n, p, h) in enumerate(zip(cells, ranks, widths)):
        # A rank exchanges messages only with adjacent blocks, so a halo can't extend beyond them.
        if n // p < max(1, h):
            raise ValueError(
                f"Domain: {n} cells along dimension {axis} can't be divided among {p} ranks: the smallest block would have "
                f"{n // p}, but needs {max(1, h)}, since the halo is {h} wide. Use a smaller halo, fewer ranks along this "
                "dimension, or a larger grid."
            )
    return ranks
