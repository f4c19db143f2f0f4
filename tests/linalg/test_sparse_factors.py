"""Solves with SuperLU's factors, for one and several right-hand sides, against dense matrices."""

import numpy as np
import pytest
import scipy.sparse
from scipy.sparse.linalg import splu

from mpiad.linalg import sparse_factors
from mpiad.linalg.sparse_factors import SparseFactors

pytestmark = pytest.mark.serial
GRID = (13, 11)


@pytest.fixture(autouse=True, params=[0, 1000], ids=["compiled", "SuperLU"])
def first_solves(request, monkeypatch):
    monkeypatch.setattr(sparse_factors, "_FIRST_SOLVES", request.param)


def matrix_of(kind, rng):
    """An operator on a grid, or a matrix without structure; the numbers of rows aren't multiples of four."""
    if kind == "diagonal":
        return scipy.sparse.diags_array(rng.random(5) + 1.0, format="csc")
    if kind == "random":
        return scipy.sparse.random_array((61, 61), density=0.08, rng=rng, format="csc") + scipy.sparse.eye_array(61)
    lines = [scipy.sparse.diags_array([-1.0, 2.5, -0.5], offsets=[-1, 0, 1], shape=(n, n)) for n in GRID]
    # "indefinite": not diagonally dominant, so that pivots aren't on the diagonal.
    return scipy.sparse.kronsum(*lines, format="csc") - (4.9 if kind == "indefinite" else 0.0) * scipy.sparse.eye_array(143)


@pytest.mark.each_combination
@pytest.mark.parametrize("kind", ["grid", "indefinite", "random", "diagonal"])
def test_solutions(kind, rng):
    matrix = matrix_of(kind, rng)
    factors, dense = SparseFactors(matrix.tocsc(), "A"), matrix.toarray()
    for count in (0, 1, 2, 5, 33, 70):  # the compiled loop takes 32 at a time
        rows = rng.standard_normal((count, len(dense)))
        for name, whole in (("N", dense), ("T", dense.T)):
            found = factors.solve(np.asfortranarray(rows), name)
            np.testing.assert_allclose(found, np.linalg.solve(whole, rows.T).T, rtol=1e-9, atol=1e-9)
    rows = rng.standard_normal((3, len(dense))) + 1j * rng.standard_normal((3, len(dense)))
    np.testing.assert_allclose(factors.solve(rows, "T"), np.linalg.solve(dense.T, rows.T).T, rtol=1e-9, atol=1e-9)


def test_fill_of_a_dominant_matrix():
    """A dominant matrix with a symmetric pattern has fewer entries in its factors than by SuperLU's default ordering."""
    line = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(40, 40))
    matrix = scipy.sparse.kronsum(line, line, format="csc")
    for shift, largest in ((0.1, 0.7), (-0.5, 1.0)):
        shifted = (matrix + shift * scipy.sparse.eye_array(1600)).tocsc()
        assert SparseFactors(shifted, "A")._factors.L.nnz <= largest * splu(shifted).L.nnz


@pytest.mark.parametrize(("dtype", "rounding"), [(np.float32, 1e-4), (np.complex128, 1e-9)])
def test_other_dtypes(dtype, rounding, rng):
    matrix = (matrix_of("grid", rng) * (1 + 0.5j if dtype == np.complex128 else 1)).astype(dtype)
    factors, rows = SparseFactors(matrix, "A"), rng.standard_normal((3, matrix.shape[0])).astype(dtype)
    found = factors.solve(rows)
    assert found.dtype == dtype
    np.testing.assert_allclose(found, np.linalg.solve(matrix.toarray(), rows.T).T, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("of_matrix", [np.float32, np.complex64])
@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_right_hand_sides_in_higher_precision(of_matrix, dtype, rng):
    """The solution has the precision of the right-hand sides."""
    matrix = matrix_of("grid", rng).astype(of_matrix)
    factors = SparseFactors(matrix, "A")
    rows = (rng.standard_normal((3, matrix.shape[0])) * (1 + 0.5j if dtype == np.complex128 else 1)).astype(dtype)
    for _ in range(2):
        for name, whole in (("N", matrix.toarray()), ("T", matrix.toarray().T)):
            found = factors.solve(rows, name)
            assert found.dtype == np.result_type(of_matrix, dtype)
            np.testing.assert_allclose(found, np.linalg.solve(whole.astype(found.dtype), rows.T).T, rtol=1e-9, atol=1e-9)


def test_right_hand_sides_that_are_not_finite(rng):
    """They don't change the other solutions, nor those of later solves."""
    matrix = matrix_of("grid", rng)
    factors, rows = SparseFactors(matrix, "A"), rng.standard_normal((3, matrix.shape[0]))
    expected = factors.solve(rows)
    spoiled = rows.copy()
    spoiled[1, 5] = np.inf
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(factors.solve(spoiled)[::2], expected[::2])
    np.testing.assert_array_equal(factors.solve(rows), expected)


def test_a_singular_matrix_is_named():
    with pytest.raises(ValueError, match="the matrix A can't be factorized"):
        SparseFactors(scipy.sparse.csc_array(np.ones((2, 2))), "the matrix A")
