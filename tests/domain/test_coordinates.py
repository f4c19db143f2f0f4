"""Coordinates of the cells."""

import numpy as np
import pytest

from mpiad.domain import Domain


def test_spacing_and_origin():
    domain = Domain((9, 8))
    x, y = domain.coordinates()
    rows, columns = np.meshgrid(np.arange(9.0), np.arange(8.0), indexing="ij", sparse=True)
    np.testing.assert_array_equal(x, rows[domain.owned[0]])
    np.testing.assert_array_equal(y, columns[:, domain.owned[1]])
    x, y = domain.coordinates((0.5, 2), (1, -3))
    np.testing.assert_allclose((x + 0 * y), (1 + 0.5 * rows + 0 * columns)[domain.owned])
    np.testing.assert_allclose((y + 0 * x), (-3 + 2 * columns + 0 * rows)[domain.owned])
    (x,) = Domain(9).coordinates(2.0, centred=True)
    np.testing.assert_allclose(x, (2 * np.arange(9) + 1)[Domain(9).owned])


def test_extent():
    domain = Domain((5, 8), periodic=(False, True))
    x, y = domain.coordinates(extent=((-1, 1), 4.0))
    np.testing.assert_allclose(x[:, 0], np.linspace(-1, 1, 5)[domain.owned[0]])
    np.testing.assert_allclose(y[0], np.linspace(0, 4, 8, endpoint=False)[domain.owned[1]])
    x, y = domain.coordinates(extent=2.0, centred=True)
    np.testing.assert_allclose(x[:, 0], ((np.arange(5) + 0.5) * 0.4)[domain.owned[0]])
    np.testing.assert_allclose(y[0], ((np.arange(8) + 0.5) * 0.25)[domain.owned[1]])


def test_halo_continues_the_grid():
    domain = Domain((9, 8), halo=(2, 1))
    inner, outer = domain.coordinates(0.1), domain.coordinates(0.1, halo=True)
    for axis, width in enumerate((2, 1)):
        assert outer[axis].size == domain.padded_shape[axis]
        np.testing.assert_array_equal(outer[axis].ravel()[width:-width], inner[axis].ravel())
        np.testing.assert_allclose(np.diff(outer[axis].ravel()), 0.1)


def test_what_is_refused():
    domain = Domain((9, 8))
    with pytest.raises(ValueError, match=r"spacing must have one entry for each of 2 dimensions, but got \(1, 2, 3\)"):
        domain.coordinates((1, 2, 3))
    with pytest.raises(ValueError, match=r"for each of 2 dimensions, but got \(1, 2, 3\)"):
        domain.coordinates(extent=(1, 2, 3))
    with pytest.raises(ValueError, match=r"extent must have ends low < high, but got \(1.0, 1.0\)"):
        domain.coordinates(extent=((1, 1), (0, 1)))
