"""Stencils against scipy.ndimage.correlate on the whole grid: values, adjoint, tangent, and both again."""

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from scipy import ndimage

import mpiad
import mpiad.domain.stencils
from mpiad.domain import Domain
from mpiad.domain.stencils import derivative
from mpiad.testing import check_adjoint, check_grads

ROUNDING = 1e-12
CASES = [
    # shape, lengths, periodic
    ((13,), (5,), False),
    ((16,), (7,), True),
    ((7, 8), (3, 3), False),
    ((7, 9), (3, 5), (True, False)),
    ((8, 9), (1, 5), False),
    ((4, 5, 3), (3, 3, 3), (False, True, False)),
]
each_case = pytest.mark.parametrize(("shape", "lengths", "periodic"), CASES, ids=str)
each_boundary = pytest.mark.parametrize("boundary", ["zero", "edge", "reflect", 2.5], ids=str)
each_kind = pytest.mark.parametrize("star", [True, False], ids=["star", "box"])


def weights_of(rng, lengths, star):
    weights = rng.standard_normal(lengths)
    if star:
        away = np.sum([i != n // 2 for i, n in zip(np.indices(lengths), lengths)], axis=0)
        weights[away > 1] = 0
    return weights


def correlated(u, weights, periodic, boundary):
    """Return the whole grid's sums, as SciPy computes them of a grid that was padded by its own modes."""
    wraps = np.broadcast_to(periodic, weights.ndim)
    width = [(n // 2,) * 2 for n in weights.shape]
    for axis, wrap in enumerate(wraps):
        along = [(0, 0)] * weights.ndim
        along[axis] = width[axis]
        mode = "wrap" if wrap else {"zero": "constant", "edge": "edge", "reflect": "reflect"}.get(boundary, "constant")
        value = {"constant_values": 0.0 if boundary == "zero" else boundary} if mode == "constant" else {}
        u = np.pad(u, along, mode, **value)
    whole = ndimage.correlate(u, weights, mode="constant")
    return whole[tuple(slice(a, n - b) for (a, b), n in zip(width, whole.shape))]


def transposed(g, weights, periodic, boundary):
    """Return the transpose, one column of the matrix after the other."""
    shape = g.shape
    linear = "zero" if isinstance(boundary, float) else boundary
    columns = [correlated(e.reshape(shape), weights, periodic, linear) for e in np.eye(g.size)]
    return np.array([np.sum(column * g) for column in columns]).reshape(shape)


@each_kind
@each_boundary
@each_case
def test_value_adjoint_and_tangent(rank_rng, shape, lengths, periodic, boundary, star):
    domain = Domain(shape, halo=[n // 2 for n in lengths], periodic=periodic)
    u, v, g = (rank_rng(100 + k).standard_normal(shape) for k in range(3))
    weights, mine = weights_of(rank_rng(200), lengths, star), domain.owned
    stencil = domain.stencil(weights, boundary)
    pull, value = mpiad.make_vjp(stencil)(u[mine])
    np.testing.assert_allclose(value, correlated(u, weights, periodic, boundary)[mine], ROUNDING, ROUNDING)
    np.testing.assert_allclose(pull(g[mine]), transposed(g, weights, periodic, boundary)[mine], ROUNDING, ROUNDING)
    linear = "zero" if isinstance(boundary, float) else boundary
    _, tangent = mpiad.jvp(stencil, u[mine], v[mine])
    np.testing.assert_allclose(tangent, correlated(v, weights, periodic, linear)[mine], ROUNDING, ROUNDING)
    varying = np.broadcast_to(weights.reshape(*lengths, *[1] * len(shape)), lengths + domain.local_shape)
    np.testing.assert_allclose(domain.correlate(u[mine], varying, boundary), value, ROUNDING, ROUNDING)


@each_kind
@pytest.mark.parametrize("boundary", ["zero", "edge", "reflect"])
def test_dot_product(rng, rank_rng, boundary, star):
    for shape, lengths, periodic in CASES:
        domain = Domain(shape, halo=[n // 2 for n in lengths], periodic=periodic)
        stencil = domain.stencil(weights_of(rank_rng(200), lengths, star), boundary)
        check_adjoint(stencil, rng.standard_normal((2, *domain.local_shape)))
        weights = rng.standard_normal(lengths + domain.local_shape)
        u = rng.standard_normal((2, *domain.local_shape))
        check_adjoint(lambda x: domain.correlate(x, weights, boundary), u)  # noqa: B023
        check_adjoint(lambda w: domain.correlate(u, w, boundary), weights)  # noqa: B023


@pytest.mark.parametrize(
    ("of_field", "of_weights"), [("f4", "f8"), ("f8", "f4"), ("f4", "c16"), ("c8", "f8"), ("c8", "c16")]
)
def test_cotangents_have_the_dtypes_of_field_and_weights(rng, of_field, of_weights):
    domain = Domain((8, 13), halo=1)
    u = rng.standard_normal(domain.local_shape).astype(of_field)
    weights = rng.standard_normal((3, 3, *domain.local_shape)).astype(of_weights)

    def loss(z):
        return domain.sum(anp.abs(domain.correlate(z["u"], z["w"])) ** 2)

    found = mpiad.grad(loss)({"u": u, "w": weights})
    assert (found["u"].dtype, found["w"].dtype) == (u.dtype, weights.dtype)
    padded = domain.exchange(u)
    pull, ans = autograd.make_vjp(lambda u: derivative(None, weights, u, 2))(padded)
    assert pull(ans).dtype == padded.dtype
    pull, ans = autograd.make_vjp(lambda w: derivative(None, w, padded, 2))(weights)
    assert pull(ans).dtype == weights.dtype


@pytest.mark.parametrize("boundary", ["zero", "edge"])
def test_first_and_second_derivatives_of_a_nonlinear_program(rng, rank_rng, boundary):
    domain = Domain((8, 13), halo=(1, 2), periodic=(True, False))
    stencil = domain.stencil(weights_of(rank_rng(200), (3, 5), False), boundary)
    u, v = (rng.standard_normal(domain.local_shape) for _ in range(2))
    weights, dw = (rng.standard_normal((3, 3, *domain.local_shape)) for _ in range(2))

    def loss(z):
        return domain.sum(anp.sin(stencil(z["u"] ** 2)) * domain.correlate(anp.tanh(z["u"]), z["w"] ** 2, boundary))

    z, dz = {"u": u, "w": weights}, {"u": v, "w": dw}
    check_grads(loss, z)
    forward = mpiad.hvp(loss)(z, dz)

    def slope(z):
        g = mpiad.grad(loss)(z)
        return domain.dot(g["u"], v) + mpiad.mpi_allreduce(anp.sum(g["w"] * dw))

    reverse = mpiad.grad(slope)(z)
    for name in ("u", "w"):
        np.testing.assert_allclose(reverse[name], forward[name], 1e-10, 1e-10)


@pytest.mark.parametrize("order", [2, 4, 6, 8])
def test_laplacian_is_exact_for_polynomials_and_converges(order):
    # Exact for x^k, k < order + 2, away from the sides.
    domain = Domain((24, 22))
    spacing = (0.5, 0.25)
    x, y = domain.coordinates(spacing, (-6.0, -2.75))
    found = domain.laplacian(spacing, order=order)(x ** (order + 1) + 3 * y**2 + 0 * x)
    expected = (order + 1) * order * x ** (order - 1) + 6 + 0 * y
    whole = [domain.gather(a) for a in (found, expected)]
    if mpiad.mpi_rank() == 0:
        inside = (slice(order // 2, -order // 2),) * 2
        scale = np.abs(whole[1]).max() + 4.0**order
        np.testing.assert_allclose(whole[0][inside], whole[1][inside], 1e-8, 1e-10 * scale)
    errors = []
    for n in (40, 80):
        ring = Domain((n,), periodic=True)
        (x,) = ring.coordinates(extent=1.0)
        wave = anp.sin(2 * np.pi * x)
        errors.append(ring.norm(ring.laplacian(1 / n, order=order)(wave) + 4 * np.pi**2 * wave) / np.sqrt(n))
    assert abs(np.log2(errors[0] / errors[1]) - order) < 0.1


def test_constants_conserve_and_symmetric_stencils_are_their_own_transposes(rng):
    domain = Domain((8, 13), halo=2, periodic=True)
    laplacian = domain.laplacian(order=4)
    u, v = (rng.standard_normal(domain.local_shape) for _ in range(2))
    assert abs(domain.sum(laplacian(u))) < 1e-12
    np.testing.assert_allclose(domain.dot(u, laplacian(v)), domain.dot(v, laplacian(u)), 1e-12)
    np.testing.assert_allclose(mpiad.make_vjp(laplacian)(u)[0](v), laplacian(v), 1e-11, 1e-11)
    closed = Domain((8, 13), dims=domain.dims).laplacian(boundary="edge")
    assert abs(domain.sum(closed(u))) < 1e-12  # nothing flows through closed sides


@pytest.mark.parametrize("dtype", ["f4", "c8", "c16"])
def test_dtypes(rank_rng, dtype):
    domain = Domain((9, 8))
    u = (rank_rng(100).standard_normal((9, 8)) * (1 if dtype == "f4" else 1 + 2j)).astype(dtype)[domain.owned]
    stencil = domain.laplacian()
    whole = correlated(domain.gather(u), stencil.weights, False, "zero") if mpiad.mpi_size() == 1 else None
    found = stencil(u)
    assert found.dtype == np.dtype(dtype)
    if whole is not None:
        np.testing.assert_allclose(found, whole, 1e-5, 1e-5)
    check_adjoint(stencil, u)


def test_results_are_new_arrays(rng):
    domain = Domain((9, 8))
    stencil = domain.laplacian(boundary="edge")
    u = rng.standard_normal(domain.local_shape)
    first = stencil(u)
    kept = first.copy()
    second = stencil(2 * u)
    np.testing.assert_array_equal(first, kept)
    np.testing.assert_allclose(second, 2 * kept, ROUNDING, ROUNDING)


def test_one_message_to_each_neighbour_while_the_inside_is_summed(rank, monkeypatch):
    domain = Domain((40, 40), periodic=True)
    events = []

    def noting(name, fun):
        def noted(*args):
            events.append(name)
            return fun(*args)

        return noted

    for name in ("post", "weighted_sum", "complete"):
        monkeypatch.setattr(mpiad.domain.stencils, name, noting(name, getattr(mpiad.domain.stencils, name)))
    domain.laplacian(order=4)(np.ones(domain.local_shape))
    assert events[:3] == (
        ["post", "weighted_sum", "complete"] if mpiad.mpi_size() > 1 else ["post", "complete", "weighted_sum"]
    )


def test_weights_that_are_all_zero(size, rng):
    domain = Domain((4, 3 * size), dims=(1, size))
    u, nothing = rng.standard_normal(domain.local_shape), domain.stencil(np.zeros((3, 3)), boundary=np.array(2.0))
    np.testing.assert_array_equal(nothing(u), 0 * u)
    loss = lambda u: domain.sum(nothing(u) ** 2 + nothing(u) + u)  # noqa: E731
    np.testing.assert_array_equal(mpiad.grad(loss)(u), np.ones_like(u))


def test_a_boundary_value_as_an_array_without_axes(size, rng):
    domain = Domain((4, 3 * size), dims=(1, size))
    u = rng.standard_normal(domain.local_shape)
    found, expected = (domain.laplacian(boundary=value)(u) for value in (np.array(2.0), 2.0))
    np.testing.assert_array_equal(found, expected)


def test_what_is_refused(size):
    domain = Domain((9, 3 * size), dims=(1, size))
    block = np.ones(domain.local_shape)
    with pytest.raises(ValueError, match=r"odd length along each of 2 dimensions, but have \(2, 3\)"):
        domain.stencil(np.ones((2, 3)))
    with pytest.raises(ValueError, match=r"odd length along each of 2 dimensions, but have \(3,\)"):
        domain.stencil(np.ones(3))
    with pytest.raises(TypeError, match="weights must be an array of real numbers, untraced, but got ndarray"):
        domain.stencil(np.ones((3, 3)) * 1j)
    with pytest.raises(ValueError, match=rf"have radius 4 along dimension 1, but .* of the {size} blocks .* has 3"):
        domain.laplacian(order=8)
    with pytest.raises(ValueError, match="order must be even, from 2 to 40, but got 3"):
        domain.laplacian(order=3)
    with pytest.raises(ValueError, match="spacing must be positive along each dimension, but got"):
        domain.laplacian((1.0, -1.0))
    with pytest.raises(ValueError, match="boundary must be one of"):
        domain.laplacian(boundary="wrap")
    with pytest.raises(TypeError, match="Domain.stencil: a boundary value can't be traced here"):
        mpiad.grad(lambda value: domain.sum(domain.stencil(np.ones((3, 3)), value)(block)))(1.0)
    laplacian = domain.laplacian()
    with pytest.raises(ValueError, match="Stencil: expected an array of shape"):
        laplacian(np.ones(domain.padded_shape))
    with pytest.raises(TypeError, match="Stencil: expected an array of floats .* but got ndarray of int"):
        laplacian(block.astype(int))
    with pytest.raises(ValueError, match="Domain.correlate: the shape of weights must be 2 odd lengths"):
        domain.correlate(block, np.ones((3, 3)))


def test_boundary_values_that_are_refused(size):
    """Before the exchange, on all ranks; the domain is usable afterwards."""
    domain = Domain(3 * size)
    u, w = np.ones(domain.local_shape), np.ones((3, *domain.local_shape))
    for value in (0.5j, np.complex128(0.5j)):
        for call in (lambda v: domain.correlate(u, w, v), lambda v: domain.stencil(np.ones(3), v)(u)):
            with pytest.raises(TypeError, match=r"the boundary value .*0\.5j.* doesn't fit into an array of dtype float64"):
                call(value)
        # The sums of three ones in the complex field, and at the ends the value and two ones.
        assert abs(domain.sum(domain.correlate(u + 0j, w, value)) - (9 * size - 2 + 2 * value)) < 1e-12
        assert abs(domain.sum(domain.stencil(np.ones(3), value)(u + 0j)) - (9 * size - 2 + 2 * value)) < 1e-12
    with pytest.raises(
        TypeError, match=r"Domain.correlate: the boundary value 0\.5 doesn't fit into an array of dtype int"
    ):
        domain.correlate(u.astype(int), w, 0.5)
    with pytest.raises(TypeError, match="Domain.correlate: a boundary value can't be traced here"):
        mpiad.grad(lambda value: domain.sum(domain.correlate(1.0 * u, w, value)))(0.5)
    assert domain.sum(domain.correlate(u, w, 0.5)) == 9 * size - 1


@pytest.mark.also_on(2, 3)
@pytest.mark.parametrize("boundary", ["zero", "edge", "reflect", 2.5], ids=str)
def test_ranks_with_and_without_a_program(boundary, rank):
    """They exchange the same messages, in both passes, also of several reverse passes that run together."""
    domain = Domain((14, 9), periodic=(False, True))
    rng = np.random.default_rng(3)
    u, g = (x[domain.owned] for x in rng.standard_normal((2, 14, 9)))
    for stencil in (domain.laplacian(order=4, boundary=boundary), domain.stencil(rng.standard_normal((3, 3)), boundary)):
        fun = lambda u: anp.sin(stencil(u)) * u  # noqa: B023, E731
        mixed = mpiad.jit(fun, strict=True) if rank % 2 else fun
        (pull, value), (expected_pull, expected) = mpiad.make_vjp(mixed)(u), mpiad.make_vjp(fun)(u)
        np.testing.assert_allclose(value, expected, ROUNDING, ROUNDING)
        np.testing.assert_allclose(pull(g), expected_pull(g), 1e-11, 1e-11)
        loss = lambda f: lambda u: domain.sum(f(u) ** 2)  # noqa: E731
        np.testing.assert_allclose(mpiad.hvp(loss(mixed))(u, g), mpiad.hvp(loss(fun))(u, g), 1e-10, 1e-10)
        sums = lambda f: lambda t: anp.stack([domain.sum(f(t * u)), domain.sum(t * f(u * t))])  # noqa: E731
        np.testing.assert_allclose(mpiad.jacobian(sums(mixed))(1.5), mpiad.jacobian(sums(fun))(1.5), 1e-10)
