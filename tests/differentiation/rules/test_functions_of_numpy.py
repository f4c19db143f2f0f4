"""Functions of NumPy whose rules in autograd are wrong, crash or are missing; and the table of all in the reference."""

import itertools
import zlib

import autograd
import autograd.numpy as np
import derivative_sweep
import numpy
import pytest
from autograd.numpy import fft, linalg

import mpiad
from mpiad.differentiation.rules import VJP_RULES

pytestmark = [pytest.mark.serial, pytest.mark.filterwarnings("ignore")]
A = numpy.array([[0.3, -1.2, 0.7], [2.0, 0.9, -0.4]])
V = numpy.array([[0.5, 0.1, -0.3], [0.8, -0.6, 0.2]])
Z = A + 1j * V


def close(found, expected, rtol=1e-13):
    numpy.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol)


# ---- closed forms


def test_repeat_counts_axes_from_the_last():
    weights = numpy.arange(6.0).reshape(2, 3)[:, :, None] + numpy.array([0.0, 10.0])
    for axis in (1, -1):
        repeated = lambda x, axis=axis: np.sum(np.repeat(x, 2, axis=axis) * weights.reshape(2, 6))  # noqa: E731
        close(mpiad.grad(repeated)(A), weights.sum(axis=2))
        close(mpiad.grad(mpiad.jit(repeated))(A), weights.sum(axis=2))


def test_tile_counts_repetitions_from_the_last_axis():
    weights = numpy.arange(12.0).reshape(2, 6)
    close(mpiad.grad(lambda x: np.sum(np.tile(x, 2) * weights))(A), weights[:, :3] + weights[:, 3:])


def test_forward_derivatives_of_norms_of_complex_arrays():
    value = numpy.sqrt(numpy.sum(numpy.abs(Z) ** 2))
    along = numpy.sum(numpy.real(numpy.conj(Z) * (V + 2j * A)))
    found = mpiad.jvp(linalg.norm, Z, V + 2j * A)
    close(found[1], along / value)
    assert numpy.isrealobj(found[1])
    # (v - z Re⟨z, v⟩ / |z|²) / |z|, conjugated as gradients are.
    v = V + 2j * A
    close(mpiad.hvp(linalg.norm)(Z, v), numpy.conj(v - Z * along / value**2) / value)
    close(mpiad.hvp(lambda x: np.sum(np.abs(x)))(Z, v), _hessian_of_modulus(Z, v))
    kept = mpiad.grad(lambda x: np.sum(linalg.norm(x, axis=1, keepdims=True) * np.array([[1.0], [3.0]])))(A)
    close(kept, A / numpy.sqrt(numpy.sum(A**2, axis=1, keepdims=True)) * numpy.array([[1.0], [3.0]]))


def _hessian_of_modulus(z, v):
    r = numpy.abs(z)
    return numpy.conj(v / r - z * numpy.real(numpy.conj(z) * v) / r**3)


@pytest.mark.few(4)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("order", [1, 1.5, 2.5, 3])
def test_norms_of_vectors_with_zeros(order, compiled):
    x, v = numpy.array([0.0, 1.0, -2.0, 0.0]), numpy.array([0.0 if order < 2 else 0.7, 0.5, 2.0, 0.0])
    norm, power = numpy.sum(numpy.abs(x) ** order) ** (1 / order), numpy.abs(x) ** (order - 1)
    gradient = numpy.sign(x) * power / norm ** (order - 1)
    curvature = numpy.array([0.0, 1.0, 2.0 ** (order - 2), 0.0]) / norm ** (order - 1)
    product = (order - 1) * (curvature * v - gradient * (gradient @ v) / norm)
    fun = lambda x: np.sum(linalg.norm(x[None], order, 1))  # noqa: E731
    fun = mpiad.jit(fun) if compiled else fun
    close(mpiad.grad(fun)(x), gradient)
    close(mpiad.make_jvp(fun)(x)(v)[1], gradient @ v)
    close(mpiad.hvp(fun)(x, v), product)
    close(mpiad.make_jvp(mpiad.grad(fun))(x)(v)[1], product)
    # The second derivative of |x|^1.5 at 0 is infinite.
    assert order != 1.5 or mpiad.hvp(fun)(x, numpy.ones(4))[0] > 1e300


def norms():
    """Yield the shapes, orders and axes of norms that NumPy computes, and that have a derivative."""
    every = itertools.product(
        ((), (3,), (2, 3), (2, 2, 3)), (None, 2, 3, 1.5, "fro", "nuc"), (None, 0, -1, (0, 1), (-2, -1))
    )
    for shape, order, axis in every:
        try:
            numpy.linalg.norm(numpy.zeros(shape), order, axis)
        except ValueError:
            continue
        if order != 2 or isinstance(axis, int) or len(shape) < 2:
            yield shape, order, axis


@pytest.mark.few(1)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", [float, complex])
@pytest.mark.parametrize("power", [1, 2])
def test_norms_at_zero(power, kind, compiled):
    for shape, order, axis in [*norms()][:: 16 if compiled else 1]:
        x = numpy.zeros(shape, kind)[()]
        v = numpy.full(shape, kind(1 + 0.5j) if kind is complex else 1.0)[()]
        fun = lambda x, order=order, axis=axis: np.sum(linalg.norm(x, order, axis) ** power)  # noqa: E731
        fun = mpiad.jit(fun) if compiled else fun
        for found in (mpiad.grad(fun)(x), mpiad.jvp(fun, x, v)[1], mpiad.linearize(fun)(x).jvp(v)):
            assert numpy.array_equal(found, numpy.zeros(numpy.shape(found)))
        for second in SECOND:
            try:
                assert numpy.all(numpy.isnan(second(fun, x, v))), (shape, order, axis)
            except (NotImplementedError, numpy.linalg.LinAlgError):
                assert order == "nuc"


SECOND = (
    lambda fun, x, v: mpiad.hvp(fun)(x, v),
    lambda fun, x, v: mpiad.grad(lambda x: np.sum(np.real(mpiad.grad(fun)(x) * v)))(x),
    lambda fun, x, v: mpiad.jvp(mpiad.grad(fun), x, v)[1],
    lambda fun, x, v: mpiad.jvp(lambda y: mpiad.jvp(fun, y, v)[1], x, v)[1],
)


@pytest.mark.parametrize("compiled", [False, True])
def test_rows_of_zeros_and_deviations_of_equal_numbers(compiled):
    x, v = numpy.array([[0.0, 0.0], [3.0, -4.0]]), numpy.array([[0.0, 0.0], [0.2, 0.7]])
    of_rows = lambda x: np.sum(linalg.norm(x, axis=1))  # noqa: E731
    of_columns = lambda x: np.sum(np.std(np.concatenate([x[1:], x[1:]]) * np.array([1.0, 0.0]) + x, axis=0))  # noqa: E731
    if compiled:
        of_rows, of_columns = mpiad.jit(of_rows), mpiad.jit(of_columns)
    unit = numpy.array([0.6, -0.8])
    close(mpiad.grad(of_rows)(x), [[0.0, 0.0], unit])
    assert numpy.all(numpy.isnan(mpiad.hvp(of_rows)(x, v)[0]))
    close(mpiad.hvp(of_rows)(x, v)[1], (v[1] - unit * (unit @ v[1])) / 5.0)
    equal = numpy.ones((2, 2)) * 0.3
    close(mpiad.grad(mpiad.jit(np.std) if compiled else np.std)(equal), numpy.zeros((2, 2)))
    assert numpy.all(numpy.isnan(mpiad.hvp(np.std)(equal, v)))
    close(mpiad.grad(of_columns)(x), [[-0.5, 0.5], [0.5, -0.5]])


@pytest.mark.parametrize("compiled", [False, True])
def test_cumulative_products_with_zeros(compiled):
    x, w = numpy.array([0.5, 0.0, -2.0, 0.0, 3.0]), numpy.array([1.0, -2.0, 0.3, 0.7, 1.1])
    fun = lambda x: np.sum(np.cumprod(x) * w)  # noqa: E731
    others = [[numpy.prod(numpy.delete(x[: k + 1], i)) if i <= k else 0.0 for i in range(5)] for k in range(5)]
    close(mpiad.grad(mpiad.jit(fun) if compiled else fun)(x), w @ numpy.array(others))
    close(mpiad.jvp(np.cumprod, x, w)[1], numpy.array(others) @ w)


NEW = "take average nansum nanmean cumprod trapezoid copy positive divmod split trace linalg.slogdet linalg.eigh".split()
NEW += "dstack block choose linalg.multi_dot gradient".split()
NEW += "full full_like copysign heaviside".split()
NEW += "asarray asanyarray ascontiguousarray asfortranarray require".split()


def one_of(count, cases):
    """Return about one of so many cases, drawn by their texts, and at least one that NumPy accepts of each function."""
    by_name = {}
    for case in cases:
        by_name.setdefault(case.name, []).append((zlib.crc32(str(case).encode()), case))
    chosen = []
    for drawn in by_name.values():
        drawn.sort(key=lambda pair: pair[0])
        few = [case for number, case in drawn if number % count == 0]
        if not any(map(accepted, few)):
            few += [case for _, case in drawn if accepted(case)][:1]
        chosen += few
    return chosen


@pytest.fixture
def some(request):
    """`some(cases)`: one of two with `--thorough`, and else one of six."""
    return lambda cases: one_of(2 if request.config.getoption("thorough") else 6, cases)


def accepted(case):
    return derivative_sweep.outcomes(case, modes=0) is not None


def test_functions_with_all_derivatives(some):
    shapes = (3,), (2, 3)
    table = derivative_sweep.run(some([case for case in derivative_sweep.cases(shapes, ((3, 3),)) if case.name in NEW]))
    assert derivative_sweep.wrong(table) == [] and table.keys() == set(NEW)
    for name, row in table.items():
        assert {outcome for each in row.values() for outcome, _ in each} == {"right"}, name


@pytest.mark.parametrize("call", [
    "np.take(x, [0, -1, 0], axis=1)", "np.nansum(np.where(mask, x, np.nan), 0)", "np.nanmean(np.where(mask, x, np.nan))",
    "np.cumprod(x, 1)", "np.trapezoid(x, a)", "np.copy(x) * x", "np.trace(x[None] * x[:, :1, None], 1, 2, 1)",
    "np.split(x, [2, 1], 1)[2] ** 2", "x[(0, 1, 0), (2, 2, 1)] ** 2",
    "np.average(x, 1, weights=a) ** 2", "np.average(x, weights=np.exp(x), returned=True)[0]",
    "linalg.norm(x, 1, 1) ** 2", "linalg.norm(x, np.inf, 1) ** 2",
    "np.dstack([x, x * x])", "np.block([[x, x * x], [2 * x, m]])", "np.choose(x > 0, [x * x, 3 * x])",
    "linalg.multi_dot([x, x.T, m, x.T])", "np.gradient(x, a, axis=1, edge_order=2)", "np.gradient(m, x[0], axis=-1)",
    "np.divmod(x, 0.7)[1]", "linalg.slogdet(x @ x.T)[1]", "linalg.eigh(x @ x.T)[0]", "np.full((2, 3), x[0]) * x",
    "np.full_like(m, x[0]) * x", "np.full_like(x, x[1, 1]) * x", "np.full_like(x, 2.0) * x", "np.copysign(x * x, x - 0.5)",
    "np.heaviside(x, 0.5) * x", "np.digitize(x, a) * x", "x[:, np.lexsort((x[1], x[0] > 0))] ** 2 * a",
    "abs(linalg.eigh(x @ x.T)[1]) ** 2",
])  # fmt: skip
def test_compiled_functions(call):
    case = derivative_sweep.Case("compiled", call, (2, 3), "real")
    assert derivative_sweep.linearized_and_compiled(case) == ("right", "right")


@pytest.mark.parametrize(
    ("axis", "shape"), [(None, (2, 3, 4)), (1, (3,)), (-1, (2, 3, 4)), ((2, 0), (4, 2)), ((0, 1), (2, 3))]
)
def test_averages_are_differentiated_with_respect_to_their_weights(axis, shape):
    rng = numpy.random.default_rng(3)
    x, w, dx, dw = [rng.uniform(0.5, 2.0, n) for n in ((2, 3, 4), shape) * 2]
    letters = "abc" if len(shape) == 3 else "".join("abc"[k] for k in (axis if isinstance(axis, tuple) else [axis]))
    rest = "".join(k for k in "abc" if axis is not None and k not in numpy.array(list("abc"))[numpy.atleast_1d(axis)])

    def products(w, x):
        return numpy.einsum(f"{letters},abc->{rest}", w, x)

    total = products(w, numpy.ones_like(x))
    mean = products(w, x) / total
    change = products(dw, numpy.ones_like(x))
    slope = (products(dw, x) + products(w, dx) - mean * change) / total  # of the quotient
    calls = [lambda x, w: np.average(x, axis, w), lambda x, w: np.average(x, axis=axis, weights=w, returned=True)[0]]
    for call in calls:
        for fun in (call, mpiad.jit(call, strict=True)):
            value, tangent = mpiad.jvp(lambda both: fun(*both), (x, w), (dx, dw))  # noqa: B023
            gradient = mpiad.grad(lambda both: np.sum(fun(*both)))((x, w))  # noqa: B023
            close(value, mean)
            close(tangent, slope)
            close(sum(numpy.sum(g * d) for g, d in zip(gradient, (dx, dw))), numpy.sum(slope))
    parts = mpiad.jvp(lambda w: np.average(x, axis, w, returned=True, keepdims=True), w, dw)[1]
    close(parts[1].ravel(), change.ravel())
    with pytest.raises(TypeError, match="Axis must be specified"):
        mpiad.grad(lambda w: np.average(x, weights=w))(w[0])


@pytest.mark.interpreted
def test_averages_with_weights_that_sum_to_zero():
    """An error as in NumPy; compiled derivatives, which don't decide by values, are NaN."""

    def loss(w):
        return np.sum(np.average(Z[:, :2].real, 1, w))

    w = numpy.array([1.0, -1.0])
    for fun in (loss, mpiad.jit(loss, strict=True), mpiad.grad(loss)):
        with pytest.raises(ZeroDivisionError, match="(?i)weights sum to zero"):
            fun(w)
    with numpy.errstate(all="ignore"):
        assert not numpy.isfinite(mpiad.grad(mpiad.jit(loss, strict=True))(w)).any()


def test_cholesky_of_hermitian_matrices():
    matrix = Z[:, :2] @ numpy.conj(Z[:, :2].T) + 2 * numpy.eye(2)
    change = numpy.array([[0.3, 0.2 - 0.5j], [0.2 + 0.5j, -0.1]])
    # log det A = 2 Σ log L_ii, so that its derivative is the trace of A⁻¹ dA.
    g = mpiad.grad(lambda a: 2 * np.sum(np.log(np.real(np.diagonal(linalg.cholesky(a))))))(matrix)
    close(numpy.sum(numpy.real(g * change)), numpy.real(numpy.trace(numpy.linalg.solve(matrix, change))))
    # |L|² summed is the trace of A, and the second entry of the first column is A_10 / √A_00.
    close(mpiad.grad(lambda a: np.sum(np.abs(linalg.cholesky(a)) ** 2))(matrix), numpy.eye(2))
    g = mpiad.grad(lambda a: np.imag(linalg.cholesky(a)[1, 0]))(matrix)
    root = numpy.sqrt(matrix[0, 0].real)
    expected = change[1, 0].imag / root - matrix[1, 0].imag * change[0, 0].real / (2 * root**3)
    close(numpy.sum(numpy.real(g * change)), expected)


def test_sort_and_partition_of_matrices():
    order = numpy.argsort(A, axis=0)
    close(mpiad.jvp(lambda x: np.sort(x, axis=0), A, V)[1], numpy.take_along_axis(V, order, 0))
    close(mpiad.grad(lambda x: np.sum(np.sort(x)[:, 0]))(A), A == A.min(axis=1, keepdims=True))
    smallest = mpiad.jvp(lambda x: np.partition(x, 0, axis=1)[:, 0], A, V)[1]
    close(smallest, numpy.take_along_axis(V, numpy.argmin(A, axis=1)[:, None], 1)[:, 0])
    close(mpiad.grad(mpiad.jit(lambda x: np.sum(np.sort(x, axis=0)[0] ** 2)))(A), 2 * A * (A == A.min(axis=0)))


@pytest.mark.parametrize("zeros", [(), (1,), (1, 3)])
def test_products_of_zeros(zeros):
    x = numpy.array([0.5, -1.5, 2.0, 3.0, 0.7])
    x[list(zeros)] = 0.0
    others = numpy.array([numpy.prod(numpy.delete(x, k)) for k in range(5)])
    pairs = numpy.array([[numpy.prod(numpy.delete(x, [j, k])) * (j != k) for k in range(5)] for j in range(5)])
    v = numpy.array([1.0, 0.3, -0.2, 0.9, -2.0])
    close(mpiad.grad(np.prod)(x), others)
    close(mpiad.jvp(np.prod, x, v)[1], others @ v)
    close(mpiad.hvp(np.prod)(x, v), pairs @ v)
    close(mpiad.grad(lambda x: np.sum(mpiad.grad(np.prod)(x) * v))(x), pairs @ v)
    close(mpiad.grad(mpiad.jit(lambda x: np.prod(x) * 1.0))(x), others)


@pytest.mark.parametrize("z", [1 + 2j, numpy.complex128(1 + 2j), numpy.array(1 + 2j), 1.5, numpy.float64(1.5)])
def test_imaginary_parts_of_numbers(z):
    pull, _ = mpiad.make_vjp(lambda z: np.imag(1j - z) / 2)(z)
    for g in (1.0, numpy.array(1.0)):
        close(pull(g), 0.5j if numpy.iscomplexobj(z) else 0.0)


@pytest.mark.parametrize("x", [1.5, numpy.float64(1.5), numpy.array(1.5), numpy.float32(1.5)])
def test_imaginary_units_beside_real_numbers(x):
    close(mpiad.make_vjp(lambda x: np.imag(x * 1j))(x)[0](1.0), 1.0)
    close(mpiad.jacobian(lambda x: np.imag((x + 1j) * x))(x), 1.0)
    rounding = 1e-13 if numpy.asarray(x).dtype == float else 2 * numpy.finfo(numpy.float32).eps
    close(mpiad.grad(lambda x: np.abs(x + 1j) ** 2)(x), 3.0, rounding)


def test_variances_over_several_axes_forwards():
    centered = A - A.mean()
    close(mpiad.jvp(lambda x: np.var(x, axis=(0, 1)), A, V)[1], 2 * numpy.sum(centered * V) / 6)
    close(mpiad.jvp(lambda x: np.std(x, axis=(0, 1)), A, V)[1], numpy.sum(centered * V) / 6 / A.std())


def test_broadcast_to_a_new_axis():
    weights = numpy.arange(12.0).reshape(2, 2, 3)
    close(mpiad.grad(lambda x: np.sum(np.broadcast_to(x, (2, 2, 3)) * weights))(A), weights.sum(axis=0))


@pytest.mark.parametrize("shape", [(2, 3), (5, 4), (2, 2)])
def test_gradient_of_grids(shape):
    x, w = numpy.random.default_rng(0).normal(size=(2, *shape))
    rows, columns = (numpy.array(numpy.gradient(numpy.eye(n), axis=0)) for n in shape)
    found = mpiad.grad(lambda x: np.sum(np.gradient(x)[0] * w) + np.sum(np.gradient(x)[1] * w))(x)
    close(found, rows.T @ w + w @ columns)


def test_outer_products_of_matrices():
    g = mpiad.grad(lambda x: np.sum(np.outer(x, V) * 2.0))(A)
    close(g, numpy.full((2, 3), 2 * V.sum()))


def test_flip_and_joining_flattened():
    weights = numpy.arange(12.0)
    close(mpiad.grad(lambda x: np.sum(np.flip(x, -1) * weights[:6].reshape(2, 3)))(A), weights[:6].reshape(2, 3)[:, ::-1])
    joined = lambda x: np.sum(np.concatenate([x, x * x], axis=None) * weights)  # noqa: E731
    close(mpiad.grad(joined)(A), (weights[:6] + 2 * A.ravel() * weights[6:]).reshape(2, 3))


def test_transforms_of_odd_lengths():
    matrix = numpy.fft.irfft(numpy.eye(3), 5)
    close(mpiad.grad(lambda x: np.sum(fft.irfft(x, 5) * A[0, 0]))(A[0]), matrix.sum(axis=1) * A[0, 0])


def test_full_sums_what_was_repeated():
    weights = numpy.arange(6.0).reshape(2, 3)
    close(mpiad.grad(lambda x: np.sum(np.full((2, 3), x) * weights))(A[0]), weights.sum(axis=0))


@pytest.mark.parametrize("template", ["traced", "plain"])
@pytest.mark.parametrize("compiled", [False, True])
def test_full_like_has_the_derivative_of_its_value(template, compiled):
    """The sum of w v³ over an array that is filled with rows v."""
    weights, like = numpy.arange(6.0).reshape(2, 3), numpy.ones((2, 3))
    fun = lambda x: np.sum(weights * np.full_like(x if template == "traced" else like, x[1]) ** 3)  # noqa: E731
    fun, of_row = mpiad.jit(fun, strict=True) if compiled else fun, numpy.array([[0.0], [1.0]]) * weights.sum(axis=0)
    close(fun(A), numpy.sum(weights * A[1] ** 3))
    close(mpiad.grad(fun)(A), 3 * of_row * A[1] ** 2)
    close(mpiad.jvp(fun, A, V)[1], numpy.sum(3 * of_row * A[1] ** 2 * V))
    close(mpiad.hvp(fun)(A, V), 6 * of_row * A[1] * V)


def test_full_like_converts_to_the_dtype_and_shape():
    for like, dtype in ((numpy.ones(2, "f4"), None), (A, "f4"), (A, complex)):
        single = numpy.result_type(like if dtype is None else dtype) == numpy.float32
        filled = lambda x, like=like, dtype=dtype: np.full_like(like, x, dtype, shape=(2, 2))  # noqa: E731
        value, change = mpiad.jvp(filled, 0.1, 2.0)
        assert value.dtype == change.dtype == numpy.result_type(like if dtype is None else dtype)
        close(value, numpy.full((2, 2), numpy.float32(0.1) if single else 0.1))
        close(mpiad.grad(lambda x, f=filled: np.sum(np.real(f(x)) ** 2))(0.1), 0.8, rtol=1e-6 if single else 1e-13)
    assert mpiad.grad(lambda x: np.sum(np.full_like([1, 2], x) * x))(1.7) == 2.0  # of integers, a constant
    for wrong in (lambda x: np.full_like(numpy.ones(2), x), lambda x: np.full(2, x)):
        with pytest.raises(ValueError, match="broadcast"):
            mpiad.grad(lambda x, f=wrong: np.sum(f(x)))(A[0])


@pytest.mark.parametrize("compiled", [False, True])
def test_copysign_and_heaviside_at_zero(compiled):
    x, y, w = numpy.array([-1.5, 0.0, -0.0, 2.0]), numpy.array([0.3, -0.7, 1.1, -0.4]), numpy.array([1.0, 2.0, 4.0, 8.0])
    form = mpiad.jit if compiled else lambda fun: fun
    sign = form(lambda p: np.sum(w * np.copysign(p[0], p[1]) ** 2 * np.sign(p[1])))
    step = form(lambda p: np.sum(w * np.heaviside(p[0], p[1]) ** 2))
    for fun, slopes in (
        (sign, [2 * w * numpy.abs(x) * numpy.sign(x), 0 * x]),  # d|x|² sign(y), where copysign is |x| sign(y)
        (step, [0 * x, 2 * w * numpy.array([0.0, -0.7, 1.1, 0.0])]),
    ):
        if fun is sign:
            slopes[0] = slopes[0] * numpy.sign(y)
        close(mpiad.grad(fun)((x, y)), slopes)
        close(mpiad.jvp(fun, (x, y), (y, x))[1], slopes[0] @ y + slopes[1] @ x)
    close(mpiad.hvp(step)((x, y), (y, x)), [0 * x, 2 * w * numpy.array([0.0, 0.0, -0.0, 0.0])])


@pytest.mark.parametrize("compiled", [False, True])
def test_digitize_and_lexsort_are_constants(compiled):
    bins, cells = numpy.array([-1.0, 0.0, 1.0]), numpy.array([0, 2, 2, 1, 2, 3])
    x = numpy.append(A[0], A[1])  # 0.3, -1.2, 0.7, 2.0, 0.9, -0.4
    numbers, order = numpy.array([2, 0, 2, 3, 2, 1]), numpy.array([0, 3, 1, 2, 4, 5])
    for fun, slope in (
        (lambda x: np.sum(np.digitize(x, bins) * x**2), 2 * numbers * x),
        (lambda x: np.sum(x[np.lexsort((x, cells))] ** 2 * numpy.arange(6)), 2 * x * numpy.argsort(order)),
        (
            lambda x: np.sum(x[np.lexsort(np.stack((x, 0 * x + cells)))] ** 2 * numpy.arange(6)),
            2 * x * numpy.argsort(order),
        ),
    ):
        fun = mpiad.jit(fun, strict=True) if compiled else fun
        close(mpiad.grad(fun)(x), slope)
        close(mpiad.jvp(fun, x, x)[1], slope @ x)
        close(mpiad.hvp(fun)(x, x), slope)


def test_powers_of_negative_numbers_with_complex_exponents():
    close(mpiad.jvp(lambda y: np.power(-2.0, y), 0.5 + 1j, 1.0 + 0j)[1], numpy.log(-2 + 0j) * (-2 + 0j) ** (0.5 + 1j))


# ---- refused by name


@pytest.mark.parametrize(("fun", "said"), [
    (lambda x: np.nan_to_num(x, nan=1.0), "nan_to_num can't be differentiated with these arguments"),
    (lambda x: linalg.svd(x)[0], "svd can't be differentiated with these arguments"),
    (lambda x: linalg.norm(x, -np.inf, 0), "norm can't be differentiated with ord=-inf of a vector"),
    (lambda x: np.prod(x, where=x > 0), "prod can't be differentiated with where"),
    (lambda x: np.diff(x, prepend=0.0), "diff can't be differentiated with prepend"),
    (np.nancumprod, "nancumprod can't be differentiated with respect to argument"),
    (np.cbrt, "cbrt can't be differentiated with respect to argument"),
    (lambda x: np.add(x, 1.0, dtype=float), "add can't be differentiated with these arguments"),
])  # fmt: skip
def test_what_has_no_rule_is_refused_by_name(fun, said):
    with pytest.raises((NotImplementedError, TypeError), match=said):
        mpiad.grad(lambda x: np.sum(fun(x)))(A)


@pytest.mark.parametrize("order", [1, 2, np.inf])
@pytest.mark.parametrize("form", ["matrix", "vector"])
def test_the_error_of_a_norm_of_a_matrix_names_what_to_write(order, form):
    """The expressions of the message have NumPy's values, and derivatives that agree with its difference quotients."""
    x = A if form == "matrix" else A[:1] if order == np.inf else A[:, :1]
    v = numpy.ones_like(x) * 0.1 + 0.2 * x
    with pytest.raises(NotImplementedError, match=r"write (.*), or for one (?:column|row) (.*)\.") as caught:
        mpiad.grad(lambda x: linalg.norm(x, order))(x)
    _, _, texts = str(caught.value).partition("write ")
    text = texts.rstrip(".").split(", or for one ")[form == "vector"].removeprefix("column ").removeprefix("row ")
    value, slope = mpiad.jvp(lambda x: eval(text, {"np": np, "x": x}), x, v)
    close(value, numpy.linalg.norm(x, order))
    close(slope, (numpy.linalg.norm(x + 1e-6 * v, order) - numpy.linalg.norm(x - 1e-6 * v, order)) / 2e-6, 1e-8)
    gradient = mpiad.grad(lambda x: eval(text, {"np": np, "x": x}))(x)
    close(numpy.sum(gradient * v), slope)


def test_a_singular_matrix_stays_numpys_error():
    with pytest.raises(numpy.linalg.LinAlgError):
        mpiad.grad(lambda x: linalg.slogdet(x)[1])(numpy.zeros((2, 2)))


def test_lists_of_traced_arrays_give_no_array_of_objects():
    with pytest.raises(TypeError, match="list of traced arrays"):
        mpiad.jvp(lambda x: np.flip([x, x]), A, V)


@pytest.mark.parametrize("fun", [
    lambda np, x: np.concatenate([[x[0] ** 2], x, (x[1], 2.0)]),
    lambda np, x: np.concatenate([[x, x**2], [[1.0, 2.0, x[2]]]], axis=0),
    lambda np, x: np.hstack([[x[0] ** 2], x, [x[2], 1.0]]),
    lambda np, x: np.vstack([[x[0] ** 2, 1.0, x[1]], x]),
    lambda np, x: np.dstack([[x[0] ** 2, 1.0, x[1]], x]),
    lambda np, x: np.array([[x[0] ** 2, 1.0], [x[1], x[2]]], dtype=float),
    lambda np, x: np.array([x, x**2], dtype="f8", order="F"),
])  # fmt: skip
def test_lists_of_traced_numbers_are_joined_to_arrays(fun):
    """Lists among arrays, as at the ends of a grid; the reference are difference quotients of NumPy's function."""
    x, v = A[0], V[0]
    weights = numpy.cos(numpy.arange(fun(numpy, x).size)).reshape(fun(numpy, x).shape)

    def slope(x):
        return numpy.sum(weights * (fun(numpy, x + 1e-6 * v) ** 2 - fun(numpy, x - 1e-6 * v) ** 2)) / 2e-6

    def loss(x):
        return np.sum(weights * fun(np, x) ** 2)

    for f in (loss, mpiad.jit(loss, strict=True)):
        close(mpiad.grad(f)(x) @ v, slope(x), 1e-8)
        close(mpiad.jvp(f, x, v)[1], slope(x), 1e-8)
        close(mpiad.hvp(f)(x, v) @ v, (slope(x + 1e-4 * v) - slope(x - 1e-4 * v)) / 2e-4, 1e-5)


@pytest.mark.parametrize("fun", [
    lambda x: np.maximum(V.T.dot(x[:2]), x), lambda x: np.where(x > 0, [x[1], x[0], 1.0], x), lambda x: V.dot(x) @ x[:2],
    lambda x: x[:2] - numpy.array([x[0] ** 2, x[1]]), lambda x: np.concatenate([V.dot(x), x]),
    lambda x: x * [x[0], 1.0, 2.0], lambda x: np.dot(x, [x[0], 1.0, 2.0]),
])  # fmt: skip
def test_traced_values_among_objects_are_refused_if_derivatives_would_be_lost(fun):
    for derivative in (mpiad.grad, mpiad.linearize, mpiad.hessian, lambda fun: lambda x: mpiad.jvp(fun, x, x)):
        with pytest.raises(TypeError, match=r"derivatives would be lost\. Write np\.dot"):
            derivative(lambda x: np.sum(fun(x)))(A[0])


def raised(fun, *args, **kwargs):
    with pytest.raises(Exception) as error:
        fun(*args, **kwargs)
    return error.type


@pytest.mark.parametrize("fun", [
    lambda np, x: np.dstack([x, x[:1]]), lambda np, x: np.block([[x], x]), lambda np, x: np.block([[x], []]),
    lambda np, x: np.block([x, x[:1]]), lambda np, x: np.choose([0, 1, 2], [x, x]), lambda np, x: np.choose(-1, [x]),
    lambda np, x: np.gradient(x[:1]), lambda np, x: np.gradient(x, axis=2), lambda np, x: np.gradient(x, 1.0, 2.0, 3.0),
    lambda np, x: np.gradient(x, numpy.arange(4), axis=1), lambda np, x: np.gradient(x, edge_order=3),
    lambda np, x: np.linalg.multi_dot([x, x, x]), lambda np, x: np.linalg.multi_dot([x]),
])  # fmt: skip
def test_compositions_raise_errors_as_numpy_does(fun):
    expected = raised(fun, numpy, A)
    for derivative in (mpiad.grad, lambda fun: lambda x: mpiad.jvp(fun, x, V)):
        assert issubclass(raised(derivative(lambda x: np.sum(fun(np, x))), A), expected)


def test_gradient_is_numpys_to_the_last_bit():
    """Also with spacings and coordinates, in the dtype of the array."""
    rng = numpy.random.default_rng(1)
    x = rng.standard_normal((4, 5))
    rows, columns = numpy.cumsum(rng.random(4)), numpy.cumsum(rng.random(5))
    for y in (x, x.astype("f4"), x + 1j * x[::-1]):
        for given in ((), (0.3,), (0.3, 0.7), (rows, columns), (2.0, columns), (numpy.arange(4), [0, 1, 3, 4, 9])):
            for edge_order in (1, 2):
                expected = numpy.gradient(y, *given, edge_order=edge_order)
                found, _ = mpiad.jvp(lambda y: tuple(np.gradient(y, *given, edge_order=edge_order)), y, y)  # noqa: B023
                for part, value in zip(found, expected, strict=True):
                    assert part.dtype == value.dtype
                    numpy.testing.assert_array_equal(part, value)
        numpy.testing.assert_array_equal(
            mpiad.jvp(lambda y: np.gradient(y, columns, axis=-1), y, y)[0], numpy.gradient(y, columns, axis=-1)
        )


def test_products_of_several_factors_in_the_cheapest_order():
    shapes = (6, 40), (40, 5), (5, 60), (60, 4)
    factors = [numpy.random.default_rng(k).standard_normal(shape) for k, shape in enumerate(shapes)]
    for given in (factors, [factors[0][0], *factors[1:]], [*factors[:3], factors[3][:, 0]], factors[1:]):
        expected = numpy.linalg.multi_dot(given)
        value, tangent = mpiad.jvp(lambda x: linalg.multi_dot([x, *given[1:]]), given[0], given[0])  # noqa: B023
        numpy.testing.assert_array_equal(value, expected)
        numpy.testing.assert_allclose(tangent, expected, rtol=1e-12, atol=1e-12)


# ---- methods, attributes and operators


def test_every_attribute_of_arrays_is_on_the_page():
    text = derivative_sweep.PAGE.read_text().partition("## Methods, attributes")[2]
    texts = derivative_sweep.METHODS, derivative_sweep.CONSTANT_METHODS, derivative_sweep.NOT_OF_TRACED
    names = [name for each in texts for name in derivative_sweep.calls_by_name(each)]
    assert len(names) == len(set(names)) and set(names) == derivative_sweep.attributes()
    for name in names:
        assert f"`{derivative_sweep.written(name)}`".replace("|", "\\|") in text or not derivative_sweep.written(name), name


@pytest.mark.parametrize("text", ["METHODS", "CONSTANT_METHODS"])
@pytest.mark.limit(300)
def test_methods_and_operators(text, some):
    shapes = (), (3,), (2, 3)
    table = derivative_sweep.run(some(derivative_sweep.method_cases(getattr(derivative_sweep, text), shapes)))
    assert derivative_sweep.wrong(table) == []
    assert all(outcome == "right" for row in table.values() for found in row.values() for outcome, _ in found)
    assert table.keys() == derivative_sweep.calls_by_name(getattr(derivative_sweep, text)).keys()


@pytest.mark.thorough
@pytest.mark.interpreted  # compiled functions are among the outcomes
@pytest.mark.limit(300)
@pytest.mark.parametrize("text", ["METHODS", "CONSTANT_METHODS"])
def test_linearized_and_compiled_methods(text, some):
    for case in some(derivative_sweep.method_cases(getattr(derivative_sweep, text), ((), (2, 3)))):
        others = ("__pos__", "copy", "real") if not case.shape else ("conj", "copy", "dot", "imag", "real")
        chosen = case.name in others or case.shape and case.kind == "real"
        if chosen and derivative_sweep.outcomes(case, modes=1) is not None:
            assert derivative_sweep.linearized_and_compiled(case) == ("right", "right"), case


@pytest.mark.parametrize("name", derivative_sweep.calls_by_name(derivative_sweep.NOT_OF_TRACED))
def test_other_attributes_are_refused_by_name(name):
    (call,) = derivative_sweep.calls_by_name(derivative_sweep.NOT_OF_TRACED)[name]
    derivatives = (
        mpiad.grad,
        lambda fun: lambda x: mpiad.jvp(fun, x, x),
        lambda fun: lambda x: mpiad.hvp(fun)(x, x),
        mpiad.linearize,
        lambda fun: mpiad.grad(mpiad.jit(fun)),
    )
    said = {
        "setitem": "item assignment",
        "delitem": "item deletion",
        "index": "indices must be integers",
        "invert": "unary ~",
    }
    said.update({name: f" {sign}: " for name, sign in derivative_sweep.SIGNS.items()})
    inner = name.strip("_")
    plain = said.get(inner) or said.get(inner.removeprefix("r"), inner)
    for derivative in derivatives:
        text = derivative_sweep.refusal_of(call, derivative)
        assert plain in text, text
        assert name.startswith("__") or any(word in text for word in ("stop_gradient", "np.", "can't be differentiated")), (
            text
        )


def test_numbers_are_not_iterable():
    for x in (1.5, numpy.float64(1.5), numpy.array(1.5)):
        with pytest.raises(TypeError, match=r"no len\(\)|unsized"):
            mpiad.grad(lambda x: sum(part for part in x))(x)


def test_traces_of_plain_autograd_keep_their_attributes():
    x = numpy.array([[1.0, 2.0], [3.0, 4.0]])
    for fun in (lambda x: x.copy(), lambda x: x.real, lambda x: +x, lambda x: round(x)):
        with pytest.raises(AttributeError, match="'ArrayBox' object has no attribute"):
            autograd.grad(lambda x, fun=fun: np.sum(fun(x)))(x)
    for fun in (lambda x: x // 2.0, lambda x: 2.0 // x, lambda x: divmod(x, 2.0)[1]):
        with pytest.raises(TypeError, match="unsupported operand"):
            autograd.grad(lambda x, fun=fun: np.sum(fun(x)))(x)
    with pytest.raises(TypeError, match="positional arguments"):
        autograd.grad(lambda x: np.sum(x.transpose(1, 0)))(x)
    close(autograd.grad(lambda x: np.sum(x.transpose((1, 0)) * x))(x), 2 * x.T)
    assert autograd.grad(lambda x: sum(part * part for part in x) * (3.0 in x) * (9.0 not in x))(x[1]).tolist() == [
        6.0,
        8.0,
    ]
    # A trace of this library inside one of plain autograd, and the reverse.
    close(autograd.grad(lambda x: mpiad.grad(lambda y: np.sum(y.real**3))(x)[0, 0])(x), [[6.0, 0.0], [0.0, 0.0]])
    close(mpiad.grad(lambda x: autograd.grad(lambda y: np.sum(y**3))(x).copy()[0, 0])(x), [[6.0, 0.0], [0.0, 0.0]])


# ---- the table


@pytest.mark.limit(400)  # jitted: one compilation for each entry
def test_table_of_the_reference():
    table = derivative_sweep.run(one_of(30, derivative_sweep.cases()))
    assert table.keys() == derivative_sweep.rows_of_page().keys()
    assert derivative_sweep.wrong(table) == []
    assert derivative_sweep.against_page(table) == []


def test_functions_of_scipy_are_on_the_page():
    section = derivative_sweep.scipy_section()
    assert section in derivative_sweep.PAGE.read_text()
    assert all(f"`{name}`" in section for name in ("linalg.solve_banded", "special.logsumexp", "stats.norm.logpdf"))
    assert "`stats.chi2.gamma`" not in section and "`linalg.solve`" not in section.partition("page on solves")[2]


def test_all_other_functions_are_refused_by_name(some):
    tested = {case.name for case in derivative_sweep.cases()}
    text = derivative_sweep.PAGE.read_text()
    assert tested == derivative_sweep.rows_of_page().keys()
    table = derivative_sweep.run(some(derivative_sweep.cases_without_a_rule(((3,), (2, 3)), tested)))
    assert derivative_sweep.wrong(table) == []
    for name, row in table.items():
        assert f"`{name}`" in text.partition("## Functions without a derivative")[2]
        assert all(outcome.startswith("refused") for found in row.values() for outcome, _ in found), name


@pytest.mark.thorough
@pytest.mark.interpreted  # jitted, a part of the table is tested above
@pytest.mark.limit(1200)
@pytest.mark.parametrize("seed", [0, 1])
def test_whole_table_of_the_reference(seed):
    if seed == 0:
        assert derivative_sweep.page() == derivative_sweep.PAGE.read_text()
    else:
        assert derivative_sweep.wrong(derivative_sweep.run(derivative_sweep.cases(), seed)) == []


def test_the_sweep_finds_what_is_wrong(monkeypatch):
    for wrong_rule in (lambda *call: lambda g: (2 * g,), lambda *call: lambda g: (g[0],), lambda *call: lambda g: 1 / 0):
        monkeypatch.setitem(VJP_RULES, np.flip, wrong_rule)
        case = derivative_sweep.Case("flip", "np.flip(x)", (3,), "real")
        assert len(derivative_sweep.wrong(derivative_sweep.run([case]))) >= 3
