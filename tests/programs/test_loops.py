"""Loops over parts, edges and rest, against NumPy: random programs of slices, pads, rolls, joins, writes and sums."""

import autograd.numpy as anp
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from jitted import assert_same, check_jit, further, objective
from random_arrays import random_program

import mpiad

pytestmark = pytest.mark.serial

seeds = st.integers(0, 10**6)


@hypothesis.given(seeds)
@hypothesis.settings(max_examples=10)
def test_random_programs(seed):
    fun, args = random_program(seed)
    total = objective(fun)
    jitted, gradient = mpiad.jit(fun, strict=True), mpiad.value_and_grad(total)
    compiled = mpiad.jit(gradient, strict=True) if seed % 2 else mpiad.value_and_grad(mpiad.jit(total, strict=True))
    for given in (args, [further(x) for x in args]):
        assert_same(jitted(*given), fun(*given), 1e-11)
        assert_same(compiled(*given), gradient(*given), 1e-9)


@hypothesis.given(seeds)
@hypothesis.settings(max_examples=6)
def test_random_programs_that_set_entries(seed):
    fun, args = random_program(seed, writes=True)
    jitted = mpiad.jit(fun, strict=True)
    for given in (args, [further(x) for x in args]):
        assert_same(jitted(*given), fun(*given), 1e-11)


def test_one_part_at_several_places():
    """In one buffer, as itself, in another shape, and as a part of what is put together again."""

    def fun(x):
        y = anp.sin(x)
        row = anp.reshape(y, (1, -1))
        pair = anp.concatenate([row, row + 0.5])
        return anp.stack([y, y, y]), pair, anp.concatenate([pair, pair * 2, pair]), anp.concatenate([row, pair, row])

    check_jit(fun, np.linspace(0.0, 1.0, 5))


def test_parts_that_are_computed_from_a_view_beside_them():
    def fun(x):
        row = anp.reshape(anp.sin(x), (1, -1))
        column = anp.transpose(anp.cumsum(x[:, None] * row, 0))
        both = mpiad.mpi_allreduce(anp.concatenate([row, row + 0.5, anp.exp(row)]))
        return both, mpiad.mpi_allreduce(anp.concatenate([column, column**2]))

    check_jit(fun, np.linspace(0.0, 1.0, 5))


@pytest.mark.few(4)
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 33, 1000])
def test_edges_at_every_length(n):
    """Shorter than the lanes of a sum, as long, and longer; a stencil that is all edge, and one with an inside."""

    def fun(x):
        padded = anp.concatenate([x[-1:], x, x[:1]])
        second = padded[2:] - 2 * padded[1:-1] + padded[:-2]
        return second, anp.sum(second**2), anp.max(second), anp.pad(x, (2, 1), "constant")[1:] * 2.0, anp.prod(1 + x / 1000)

    x = np.sin(np.arange(n) + 1.0)
    jitted = mpiad.jit(fun, strict=True)
    for y in (x, 2 * x):
        found = jitted(y)
        second = np.roll(y, 1) - 2 * y + np.roll(y, -1)
        np.testing.assert_allclose(found[0], second, rtol=1e-13, atol=1e-14)
        np.testing.assert_allclose(found[1], np.sum(second**2), rtol=1e-13)
        assert abs(found[2] - second.max()) < 1e-14
        np.testing.assert_array_equal(found[3], np.concatenate([[0.0], y, [0.0]]) * 2)
        np.testing.assert_allclose(found[4], np.prod(1 + y / 1000), rtol=1e-13)


def by_lanes(row):
    """Return the sum of a row in the order of loops: sixteen partial sums, then halves onto halves."""
    lanes, whole = np.zeros(16), len(row) // 16 * 16
    for block in row[:whole].reshape(-1, 16):
        lanes = lanes + block
    for x in row[whole:]:
        lanes[0] += x
    for width in (8, 4, 2, 1):
        lanes[:width] += lanes[width : 2 * width]
    return lanes[0]


@pytest.mark.few(2)
@pytest.mark.parametrize("n", [31, 32, 47, 100])
def test_folds_of_rows(n):
    x = np.random.default_rng(n).normal(size=(3, 4, n))
    x[1, 2, -1], x[0, 0, 5] = np.nan, np.inf
    y = np.where(np.isfinite(x), x, 1.0)
    folds = mpiad.jit(lambda x: [anp.max(x, axis=-1), anp.min(2 * x, axis=2), anp.prod(x, axis=-1)])
    totals = mpiad.jit(lambda y: [anp.sum(y, axis=-1), anp.sum(y * (1 + 2j), axis=(0, 2))])
    for _ in range(2):  # the first call is the trace
        found, (sums, both) = folds(x), totals(y)
        single = folds(x.astype(np.float32))[0]
    assert_same(found, [np.max(x, axis=-1), np.min(2 * x, axis=2), np.prod(x, axis=-1)])
    np.testing.assert_array_equal(single, np.max(x.astype(np.float32), axis=-1))
    np.testing.assert_allclose(both, np.sum(y * (1 + 2j), axis=(0, 2)), rtol=1e-13, atol=1e-13)
    joined = mpiad.jit(lambda y: anp.sum(anp.concatenate([y[1:] * 2, y[:1]]) ** 2, axis=-1))  # rows of two expressions
    np.testing.assert_allclose(joined(y), np.sum(np.concatenate([y[1:] * 2, y[:1]]) ** 2, axis=-1), rtol=1e-13)
    if n > 31:
        np.testing.assert_array_equal(sums, [[by_lanes(row) for row in rows] for rows in y])
    check_jit(lambda y: anp.sum(anp.exp(y - anp.max(y, axis=-1, keepdims=True)), axis=-1) ** 2, y)
