"""Blocks of whole arrays, on the root or in files, and conversions between indices of the grid and of blocks."""

from __future__ import annotations

import math
from os import PathLike
from pathlib import Path

import autograd.numpy as anp
import numpy as np
from autograd.extend import defjvp, defvjp, primitive

from mpiad._typing import Array, LocalArray, Rank, RootArray
from mpiad.domain.decomposition import Decomposition, checked_block
from mpiad.domain.partition import Partition, lengths
from mpiad.primitives import mpi_gather, stop_gradient
from mpiad.primitives.checks import root_of
from mpiad.primitives.scatter import scatter_pieces
from mpiad.transport.core.agreement import raising_together, require_same
from mpiad.transport.core.array_files import Layout, read_block, write_block
from mpiad.transport.devices.device_arrays import empty_like, is_device_array


def scatter(domain: Decomposition, u: RootArray, root: Rank) -> LocalArray:
    """See `Domain.scatter`."""
    call, cells, error = "Domain.scatter", None, None
    used = domain._channel
    root = root_of(root, used, call)
    if used.rank == root:
        try:
            cells = reordered(checked_block(domain, u, call, domain.shape), domain._partition, True)
        except (TypeError, ValueError) as found:  # raised on all ranks, which wait for the root's shape
            error = found
    counts = [math.prod(lengths(domain._partition.block(r))) for r in range(used.size)]
    block = scatter_pieces(cells, root, counts, error, used, call)
    return anp.moveaxis(block, 0, -1).reshape(block.shape[1:] + domain.local_shape)


def gather(domain: Decomposition, u: LocalArray, root: Rank) -> RootArray:
    """See `Domain.gather`."""
    u = checked_block(domain, u, "Domain.gather")
    lead = u.shape[: u.ndim - len(domain.shape)]
    # Flattened blocks are concatenated along the first axis; the other axes have the same lengths on all ranks.
    cells = mpi_gather(anp.moveaxis(u.reshape((*lead, -1)), -1, 0), root, axis=0, comm=domain.comm)
    if domain._channel.rank == root:
        return reordered(cells, domain._partition, False)
    # The result is empty, but has the same number of axes as on the root, so that all ranks can run the same program.
    return cells.reshape((*lead, 0, *domain.shape[1:]))


def owner(domain: Decomposition, index: Array) -> Array:
    """See `Domain.owner`."""
    owners = domain._partition.owners(_in_grid(domain, index, "Domain.owner"))
    return owners if owners.ndim else int(owners)


def to_local(domain: Decomposition, index: Array, halo: bool) -> Array:
    """See `Domain.to_local`."""
    call = "Domain.to_local"
    cells = _in_grid(domain, index, call)
    widths = np.array(domain.halo if halo else (0,) * len(domain.shape))
    block, shape = np.array(domain.local_shape), np.array(domain.shape)
    local = cells - [owned.start for owned in domain.owned]
    # Along a periodic dimension, a halo may contain cells of the opposite end of the grid, or copies of the block's.
    after = local % shape
    local = widths + np.where(domain.periodic, np.where(after < block + widths, after, after - shape), local)
    outside = ((local < 0) | (local >= block + 2 * widths)).any(axis=-1)
    if outside.any():
        cell = tuple(cells[outside][0].tolist())
        raise IndexError(
            f"{call}: cell {cell} belongs to rank {owner(domain, cell)}, and isn't in the block "
            f"{'with its halo ' if halo else ''}of rank {domain._channel.rank}, "
            f"[{', '.join(f'{cells.start}:{cells.stop}' for cells in domain.owned)}]. "
            "domain.owner(index) returns the owners of cells."
        )
    return local


def to_global(domain: Decomposition, index: Array, halo: bool) -> Array:
    """See `Domain.to_global`."""
    call = "Domain.to_global"
    indices = _index_array(domain, index, call)
    widths = np.array(domain.halo if halo else (0,) * len(domain.shape))
    shape = np.array(domain.local_shape) + 2 * widths
    _require_inside(indices, shape, f"{call}: index {{}} isn't in a block of {{}} cells")
    return _in_grid(domain, indices + np.array([cells.start for cells in domain.owned]) - widths, call)


def _index_array(domain: Decomposition, index: object, call: str) -> np.ndarray:
    indices = np.asarray(index)
    if indices.dtype.kind not in "iu":
        raise TypeError(f"{call}: expected integers, but got {type(index).__name__} of dtype {indices.dtype}.")
    if indices.shape[-1:] != (len(domain.shape),):
        raise ValueError(
            f"{call}: expected an index of shape (..., {len(domain.shape)}), one entry for each dimension of the grid, "
            f"but got {indices.shape}."
        )
    return indices.astype(np.intp)


def _in_grid(domain: Decomposition, index: object, call: str) -> np.ndarray:
    cells, shape = _index_array(domain, index, call), np.array(domain.shape)
    wrapped = np.where(np.array(domain.periodic), cells % shape, cells)
    _require_inside(wrapped, shape, f"{call}: cell {{}} isn't in a grid of {{}} cells")
    return wrapped


def _require_inside(index: np.ndarray, shape: np.ndarray, message: str) -> None:
    outside = ((index < 0) | (index >= shape)).any(axis=-1)
    if outside.any():
        raise IndexError(message.format(tuple(index[outside][0].tolist()), tuple(shape.tolist())) + ".")


# Fields in files: one array in NumPy's format, in which each rank writes or reads its block.


def save(domain: Decomposition, path: str | PathLike[str], u: LocalArray) -> None:
    """See `Domain.save`."""
    call = "Domain.save"
    with raising_together(domain._channel, Exception):
        if is_device_array(stop_gradient(u)):
            raise TypeError(f"{call}: expected an array on the host. Copy it with mpiad.device.to_host.")
        block = np.ascontiguousarray(stop_gradient(checked_block(domain, u, call)))
        if block.dtype.kind in "OV":
            kind = "Python objects" if block.dtype.hasobject else f"structures, {block.dtype}"
            raise TypeError(f"{call}: expected numbers, but got an array of {kind}.")
        file = Path(path)
    lead = block.shape[: block.ndim - len(domain.shape)]
    # Ranks with different shapes would overwrite each other's blocks.
    require_same(domain._channel, f"path={str(file)!r}, leading axes {lead}, dtype {block.dtype.str}", call)
    write_block(domain._channel, file, (*lead, *domain.shape), _starts(domain, len(lead)), block, call)


def load(domain: Decomposition, path: str | PathLike[str]) -> LocalArray:
    """See `Domain.load`."""
    call = "Domain.load"

    def start_and_memory(layout: Layout) -> tuple[tuple[int, ...], np.ndarray]:
        lead = max(0, len(layout.shape) - len(domain.shape))
        if layout.shape[lead:] != domain.shape:
            raise ValueError(f"it contains an array of shape {layout.shape}, but the grid has shape {domain.shape}")
        return _starts(domain, lead), np.empty((*layout.shape[:lead], *domain.local_shape), layout.dtype)

    with raising_together(domain._channel, Exception):
        file = Path(path)
    return read_block(domain._channel, file, start_and_memory, call)


def _starts(domain: Decomposition, lead: int) -> tuple[int, ...]:
    return (0,) * lead + tuple(cells.start for cells in domain.owned)


@primitive
def reordered(x: RootArray, partition: Partition, by_owner: bool) -> RootArray:
    """Reorder a whole array (..., *partition.shape) to (cells, ...), with the cells sorted `by_owner`; if False, back."""
    lead = x.shape[: x.ndim - len(partition.shape)] if by_owner else x.shape[1:]
    out = empty_like(x, (math.prod(partition.shape), *lead) if by_owner else lead + partition.shape)
    grid, cells = (x, out) if by_owner else (out, x)
    start = 0
    for rank in range(math.prod(partition.dims)):
        block = partition.block(rank)
        stop = start + math.prod(lengths(block))
        # Not written through views, which `jit` refuses.
        if by_owner:
            cells[start:stop] = np.moveaxis(grid[(..., *block)].reshape((*lead, -1)), -1, 0)
        else:
            grid[(..., *block)] = np.moveaxis(cells[start:stop], 0, -1).reshape(lead + lengths(block))
        start = stop
    return out


# A permutation, whose transpose is its inverse.
defvjp(reordered, lambda ans, x, partition, by_owner: lambda g: reordered(g, partition, not by_owner))
defjvp(reordered, "same")
