"""Solves and loops in time inside a jitted function are calls within its program; and jitted functions inside of them."""

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from autograd.extend import defvjp, primitive
from jitted import assert_same
from mpi4py import MPI

import mpiad
from mpiad import linalg
from mpiad.domain import Domain
from mpiad.parallel import Adam, DistributedOptimizer
from mpiad.programs.replay import Replays
from mpiad.timestepping import scan
from mpiad.vi import VI, MeanFieldGaussian

SHAPE, ROOT = (7, 6), MPI.COMM_WORLD.size - 1
DOMAIN = Domain(SHAPE)
POINTS = np.arange(42.0).reshape(SHAPE)[DOMAIN.owned]
X, V = np.array([0.5, 0.9, 1.3]), np.array([1.0, -2.0, 0.5])


@pytest.fixture
def replays(monkeypatch):
    """A function that tells how often programs were replayed since it was called last."""
    taken, bare = [], Replays.take
    monkeypatch.setattr(Replays, "take", lambda self: taken.append(self) or bare(self))

    def count():
        found = len(taken)
        taken.clear()
        return found

    return count


def laplacian(u, k):
    padded = DOMAIN.exchange(u)
    around = padded[2:, 1:-1] + padded[:-2, 1:-1] + padded[1:-1, 2:] + padded[1:-1, :-2]
    return u + k * (4 * u - around)


compiled_laplacian = mpiad.jit(laplacian, strict=True)


def cubic(u, k, a):
    return laplacian(u, k) + u**3 - a


def linear(x):
    b = anp.sin(x[0] * POINTS) + x[1]
    u = linalg.solve(laplacian, b, anp.exp(x[2]), rtol=1e-13)
    return DOMAIN.sum(anp.sin(POINTS) * u**2)


def linear_by_gmres(x):
    """The right-hand side carries a derivative on one rank, and the solve has an adjoint on all."""
    b = anp.sin(POINTS) * (x[0] if MPI.COMM_WORLD.rank == ROOT else 1.0)
    u = linalg.solve(compiled_laplacian, b, 0.7, method="gmres", rtol=1e-13)
    return DOMAIN.sum(u**2) * x[1]


def nonlinear(x):
    u = linalg.newton(cubic, POINTS * 0.0, x[0] ** 2, anp.cos(x[1] * POINTS), rtol=1e-13)
    return DOMAIN.sum(u**2) + x[2]


def elliptic(x):
    u = linalg.solve_elliptic(DOMAIN, anp.exp(x[0] * anp.sin(POINTS)), anp.cos(POINTS) * x[1], x[2] ** 2, rtol=1e-13)
    return DOMAIN.sum(u**2)


def step(u, k, a):
    return u + 0.1 * a * anp.sin(laplacian(u, 0.1)) - 0.01 * k * u


def pushed(u, k, push, a):
    return step(u, k, a) + push


def energy(u, k, a):
    return DOMAIN.sum(u * u) * a


def checkpointed(x):
    u = scan(step, x[0] * anp.sin(POINTS), 12, x[1], checkpoints=3)
    return DOMAIN.sum(u**2) * x[2]


def unrolled_no_further(x):
    u = scan(step, x[0] * anp.sin(POINTS), 60, x[1])
    return DOMAIN.sum(u**2) * x[2]


def observed(x):
    pushes = anp.sin(x[2] * anp.arange(6.0))
    u, energies = scan(pushed, x[0] * anp.sin(POINTS), 6, x[1], inputs=pushes, observe=energy, checkpoints=2)
    return DOMAIN.sum(u**2) + anp.sum(energies**2)


EVERYWHERE, MIXED = (lambda rank: True), (lambda rank: rank != 1)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "fun, compiled",
    [
        (linear, MIXED),
        pytest.param(linear_by_gmres, EVERYWHERE, marks=pytest.mark.thorough),
        (nonlinear, MIXED),
        (elliptic, MIXED),
        (checkpointed, MIXED),
        pytest.param(unrolled_no_further, EVERYWHERE, marks=pytest.mark.thorough),
        # Other ranks that are interpreted, and checkpoints over ranks, are those of the ones before.
        pytest.param(observed, MIXED, marks=pytest.mark.one_rank),
    ],
)
def test_as_it_is_interpreted(fun, compiled, rank):
    """Values, gradients and tangents, each traced once, and replayed with other values."""

    def made(fun):
        return mpiad.jit(fun, strict=True) if compiled(rank) else fun

    jitted = made(fun)
    outside, inside = mpiad.value_and_grad(jitted, root=ROOT), made(mpiad.value_and_grad(fun, root=ROOT))
    tangent = made(lambda x: mpiad.jvp(fun, x, V))
    for x in (X, X * 0.8):
        value, gradient = expected = mpiad.value_and_grad(fun, root=ROOT)(x)
        assert_same(jitted(x), fun(x), 1e-9)
        assert_same(outside(x), expected, 1e-8)
        assert_same(inside(x), expected, 1e-8)
        along = mpiad.mpi_allreduce(gradient @ V)
        # Of the root's term: the derivative along V, from all ranks' gradients.
        value, change = tangent(x)
        assert abs(mpiad.mpi_bcast(change, ROOT) - along) < 1e-7 * abs(along)
    if compiled(rank):
        assert (jitted._cache.attempts.traces, len(jitted._cache.entries), None in jitted._cache.entries.values()) == (
            2,
            2,
            False,
        )


def test_a_solve_against_a_dense_one(rank):
    """The derivative by a complex step through NumPy's own solve, on the whole grid."""
    whole = np.arange(42.0).reshape(SHAPE)
    shifts = [np.kron(np.eye(7, k=by), np.eye(6)) + np.kron(np.eye(7), np.eye(6, k=by)) for by in (1, -1)]
    matrix = 4 * np.eye(42) - sum(shifts)

    def dense(x):
        u = np.linalg.solve(np.eye(42) + np.exp(x[2]) * matrix, (np.sin(x[0] * whole) + x[1]).ravel())
        return np.sum(np.sin(whole).ravel() * u**2)

    jitted = mpiad.value_and_grad(mpiad.jit(linear, strict=True), objective="mean", shared=True)
    for x in (X, X * 0.8, X * 1.1):
        value, gradient = jitted(x)
        np.testing.assert_allclose(value, dense(x), rtol=1e-10)
        steps = [dense(x + 1e-30j * unit).imag / 1e-30 for unit in np.eye(3)]
        np.testing.assert_allclose(gradient, steps, rtol=1e-9)


def test_steps_of_a_scan_are_replayed(replays):
    """Twelve steps with three states kept, three steps at a time: forwards, and each of four blocks once more on a tape."""
    gradient = mpiad.jit(mpiad.grad(checkpointed), strict=True)
    interpreted = mpiad.grad(checkpointed)
    for x in (X, X * 0.8):
        replays()
        assert_same(gradient(x), interpreted(x), 1e-10)
        assert 2 + 4 < replays() < 24 or x is X


def test_a_traced_value_from_around_a_loop_is_refused(caplog):
    """It would be a constant of the first call."""

    def fun(x):
        held = [[[[[[x * 2.0]]]]]]
        return scan(lambda u, k: u + held[0][0][0][0][0][0], np.zeros(3), 4, checkpoints=2)

    jitted = mpiad.jit(fun)
    for x in (X, X * 3, X * 5):
        np.testing.assert_allclose(jitted(x), 8 * x, rtol=1e-14)
    assert "scan gets functions or objects that contain traced values: pass the values as arguments" in caplog.text


@pytest.mark.parametrize("used", [(), (0,)], ids=["unused", "used on rank 0"])
@pytest.mark.parametrize("leaves", ["forwards", "backwards"])
@pytest.mark.parametrize("checkpoints, steps", [(3, 3), (2, 5)])
def test_a_loop_before_the_line_at_which_a_rank_leaves_its_trace(checkpoints, steps, leaves, used, rank, size):
    """The last rank is interpreted from there on: it still takes part in the reverse pass of the loop."""
    x, last = X + rank, size - 1

    def advance(u, k, x):
        return u + 0.1 * mpiad.mpi_allreduce(anp.sin(x))

    def fun(x):
        z = x if rank < last or leaves == "forwards" else decides_backwards(x)
        y = scan(advance, x, steps, z, checkpoints=checkpoints)
        if leaves == "forwards" and rank == last and x[0] < -100:
            return 7.0
        return anp.sum(z**2) + (anp.sum(y) if rank in used else 0.0)

    expected = 2 * x + (0.1 * steps * np.cos(x) + (rank == 0) if used else 0.0)
    inside = mpiad.grad(mpiad.jit(fun), objective="sum")
    outside = mpiad.jit(mpiad.grad(fun, objective="sum"))
    for gradient in (inside, outside, inside, outside):
        np.testing.assert_allclose(gradient(x), expected, rtol=1e-14)


@primitive
def decides_backwards(x):
    return 1.0 * x


defvjp(decides_backwards, lambda ans, x: lambda g: 1.0 * g if anp.sum(g) < 1e6 else 0.0 * g)


def loss(x, y):
    return mpiad.mpi_allreduce(anp.sum((anp.sin(x) - y) ** 2))


Y = np.array([0.1, 0.2, 0.3])


def test_jitted_functions_in_solves_and_optimizers(replays, rank):
    """Right, and compiled: nearly every evaluation is a replay."""
    fast, mine = mpiad.jit(loss, strict=True), Y * (1 + rank)

    def descends(fun):
        return mpiad.minimize(lambda x: fun(x, mine), X, options={"maxiter": 5}).x

    residuals = mpiad.jit(lambda x: anp.sin(x) - mine, strict=True)
    trained = DistributedOptimizer(Adam(0.05))

    def trains(fun):
        state, x = trained.setup(X), X
        for _ in range(4):
            state, x, _ = trained.step(state, x, fun, mine)
        return x

    def infers(fun):
        vi = VI(lambda theta, data: fun(theta, data), MeanFieldGaussian(3), ("norm", 0.0, 1.0), Adam(0.1), 1.0, 12, rng=1)
        return vi.run(np.tile(Y, (4, 1)), 3).params["mean"]

    def local(x, y):
        return anp.sum((x - y) ** 2)

    def solves(operator):
        u = linalg.solve(operator, anp.cos(POINTS), 0.5, method="bicgstab", rtol=1e-12)
        return linalg.newton(lambda u, k: operator(u, k) + u**3, u, 0.3, rtol=1e-12)

    # From the third step of a training on, a program of plain arrays is called without `take`.
    cases = [
        (descends, loss, fast, 5), (trains, loss, fast, 1), (infers, local, mpiad.jit(local, strict=True), 3),
        (solves, laplacian, compiled_laplacian, 10),
        (lambda fun: mpiad.optimize.least_squares(fun, X).x, lambda x: anp.sin(x) - mine, residuals, 2),
    ]  # fmt: skip
    for solved, fun, jitted, least in cases:
        replays()
        found = solved(jitted)
        assert replays() >= least and None not in jitted._cache.entries.values()
        assert_same(found, solved(fun), 1e-9)


def test_tangents_of_reverse_passes():
    """`linearize` of a jitted function with a loop inside, whose products with tangents transpose its reverse pass."""
    x, v = X, V

    def whole(x):
        u = x
        for _ in range(5):
            u = 0.9 * u + 0.1 * anp.sin(x)
        return anp.sum(u**2)

    def looped(x):
        return anp.sum(scan(lambda u, k, x: 0.9 * u + 0.1 * anp.sin(x), x, 5, x, checkpoints=2) ** 2)

    linear, gradient = mpiad.linearize(mpiad.jit(looped))(x), autograd.grad(whole)(x)
    np.testing.assert_allclose(linear.vjp(1.0), gradient, rtol=1e-12)
    np.testing.assert_allclose(linear.jvp(v), gradient @ v, rtol=1e-12)
    np.testing.assert_allclose(linear.jvp(np.stack([v, 2 * v]), batch=True), gradient @ v * np.array([1, 2]), rtol=1e-12)
    np.testing.assert_allclose(mpiad.jvp(lambda w: linear.vjp(w), 1.0, 1.0)[1], gradient, rtol=1e-12)


@pytest.mark.parametrize("calls", [1, 2])
def test_linearize_around_a_loop_of_many_steps(calls, rank, size, rank_rng):
    """The first call is interpreted, and records for products in both directions."""
    starts, along = ([rank_rng(shift + k).standard_normal(3) for k in range(size)] for shift in (0, 50))

    def loop(x):
        return scan(lambda u, k: anp.sin(u) + mpiad.mpi_allreduce(anp.sum(u)) / (3 * size + k), x, 60) ** 2

    def whole(x):
        u = x
        for k in range(60):
            u = np.sin(u) + np.sum(u) / (3 * size + k)
        return u**2

    linear = mpiad.linearize(mpiad.jit(loop))
    for _ in range(calls):
        products = linear(starts[rank])
    expected = np.imag(whole(np.concatenate(starts) + 1e-30j * np.concatenate(along))) / 1e-30
    np.testing.assert_allclose(products.jvp(along[rank]), np.split(expected, size)[rank], rtol=1e-11)
    pairing = mpiad.mpi_allreduce(np.sum(products.vjp(starts[rank]) * along[rank]))
    np.testing.assert_allclose(pairing, expected @ np.concatenate(starts), rtol=1e-11)
