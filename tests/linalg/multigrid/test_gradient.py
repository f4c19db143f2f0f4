"""Derivatives of `solve_elliptic` by κ, c and b: against written-out ones, complex steps, and Taylor rates."""

import autograd.numpy as anp
import numpy as np
import pytest
from diffusion import Diffusion
from elliptic_matrix import elliptic_matrix, fixed_sides
from scipy.sparse.linalg import spsolve

import mpiad
from mpiad.domain import Domain
from mpiad.linalg import Elliptic, solve_elliptic
from mpiad.testing import check_grads

SHAPE = (9, 8)
CLOSE = {"rtol": 1e-8, "atol": 1e-10}
TIGHT = {"rtol": 1e-13}


class Case:
    """The same problem on all ranks: whole fields and this rank's blocks."""

    def __init__(self, rank_rng):
        self.domain, self.reference, rng = Domain(SHAPE), Diffusion(SHAPE), rank_rng(100)
        self.kappa, self.c = np.exp(rng.standard_normal(SHAPE)), 0.7
        self.b, self.w = rng.standard_normal((2, *SHAPE))
        self.directions = rng.standard_normal(SHAPE), 0.4, rng.standard_normal(SHAPE)

    def block(self, u):
        return u[self.domain.owned]

    def local(self, kappa, c, b):
        return {"kappa": self.block(kappa), "c": c, "b": self.block(b)}

    @property
    def point(self):
        return self.local(self.kappa, self.c, self.b)

    def loss(self, x):
        u = solve_elliptic(self.domain, x["kappa"], x["b"], x["c"], **TIGHT)
        return self.domain.dot(self.block(self.w), u**2) / 2

    def check(self, found, expected):
        np.testing.assert_allclose(found["kappa"], self.block(expected[0]), **CLOSE)
        np.testing.assert_allclose(mpiad.mpi_allreduce(found["c"]), expected[1], **CLOSE)
        np.testing.assert_allclose(found["b"], self.block(expected[2]), **CLOSE)


@pytest.fixture
def case(rank_rng):
    return Case(rank_rng)


def test_gradient(case):
    value, gradient = mpiad.value_and_grad(case.loss)(case.point)
    u = case.reference.solve(case.kappa, case.c, case.b)
    np.testing.assert_allclose(value, np.sum(case.w * u**2) / 2, **CLOSE)
    case.check(gradient, case.reference.gradient(case.kappa, case.c, case.b, case.w))


def test_tangent(case):
    _, tangent = mpiad.jvp(
        lambda x: solve_elliptic(case.domain, x["kappa"], x["b"], x["c"], **TIGHT), case.point, case.local(*case.directions)
    )
    expected = case.reference.tangent(case.kappa, case.c, case.b, case.directions)
    np.testing.assert_allclose(tangent, case.block(expected), **CLOSE)


@pytest.mark.not_on(4)
def test_hessian(case):
    expected = case.reference.hessian_product(case.kappa, case.c, case.b, case.w, case.directions)
    case.check(mpiad.hvp(case.loss)(case.point, case.local(*case.directions)), expected)


@pytest.mark.not_on(4)
def test_hessian_by_coefficients_of_one_rank(case, rank):
    """In reverse twice: where they are no variables, ranks take part all the same in what follows from the first's."""
    roots, (of_kappa, _, of_b) = np.zeros(SHAPE), case.directions
    roots[case.domain._partition.block(0)] = 1
    point, along = ({"kappa": case.block(x), "b": case.block(y)} for x, y in ((case.kappa, case.b), (of_kappa, of_b)))

    def loss(x):
        return case.loss({"kappa": x["kappa"] if rank == 0 else case.block(case.kappa), "b": x["b"], "c": case.c})

    def slope(x):
        gradient = mpiad.grad(loss)(x)
        return sum(case.domain.dot(gradient[name], along[name]) for name in along)

    found = mpiad.grad(slope)(point)
    expected = case.reference.hessian_product(case.kappa, case.c, case.b, case.w, (of_kappa * roots, 0.0, of_b))
    np.testing.assert_allclose(found["kappa"], case.block(expected[0] * roots), **CLOSE)
    np.testing.assert_allclose(found["b"], case.block(expected[2]), **CLOSE)


@pytest.mark.one_rank  # on ranks the gradient is compared with the reference's, which is sharper
def test_taylor_rates(case):
    def loss(x):
        return case.loss({**x, "kappa": anp.exp(x["kappa"])})

    check_grads(loss, {**case.point, "kappa": np.log(case.point["kappa"])}, order=1)


@pytest.mark.not_on(4)
def test_solution_that_one_rank_uses(case, rank):
    def loss(x):
        u = solve_elliptic(case.domain, x["kappa"], x["b"], x["c"], **TIGHT)
        return (u**2).sum() / 2 if rank == 0 else None

    roots = np.zeros(SHAPE)
    roots[case.domain._partition.block(0)] = 1
    case.check(mpiad.grad(loss)(case.point), case.reference.gradient(case.kappa, case.c, case.b, roots))


@pytest.mark.not_on(4)
def test_start_and_callback_count_only_forwards(case):
    norms, u = [], solve_elliptic(case.domain, case.block(case.kappa), case.block(case.b), 0.7, **TIGHT)

    def loss(x):
        u0 = u * x["c"]
        found = solve_elliptic(case.domain, x["kappa"], x["b"], x["c"], x0=u0, callback=norms.append, **TIGHT)
        return case.domain.dot(case.block(case.w), found**2) / 2

    case.check(mpiad.grad(loss)(case.point), case.reference.gradient(case.kappa, case.c, case.b, case.w))
    steps = len(norms)
    loss(case.point)
    assert len(norms) == 2 * steps > 0


@pytest.mark.not_on(4)
def test_number_as_kappa(case):
    def loss(kappa):
        u = solve_elliptic(case.domain, kappa, case.block(case.b), 0.3, **TIGHT)
        return case.domain.dot(u, u) / 2

    found = mpiad.mpi_allreduce(mpiad.grad(loss)(2.0))
    expected = case.reference.gradient(np.full(SHAPE, 2.0), 0.3, case.b, np.ones(SHAPE))[0].sum()
    np.testing.assert_allclose(found, expected, **CLOSE)


@pytest.mark.parametrize(
    ("shape", "settings", "periodic"),
    [
        ((8, 11), {"boundary": ("neumann", ("dirichlet", "neumann")), "spacing": (0.5, 0.8)}, False),
        ((10, 7), {"centred": True}, (True, False)),
        ((6, 5, 7), {"boundary": ("neumann", "dirichlet", "neumann")}, False),
    ],
    ids=str,
)
def test_directional_derivatives(shape, settings, periodic, rank_rng):
    """Along random directions, against complex steps of a sparse factorisation."""
    rng, domain = rank_rng(100), Domain(shape, periodic=periodic)
    kappa, c = np.exp(rng.standard_normal(shape)), rng.random(shape)
    b, w = rng.standard_normal((2, *shape))
    point, directions = (kappa, c, b), rng.standard_normal((3, *shape))

    def loss(kappa, c, b):
        u = solve_elliptic(domain, kappa, b, c, **settings, **TIGHT)
        return domain.dot(w[domain.owned], u**3)

    gradients = mpiad.grad(loss, (0, 1, 2))(*[x[domain.owned] for x in point])
    fixed = fixed_sides(mpiad.linalg.Elliptic(domain, **settings).sides)
    rest = settings.get("spacing", 1.0), fixed, settings.get("centred", False), periodic
    for k, direction in enumerate(directions):
        moved = [x + 1e-30j * direction * (j == k) for j, x in enumerate(point)]
        u = spsolve(elliptic_matrix(moved[0], moved[1], *rest).tocsc(), moved[2].ravel().astype(complex)).reshape(shape)
        expected = np.imag(np.sum(w * u**3)) / 1e-30
        np.testing.assert_allclose(domain.dot(gradients[k], direction[domain.owned]), expected, rtol=1e-8)


def test_mean_zero(rank_rng):
    shape, rng = (9, 8), rank_rng(100)
    domain, kappa = Domain(shape), np.exp(rng.standard_normal(shape))
    b, w, of_kappa, of_b = rng.standard_normal((4, *shape))

    def loss(kappa, b):
        u = solve_elliptic(domain, kappa, b, boundary="neumann", mean_zero=True, **TIGHT)
        return domain.dot(w[domain.owned], u**3)

    def dense(kappa, b):
        # The mean of b is taken away, and u's is pinned at zero.
        matrix = elliptic_matrix(kappa, fixed=False).toarray() + np.ones((kappa.size,) * 2)
        u = np.linalg.solve(matrix, (b - b.mean()).ravel().astype(complex))
        return np.sum(w.ravel() * u**3)

    found = mpiad.grad(loss, (0, 1))(kappa[domain.owned], b[domain.owned])
    np.testing.assert_allclose(
        domain.dot(found[0], of_kappa[domain.owned]), np.imag(dense(kappa + 1e-30j * of_kappa, b)) / 1e-30, rtol=1e-8
    )
    np.testing.assert_allclose(
        domain.dot(found[1], of_b[domain.owned]), np.imag(dense(kappa, b + 1e-30j * of_b)) / 1e-30, rtol=1e-8
    )


@pytest.mark.not_on(4)
def test_a_product_of_a_solve_is_differentiated_along_another_direction(rank_rng):
    """With A(κ) linear in κ = exp m, from A u = f follows A u_vw = -(A(κ v) u_w + A(κ w) u_v + A(κ v w) u)."""
    shape = (5, 4)
    domain = mpiad.Domain(shape)
    m, v, w = rank_rng(0).standard_normal((3, *shape))
    of = lambda field: elliptic_matrix(np.exp(m) * field, 0.0, (1.0, 1.0)).toarray()  # noqa: E731
    a = of(np.ones(shape))
    u = np.linalg.solve(a, np.ones(20))
    u_v, u_w = (-np.linalg.solve(a, of(along) @ u) for along in (v, w))
    expected = -np.linalg.solve(a, of(v) @ u_w + of(w) @ u_v + of(v * w) @ u)

    def state(m):
        return solve_elliptic(domain, anp.exp(m), np.ones(domain.local_shape), rtol=1e-12)

    mine = [np.ascontiguousarray(field[domain.owned]) for field in (m, v, w, expected.reshape(shape))]
    found = mpiad.jvp(lambda m: mpiad.linearize(state)(m).jvp(mine[1]), mine[0], mine[2])
    np.testing.assert_allclose(found[0], u_v.reshape(shape)[domain.owned], atol=1e-9)
    np.testing.assert_allclose(found[1], mine[3], atol=1e-8)


@pytest.mark.not_on(4)
def test_a_product_of_a_solve_differentiates_the_operator_once(monkeypatch, rank, rank_rng):
    """With respect to κ, for the first J v; a further one is only a solve."""
    domain, calls, plain = mpiad.Domain((8, 8)), [], Elliptic.product
    monkeypatch.setattr(Elliptic, "product", lambda self, *args: calls.append(1) or plain(self, *args))
    m, v = rank_rng(rank).standard_normal((2, *domain.local_shape))
    kept, counts = mpiad.linearize(lambda m: solve_elliptic(domain, anp.exp(m), np.ones(domain.local_shape)))(m), []
    for _ in range(2):
        calls.clear()
        kept.jvp(v)
        counts.append(len(calls))
    assert counts == [1, 0]
