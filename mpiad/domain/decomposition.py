"""A grid, its blocks, and this rank's place among them: what the parts of a domain share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autograd.tracer import getval

from mpiad._typing import Array, Comm, Shape
from mpiad.domain.allocation import is_array
from mpiad.domain.boundary import Sides
from mpiad.domain.domain_arguments import layout
from mpiad.domain.halo import Halo
from mpiad.domain.root_copies import require_own_block
from mpiad.transport import channel

__all__ = ["Decomposition", "lengths", "listed"]


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
        used = channel(comm, "Domain")
        partition, self.halo = layout(used, shape, halo, periodic, dims)
        self.comm, self._channel, self._partition = comm, used, partition
        self.shape, self.dims, self.periodic = partition.shape, partition.dims, partition.periodic
        self.position = partition.position(used.rank)
        self.neighbours = partition.neighbours(used.rank)
        self.owned = partition.block(used.rank)
        self.local_shape: Shape = tuple(s.stop - s.start for s in self.owned)
        self._halo = Halo(partition, used.rank, self.halo, comm)
        self.padded_shape = self._halo.padded
        self.interior = self._halo.interior[1:]  # without the ellipsis in front, which users write themselves

    def __repr__(self) -> str:
        return f"Domain({self.shape}, halo={self.halo}, periodic={self.periodic}, dims={self.dims})"

    def _checked(self, u: Array, shape: Shape, call: str) -> Any:
        found = getval(u)
        if not is_array(found):
            raise TypeError(f"{call}: expected an array of shape (..., {listed(shape)}), but got {type(found).__name__}.")
        if found.shape[max(0, found.ndim - len(shape)) :] != shape:
            raise ValueError(
                f"{call}: expected an array of shape (..., {listed(shape)}), but got {found.shape} on rank "
                f"{self._channel.rank}, which owns {self.local_shape} of {self.shape} cells."
            )
        require_own_block(u, self.local_shape, self._channel.size, self._channel.rank, call)
        return u

    def _check_reflection(self, sides: Sides, call: str, widths: tuple[int, ...]) -> None:
        for axis, (n, p, h, pair) in enumerate(zip(self.shape, self.dims, widths, sides)):
            needed = h + max((side.spare for side in pair if side.spare is not None), default=-h)
            if p == 1 and n < needed and not self.periodic[axis]:
                raise ValueError(
                    f"{call}: a halo of {h} can't be reflected along dimension {axis}, which has {n} cells: "
                    f"at least {needed} are needed."
                )


def lengths(block: tuple[slice, ...]) -> Shape:
    """Return how many cells a block has along each dimension."""
    return tuple(cells.stop - cells.start for cells in block)


def listed(shape: Shape) -> str:
    """Return a shape as text, without parentheses."""
    return ", ".join(map(str, shape))
