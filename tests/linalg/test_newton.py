"""`newton` on blocks against Newton's method with the dense Jacobian of the whole grid in one process."""

import importlib

import autograd.numpy as anp
import numpy as np
import pytest
import scipy.sparse
from mpi4py import MPI
from transport_matrix import matrix

import mpiad
from mpiad.domain import Domain
from mpiad.errors import ConvergenceError
from mpiad.linalg import newton
from mpiad.testing import check_grads

factorized_module = importlib.import_module("mpiad.linalg.factorized")
SHAPE = (4, 5)
CLOSE = {"rtol": 1e-7, "atol": 1e-9}


def burgers(v, x):
    """The residual of the tests, from a padded block."""
    u, east, west = v[1:-1, 1:-1], v[1:-1, 2:], v[1:-1, :-2]
    return x["nu"] * (4 * u - v[:-2, 1:-1] - v[2:, 1:-1] - east - west) + u * (east - west) + x["k"] * u**3 - x["b"]


class Burgers:
    """ν(4 u - neighbours) + u (u east - u west) + k u³ = b on all ranks, and with its dense Jacobian in one process."""

    def __init__(self, rank_rng):
        self.domain, rng = Domain(SHAPE), rank_rng(100)
        self.nu, self.k, self.b = 0.6, 1.0 + rng.random(SHAPE), 1.5 * rng.standard_normal(SHAPE)
        self.weight, self.evaluations = rng.random(SHAPE), 0
        self.settings = {}
        self.along = 0.3, rng.standard_normal(SHAPE), rng.standard_normal(SHAPE)

    def block(self, u):
        return u[self.domain.owned]

    def local(self, nu, k, b):
        return {"nu": nu, "k": self.block(k), "b": self.block(b)}

    @property
    def point(self):
        return self.local(self.nu, self.k, self.b)

    def residual(self, u, x):
        self.evaluations += 1
        return burgers(self.domain.exchange(u), x)

    def solved(self, x, **settings):
        return newton(self.residual, np.zeros(self.domain.local_shape), x, rtol=1e-12, **self.settings, **settings)

    def loss(self, x):
        return self.domain.sum(self.block(self.weight) * self.solved(x) ** 4)

    def reference(self, nu, k, b):
        """Return u and the gradient of Σ weight u⁴ by ν, k and b."""
        u, zero = np.zeros(SHAPE), np.zeros(SHAPE)
        laplacian = matrix(SHAPE, nu, zero, zero)
        for _ in range(60):
            step = np.linalg.solve(self.jacobian(u, nu, k), self.dense_residual(u, laplacian, k, b).ravel())
            u = u - min(1.0, 2.0 / np.abs(step).max()) * step.reshape(SHAPE)
        multiplier = np.linalg.solve(self.jacobian(u, nu, k).T, (4 * self.weight * u**3).ravel()).reshape(SHAPE)
        of_nu = -np.sum(multiplier.ravel() * (matrix(SHAPE, 1.0, zero, zero) @ u.ravel()))
        return u, of_nu, -multiplier * u**3, multiplier

    def dense_residual(self, u, laplacian, k, b):
        wind = matrix(SHAPE, 0.0, u, np.zeros(SHAPE))
        return ((laplacian + wind) @ u.ravel()).reshape(SHAPE) + k * u**3 - b

    def jacobian(self, u, nu, k):
        difference = matrix(SHAPE, 0.0, np.ones(SHAPE), np.zeros(SHAPE)) @ u.ravel()
        return matrix(SHAPE, nu, u, difference.reshape(SHAPE) + 3 * k * u**2)

    def check(self, found, expected, close=CLOSE):
        np.testing.assert_allclose(mpiad.mpi_allreduce(found["nu"]), expected[0], **close)
        np.testing.assert_allclose(found["k"], self.block(expected[1]), **close)
        np.testing.assert_allclose(found["b"], self.block(expected[2]), **close)

    def slopes(self, h=1e-4):
        """Return the derivatives of u and of the gradient along a direction, by differences."""
        ends = [self.reference(*(x + t * d for x, d in zip((self.nu, self.k, self.b), self.along))) for t in (h, -h)]
        return [(after - before) / (2 * h) for after, before in zip(*ends)]


@pytest.fixture
def case(rank_rng):
    return Burgers(rank_rng)


@pytest.mark.parametrize("method", ["gmres", "bicgstab"])
def test_value_and_gradient(case, method):
    u, *expected = case.reference(case.nu, case.k, case.b)
    norms = []
    np.testing.assert_allclose(case.solved(case.point, method=method, callback=norms.append), case.block(u), **CLOSE)
    assert norms == sorted(norms, reverse=True)
    case.check(mpiad.grad(case.loss)(case.point), expected)


def check_higher_derivatives(case):
    of_u, *of_gradient = case.slopes()
    direction, close = case.local(*case.along), {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(mpiad.jvp(case.solved, case.point, direction)[1], case.block(of_u), **close)
    case.check(mpiad.hvp(case.loss)(case.point, direction), of_gradient, close)

    def slope(x):
        g = mpiad.grad(case.loss)(x)
        return sum(anp.sum(g[name] * direction[name]) for name in g)

    case.check(mpiad.grad(slope, objective="sum")(case.point), of_gradient, close)


def test_higher_derivatives(case):
    check_higher_derivatives(case)


def pattern_of(case, kind):
    """Return the entries of the Jacobian of the whole grid: a domain, or this rank's rows of a matrix."""
    if kind == "domain":
        return case.domain
    whole = scipy.sparse.csr_array(case.jacobian(np.full(SHAPE, 0.3), 1.0, np.ones(SHAPE)) != 0.0)
    # Unknowns are numbered by blocks, rank by rank.
    numbers = np.arange(whole.shape[0]).reshape(SHAPE)[case.domain.owned].ravel()
    order = np.concatenate(MPI.COMM_WORLD.allgather(numbers))
    return whole[numbers][:, order]


@pytest.mark.few(2)
@pytest.mark.parametrize("form", ["interpreted", "compiled"])
@pytest.mark.parametrize(
    "settings", [{}, {"reuse": 2}, {"reuse": 50, "method": "bicgstab"}], ids=["new factors", "kept twice", "kept"]
)
@pytest.mark.parametrize("kind", ["domain", "matrix"])
def test_a_sparse_jacobian(case, kind, settings, form):
    u, *expected = case.reference(case.nu, case.k, case.b)
    if form == "compiled":
        domain = case.domain
        case.residual = mpiad.jit(lambda u, x: burgers(domain.exchange(u), x), strict=True)
    case.settings = {"jacobian": "sparse", "pattern": pattern_of(case, kind), **settings}
    np.testing.assert_allclose(case.solved(case.point), case.block(u), **CLOSE)
    case.check(mpiad.grad(case.loss)(case.point), expected)
    check_higher_derivatives(case)


def test_the_derivative_where_the_start_is_the_root(case):
    u, *expected = case.reference(case.nu, case.k, case.b)
    start = case.solved(case.point)

    def loss(x):
        found = newton(case.residual, start, x, atol=1e-8, jacobian="sparse", pattern=case.domain)
        return case.domain.sum(case.block(case.weight) * found**4)

    case.check(mpiad.grad(loss)(case.point), expected)


def test_factors_save_products(case, monkeypatch):
    """One evaluation yields the products of a Jacobian with the fields of all nine colors."""
    factored, computed = [], factorized_module.probed_matrix
    monkeypatch.setattr(factorized_module, "probed_matrix", lambda *args: factored.append(1) or computed(*args))

    def evaluations(**settings):
        before, case.settings = case.evaluations, {"jacobian": "sparse", "pattern": case.domain, **settings}
        factored.clear()
        case.solved(case.point)
        return case.evaluations - before

    steps = []
    case.solved(case.point, callback=steps.append)
    assert evaluations() < 9 * len(steps) and len(steps) / 2 < len(factored) <= len(steps) + 1
    evaluations(reuse=50)
    assert len(factored) == 1
    value, pull = mpiad.make_vjp(case.solved)(case.point)[::-1]
    before = case.evaluations
    pull(np.ones_like(value))
    assert case.evaluations - before <= 12


def test_a_residual_that_is_not_compiled(case):
    """A step linearizes it once for all colors, as without `jit`."""
    residual, counts = case.residual, []
    case.settings = {"jacobian": "sparse", "pattern": case.domain}

    def branching(u, x):
        return residual(u, x) if float(mpiad.stop_gradient(u).max()) < 1e9 else u

    compiled = mpiad.jit(branching)
    for case.residual in branching, compiled, compiled:
        before = case.evaluations
        case.solved(case.point)
        counts.append(case.evaluations - before)
    assert counts[2] == counts[0] < counts[1]


@pytest.mark.one_rank  # on ranks the gradient is compared with the reference's, which is sharper
@pytest.mark.parametrize("strength", [0.9, 0.4])
def test_an_entry_that_appears_after_the_start(rank, size, strength):
    """At the start the Jacobian is diagonal. The factors miss later entries, so that the steps take products, too."""
    own = np.arange(6)
    diagonal = scipy.sparse.csr_array((np.ones(6), (own, rank * 6 + own)), shape=(6, size * 6))
    coupling = strength * np.eye(6)[::-1] * np.where(own < 3, 1.0, -1.0)[:, None]

    def root(c):
        residual = lambda u, c: u + coupling @ anp.maximum(u - 0.5, 0.0) - c  # noqa: E731
        return newton(residual, np.zeros(6), c, jacobian="sparse", pattern=diagonal, rtol=1e-12, callback=steps.append)

    steps = []
    c = 1.0 + 0.001 * own
    expected = np.linalg.solve(np.eye(6) + coupling, c + 0.5 * coupling.sum(axis=1))
    assert expected.min() > 0.5
    np.testing.assert_allclose(root(c), expected, rtol=1e-9)
    assert len(steps) <= 6  # the factors alone would reduce the residual slowly
    slope = mpiad.grad(lambda c: anp.sum(root(c) ** 2), objective="sum")(c)
    np.testing.assert_allclose(slope, np.linalg.solve((np.eye(6) + coupling).T, 2.0 * expected), rtol=1e-8)


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_sparse_jacobian_in_single_precision(rank, size, dtype):
    """Also after an entry was missing in the pattern, which all ranks report."""
    own, pair = np.arange(4), np.eye(4, dtype=dtype)[::-1]
    c, start = (1.0 + 0.1 * own + 0.5 * rank).astype(dtype), np.ones(4, dtype)
    residual = lambda u, c: u**3 + 2.0 * u + 0.3 * (pair @ u) - c  # noqa: E731
    with pytest.raises(ValueError, match="is missing in the pattern"):
        newton(residual, start, c, jacobian="sparse", pattern=(own + 4 * rank, own + 4 * rank))
    pattern = np.tile(own, 2) + 4 * rank, np.concatenate([own, own[::-1]]) + 4 * rank
    u = newton(residual, start, c, jacobian="sparse", pattern=pattern, rtol=1e-6)
    assert u.dtype == dtype
    np.testing.assert_allclose(residual(u, c), np.zeros(4), atol=1e-5)


@pytest.mark.thorough
def test_taylor_rates(case):
    check_grads(case.loss, case.point, order=1)


def test_last_steps_are_quadratic(case):
    norms = []
    case.solved(case.point, callback=norms.append)
    assert 4 < len(norms) < 14
    # Near the root the tolerance of the linear systems follows the residual; the last one needn't be so exact.
    near = [norm for norm in norms if norm < 0.1][:-1]
    assert len(near) >= 2
    assert all(after < 3.0 * before**1.7 for before, after in zip(near, near[1:]))


def test_preconditioner_sees_the_state(case, rank_rng):
    u, seen = case.reference(case.nu, case.k, case.b)[0], []

    def jacobi(r, state, x):
        seen.append(case.domain.norm(state))
        return r / (4 * x["nu"] + 3 * x["k"] * state**2)

    found = case.solved(case.point, preconditioner=jacobi)
    np.testing.assert_allclose(found, case.block(u), **CLOSE)
    assert len(set(seen)) > 3
    before = case.evaluations
    case.solved(case.point)
    assert case.evaluations - before > 20


def test_start_at_the_root(case):
    u = case.solved(case.point)
    again = newton(case.residual, u, case.point, atol=1e-8)
    np.testing.assert_array_equal(again, u)
    # A tolerance below rounding is met as far as that goes.
    np.testing.assert_allclose(newton(case.residual, u, case.point, rtol=1e-30), u, 1e-9, 1e-11)


@pytest.mark.parametrize("steps", [300, 1500])
def test_a_fixed_point_that_is_not_isolated(rank, size, steps):
    """V with V Vᵀ = A Aᵀ by multiplicative steps: V times a rotation is a fixed point, too, so the Jacobian is singular."""
    rng = np.random.default_rng(0)
    A, start = rng.random((4 * size, 2)), rng.random((4 * size, 2)) + 0.1
    rows = slice(4 * rank, 4 * rank + 4)

    def step(v, c):
        V = mpiad.mpi_allgather(v, axis=0)
        return v * (0.5 + 0.5 * anp.dot(c, V) / anp.dot(v, anp.dot(V.T, V)))

    def loss(a):
        whole = mpiad.mpi_allgather(a, axis=0)
        c, v = anp.dot(a, whole.T), start[rows]
        for _ in range(steps):
            v = step(v, mpiad.stop_gradient(c))
        v = mpiad.linalg.newton(lambda v, c: step(v, c) - v, mpiad.stop_gradient(v), c)
        return mpiad.mpi_allreduce(anp.sum(anp.dot(v, mpiad.mpi_allgather(v, axis=0).T) ** 2))

    J, gradient = mpiad.value_and_grad(loss)(A[rows])
    np.testing.assert_allclose(J, np.sum((A @ A.T) ** 2), rtol=1e-8)
    np.testing.assert_allclose(gradient, 4 * (A @ A.T @ A)[rows], rtol=1e-6)


def test_the_message_names_atol_if_the_residual_is_small(size):
    def residual(u, gap):  # singular, and without a root
        return anp.array([u[0] + u[1], u[0] + u[1] + gap])

    advice = (
        "If a residual of .* is small enough, pass a larger atol=. The Jacobian is singular if solutions aren't isolated"
    )
    with pytest.raises(ConvergenceError, match=advice):
        newton(residual, np.array([1.0, 2.0]), 1e-11, rtol=1e-15)
    u = newton(residual, np.array([1.0, 2.0]), 1e-11, rtol=1e-15, atol=1e-10)
    assert abs(u[0] + u[1]) < 1e-10
    with pytest.raises(ConvergenceError, match="the linear system wasn't solved") as raised:
        newton(residual, np.array([1.0, 2.0]), 0.1)
    assert "atol" not in str(raised.value)


@pytest.mark.parametrize(("method", "problem"), [("gmres", "it stalls"), ("bicgstab", "within maxiter=")])
def test_a_step_that_keeps_its_boundary_cells(rank, size, method, problem):
    """The residual of the step has no entry for the boundary, so its Jacobian is singular; the error says what to write.

    Reference: the stationary heat equation -0.4 u" = f between 0 and 0 has u_i = f i (n - 1 - i) / 0.8 at n points.
    """
    domain = Domain(12)
    i = np.arange(12.0)[domain.owned]
    boundary, exact = (i == 0) | (i == 11), i * (11 - i) / 0.8

    def step(u, f):
        v = domain.exchange(u)
        return anp.where(boundary, u, u + 0.4 * (v[2:] - 2 * u + v[:-2]) + f)

    def loss(f, residual):
        return domain.sum((newton(residual, 0.01 * exact, f, method=method) - 0.2) ** 2)

    advice = (
        f"{method}: .*{problem}.* Prescribe their values in the residual, as in np.where.boundary, u - prescribed, step"
    )
    with pytest.raises(ConvergenceError, match=advice):
        mpiad.grad(lambda f: loss(f, lambda u, f: step(u, f) - u))(0.01)
    expected = domain.sum(2 * (0.01 * exact - 0.2) * exact)
    for residual in (
        lambda u, f: anp.where(boundary, u, step(u, f) - u),
        lambda u, f: anp.where(boundary, 0.0, step(u, f)) - u,
    ):
        slope = mpiad.grad(lambda f, residual=residual: loss(f, residual), shared=True)(0.01)
        np.testing.assert_allclose(slope, expected, rtol=1e-8)


def test_only_newton_advises_on_residuals():
    domain = Domain(12, periodic=True)
    b = np.where(np.arange(12)[domain.owned] == 0, 1.0, 0.0)
    with pytest.raises(ConvergenceError, match="gmres: it stalls") as caught:
        mpiad.linalg.solve(lambda u: domain.exchange(u)[:-2], b, method="gmres", restart=4)
    assert "Prescribe" not in str(caught.value)


def test_complex_root(rank_rng):
    domain, rng = Domain(7), rank_rng(100)
    b = (rng.standard_normal(7) + 1j * rng.standard_normal(7))[domain.owned]

    def residual(u, b):
        v = domain.exchange(u)
        return (3 + 1j) * u - v[:-2] - 0.5j * v[2:] + 0.2 * u**2 - b

    def loss(b):
        return domain.sum(anp.abs(newton(residual, np.zeros(domain.local_shape, complex), b)) ** 2)

    check_grads(loss, b, order=1)


def test_symmetric_jacobian(case):
    def residual(u, b):
        v = case.domain.exchange(u)
        return 4 * u - v[:-2, 1:-1] - v[2:, 1:-1] - v[1:-1, :-2] - v[1:-1, 2:] + u**3 - b

    def loss(b, method):
        return case.domain.sum(newton(residual, np.zeros(case.domain.local_shape), b, method=method) ** 2)

    gradients = [mpiad.grad(loss)(case.block(case.b), method) for method in ("cg", "gmres")]
    np.testing.assert_allclose(*gradients, **CLOSE)


def test_what_is_refused(case, rank, size):
    start = np.zeros(case.domain.local_shape)
    with pytest.raises(TypeError, match="newton: residual must be a function, but got float 0.5"):
        newton(0.5, start)
    with pytest.raises(TypeError, match="newton: preconditioner_transpose must be a function, but got str 'derive'"):
        newton(case.residual, start, case.point, preconditioner=lambda r, *_: r, preconditioner_transpose="derive")
    with pytest.raises(TypeError, match="u0 must be an array .* but got dtype int64"):
        newton(case.residual, start.astype(int) if rank == size - 1 else start, case.point)
    for most in (0, None):
        with pytest.raises(ValueError, match=f"newton: maxiter must be .*integer above zero, but got {most}"):
            newton(case.residual, start, case.point, maxiter=most)
    with pytest.raises(ValueError, match=r"newton: residual must return an array of the shape .* but returned \(3,\)"):
        newton(lambda u: np.ones(3) if rank == size - 1 else u, start)
    with pytest.raises(ValueError, match=rf"the residual at u0 is not finite: .* on rank {size - 1} are NaN"):
        newton(lambda u: u + (np.nan if rank == size - 1 else 1.0), start)
    with pytest.raises(ConvergenceError, match="within maxiter=2 steps. After 2 iterations the norm") as caught:
        newton(case.residual, start, case.point, maxiter=2)
    assert len(caught.value.history) == 3
    with pytest.raises(ConvergenceError, match="its norm has a minimum but no root") as caught:
        newton(lambda u: u**2 + 1.0, start + 0.3)
    assert caught.value.history
    with pytest.raises(ConvergenceError, match="in step 1 the linear system wasn't solved: .* it is singular"):
        newton(lambda u: u - case.domain.mean(u) + 1.0, start)
    with pytest.raises(ConvergenceError, match=r"in step 3 the linear system wasn't solved \(.* within maxiter=2"):
        newton(case.residual, start, case.point, linear_maxiter=2)
    assert mpiad.mpi_allreduce(1) == size


def test_sparse_jacobians_that_are_refused(case, rank, size):
    start = np.zeros(case.domain.local_shape)

    def attempt(residual=case.residual, params=(case.point,), **settings):
        newton(residual, start, *params, **{"jacobian": "sparse", "pattern": case.domain, **settings})

    for settings, kind, text in (
        ({"jacobian": "dense"}, ValueError, "jacobian must be 'products' or 'sparse', but got 'dense'"),
        ({"jacobian": "products"}, TypeError, "pattern and reuse are for jacobian='sparse' only"),
        ({"reuse": -1}, ValueError, "reuse must be an integer, zero or more, but got -1"),
        ({"method": "cg"}, ValueError, "takes no preconditioner, .* but got method='cg'"),
        ({"pattern": Domain((8, 5))}, ValueError, "u0 must have the domain's local shape"),
        ({"pattern": np.eye(3)}, TypeError, "pattern must be a Domain or a sparse matrix with"),
    ):
        with pytest.raises(kind, match=f"newton: .*{text}"):
            attempt(**settings)
    with pytest.raises(ValueError, match="newton: reuse must be"):
        attempt(reuse=-1 if rank == size - 1 else 0)
    if size > 1:
        with pytest.raises(ValueError, match="newton: all ranks must give the same arguments, but .* reuse=0"):
            attempt(reuse=1 if rank == size - 1 else 0)
        with pytest.raises(ValueError, match="newton: all ranks must give the same arguments, but .* jacobian='products'"):
            attempt(**({"jacobian": "products", "pattern": None} if rank == 0 else {}))
    with pytest.raises(ValueError, match="depends on points beyond the halo"):
        attempt(lambda u: u + 0.1 * case.domain.sum(u) - 1.0, ())
    diagonal = scipy.sparse.eye_array(start.size, case.domain.shape[0] * case.domain.shape[1], k=0, format="csr")
    if size == 1:
        with pytest.raises(ValueError, match=r"newton: .* in row \d+, the entry of column \d+ is missing in the pattern"):
            attempt(pattern=diagonal)
        with pytest.raises(ValueError, match="newton: .*singular.* The null vector is largest in row"):
            attempt(lambda u: u - case.domain.exchange(u, "edge")[1:-1, :-2] - 1.0, ())
    assert mpiad.mpi_allreduce(1) == size


def test_a_residual_that_stalls_ends_the_steps(case, size):
    """Within 1.2 of the root the derivative is ten thousand times too large; 8 (2/3)⁵ is the first iterate there."""

    def residual(u):
        return anp.where(anp.abs(u) < 1.2, u + 1e4 * (u - mpiad.stop_gradient(u)), u**3)

    start = np.full(case.domain.local_shape, 8.0)
    stalled = 8.0 * (2 / 3) ** 5 * np.sqrt(start.size * size) if size == 1 else None
    said = r"it stalled at step 5, residual " + (f"{stalled:.3e}: 5 more steps" if stalled else "")
    with pytest.raises(ConvergenceError, match=said.replace("+", r"\+")) as caught:
        newton(residual, start, rtol=1e-10)
    assert len(caught.value.history) == 11
    np.testing.assert_allclose(caught.value.history[4] / caught.value.history[3], (2 / 3) ** 3, rtol=0.05)


def test_jacobian_that_is_not_symmetric(case):
    def loss(x):
        return case.domain.sum(newton(residual, np.zeros(case.domain.local_shape), x, method="cg") ** 2)

    def residual(u, x):
        v = case.domain.exchange(u)
        return 8 * u - v[:-2, 1:-1] - v[2:, 1:-1] - v[1:-1, :-2] - x * v[1:-1, 2:] - 1.0

    with pytest.raises(ValueError, match="newton: cg needs a symmetric operator, but in the derivative"):
        mpiad.grad(loss)(1.2)


def test_residuals_whose_squares_leave_the_range(rank_rng):
    domain = Domain(17)
    b = rank_rng(100).standard_normal(17)[domain.owned].astype(np.float32)
    size = np.float32(1e-25)

    def residual(u, right):
        v = domain.exchange(u)
        return np.float32(3) * u - v[:-2] - v[2:] - right

    expected = newton(residual, 0 * b, b, rtol=1e-5)
    np.testing.assert_allclose(newton(residual, 0 * b, b * size, rtol=1e-5) / size, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("start", [0.0, 1.0])
def test_a_derivative_that_vanishes_is_not_taken_for_a_neumann_problem(start):
    """u² + 1 = 0 has no root: from 1 the first step leads to 0, where the derivative is zero."""
    with pytest.raises(ConvergenceError, match="the operator maps all fields to zero. .*start from another u") as raised:
        newton(lambda u: u**2 + 1.0, np.full(4, start))
    assert "Neumann" not in str(raised.value)


def test_ranks_pass_the_same_kind_of_pattern(rank, size):
    domain = Domain(SHAPE)
    u = np.ones(domain.local_shape)
    rows = scipy.sparse.csr_array(np.ones((u.size, np.prod(SHAPE))))
    pattern = rows if rank == size - 1 else domain
    if size == 1:
        np.testing.assert_allclose(newton(lambda u: u**2 - 4.0, u, jacobian="sparse", pattern=rows), 2.0 * u)
        return
    with pytest.raises(ValueError, match="all ranks must give the same .*pattern='a sparse matrix'"):
        newton(lambda u: u**2 - 4.0, u, jacobian="sparse", pattern=pattern, comm=domain.comm)
