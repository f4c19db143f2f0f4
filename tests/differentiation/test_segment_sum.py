"""Sums of segments are those of a loop over the entries, bit for bit, and their derivatives those of a dense matrix."""

import autograd.numpy as anp
import numpy as np
import pytest
from device_double import DeviceArray, on_device, on_host
from jitted import check_jit

import mpiad
from mpiad.testing import check_adjoint

SEGMENTS = np.array([3, 0, 3, 5, 0, 3, 1, 5, 3])
COUNT = 7


def dense():
    matrix = np.zeros((COUNT, len(SEGMENTS)))
    matrix[SEGMENTS, np.arange(len(SEGMENTS))] = 1
    return matrix


def by_loop(values, segments, count):
    out = np.zeros((count, *values.shape[1:]), values.dtype)
    for segment, value in zip(segments, values):
        out[segment] += value
    return out


def random(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape)
    return (values + 1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else values).astype(dtype)


@pytest.mark.parametrize("rest", [(), (1,), (3,), (2, 2), (0,)], ids=str)
@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
def test_bits_are_those_of_a_loop(dtype, rest):
    n, count = 200, 13
    segments = np.random.default_rng(1).integers(0, count, n)
    for layout in (np.ascontiguousarray, np.asfortranarray):
        values = layout(random((n, *rest), dtype))
        found = mpiad.segment_sum(values, segments, count)
        assert found.dtype == values.dtype
        np.testing.assert_array_equal(found, by_loop(values, segments, count))


@pytest.mark.parametrize("dtype", ["i4", "u8", "?", "f2"])
@pytest.mark.parametrize("rest", [(), (2,)], ids=str)
def test_integers_booleans_and_half_precision(dtype, rest):
    values = np.random.default_rng(1).integers(0, 2, (len(SEGMENTS), *rest)).astype(dtype)
    np.testing.assert_array_equal(mpiad.segment_sum(values, SEGMENTS, COUNT), by_loop(values, SEGMENTS, COUNT))


def test_no_entries():
    for rest in ((), (3,)):
        assert mpiad.segment_sum(np.zeros((0, *rest)), [], 4).tolist() == np.zeros((4, *rest)).tolist()
    assert mpiad.segment_sum(np.zeros(0), np.zeros(0, int), 0).shape == (0,)


def test_lists_of_numbers():
    """Also of traced ones."""
    np.testing.assert_array_equal(mpiad.segment_sum([1.0, 2.0, 4.0], [2, 0, 2], 3), [2.0, 0.0, 5.0])
    gradient = mpiad.grad(lambda x: anp.sum(mpiad.segment_sum([x[1], x[0] ** 2, 1.0], [1, 1, 0], 2) ** 2), objective="sum")
    np.testing.assert_allclose(gradient(np.array([2.0, 3.0])), [2 * 7 * 4, 2 * 7])


def test_infinite_entries():
    values = np.array([[1.0 + 0j, np.inf], [np.nan, 2.0], [3.0, 4.0]])
    found = mpiad.segment_sum(values, [0, 1, 2], 4)
    np.testing.assert_array_equal(found, np.vstack([values, np.zeros((1, 2))]))


@pytest.mark.parametrize("rest", [(), (3,)], ids=str)
@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
def test_derivatives(dtype, rest):
    """Without conjugation: the transpose of the dense matrix, and its tangent."""
    x, v, g = (random((len(SEGMENTS), *rest), dtype, seed) for seed in range(3))
    fun = lambda x: mpiad.segment_sum(x, SEGMENTS, COUNT)  # noqa: E731
    vjp, value = mpiad.make_vjp(fun)(x)
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(value, np.tensordot(dense(), x, 1), rtol=8 * eps, atol=8 * eps)
    np.testing.assert_allclose(mpiad.jvp(fun, x, v)[1], np.tensordot(dense(), v, 1), rtol=8 * eps, atol=8 * eps)
    np.testing.assert_array_equal(vjp(g[:COUNT]), np.tensordot(dense().T, g[:COUNT], 1).astype(dtype))
    check_adjoint(fun, x)


def test_second_and_third_derivatives(size):
    """Of Σ (A x)⁴ / 12: the Hessian is Aᵀ diag((A x)²) A."""
    x, v = random(len(SEGMENTS), "f8"), random(len(SEGMENTS), "f8", 1)
    fun = lambda x: anp.sum(mpiad.segment_sum(x, SEGMENTS, COUNT) ** 4) / 12  # noqa: E731
    a = dense()
    np.testing.assert_allclose(
        mpiad.hvp(fun)(x, v), a.T @ ((a @ x) ** 2 * (a @ v)) * (mpiad.mpi_rank() == 0), rtol=1e-13, atol=1e-14
    )
    third = mpiad.grad(lambda x: anp.sum(v * mpiad.hvp(fun, objective="sum")(x, v)), objective="sum")(x)
    np.testing.assert_allclose(third, a.T @ (2 * (a @ x) * (a @ v) ** 2), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("rest", [(), (2,)], ids=str)
def test_in_compiled_functions(rest):
    """Segments that are arguments are those of each call."""
    x = random((len(SEGMENTS), *rest), "f8")
    check_jit(lambda x: anp.sum(anp.sin(mpiad.segment_sum(x**2, SEGMENTS, COUNT)) ** 3), x)
    jitted = mpiad.jit(lambda x, segments: mpiad.segment_sum(x * 2, segments, COUNT) * 3, strict=True)
    gradient = mpiad.grad(lambda x, segments: anp.sum(jitted(x, segments) ** 2), objective="sum")
    for segments in (SEGMENTS, SEGMENTS[::-1].copy(), SEGMENTS):
        np.testing.assert_allclose(jitted(x, segments), 6 * by_loop(x, segments, COUNT), rtol=1e-14)
        np.testing.assert_allclose(gradient(x, segments), 72 * by_loop(x, segments, COUNT)[segments], rtol=1e-13)
    with pytest.raises(ValueError, match="segments must be from 0 to 6, but entry 2 has segment 9"):
        jitted(x, np.array([0, 1, 9, 0, 0, 0, 0, 0, 0]))


def test_programs_of_second_derivatives_get_the_segments_as_an_argument():
    """Of Σ (A x)⁴ / 12, compiled: the Hessian is Aᵀ diag((A x)²) A, with the matrix A of each call."""
    x, v = random(len(SEGMENTS), "f8"), random(len(SEGMENTS), "f8", 1)
    jitted = mpiad.jit(lambda x, segments: anp.sum(mpiad.segment_sum(x, segments % COUNT, COUNT) ** 4) / 12, strict=True)
    for segments in (SEGMENTS, SEGMENTS[::-1].copy(), SEGMENTS + COUNT):
        a = np.eye(COUNT)[:, segments % COUNT]
        product = a.T @ ((a @ x) ** 2 * (a @ v))
        np.testing.assert_allclose(mpiad.hvp(jitted, objective="sum")(x, segments, v), product, rtol=1e-13, atol=1e-14)
        at_x = mpiad.make_hvp(jitted, objective="sum")(x, segments)
        np.testing.assert_allclose(at_x.product(np.stack([v, 2 * v]), batch=True)[1], 2 * product, rtol=1e-13, atol=1e-14)
    programs = [*jitted._cache.entries.values(), *jitted._cache.programs.values()]
    assert programs and None not in programs


@pytest.mark.parametrize("rest", [(), (3,)], ids=str)
def test_on_devices(rest):
    x = random((len(SEGMENTS), *rest), "f8")
    for segments in (SEGMENTS, on_device(SEGMENTS)):
        found = mpiad.segment_sum(on_device(x), segments, COUNT)
        assert type(found) is DeviceArray
        np.testing.assert_allclose(on_host(found), by_loop(x, SEGMENTS, COUNT), rtol=1e-14, atol=1e-15)
    fun = lambda x: anp.sum(mpiad.segment_sum(x, SEGMENTS, COUNT) ** 2)  # noqa: E731
    gradient = mpiad.grad(fun, objective="sum")(on_device(x))
    np.testing.assert_allclose(on_host(gradient), 2 * by_loop(x, SEGMENTS, COUNT)[SEGMENTS], rtol=1e-13, atol=1e-14)


def test_errors():
    for kind, text, values, segments, count in (
        (ValueError, "segments must be from 0 to 2, but entry 1 has segment 3", np.ones(2), [0, 3], 3),
        (ValueError, "segments must be from 0 to 2, but entry 0 has segment -1", np.ones((2, 2)), [-1, 0], 3),
        (ValueError, r"must have the same length, but got shapes \(3,\) and \(2,\)", np.ones(3), [0, 1], 3),
        (ValueError, r"must have the same length, but got shapes \(\) and \(2,\)", 1.0, [0, 1], 3),
        (TypeError, "segments must be an array of integers.*float64", np.ones(2), [0.0, 1.0], 3),
        (TypeError, r"segments must be an array of integers.*shape \(1, 2\)", np.ones(2), [[0, 1]], 3),
        (TypeError, "count must be an integer, zero or more, but got -1", np.ones(2), [0, 1], -1),
        (TypeError, "count must be an integer, zero or more, but got float 2.0", np.ones(2), [0, 1], 2.0),
    ):
        with pytest.raises(kind, match=f"segment_sum: .*{text}"):
            mpiad.segment_sum(values, segments, count)
