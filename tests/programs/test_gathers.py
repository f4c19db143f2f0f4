"""Gathers by arrays of indices and segment sums in loops: values and derivatives of NumPy's and autograd's, and errors."""

import autograd.numpy as anp
import numpy as np
import pytest
from jitted import assert_same, check_jit

import mpiad
from mpiad import segment_sum
from mpiad.domain import Domain

serial = pytest.mark.serial
NODES, EDGES = 7, 40
X, Y = np.linspace(-1, 2, NODES), np.cos(np.arange(NODES) * 2.0)
A, C = np.sin(np.arange(21.0)).reshape(NODES, 3), np.cos(np.arange(84.0)).reshape(NODES, 3, 4)
LEFT, RIGHT = np.random.default_rng(1).integers(0, NODES, (2, EDGES))
NEGATIVE = RIGHT - NODES * (RIGHT > 3)  # as NumPy counts, from the end
W = np.linspace(0.5, 1.5, EDGES)


def divergence(x, left, right):
    """Sums of fluxes through edges."""
    flux = x[left] * x[right] + anp.sin(x[left] - x[right])
    return segment_sum(flux, left, NODES) - segment_sum(flux, right, NODES), anp.sum(flux)


def edges(x, y):
    return x[LEFT] * y[NEGATIVE], anp.sin(x * y)[LEFT] + x[LEFT], x[::-1][RIGHT] ** 2, anp.sum(x)[None][LEFT * 0] * W


def rows(a):
    by_axis = a[LEFT, :] * 2, a[:, np.array([2, -3, 2, 0])] + 1, anp.transpose(a)[:, RIGHT] * W
    cells = a[np.stack([LEFT, NEGATIVE], axis=1)]
    return *by_axis, cells[:, 0] * cells[:, 1], anp.sum(a[LEFT] ** 2, axis=1), a[LEFT][RIGHT % 5] * 3


def sums(x, a):
    several = segment_sum(a[LEFT] * W[:, None], RIGHT, NODES), segment_sum((x[:5, None] * x), LEFT[:5], NODES + 2) * 2
    parts = anp.stack([x[LEFT] * x[RIGHT], anp.exp(x[RIGHT]), x[LEFT]], axis=1)
    return *several, segment_sum(parts, LEFT, NODES), segment_sum(x, np.zeros(NODES, int), 1), divergence(x, LEFT, RIGHT)


def chains(x, a):
    """Gathers of sums, sums of gathered sums, and gathers of what is put together."""
    flux = segment_sum(x[LEFT] ** 2, RIGHT, NODES)[LEFT] * x[RIGHT]
    both, stacked = anp.concatenate([x, flux, x**2]), anp.stack([x, anp.sin(x)], axis=1)
    return segment_sum(flux, LEFT, NODES), both[::-1][RIGHT + EDGES] * 2, stacked[LEFT][:, 1] * W, a[LEFT][::2] + 1


def fields(c):
    return (
        c[LEFT] * 2,
        c[:, :, np.array([3, 0, 0])] ** 2,
        segment_sum(c, np.array([0, 3, 0, 1, 1, 3, 3]), 4) * 3,
        c[LEFT][:, 1:],
    )


CASES = [(edges, (X, Y)), (rows, (A,)), (sums, (X, A)), (chains, (X, A)), (fields, (C,))]


@serial
@pytest.mark.parametrize(("fun", "args"), CASES, ids=lambda case: getattr(case, "__name__", ""))
def test_values_and_derivatives(fun, args):
    check_jit(fun, *args, outside=True)
    steps = mpiad.jit(fun).program(*args).loops.splitlines()
    assert all(step.startswith("loop over") for step in steps)  # NumPy runs none of it


@serial
@pytest.mark.parametrize("dtype", ["f4", "c8", "c16"])
def test_other_dtypes(dtype):
    x = (X + 1j * Y if dtype[0] == "c" else X).astype(dtype)
    rounding = 1e-12 if dtype == "c16" else 4e-6
    check_jit(
        lambda x: (segment_sum(x[LEFT] * x[RIGHT], LEFT, NODES), x[LEFT] * 2, anp.abs(x)[RIGHT]), x, rounding=rounding
    )
    masks = mpiad.jit(lambda x: (anp.where((anp.real(x) > 0)[LEFT], x[LEFT], 0), (x != 0)[RIGHT]), strict=True)
    for given in (x, x * 0, -x):
        expected = np.where((given.real > 0)[LEFT], given[LEFT], 0), (given != 0)[RIGHT]
        assert_same(masks(given), expected)


@pytest.mark.few(1)
@serial
@pytest.mark.parametrize("kinds", [("i8", "i8"), ("i4", "i8"), ("i1", "u2"), ("i2", "u8")], ids=str)
def test_index_arrays_as_arguments(kinds):
    """They change from call to call, and derivatives use those of the forward pass. One program serves all of them."""
    rng = np.random.default_rng(2)
    total = lambda x, left, right: anp.sum(divergence(x, left, right)[0] ** 2)  # noqa: E731
    jitted, inside, outside = (
        mpiad.jit(fun, strict=True) for fun in (divergence, mpiad.value_and_grad(total), total)
    )  # fmt: skip
    second = mpiad.jit(mpiad.hvp(total), strict=True)
    for _ in range(4):
        left, right = (rng.integers(0, NODES, EDGES).astype(kind) for kind in kinds)
        given = X, left, right
        assert_same(jitted(*given), divergence(*given))
        expected = mpiad.value_and_grad(total)(*given)
        for found in (inside(*given), mpiad.value_and_grad(outside)(*given)):
            assert_same(found, expected)
        along = mpiad.hvp(lambda x: total(x, left, right))(X, Y)  # noqa: B023
        assert_same(second(*given, Y), along)
        assert_same(mpiad.hvp(lambda x: outside(x, left, right))(X, Y), along)  # noqa: B023
        product = mpiad.make_hvp(mpiad.jit(lambda x: total(x, left, right)))(X).product  # noqa: B023
        assert_same(product(np.stack([X, Y]), batch=True)[1], along)
    assert jitted._cache.attempts.traces == inside._cache.attempts.traces == second._cache.attempts.traces == 1


@serial
@pytest.mark.unguarded
def test_index_arrays_of_other_lengths_and_changed_in_place():
    jitted, left = mpiad.jit(divergence, strict=True), LEFT.copy()
    for n in (EDGES, 0, 11, EDGES, 1, 0, 11):
        assert_same(jitted(X, left[:n], NEGATIVE[:n] % NODES), divergence(X, left[:n], NEGATIVE[:n] % NODES))
    assert jitted._cache.attempts.traces == 4
    total = mpiad.jit(lambda x, left: anp.sum(x[left] ** 3), strict=True)
    pull, _ = mpiad.make_vjp(lambda x: total(x, left))(X)
    expected = 3 * X**2 * np.bincount(left, minlength=NODES)
    left[...] = 10**6
    np.testing.assert_allclose(pull(1.0), expected, rtol=1e-14)


POSITIONS, CELLS, TABLE = np.array([0.1, 0.35, 0.5, 0.7, 0.55]), 4, np.array([2.0, -1.0, 0.5, 3.0])
CELL = np.array([0, 1, 2, 2, 2])  # of each of the positions
SHARES = np.bincount(CELL, POSITIONS, CELLS)[CELL]
# Functions of positions, with their gradients by hand.
CONVERTED = {
    "deposit": (lambda x, e: anp.sum(segment_sum(x, (CELLS * x).astype(int), CELLS) ** 2), 2 * SHARES),
    "own entries": (
        lambda x, e: anp.sum((x * x)[(CELLS * x).astype(np.int64)]),
        2 * POSITIONS * np.bincount(CELL, minlength=5),
    ),
    "table": (lambda x, e: anp.sum(x * e[(CELLS * x).astype("i4")]), TABLE[CELL]),
    "take": (lambda x, e: anp.sum(x * anp.take(e, (CELLS * x).astype(int))), TABLE[CELL]),
    "factor": (lambda x, e: anp.sum(x**2 * (CELLS * x).astype(int)), 2 * POSITIONS * CELL),
    "mask": (lambda x, e: anp.sum(anp.where((x - 0.5).astype(bool), x**2, 0)), 2 * POSITIONS * (POSITIONS != 0.5)),
}


@serial
@pytest.mark.parametrize("name", CONVERTED)
def test_integers_and_booleans_of_traced_values_have_no_derivative(name):
    fun, gradient = CONVERTED[name]
    jitted = mpiad.jit(fun, strict=True)
    x, v, second = POSITIONS, np.cos(POSITIONS), mpiad.hvp(lambda x: fun(x, TABLE))
    for _ in range(3):
        for found in (mpiad.grad(jitted)(x, TABLE), mpiad.jit(mpiad.grad(fun), strict=True)(x, TABLE)):
            np.testing.assert_allclose(found, gradient, rtol=1e-14)
        np.testing.assert_allclose(mpiad.jvp(lambda x: jitted(x, TABLE), x, v)[1], gradient @ v, rtol=1e-13)
        assert_same(mpiad.hvp(lambda x: jitted(x, TABLE))(x, v), second(x, v))
        assert jitted(x, TABLE) == fun(x, TABLE)


@serial
@pytest.mark.parametrize("read", [lambda i: TABLE[i], lambda i: anp.take(TABLE, i)])
def test_traced_indices_of_a_plain_array_are_refused_with_advice(read):
    jitted = mpiad.jit(lambda x: anp.sum(x * read((CELLS * x).astype(int))), strict=True)
    for call in (jitted, mpiad.grad(jitted), lambda x: mpiad.jvp(jitted, x, x)):
        with pytest.raises(
            TypeError, match="indexes an array of numbers by traced integers: pass this array as an argument"
        ):
            call(POSITIONS)


@serial
def test_computed_and_captured_index_arrays():
    def fun(x, shift):
        cells = np.floor(np.abs(x) * 2).astype(int)
        return (
            x[np.argsort(-x)] * x,
            segment_sum(x * 2, cells, 9),
            segment_sum(x, (np.arange(NODES) + shift) % NODES, NODES),
        )

    check_jit(lambda x: x[np.argsort(np.arange(7.0))] * 2, X)
    jitted = mpiad.jit(fun, strict=True)
    for x in (X, Y, X[::-1].copy()):
        for shift in (0, 3):
            assert_same(jitted(x, shift), fun(x, shift))
    captured = LEFT.copy()
    kept = mpiad.jit(lambda x: x[captured] * 2, strict=True)
    for k in range(3):
        captured[:] = np.roll(LEFT, k)
        assert_same(kept(X), 2 * X[captured])


@serial
def test_empty_arrays():
    none = np.zeros(0, int)
    check_jit(lambda x, e: (x[none] * 2, segment_sum(e, none, 3) + 1, segment_sum(x[none], none, 0), e[none] * 3), X, X[:0])
    check_jit(lambda a: (a[none] * 2, segment_sum(a[none], none, 4), a[:, none] + 1), A)


@serial
def test_sums_are_those_of_numpy_bit_for_bit():
    rng = np.random.default_rng(3)
    values, segments = rng.standard_normal(5000) * 10.0 ** rng.integers(-9, 9, 5000), rng.integers(0, 50, 5000)
    jitted = mpiad.jit(lambda values, segments: segment_sum(values, segments, 50), strict=True)
    for order in (segments, np.sort(segments), segments[::-1].copy()):
        expected = np.zeros(50)
        np.add.at(expected, order, values)
        np.testing.assert_array_equal(jitted(values, order), expected)


@serial
def test_transposes_by_dot_products():
    """A gather and a segment sum are the transposes of each other, and not of another index array."""
    rng = np.random.default_rng(4)
    gathered = mpiad.jit(lambda x, left: x[left], strict=True)
    summed = mpiad.jit(lambda y, left: segment_sum(y, left, NODES), strict=True)
    for left in (LEFT, RIGHT):
        x, y = rng.standard_normal(NODES), rng.standard_normal(EDGES)
        pull, _ = mpiad.make_vjp(lambda x: gathered(x, left))(x)  # noqa: B023
        push = mpiad.make_vjp(lambda y: summed(y, left))(y)[0]  # noqa: B023
        np.testing.assert_allclose(y @ gathered(x, left), pull(y) @ x, rtol=1e-13)
        np.testing.assert_allclose(x @ summed(y, left), push(x) @ y, rtol=1e-13)
        assert abs(x @ summed(y, left[::-1].copy()) - push(x) @ y) > 1e-3
        np.testing.assert_allclose(pull(y), summed(y, left), rtol=1e-14)


@serial
def test_fluxes_are_one_loop_over_edges_and_one_over_cells():
    """Without arrays as long as there are edges."""
    jitted = mpiad.jit(lambda x, left, right: x - 0.1 * divergence(x, left, right)[0], strict=True)
    steps = jitted.program(X, LEFT, RIGHT).loops.splitlines()
    assert [step.split(":")[0].split(" ->")[0] for step in steps] == [
        "checked_indices", "checked_indices", f"loop over [{EDGES}]", f"loop over [{NODES}]"
    ]  # fmt: skip
    (entry,) = jitted._cache.entries.values()
    schedule = entry.replays.schedule
    assert all(np.prod(schedule.buffers[b].shape) == NODES for b in entry.replays.allocations)


@serial
@pytest.mark.parametrize("n", [NODES, 20_000], ids=["small", "large"])
def test_errors(n):
    """Those of the interpreted function, before anything is computed, at the first call and at later ones."""
    x, good = np.linspace(0, 1, n), np.arange(EDGES) % n

    def gathered(x, left):
        return x[left] * 2

    def summed(x, left):
        return segment_sum(x[left] * 2, left, n)

    bad = [(good + n - 5, IndexError), (good - n - 1, IndexError), (-1 - good, ValueError), (good + 2**40, IndexError)]
    fresh, known = ([mpiad.jit(fun, strict=True) for fun in (gathered, summed)] for _ in range(2))
    for fun, jitted, again in zip((gathered, summed), known, fresh):
        assert_same(jitted(x, good), fun(x, good))
        for left, kind in bad:
            if fun is gathered and kind is ValueError:
                assert_same(jitted(x, left), fun(x, left))
                continue
            with pytest.raises(kind) as expected:
                fun(x, left)
            for each in (jitted, again):
                with pytest.raises(kind) as found:
                    each(x, left)
                assert str(found.value) == str(expected.value)
        gradient = mpiad.grad(lambda x, left: anp.sum(jitted(x, left)))  # noqa: B023
        gradient(x, good)
        with pytest.raises(IndexError, match="out of bounds for axis 0 with size"):
            gradient(x, good + n)
    with pytest.raises(IndexError, match="index 5 is out of bounds for axis 1 with size 3"):
        mpiad.jit(lambda a, i: a[:, i] * 2)(A, np.array([5]))


def test_ranks_with_different_lengths(rank, size):
    """Each rank has its own edges, also none; the field's halo is exchanged before the gather, in both passes."""
    domain = Domain(30 * size, periodic=True)
    n = domain.local_shape[0]
    x = np.sin(np.arange(30 * size, dtype=float) ** 2)[domain.owned]
    left = np.arange(n + 1)[: n + 1 if rank != 1 else 0]

    def fun(x, left):
        padded = domain.exchange(x)
        flux = anp.sin(padded[left] - padded[left + 1]) * padded[left]
        sums = segment_sum(flux, left, n + 1)
        return domain.sum(x * (sums[1:] - sums[:-1]) ** 2)

    jitted = mpiad.jit(fun, strict=True) if rank != 2 else fun
    for given in (x, x[::-1].copy(), 2 * x):
        assert_same(jitted(given, left), fun(given, left))
        gradient = mpiad.value_and_grad(lambda x: fun(x, left))
        for found in (mpiad.value_and_grad(lambda x: jitted(x, left)), mpiad.jit(gradient)):
            assert_same(found(given), gradient(given), 1e-11)
        assert_same(mpiad.hvp(lambda x: jitted(x, left))(given, x), mpiad.hvp(lambda x: fun(x, left))(given, x), 1e-11)


def test_large_loops_after_a_halo_exchange(rank, size):
    """A gather may read any entry of the halo, so no part of its loop runs before the messages have arrived."""
    domain = Domain(20_000 * size, periodic=True)
    n = domain.local_shape[0]
    x, order = np.sin(np.arange(20_000.0 * size))[domain.owned], (np.arange(n) * 7919 + rank) % (n + 2)
    fun = lambda x: anp.sin(domain.exchange(x)[order]) * x  # noqa: E731
    jitted = mpiad.jit(fun, strict=True)
    for given in (x, x + rank, -x):
        assert_same(jitted(given), fun(given))
