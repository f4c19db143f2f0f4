"""The methods satisfy their order conditions, and so do their interpolants."""

from __future__ import annotations

from functools import cache
from math import prod

import numpy as np
import pytest

from mpiad.ensemble import BS3, RK4, RK45, Tsit5, Vern7

pytestmark = pytest.mark.serial

# Of each the orders of both solutions, and of the states between steps.
METHODS = {RK45: (5, 4, 4), Tsit5: (5, 4, 4), RK4: (4, None, 3), BS3: (3, 2, 3), Vern7: (7, 6, 5)}
every_method = pytest.mark.parametrize("method", METHODS)


@cache
def trees(order):
    """Return all rooted trees with so many nodes, each as the tuple of its branches."""
    return sorted(forests(order - 1, order - 1))


@cache
def forests(nodes, largest):
    """Return all sets of trees with so many nodes together, and at most `largest` in one."""
    if not nodes:
        return {()}
    return {
        tuple(sorted((tree, *rest)))
        for size in range(1, min(nodes, largest) + 1) for tree in trees(size) for rest in forests(nodes - size, size)
    }  # fmt: skip


def nodes(tree):
    return 1 + sum(map(nodes, tree))


def density(tree):
    return nodes(tree) * prod(map(density, tree))


def defects(tableau, b, x, order):
    """By how much weights b miss the conditions of one order, at the part x of a step (Hairer, Nørsett, Wanner, II.2)."""
    a = np.zeros((tableau.stages, tableau.stages))
    for i, row in enumerate(tableau.a, 1):
        a[i, : len(row)] = row

    def weights(tree):
        return np.prod([a @ weights(branch) if branch else tableau.c for branch in tree], axis=0) * np.ones(len(a))

    return max(abs(b @ weights(tree) - x**order / density(tree)) for tree in trees(order))


def worst(tableau, b, x, order):
    return max(defects(tableau, b, x, q) for q in range(1, order + 1))


def test_trees_are_counted_as_in_the_books():
    assert [len(trees(order)) for order in range(1, 8)] == [1, 1, 2, 4, 9, 20, 48]


@every_method
def test_order(method):
    tableau, (order, embedded, _) = method.tableau, METHODS[method]
    b = np.append(tableau.a[-1], 0)
    assert (tableau.order, tableau.embedded_order) == (order, embedded)
    assert worst(tableau, b, 1, order) < 1e-14 < 1e-6 < defects(tableau, b, 1, order + 1)
    if embedded is not None:
        other = b - np.array(tableau.error)
        assert worst(tableau, other, 1, embedded) < 1e-14 < 1e-6 < defects(tableau, other, 1, embedded + 1)
        assert tableau.error_order == min(order, embedded) + 1


@every_method
@pytest.mark.parametrize("x", [0.2, 0.5, 0.9, 1.0])
def test_interpolant(method, x):
    tableau, order = method.tableau, METHODS[method][2]
    weights = tableau.dense @ x ** np.arange(1, tableau.dense.shape[1] + 1)
    assert worst(tableau, weights, x, order) < 2e-14
    assert x == 1 or defects(tableau, weights, x, order + 1) > 1e-7


@every_method
def test_interpolant_meets_the_step_smoothly(method):
    tableau = method.tableau
    degree = tableau.dense.shape[1]
    np.testing.assert_allclose(tableau.dense.sum(axis=1), np.append(tableau.a[-1], 0), atol=1e-14)
    np.testing.assert_allclose(tableau.dense[:, 0], np.eye(tableau.stages)[0], atol=1e-14)
    np.testing.assert_allclose(tableau.dense @ np.arange(1, degree + 1), np.eye(tableau.stages)[-1], atol=2e-13)
