"""Factors and solutions of kernels, run as plain Python, compared with NumPy's solutions."""

from __future__ import annotations

import numpy as np
import pytest

from mpiad.ensemble.compiled.rosenbrock_kernel import (
    Factors,
    LoopedLU,
    Part,
    UnrolledLU,
    factorize_looped,
    factorize_unrolled,
    solve_looped,
    solve_transposed_unrolled,
    solve_unrolled,
)  # fmt: skip

pytestmark = pytest.mark.serial
D = 9


def sparse(seed):
    """Return an arrow whose head comes first, which fills up in that order, with small numbers on the diagonal."""
    rng = np.random.default_rng(seed)
    matrix = np.diag(0.1 * rng.normal(size=D))
    matrix[0], matrix[:, 0] = rng.normal(size=(2, D))
    return matrix


def banded(seed):
    """Return a matrix whose bandwidth is small in another order of the unknowns."""
    rng = np.random.default_rng(seed)
    order = np.array([4, 0, 7, 2, 8, 5, 1, 6, 3])
    band = np.diag(0.1 * rng.normal(size=D)) + np.diag(rng.normal(size=D - 1), 1) + np.diag(rng.normal(size=D - 1), -1)
    return band[order][:, order]


def places_of(matrix):
    return sorted({*map(tuple, np.argwhere(matrix).tolist()), *((i, i) for i in range(D))})


def solved_unrolled(matrix, right, transposed):
    lu, w, swaps, x = UnrolledLU(D, places_of(matrix)), np.full((D, D), np.nan), np.empty((D, D)), right.copy()
    for i, j in places_of(matrix):
        w[i, j] = matrix[i, j]
    factorize_unrolled(lu, w, swaps, 0.0, 1.0)
    (solve_transposed_unrolled if transposed else solve_unrolled)(lu, w, swaps, x)
    return x


def solved_looped(matrix, right, transposed):
    lu, array, start = LoopedLU(D, places_of(matrix)), np.full(200, np.nan), 3
    array[start : start + lu.size] = 0.0
    for i, j in places_of(matrix):
        array[start + lu.entry(i, j)] = matrix[i, j]
    w, swaps, x = Factors(lu, array, start), Part(array, start + lu.size + D), np.empty(D)
    x[lu.place] = right
    factorize_looped(lu, w, swaps, 1.0)
    solve_looped(lu, w, swaps, x, transposed)
    assert np.isnan(array[start + lu.length :]).all()
    return x[lu.place]


@pytest.mark.parametrize("solved", [solved_unrolled, solved_looped])
@pytest.mark.parametrize("make", [sparse, banded])
@pytest.mark.parametrize("transposed", [False, True])
def test_solutions_are_those_of_numpy(solved, make, transposed):
    for seed in range(20):
        matrix, right = make(seed), np.random.default_rng(100 + seed).normal(size=D)
        expected = np.linalg.solve(matrix.T if transposed else matrix, right)
        np.testing.assert_allclose(solved(matrix, right, transposed), expected, rtol=1e-9)


def test_the_loops_run_over_a_band():
    assert LoopedLU(D, places_of(banded(0))).length == (4 + 2) * D


def test_the_order_of_unknowns_fills_little():
    turned = [(D - 1 - i, D - 1 - j) for i, j in places_of(sparse(0))]  # in the order in which it is written already
    assert UnrolledLU(D, places_of(sparse(0))).lines[0] == UnrolledLU(D, turned).lines[0] < 200
