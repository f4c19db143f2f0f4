"""The pairs satisfy their order conditions, and so do their interpolants."""

from __future__ import annotations

import numpy as np
import pytest

from mpiad.ensemble.tableaus import CLASSIC, DORMAND_PRINCE, TSITOURAS

pytestmark = pytest.mark.serial


def defects(tableau, b, x, order):
    """By how much weights b miss the conditions of an order, at the part x of a step."""
    a = np.zeros((tableau.stages, tableau.stages))
    for i, row in enumerate(tableau.a, 1):
        a[i, : len(row)] = row
    c = np.array(tableau.c)
    ac, ac2 = a @ c, a @ c**2
    conditions = [
        [(b.sum(), 1)],
        [(b @ c, 2)],
        [(b @ c**2, 3), (b @ ac, 6)],
        [(b @ c**3, 4), (b * c @ ac, 8), (b @ ac2, 12), (b @ a @ ac, 24)],
        [(b @ c**4, 5), (b * c**2 @ ac, 10), (b * c @ ac2, 15), (b * c @ a @ ac, 30), (b @ ac**2, 20),
         (b @ a @ c**3, 20), (b @ a @ (c * ac), 40), (b @ a @ ac2, 60), (b @ a @ a @ ac, 120)],
    ]  # fmt: skip
    return [abs(value - x ** (i + 1) / n) for i in range(order) for value, n in conditions[i]]


@pytest.mark.parametrize("tableau", [DORMAND_PRINCE, TSITOURAS, CLASSIC])
def test_order(tableau):
    b = np.append(tableau.a[-1], 0)
    assert max(defects(tableau, b, 1, tableau.order)) < 1e-14
    if tableau.error is not None:
        embedded = b - np.array(tableau.error)
        assert max(defects(tableau, embedded, 1, 4)) < 1e-14 < max(defects(tableau, embedded, 1, 5))


@pytest.mark.parametrize("tableau, order", [(DORMAND_PRINCE, 4), (TSITOURAS, 4), (CLASSIC, 3)])
@pytest.mark.parametrize("x", [0.2, 0.5, 0.9, 1.0])
def test_interpolant(tableau, order, x):
    powers = x ** np.arange(1, tableau.dense.shape[1] + 1)
    assert max(defects(tableau, tableau.dense @ powers, x, order)) < 2e-14


@pytest.mark.parametrize("tableau", [DORMAND_PRINCE, TSITOURAS, CLASSIC])
def test_interpolant_meets_the_step_smoothly(tableau):
    np.testing.assert_allclose(tableau.dense.sum(axis=1), np.append(tableau.a[-1], 0), atol=1e-14)
    slope = tableau.dense @ np.arange(1, tableau.dense.shape[1] + 1)
    np.testing.assert_allclose(slope, np.eye(tableau.stages)[-1], atol=2e-13)
