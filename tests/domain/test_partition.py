"""How grids are divided, for many numbers of ranks: every cell has one owner, and the halo surface is the least."""

import itertools

import numpy as np
import pytest
from whole_grid import factorisations, owned

from mpiad.domain.partition import Partition, choose_dims


@pytest.mark.parametrize("dims", [(1,), (7,), (3, 2), (1, 4), (2, 3, 2), (3, 1, 4)], ids=str)
def test_blocks_cover_the_grid_once(dims):
    shape = (11, 9, 10)[: len(dims)]
    partition = Partition(shape, dims, (False,) * len(dims))
    owners = np.zeros(shape, int)
    for rank in range(np.prod(dims)):
        assert partition.block(rank) == owned(shape, dims, rank)
        assert partition.neighbour(rank, (0,) * len(dims)) == rank
        owners[partition.block(rank)] += 1
    assert (owners == 1).all()
    assert tuple(n // p for n, p in zip(shape, dims)) == tuple(  # what wide halos are refused by
        min(c.stop - c.start for c in cells) for cells in zip(*[partition.block(r) for r in range(np.prod(dims))])
    )


@pytest.mark.parametrize("periodic", [(False, False), (True, False), (True, True)], ids=str)
def test_neighbours(periodic):
    dims = (3, 2)
    partition = Partition((9, 8), dims, periodic)
    grid = np.arange(6).reshape(dims)
    for rank in range(6):
        place = np.argwhere(grid == rank)[0]
        for axis, pair in enumerate(partition.neighbours(rank)):
            for step, found in zip((-1, 1), pair):
                there = place.copy()
                there[axis] += step
                outside = not 0 <= there[axis] < dims[axis]
                expected = None if outside and not periodic[axis] else grid[tuple(there % dims)]
                assert found == expected


def exchanged(shape, dims, halo, periodic):
    """Count halo cells, corners left out, that come from other ranks: over all ranks and sides."""
    partition, total = Partition(shape, dims, periodic), 0
    for rank in range(np.prod(dims)):
        block = [c.stop - c.start for c in partition.block(rank)]
        for axis, pair in enumerate(partition.neighbours(rank)):
            others = [n for n in pair if n is not None and n != rank]
            total += len(others) * halo[axis] * np.prod(block) // block[axis]
    return total


@pytest.mark.parametrize("shape", [(40,), (30, 30), (20, 60), (16, 16, 16), (8, 40, 20)], ids=str)
def test_least_halo_surface(shape):
    for size, halo, periodic in itertools.product([1, 2, 3, 4, 6, 7, 8, 12], [1, 2], [False, True]):
        halos, wraps = (halo,) * len(shape), (periodic,) * len(shape)
        fitting = [d for d in factorisations(size, len(shape)) if all(n // p >= halo for n, p in zip(shape, d))]
        chosen = choose_dims(shape, size, halos, wraps)
        assert chosen in fitting
        assert exchanged(shape, chosen, halos, wraps) == min(exchanged(shape, d, halos, wraps) for d in fitting)


def test_what_fits_is_found():
    assert choose_dims((2, 100), 7, (1, 1), (False, False)) == (1, 7)
    assert choose_dims((5, 5), 7, (1, 1), (False, False)) is None
    assert choose_dims((8, 8), 4, (4, 4), (False, False)) == (2, 2)
    assert choose_dims((8, 8), 4, (5, 5), (False, False)) is None
    assert choose_dims((12, 12), 2, (1, 1), (False, False)) == (2, 1)
