"""Factors and solutions in the kernel language, which is a part of Python, run as such: beside NumPy's solutions."""

from __future__ import annotations

import numpy as np
import pytest

from mpiad.ensemble.compiled.rosenbrock_text import LoopedLU, UnrolledLU

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


@pytest.mark.parametrize("make", [UnrolledLU, lambda d, places: LoopedLU(d, places, "b", 3)])
@pytest.mark.parametrize("sparse", [sparse, banded])
@pytest.mark.parametrize("transposed", [False, True])
def test_solutions_are_those_of_numpy(make, sparse, transposed):
    places = sorted({*map(tuple, np.argwhere(sparse(0)).tolist()), *((i, i) for i in range(D))})
    lu = make(D, places)
    entries = [f"{lu.entry(i, j)} = w[{i}, {j}]" for i, j in places]
    lines = [*lu.cleared, *entries, *lu.factors, *(lu.solved_transposed("x") if transposed else lu.solved("x"))]
    text = compile("\n".join(lines), "lu", "exec")
    for seed in range(20):
        matrix, right = sparse(seed), np.random.default_rng(100 + seed).normal(size=D)
        names = {"where": lambda c, a, b: a if c else b, "zero": 0.0, "one": 1.0, "np": np, "b": np.ones(200)}
        names |= {"w": matrix} | {f"x_{i}": right[i] for i in range(D)}
        exec(text, names)  # noqa: S102 the language is a part of Python
        found = [names[f"x_{i}"] for i in range(D)]
        np.testing.assert_allclose(found, np.linalg.solve(matrix.T if transposed else matrix, right), rtol=1e-9)


def test_the_loops_run_over_a_band():
    places = sorted({*map(tuple, np.argwhere(banded(0)).tolist()), *((i, i) for i in range(D))})
    assert LoopedLU(D, places, "b", 0).length == (4 + 2) * D


def test_the_order_of_unknowns_fills_little():
    places = sorted({*map(tuple, np.argwhere(sparse(0)).tolist()), *((i, i) for i in range(D))})
    turned = [(D - 1 - i, D - 1 - j) for i, j in places]  # in the order in which it is written already
    assert len(UnrolledLU(D, places).factors) == len(UnrolledLU(D, turned).factors) < 200
