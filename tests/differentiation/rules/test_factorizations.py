"""Derivatives of eigh and svd of matrices with equal values: those of closed forms and differences, or an error."""

import autograd.numpy as np
import numpy
import pytest
import scipy.linalg
from autograd.numpy import linalg
from mpi4py import MPI

import mpiad

pytestmark = pytest.mark.serial
RNG = numpy.random.default_rng(3)
Y, C = RNG.normal(size=(6, 10)), RNG.normal(size=(10, 10))
W = RNG.normal(size=(5, 7))
FORMS = {
    "grad": mpiad.grad,
    "jit inside": lambda fun: mpiad.grad(mpiad.jit(fun, strict=True)),
    "jit outside": lambda fun: mpiad.jit(mpiad.grad(fun), strict=True),
}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def close(found, expected, rtol=1e-9):
    numpy.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol)


def difference(fun, x, v, step=1e-5):
    return (fun(x + step * v) - fun(x - step * v)) / (2 * step)


def analysis(y):
    """A function of yᵀ y + 9 I, an ensemble transform; four of ten eigenvalues are 9."""
    values, vectors = linalg.eigh(np.dot(y.T, y) + 9 * np.eye(10))
    return np.sum(C * np.dot(vectors / np.sqrt(values), vectors.T))


def analysis_by_svd(y):
    _, s, right = linalg.svd(y, full_matrices=False)
    return np.sum(C * np.dot(right.T * (1 / np.sqrt(s**2 + 9) - 1 / 3), right)) + np.trace(C) / 3


def change_of_analysis(y, v):
    """The derivative of S = A^(-1/2) solves dS S + S dS = -A⁻¹ dA A⁻¹."""
    inverse = numpy.linalg.inv(y.T @ y + 9 * numpy.eye(10))
    root = numpy.real(scipy.linalg.sqrtm(inverse))
    return numpy.sum(C * scipy.linalg.solve_sylvester(root, root, -inverse @ (v.T @ y + y.T @ v) @ inverse))


def test_a_run_before_the_trace_refuses_what_has_no_derivative():
    """The first use of a communicator is interpreted."""
    comm = MPI.COMM_WORLD.Dup()
    with pytest.raises(numpy.linalg.LinAlgError, match=r"eigenvalues \[0, 1, 2, 3\]"):
        mpiad.jit(mpiad.grad(analysis, comm=comm), strict=True)(Y)
    comm.Free()
    comm = MPI.COMM_WORLD.Dup()
    with pytest.raises(NotImplementedError, match="linearly dependent columns"):
        mpiad.jit(mpiad.grad(lambda a: np.sum(linalg.lstsq(a, Y)[0]), comm=comm), strict=True)(numpy.ones((6, 2)))
    comm.Free()


@each_form
def test_a_function_of_the_matrix_is_refused_or_right(form):
    gradient = form(analysis)
    for _ in range(2):
        with pytest.raises(
            numpy.linalg.LinAlgError, match=r"eigenvalues \[0, 1, 2, 3\], \[(8.99|9.0).*solve, inv, cholesky"
        ):
            gradient(Y)
    v = RNG.normal(size=Y.shape)
    expected = change_of_analysis(Y, v)
    close(mpiad.jvp(analysis, Y, v)[1], expected)
    close(mpiad.jit(lambda y, v: mpiad.jvp(analysis, y, v)[1], strict=True)(Y, v), expected)
    close(numpy.sum(form(analysis_by_svd)(Y) * v), expected)


def matrices(kind):
    """Two matrices with the eigenvalues 1, 1, 1, 4 and 2, 2, 3, 7, and directions."""
    q = RNG.normal(size=(2, 4, 4)) + (1j * RNG.normal(size=(2, 4, 4)) if kind == "complex" else 0)
    q = numpy.linalg.qr(q)[0]
    a = numpy.matmul(q * numpy.array([[1.0, 1, 1, 4], [2, 2, 3, 7]])[:, None, :], numpy.conj(numpy.swapaxes(q, 1, 2)))
    v = RNG.normal(size=a.shape) + (1j * RNG.normal(size=a.shape) if kind == "complex" else 0)
    v = v + numpy.conj(numpy.swapaxes(v, 1, 2))
    return (a.astype(numpy.float32), v.astype(numpy.float32)) if kind == "float32" else (a, v)


def paired(g, v, uplo):
    """The change for a Hermitian direction, of which eigh reads a triangle."""
    read = (numpy.tril if uplo == "L" else numpy.triu)(numpy.ones((4, 4)))
    assert numpy.all(g * (1 - read) == 0)
    return numpy.sum(numpy.real(g * v))


@each_form
@pytest.mark.parametrize("uplo", ["L", "U"])
@pytest.mark.parametrize("kind", ["real", "complex", "float32"])
def test_eigenvalues_and_other_vectors_have_their_derivatives(kind, uplo, form):
    a, v = matrices(kind)
    rtol = 1e-4 if kind == "float32" else 1e-9
    logarithms = lambda a: np.sum(np.log(linalg.eigh(a, uplo)[0]))  # noqa: E731
    expected = numpy.real(numpy.trace(numpy.linalg.solve(a, v), axis1=1, axis2=2).sum())
    close(paired(form(logarithms)(a), v, uplo), expected, rtol)
    close(mpiad.jvp(logarithms, a, v)[1], expected, rtol)

    def of_last(a):
        last = linalg.eigh(a, uplo)[1][..., -1]
        return np.sum(np.abs(last) ** 2 * np.arange(8.0).reshape(2, 4))

    expected = 0.0
    for k in range(2):
        values, vectors = numpy.linalg.eigh(a[k])
        last = vectors[:, -1]
        change = numpy.linalg.pinv(values[-1] * numpy.eye(4) - a[k], rcond=1e-5) @ v[k] @ last
        expected += 2 * numpy.sum(numpy.real(numpy.conj(last) * change) * numpy.arange(8.0).reshape(2, 4)[k])
    close(paired(form(of_last)(a), v, uplo), expected, rtol)
    close(mpiad.jvp(of_last, a, v)[1], expected, rtol)

    every = lambda a: np.sum(np.abs(linalg.eigh(a, uplo)[1]) ** 4)  # noqa: E731
    with pytest.raises(numpy.linalg.LinAlgError, match=r"the eigenvalues \[0, 1, 2\], "):
        form(every)(a)
    with pytest.raises(numpy.linalg.LinAlgError, match=r"the eigenvalues \[0, 1\], \[(2|1.99)"):
        form(every)(a[1])


def test_tangents_of_vectors_with_equal_eigenvalues_are_nan_or_known():
    a, v = matrices("real")
    tangent = mpiad.jvp(lambda a: linalg.eigh(a)[1], a, v)[1]
    assert numpy.isnan(tangent[0, :, :3]).all() and numpy.isnan(tangent[1, :, :2]).all()
    assert numpy.isfinite(tangent[0, :, 3]).all() and numpy.isfinite(tangent[1, :, 2:]).all()
    # A change of the eigenvalues only leaves the vectors.
    for k in range(2):
        close(mpiad.jvp(lambda a: linalg.eigh(a)[1], a[k], a[k] @ a[k])[1], 0.0)


def test_second_derivatives_where_eigenvalues_differ():
    x, v, c = RNG.normal(size=(3, 4, 4))

    def by_eigh(x):
        values, vectors = linalg.eigh(x + x.T)
        return np.sum(c * np.dot(vectors * values**3, vectors.T))

    cube = lambda x: np.sum(c * np.dot(x + x.T, np.dot(x + x.T, x + x.T)))  # noqa: E731
    expected = mpiad.hvp(cube)(x, v)
    close(mpiad.hvp(by_eigh)(x, v), expected)
    close(mpiad.grad(lambda x: np.sum(mpiad.grad(by_eigh)(x) * v))(x), expected)
    close(mpiad.grad(lambda x: mpiad.jvp(by_eigh, x, v)[1])(x), expected)
    close(mpiad.jit(mpiad.hvp(by_eigh), strict=True)(x, v), expected)
    twice = mpiad.jvp(lambda x: mpiad.jvp(by_eigh, x, v)[1], x, v)[1]
    close(twice, numpy.sum(expected * v))


def test_eigenvalues_of_general_matrices():
    q = RNG.normal(size=(4, 4))
    a = q @ numpy.diag([1.0, 1.0, 1.0, 3.0]) @ numpy.linalg.inv(q)
    close(mpiad.grad(lambda a: np.sum(np.real(linalg.eig(a)[0] ** 2)))(a), 2 * a.T)  # the trace of a²
    with pytest.raises(numpy.linalg.LinAlgError, match=r"the eigenvalues \[.*\], \[.*\], are equal up to rounding"):
        mpiad.grad(lambda a: np.sum(q[:2, :2] * np.real(linalg.eig(a)[1])))(2 * numpy.eye(2))
    distinct = q @ numpy.diag([1.0, 2.0, -1.0, 3.0]) @ numpy.linalg.inv(q)
    lengths = lambda a: np.sum(np.abs(linalg.eig(a)[1]) ** 4)  # noqa: E731
    close(numpy.sum(mpiad.grad(lengths)(distinct) * q), difference(lengths, distinct, q), 1e-6)


def of_rank_three():
    return RNG.normal(size=(5, 3)) @ RNG.normal(size=(3, 7))


def truncated(x):
    left, s, right = linalg.svd(x, full_matrices=False)
    return np.sum(W * np.dot(left[:, :3] * np.sqrt(s[:3]), right[:3]))


def product(x):
    left, s, right = linalg.svd(x, full_matrices=False)
    return np.sum(W * np.dot(left * s, right))


def first(x):
    left, s, right = linalg.svd(x, full_matrices=False)
    return np.sum(np.abs(left[:, 0]) ** 2 * np.arange(5.0)) * s[1] + np.abs(right[0, 2]) ** 2


@each_form
def test_singular_values_that_are_zero_or_equal(form):
    x, v = of_rank_three(), RNG.normal(size=(5, 7))
    for fun in (truncated, first):
        close(numpy.sum(form(fun)(x) * v), difference(fun, x, v), 1e-6)
        close(numpy.sum(form(lambda x, fun=fun: fun(x.T))(x.T) * v.T), difference(fun, x, v), 1e-6)
    close(form(lambda x: np.sum(linalg.svd(x, full_matrices=False)[1] ** 2))(2 * numpy.eye(3)), 4 * numpy.eye(3))
    with pytest.raises(numpy.linalg.LinAlgError, match=r"the singular values \[3, 4\], .* up to rounding"):
        form(product)(x)
    with pytest.raises(
        numpy.linalg.LinAlgError, match=r"the singular values \[0, 1\], \[2.0, 2.0\], are equal up to rounding"
    ):
        form(lambda x: np.sum(W[:2, :2] * linalg.svd(x, full_matrices=False)[0]))(2 * numpy.eye(2))


@each_form
@pytest.mark.parametrize("shape", [(3, 3), (2, 3, 5), (5, 3)])
def test_complex_singular_vectors(shape, form):
    x, v = RNG.normal(size=(2, *shape)) + 1j * RNG.normal(size=(2, *shape))

    def fun(x):
        left, s, right = linalg.svd(x, full_matrices=False)
        parts = np.abs(left) ** 2 * np.arange(3.0), np.matmul(left * s[..., None, :] ** 3, right) * (1 + 2j)
        return np.sum(parts[0]) + np.sum(np.real(parts[1])) + np.sum(np.abs(right[..., 1, :]) ** 4)

    close(numpy.sum(numpy.real(form(fun)(x) * v)), difference(fun, x, v), 1e-6)


def fitted_line(a, b):
    return np.sum(linalg.lstsq(a, b, rcond=None)[0] ** 3)


@each_form
def test_least_squares(form):
    """The derivatives of (AᵀA)⁻¹ Aᵀ b, with complex steps; in the second case the singular values are equal."""
    for a in (RNG.normal(size=(6, 3)), numpy.linalg.qr(RNG.normal(size=(6, 3)))[0]):
        b, v = RNG.normal(size=6), RNG.normal(size=(6, 3))

        def along(t, a=a, b=b, v=v):
            moved = a + t * v
            return numpy.sum(numpy.linalg.solve(moved.T @ moved, moved.T @ b) ** 3)

        slope = lambda h, along=along: numpy.imag(along(h + 1e-30j)) / 1e-30  # noqa: E731
        close(numpy.sum(form(fitted_line)(a, b) * v), slope(0.0))
        product = mpiad.hvp(mpiad.jit(fitted_line, strict=True) if form is not mpiad.grad else fitted_line)(a, b, v)
        differences = [c * (slope(k * 1e-3) - slope(-k * 1e-3)) for k, c in ((1, 45), (2, -9), (3, 1))]
        close(numpy.sum(product * v), sum(differences) / 0.06, rtol=1e-8)


def test_least_squares_of_dependent_columns():
    """NumPy's values in compiled functions, and an error in derivatives."""
    b = RNG.normal(size=4)
    for a in (numpy.ones((4, 2)), RNG.normal(size=(4, 5)), numpy.zeros((4, 2))):
        found = mpiad.jit(lambda a: linalg.lstsq(a, b, rcond=None), strict=True)(a)
        expected = numpy.linalg.lstsq(a, b, rcond=None)
        for k in (0, 2, 3):
            close(found[k], expected[k])
        for form in FORMS.values():
            gradient, (rows, columns) = form(lambda a: fitted_line(a, b)), a.shape
            if rows > columns:
                gradient(RNG.normal(size=a.shape))  # compiled functions are compiled
            with pytest.raises(NotImplementedError, match=r"lstsq can't be .* write np\.dot\(np\.linalg\.pinv\(a\), b\)"):
                gradient(a)
    a = numpy.outer(numpy.ones(4), [1.0, 2.0])
    # The advised function, for a change of a that keeps the rank.
    advised = lambda s: np.sum(np.dot(linalg.pinv(a * s), b) ** 3)  # noqa: E731
    close(mpiad.grad(advised)(2.0), difference(advised, 2.0, 1.0))


def test_the_rank_is_a_constant():
    for rank, x in ((1, numpy.ones((3, 2))), (2, RNG.normal(size=(3, 2)))):
        for fun in (
            lambda x: np.sum(x) * linalg.matrix_rank(x),
            mpiad.jit(lambda x: np.sum(x) * linalg.matrix_rank(x), strict=True),
        ):
            close(mpiad.grad(fun)(x), rank * numpy.ones((3, 2)))
            close(mpiad.jvp(fun, x, x)[1], rank * numpy.sum(x))


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4)])
def test_tangents_of_singular_vectors(shape):
    """A function of the vectors without their signs, also compiled, and a Hessian through them."""
    x, v = RNG.normal(size=shape), RNG.normal(size=shape)
    w, z = RNG.normal(size=shape[0]), RNG.normal(size=shape[1])

    def fun(np, x):
        left, s, right = np.linalg.svd(x, full_matrices=False)
        return np.sum(np.sin(s) * np.dot(w, left) * np.dot(right, z))

    plain = lambda x: fun(numpy, x)  # noqa: E731
    for compiled in (lambda x: fun(np, x), mpiad.jit(lambda x: fun(np, x), strict=True)):
        close(mpiad.jvp(compiled, x, v)[1], difference(plain, x, v), rtol=1e-8)
        close(
            numpy.sum(mpiad.hvp(compiled)(x, v) * v),
            difference(lambda y: difference(plain, y, v, 1e-3), x, v, 1e-3),
            rtol=1e-3,
        )


@each_form
@pytest.mark.parametrize("kind", ["real", "complex"])
def test_cholesky_reads_the_lower_triangle(kind, form):
    """The matrix, and the direction, have other entries above the diagonal."""
    a, v = matrices(kind)
    a = numpy.tril(a) + numpy.triu(RNG.normal(size=a.shape), 1)
    v = v + numpy.triu(RNG.normal(size=a.shape), 1)
    weights = RNG.normal(size=a.shape)

    def loss(a, root=linalg.cholesky):
        return np.sum(weights * np.abs(root(a) + 0.3) ** 2)

    def slope(a):
        return difference(lambda a: loss(a, numpy.linalg.cholesky), a, v)

    g = form(loss)(a)
    close(numpy.triu(g, 1), 0.0)
    close(numpy.sum(numpy.real(g * v)), slope(a), 1e-8)
    close(mpiad.jvp(loss, a, v)[1], slope(a), 1e-8)
    close(numpy.sum(numpy.real(mpiad.hvp(loss)(a, v) * v)), difference(slope, a, v, 1e-4), 1e-4)
    only = lambda x: loss(np.tril(a + x * v))  # noqa: E731
    close(form(only)(0.0), slope(a), 1e-8)


def minors(a):
    """The cofactors of a matrix, as determinants of its minors."""
    n = len(a)
    signs = (-1.0) ** numpy.add.outer(numpy.arange(n), numpy.arange(n))
    less = lambda i, j: numpy.delete(numpy.delete(a, i, 0), j, 1)  # noqa: E731
    return signs * numpy.array([[numpy.linalg.det(less(i, j)) for j in range(n)] for i in range(n)])


@each_form
@pytest.mark.parametrize("kind", ["real", "complex"])
@pytest.mark.parametrize("n, rank", [(n, rank) for n in (1, 2, 3, 4) for rank in range(n + 1)])
def test_determinants_of_singular_matrices(n, rank, kind, form):
    """In two directions of a cubic, or a lower, polynomial, central differences of second derivatives are exact."""
    rng = numpy.random.default_rng(n)
    normal = lambda *shape: rng.normal(size=shape) + (1j * rng.normal(size=shape) if kind == "complex" else 0.0)  # noqa: E731
    a, v = normal(2, n, rank) @ normal(2, rank, n), normal(2, n, n)
    loss = lambda a: np.sum(np.real(np.linalg.det(a)) * numpy.array([1.0, -2.0]))  # noqa: E731
    weights = numpy.array([1.0, -2.0])[:, None, None]
    close(form(loss)(a), weights * numpy.stack([minors(x) for x in a]))
    steps = (0.5, 1.0)  # Richardson's extrapolation: exact for cofactors of degree 3
    halves = [
        (numpy.stack([minors(x) for x in a + h * v]) - numpy.stack([minors(x) for x in a - h * v])) / (2 * h) for h in steps
    ]
    expected = weights * (4 * halves[0] - halves[1]) / 3
    close(mpiad.hvp(loss)(a, v), expected)
    close(mpiad.hvp(mpiad.jit(loss, strict=True))(a, v), expected)
    close(mpiad.jvp(lambda a: form(loss)(a), a, v)[1], expected)
    close(mpiad.grad(lambda a: np.sum(np.real(mpiad.grad(loss)(a) * v)))(a), expected)


def test_third_derivatives_of_determinants():
    """∂³ det / ∂a₀₀ ∂a₁₁ ∂a₂₂ = 1, in both modes."""
    a, units = RNG.normal(size=(3, 3)) + 3 * numpy.eye(3), [numpy.diag(row) for row in numpy.eye(3)]
    second = lambda a: np.sum(mpiad.hvp(np.linalg.det)(a, units[0]) * units[1])  # noqa: E731
    expected = numpy.zeros((3, 3))
    expected[2, 2] = 1.0
    close(mpiad.grad(second)(a), expected)
    close([mpiad.jvp(second, a, v)[1] for v in units], [0.0, 0.0, 1.0])


def test_determinants_of_matrices_with_nan():
    with numpy.errstate(invalid="ignore"):
        assert numpy.all(numpy.isnan(mpiad.grad(np.linalg.det)(numpy.full((2, 2), numpy.nan))))
