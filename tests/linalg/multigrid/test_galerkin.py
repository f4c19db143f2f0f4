"""The operators of all levels against PᵀAP, assembled in one process from the definition."""

import numpy as np
import pytest
from elliptic_matrix import blocks, elliptic_matrix, fixed_sides, interpolation_matrix

import mpiad.linalg.multigrid.hierarchy as levels
from mpiad.domain import Domain
from mpiad.linalg import Multigrid
from mpiad.linalg.multigrid.stencil import offsets

SETTINGS = [
    ((14, 17), {}, {}),
    ((13, 10), {"boundary": ("neumann", ("dirichlet", "neumann")), "spacing": (0.5, 0.7)}, {"c": 0.3}),
    ((12, 16), {"centred": True}, {"periodic": (False, True)}),
    ((7, 6, 9), {"boundary": ("dirichlet", "neumann", "neumann")}, {"c": 0.1}),
    ((6, 8, 5), {}, {"periodic": (False, True, False)}),
    ((19,), {}, {}),
]


def dense(stencil, shape, periodic):
    """Return the rows of a level's operator on this rank's points, and which they are."""
    layout, number = stencil.layout, np.arange(np.prod(shape)).reshape(shape)
    box = tuple(slice(a, b) for a, b in zip(layout.box.low, layout.box.high))
    rows, out = number[box].ravel(), np.zeros((number[box].size, np.prod(shape)))
    for offset, coupling in stencil.couplings.items():
        values = layout.join(coupling).ravel()
        there = np.array(np.unravel_index(rows, shape)) + np.array(offset)[:, None]
        inside = np.ones(rows.size, bool)
        for axis, n in enumerate(shape):
            if np.broadcast_to(periodic, len(shape))[axis]:
                there[axis] %= n
            inside &= (there[axis] >= 0) & (there[axis] < n)
        np.testing.assert_array_equal(values[~inside], 0.0)
        columns = np.ravel_multi_index(tuple(there[:, inside]), shape)
        np.add.at(out, (np.flatnonzero(inside), columns), -values[inside])
    return rows, out


@pytest.mark.parametrize("shortest", [1, 4])
@pytest.mark.parametrize(("shape", "settings", "more"), SETTINGS, ids=[str(shape) for shape, *_ in SETTINGS])
def test_operators_of_all_levels(shape, settings, more, shortest, rank_rng, monkeypatch):
    monkeypatch.setattr(levels, "_FACTORIZED", {1: 3, 2: 12, 3: 12})
    monkeypatch.setattr(levels, "_SHORTEST", dict.fromkeys((1, 2, 3), shortest))
    periodic, c = more.get("periodic", False), more.get("c", 0.0)
    kappa = blocks(shape, rank_rng(100), 5) * rank_rng(101).uniform(1, 2, shape)
    domain = Domain(shape, periodic=periodic)
    multigrid = Multigrid(domain, kappa[domain.owned], c, **settings)
    fixed = fixed_sides(multigrid.operator.sides)
    matrix = elliptic_matrix(kappa, c, settings.get("spacing", 1.0), fixed, settings.get("centred", False), periodic)

    level, depth = multigrid._level, 0
    while True:
        if level is not None:
            rows, found = dense(level._stencil, shape, periodic)
            expected = matrix[rows].toarray()
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12 * abs(matrix).max())
            level = level._below._solver if isinstance(level._below._solver, levels.Level) else None
        interpolation, shape = interpolation_matrix(matrix, shape, periodic)
        matrix = (interpolation.T @ matrix @ interpolation).tocsr()
        depth += 1
        if levels._FACTORIZED[len(shape)] >= np.prod(shape):
            break
        if any(n % 2 for n, wraps in zip(shape, np.broadcast_to(periodic, len(shape))) if wraps):
            break
    assert level is None and depth >= 2


@pytest.mark.serial
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_offsets_reversed_are_opposite(ndim):
    found = offsets(ndim)
    assert len(found) == 3**ndim
    assert [tuple(-o for o in offset) for offset in found] == found[::-1]
