"""Which cell is whose, and where: against slices of a whole grid that holds the cells' own numbers."""

import numpy as np
import pytest
from whole_grid import Exchange, owned

from mpiad.domain import Domain

SHAPES = [(13,), (9, 7), (5, 6, 7)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def cells_of(shape):
    return np.stack(np.unravel_index(np.arange(np.prod(shape)), shape), axis=-1)


@each_shape
def test_owners(shape, size):
    domain = Domain(shape)
    expected = np.full(shape, -1)
    for rank in range(size):
        expected[owned(shape, domain.dims, rank)] = rank
    cells = cells_of(shape)
    np.testing.assert_array_equal(domain.owner(cells), expected.ravel())
    assert domain.owner(cells.reshape(*shape, -1)).shape == shape
    last = tuple(n - 1 for n in shape)
    assert domain.owner(last) == size - 1 and type(domain.owner(last)) is int


@each_shape
def test_to_local_and_back(shape, rank):
    domain = Domain(shape)
    numbers = np.arange(np.prod(shape)).reshape(shape)
    cells = cells_of(shape)
    mine = cells[domain.owner(cells) == rank]
    local = domain.to_local(mine)
    np.testing.assert_array_equal(numbers[domain.owned][tuple(local.T)], numbers[tuple(mine.T)])
    np.testing.assert_array_equal(domain.to_global(local), mine)
    first = tuple(cells.start for cells in domain.owned)
    assert tuple(domain.to_local(first)) == (0,) * len(shape)


@pytest.mark.parametrize("periodic", [(False, False), (True, False), (True, True)], ids=str)
def test_in_the_halo(rank, periodic):
    # Every halo cell that isn't beyond a physical side is a cell of the grid.
    shape, halo = (9, 8), (2, 1)
    domain = Domain(shape, halo=halo, periodic=periodic)
    places = Exchange(shape, domain.dims, halo, periodic, "zero").places[rank]
    local = np.argwhere(places >= 0)
    found = domain.to_global(local, halo=True)
    np.testing.assert_array_equal(np.ravel_multi_index(found.T, shape), places[places >= 0])
    again = domain.to_local(found, halo=True)
    np.testing.assert_array_equal(places[tuple(again.T)], places[places >= 0])
    mine = found[domain.owner(found) == rank]  # also of cells with a copy in the halo
    np.testing.assert_array_equal(domain.to_local(mine, halo=True), domain.to_local(mine) + halo)
    for beyond in np.argwhere(places < 0)[:1]:
        with pytest.raises(IndexError, match=r"Domain.to_global: cell .* isn't in a grid of \(9, 8\) cells"):
            domain.to_global(beyond, halo=True)


def test_what_is_refused(rank, size):
    domain = Domain((9, 8), periodic=(False, True))
    assert domain.owner((0, -1)) == domain.owner((0, 7))
    with pytest.raises(IndexError, match=r"Domain.owner: cell \(9, 3\) isn't in a grid of \(9, 8\) cells"):
        domain.owner([(0, 0), (9, 3)])
    with pytest.raises(IndexError, match=r"cell \(-1, 3\)"):
        domain.to_local((-1, 3))
    with pytest.raises(ValueError, match=r"index of shape \(..., 2\).* but got \(3,\)"):
        domain.owner((1, 2, 3))
    with pytest.raises(TypeError, match="expected integers, but got ndarray of dtype float64"):
        domain.to_local(np.ones(2))
    with pytest.raises(IndexError, match=r"index \(-1, 0\) isn't in a block of"):
        domain.to_global((-1, 0))
    if size > 1:
        other = (rank + 1) % size
        cell = tuple(cells.start for cells in owned((9, 8), domain.dims, other))
        with pytest.raises(IndexError, match=rf"belongs to rank {other}, and isn't in the block of rank {rank}"):
            domain.to_local(cell)
