"""`solve` on blocks against the matrix of the whole grid in one process, on every number of ranks."""

import autograd.numpy as anp
import numpy as np
import pytest
from diffusion import Diffusion
from mpi4py import MPI
from whole_grid import owned

import mpiad
import mpiad.linalg.system
from mpiad.domain import Domain
from mpiad.errors import ConvergenceError
from mpiad.linalg import solve
from mpiad.testing import check_grads

SHAPE = (7, 6)
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
TIGHT = {"rtol": 1e-13}


class Case:
    """The same problem on all ranks: whole fields, this rank's blocks, and the operator on blocks."""

    def __init__(self, rank_rng):
        self.domain, self.reference = Domain(SHAPE), Diffusion(SHAPE)
        rng = rank_rng(100)
        self.kappa, self.c = np.exp(0.3 * rng.standard_normal(SHAPE)), 2.0
        self.b, self.w = rng.standard_normal(SHAPE), rng.standard_normal(SHAPE)
        self.directions = rng.standard_normal(SHAPE), 0.7, rng.standard_normal(SHAPE)
        self.products = 0

    def block(self, u):
        return u[self.domain.owned]

    def local(self, kappa, c, b):
        """Return the nest that the tests differentiate by."""
        return {"medium": (self.block(kappa), c), "b": self.block(b)}

    @property
    def point(self):
        return self.local(self.kappa, self.c, self.b)

    @property
    def direction(self):
        return self.local(*self.directions)

    def matvec(self, u, medium):
        self.products += 1
        kappa, c = medium
        k, v = self.domain.exchange(kappa, "edge"), self.domain.exchange(u)
        rows = (k[1:, 1:-1] + k[:-1, 1:-1]) / 2 * (v[1:, 1:-1] - v[:-1, 1:-1])
        columns = (k[1:-1, 1:] + k[1:-1, :-1]) / 2 * (v[1:-1, 1:] - v[1:-1, :-1])
        return rows[:-1] - rows[1:] + columns[:, :-1] - columns[:, 1:] + c * u

    def jacobi(self, r, medium):
        kappa, c = medium
        return r / (4 * kappa + c)

    def loss(self, x):
        u = solve(self.matvec, x["b"], x["medium"], **TIGHT)
        return self.domain.dot(self.block(self.w), u**2) / 2

    def check(self, found, expected):
        """Compare a nest like `point` with whole fields; the c of all ranks are one number's shares."""
        of_kappa, of_c, of_b = expected
        total_of_c = mpiad.mpi_allreduce(found["medium"][1])
        np.testing.assert_allclose(found["medium"][0], self.block(of_kappa), **CLOSE)
        np.testing.assert_allclose(total_of_c, of_c, **CLOSE)
        np.testing.assert_allclose(found["b"], self.block(of_b), **CLOSE)


@pytest.fixture
def case(rank_rng):
    return Case(rank_rng)


@pytest.mark.parametrize("preconditioned", [False, True])
def test_value(case, preconditioned):
    settings = {"preconditioner": case.jacobi} if preconditioned else {}
    u = solve(case.matvec, case.block(case.b), (case.block(case.kappa), case.c), **TIGHT, **settings)
    np.testing.assert_allclose(u, case.block(case.reference.solve(case.kappa, case.c, case.b)), **CLOSE)


def test_gradient(case):
    value, gradient = mpiad.value_and_grad(case.loss)(case.point)
    u = case.reference.solve(case.kappa, case.c, case.b)
    np.testing.assert_allclose(value, np.sum(case.w * u**2) / 2, **CLOSE)
    case.check(gradient, case.reference.gradient(case.kappa, case.c, case.b, case.w))


def test_tangent(case):
    def solution(x):
        return solve(case.matvec, x["b"], x["medium"], **TIGHT)

    _, tangent = mpiad.jvp(solution, case.point, case.direction)
    expected = case.reference.tangent(case.kappa, case.c, case.b, case.directions)
    np.testing.assert_allclose(tangent, case.block(expected), **CLOSE)


@pytest.mark.not_on(4)
def test_hessian(case):
    expected = case.reference.hessian_product(case.kappa, case.c, case.b, case.w, case.directions)
    case.check(mpiad.hvp(case.loss)(case.point, case.direction), expected)

    def slope(x):
        # Reverse over reverse: the derivative of this rank's part of the gradient along the direction.
        g, d = mpiad.grad(case.loss)(x), case.direction
        parts = (g["b"] * d["b"], g["medium"][0] * d["medium"][0], g["medium"][1] * d["medium"][1])
        return sum(anp.sum(part) for part in parts)

    case.check(mpiad.grad(slope, objective="sum")(case.point), expected)


@pytest.mark.one_rank  # on ranks the gradient is compared with the reference's, which is sharper
def test_taylor_rates(case):
    check_grads(case.loss, case.point, order=1)


def test_solution_that_one_rank_uses(case, rank):
    # J = the sum of the root's block; the others return None and must solve the adjoint all the same.
    def loss(x):
        u = solve(case.matvec, x["b"], x["medium"], **TIGHT)
        return anp.sum(u**2) / 2 if rank == 0 else None

    roots = np.zeros(SHAPE)
    roots[owned(SHAPE, case.domain.dims, 0)] = 1
    case.check(mpiad.grad(loss)(case.point), case.reference.gradient(case.kappa, case.c, case.b, roots))


@pytest.mark.not_on(4)
def test_right_hand_side_alone(case):
    # Nothing but b is differentiated, and then nothing but a parameter, on one rank.
    def loss(b):
        u = solve(case.matvec, b, (case.block(case.kappa), case.c), **TIGHT)
        return case.domain.dot(case.block(case.w), u**2) / 2

    expected = case.reference.gradient(case.kappa, case.c, case.b, case.w)
    np.testing.assert_allclose(mpiad.grad(loss)(case.block(case.b)), case.block(expected[2]), **CLOSE)

    def identity(b):
        return case.domain.sum(solve(lambda u: 2 * u, b) ** 2)

    np.testing.assert_allclose(mpiad.grad(identity)(case.block(case.b)), case.block(case.b) / 2, **CLOSE)


def test_rank_without_variables(case, rank):
    # The parameter is None on all ranks but the root, where it is a number.
    def matvec(u, c):
        share = mpiad.mpi_bcast(c, 0)
        return case.matvec(u, (case.block(case.kappa), share))

    def loss(x):
        c = x if rank == 0 else None
        u = solve(matvec, case.block(case.b), c, **TIGHT)
        return case.domain.dot(case.block(case.w), u**2) / 2

    expected = case.reference.gradient(case.kappa, case.c, case.b, case.w)[1]
    np.testing.assert_allclose(mpiad.grad(loss)(case.c), expected if rank == 0 else 0.0, **CLOSE)


@pytest.mark.not_on(4)
def test_several_right_hand_sides_as_one_system(case, rank_rng):
    # Leading axes of u are further unknowns; one iteration serves all of them.
    many = rank_rng(50).standard_normal((3, *SHAPE))

    def matvec(u, kappa):
        k, v = case.domain.exchange(kappa, "edge"), case.domain.exchange(u)
        rows = (k[1:, 1:-1] + k[:-1, 1:-1]) / 2 * (v[:, 1:, 1:-1] - v[:, :-1, 1:-1])
        columns = (k[1:-1, 1:] + k[1:-1, :-1]) / 2 * (v[:, 1:-1, 1:] - v[:, 1:-1, :-1])
        return rows[:, :-1] - rows[:, 1:] + columns[:, :, :-1] - columns[:, :, 1:] + case.c * u

    def loss(kappa):
        u = solve(matvec, case.block_of_many(many), kappa, **TIGHT)
        return case.domain.dot(anp.broadcast_to(case.block(case.w), u.shape), u**2) / 2

    case.block_of_many = lambda u: u[(slice(None), *case.domain.owned)]
    gradient = mpiad.grad(loss)(case.block(case.kappa))
    expected = sum(case.reference.gradient(case.kappa, case.c, b, case.w)[0] for b in many)
    np.testing.assert_allclose(gradient, case.block(expected), **CLOSE)


def test_communicator_of_some_ranks(rank, rank_rng):
    part = MPI.COMM_WORLD.Split(rank % 2, rank)
    case = Case(rank_rng)
    case.domain = Domain(SHAPE, comm=part)

    def loss(x):
        u = solve(case.matvec, x["b"], x["medium"], **TIGHT, comm=part)
        return case.domain.dot(case.block(case.w), u**2) / 2

    gradient = mpiad.grad(loss, comm=part)(case.point)
    expected = case.reference.gradient(case.kappa, case.c, case.b, case.w)
    np.testing.assert_allclose(gradient["medium"][0], case.block(expected[0]), **CLOSE)
    part.Free()


@pytest.mark.not_on(4)
def test_single_precision(case):
    point = case.block(case.b).astype("f4"), (case.block(case.kappa).astype("f4"), np.float32(case.c))

    def loss(b, medium):
        return case.domain.sum(solve(case.matvec, b, medium, rtol=1e-6) ** 2)

    u = solve(case.matvec, point[0], point[1], rtol=1e-6)
    assert u.dtype == np.float32
    reference = case.reference.solve(case.kappa, case.c, case.b)
    np.testing.assert_allclose(u, case.block(reference), atol=1e-5 * np.abs(reference).max())
    of_b, of_medium = mpiad.grad(loss, (0, 1))(*point)
    assert of_b.dtype == of_medium[0].dtype == np.float32
    expected = case.reference.gradient(case.kappa, case.c, case.b, 2.0)
    np.testing.assert_allclose(of_b, case.block(expected[2]), atol=1e-4 * np.abs(expected[2]).max())
    np.testing.assert_allclose(of_medium[0], case.block(expected[0]), atol=1e-4 * np.abs(expected[0]).max())


@pytest.mark.not_on(4)
def test_products_with_the_operator_are_counted(case):
    """One for each iteration and two for checks, one in derivatives, where a product and its adjoint are added."""
    medium, w = (case.block(case.kappa), case.c), case.block(case.w)

    def iterations(b):
        norms = []
        solve(case.matvec, b, medium, callback=norms.append)
        return len(norms)

    u = solve(case.matvec, case.block(case.b), medium)
    of_solution, of_adjoint = iterations(case.block(case.b)), iterations(w * u)
    case.products = 0
    solve(case.matvec, case.block(case.b), medium, verify=False)
    # Where the end isn't foreseen, the last residual is known after one product more.
    assert of_solution <= case.products <= of_solution + 1
    case.products = 0

    def loss(x):
        return case.domain.dot(w, solve(case.matvec, case.block(case.b), x) ** 2) / 2

    mpiad.grad(loss)(medium)
    assert 4 <= case.products - of_solution - of_adjoint <= 6


def test_one_reduction_for_each_iteration(case, monkeypatch):
    calls, norms = [], []

    def counting(x, comm=None):
        calls.append(x.size)
        return mpiad.mpi_allreduce(x, comm=comm)

    monkeypatch.setattr(mpiad.linalg.system, "mpi_allreduce", counting)
    solve(case.matvec, case.block(case.b), (case.block(case.kappa), case.c), callback=norms.append)
    # Besides: the norm of b, one that is asked for near the end or twice, and two for checks.
    assert len(calls) <= len(norms) + 5


def test_residuals_and_start(case):
    medium, b, norms = (case.block(case.kappa), case.c), case.block(case.b), []
    u = solve(case.matvec, b, medium, rtol=1e-6, callback=norms.append)
    true = case.domain.norm(b - case.matvec(u, medium))
    np.testing.assert_allclose(norms[-1], true, 1e-6)
    assert true <= 1e-6 * case.domain.norm(b) < norms[-2]
    again = []
    np.testing.assert_array_equal(solve(case.matvec, b, medium, x0=u, rtol=1e-6, callback=again.append), u)
    assert again == []
    better = solve(case.matvec, b, medium, x0=u, **TIGHT, callback=again.append)
    np.testing.assert_allclose(better, case.block(case.reference.solve(case.kappa, case.c, case.b)), **CLOSE)
    rough = []
    solve(case.matvec, b, medium, atol=0.1 * case.domain.norm(b), callback=rough.append)
    assert len(rough) < len(norms) and rough[-1] <= 0.1 * case.domain.norm(b)


@pytest.mark.not_on(4)
def test_gradient_does_not_depend_on_the_start(case):
    start = case.block(case.reference.solve(case.kappa, case.c, case.b)) + 0.1

    def loss(x):
        u = solve(case.matvec, x["b"], x["medium"], x0=start * x["medium"][1], preconditioner=lambda r: r / 4, **TIGHT)
        return case.domain.dot(case.block(case.w), u**2) / 2

    case.check(mpiad.grad(loss)(case.point), case.reference.gradient(case.kappa, case.c, case.b, case.w))


@pytest.mark.not_on(4)
@pytest.mark.parametrize("systems", [1, 2])
def test_the_adjoint_of_a_compliance_ends_at_its_start(case, systems):
    """The derivative of b·u by u is b, so the adjoint solution is a multiple of u, for each system."""
    scales = np.array([-3.0, 0.5])[:systems, None, None]
    medium, b = (case.block(case.kappa), case.c), case.block(case.b) * np.ones((systems, 1, 1))

    def matvec(u, medium):
        return anp.stack([Case.matvec(case, u[k], medium) for k in range(systems)])

    def iterations_and_gradient(change):
        def loss(medium):
            u = solve(matvec, b, medium, batch=1, **TIGHT)
            case.products = 0
            return case.domain.dot(scales * b + change, u)

        gradient = mpiad.grad(loss)(medium)
        return case.products, gradient

    (few, found), (many, _) = (iterations_and_gradient(change) for change in (0.0, case.block(case.w)))
    # The product that is traced, the residual at the start and the one at the end, which is checked.
    assert few <= 3 * systems < many
    u = case.block(case.reference.solve(case.kappa, case.c, case.b))
    np.testing.assert_allclose(found[1], -scales.sum() * np.sum(u**2), rtol=1e-9)


@pytest.mark.not_on(4)
def test_preconditioner_saves_iterations(case, rank_rng):
    uneven = np.exp(3 * rank_rng(60).standard_normal(SHAPE))
    medium, plain, jacobi = (case.block(uneven), case.c), [], []
    u = solve(case.matvec, case.block(case.b), medium, callback=plain.append, **TIGHT)
    diagonal = case.block(case.reference.matrix(uneven, case.c).diagonal().reshape(SHAPE))

    def precondition(r, damping=1.0):  # what has a default isn't asked for
        return damping * r / diagonal

    v = solve(case.matvec, case.block(case.b), medium, preconditioner=precondition, callback=jacobi.append, **TIGHT)
    assert len(jacobi) < 0.8 * len(plain)
    np.testing.assert_allclose(u, v, 1e-8, 1e-10)


def test_right_hand_side_of_zeros(case):
    zeros = np.zeros(case.domain.local_shape)
    u, gradient = mpiad.make_vjp(lambda b: solve(case.matvec, b, (case.block(case.kappa), case.c), **TIGHT))(zeros)[::-1]
    assert not u.any()
    expected = case.reference.solve(case.kappa, case.c, case.w)
    np.testing.assert_allclose(gradient(case.block(case.w)), case.block(expected), **CLOSE)


@pytest.mark.parametrize("method", ["cg", "gmres", "bicgstab"])
def test_averaged_copies_of_the_unknowns(method, rank, size, rank_rng):
    """Normal equations with rows of the matrix on each rank, and all unknowns on each rank, as on the page."""
    blocks = [rank_rng(7 + k).standard_normal((3 + k, 3)) for k in range(size)]
    rng = np.random.default_rng(3)
    whole, data = np.concatenate(blocks), rng.standard_normal(sum(map(len, blocks)))
    rows = np.array_split(np.arange(len(data)), np.cumsum([len(block) for block in blocks])[:-1])[rank]

    def average(u):
        return mpiad.mpi_allreduce(u) / size

    def product(u, matrix):
        return mpiad.mpi_allreduce(anp.dot(matrix.T, anp.dot(matrix, average(u))))

    def loss(matrix):
        b = mpiad.mpi_allreduce(anp.dot(matrix.T, data[rows]))
        return anp.sum(anp.exp(average(solve(product, b, matrix, method=method, **TIGHT))) * np.arange(1.0, 4.0))

    def dense(matrix):
        return np.sum(np.exp(np.linalg.solve(matrix.T @ matrix, matrix.T @ data)) * np.arange(1.0, 4.0))

    value, gradient = mpiad.value_and_grad(loss, root=size - 1)(whole[rows])
    np.testing.assert_allclose(value, dense(whole), **CLOSE)
    units = np.eye(whole.size).reshape(-1, *whole.shape)
    expected = np.reshape([dense(whole + 1e-30j * unit).imag / 1e-30 for unit in units], whole.shape)
    np.testing.assert_allclose(gradient, expected[rows], **CLOSE)


@pytest.mark.mpi(min_size=2)
def test_copies_that_are_not_averaged(rank_rng):
    matrix = rank_rng(7).standard_normal((4, 3))

    def loss(matrix):
        b = mpiad.mpi_allreduce(anp.sum(matrix, axis=0))
        return anp.sum(solve(lambda u, m: mpiad.mpi_allreduce(anp.dot(m.T, anp.dot(m, u))), b, matrix, **TIGHT))

    with pytest.raises((ValueError, ConvergenceError), match="average the copies"):
        mpiad.grad(loss)(matrix)
