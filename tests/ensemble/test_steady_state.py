"""Steady states: closed forms, SciPy's root, derivatives by formulas, codes, ranks."""

from __future__ import annotations

import logging

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI
from scipy.optimize import root

import mpiad
from mpiad.ensemble import (
    RK45,
    EnsembleGPU,
    EnsembleMPI,
    EnsembleProblem,
    EnsembleSerial,
    EnsembleVectorized,
    ODEProblem,
    Rodas5P,
    remake,
    steady_state,
)

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
ALONE = MPI.COMM_SELF  # each rank differentiates its own


def logistic(u, p, t):
    return [p[0] * u[0] * (1 - u[0] / p[1])]


def reactions(u, p, t):
    """A is fed, 2 A <-> B, B + C <-> nothing left, C is fed by A."""
    a, b, c = u
    k = p["k"]
    return [
        p["feed"] - 2 * k[0] * a * a + 2 * k[1] * b - k[2] * a,
        k[0] * a * a - k[1] * b - k[3] * b * c,
        k[2] * a - k[3] * b * c - 0.1 * c,
    ]


LOGISTIC = ODEProblem(logistic, [0.1], (0.0, 1.0))
P = np.column_stack([np.linspace(0.5, 4.0, 7), np.linspace(1.0, 3.0, 7)])
NETWORK = ODEProblem(reactions, [1.0, 0.0, 0.0], (0.0, 1.0))
RATES = np.random.default_rng(0).uniform(0.5, 2.0, (6, 4)) * np.array([100.0, 1.0, 1.0, 10.0])
FEED = np.linspace(0.5, 2.0, 6)


@pytest.mark.serial
@pytest.mark.parametrize("tspan", [(0.0, 1.0), (0.0, 0.0)])
def test_the_capacity_of_a_population(tspan):
    # A tenth of it grows slowly at first, and Newton's method by itself would go back to the empty state.
    found = steady_state(EnsembleProblem(remake(LOGISTIC, tspan=tspan), p=P))
    np.testing.assert_allclose(found.u[:, 0], P[:, 1], rtol=1e-12)
    np.testing.assert_allclose(found.jacobian[:, 0, 0], -P[:, 0], rtol=1e-10)
    np.testing.assert_allclose(found.eigenvalues()[:, 0], -P[:, 0], rtol=1e-10)
    assert found.success.all() and (found.niter < 40).all()
    alone = steady_state(remake(LOGISTIC, p=P[2]))
    assert alone.u.shape == (1,) and alone.retcode == "Success" and alone.u[0] == pytest.approx(P[2, 1], rel=1e-12)


@pytest.mark.serial
def test_a_linear_system_and_its_derivatives():
    rng = np.random.default_rng(1)
    a, b, weight = rng.normal(size=(5, 3, 3)) - 4 * np.eye(3), rng.normal(size=(5, 3)), rng.normal(size=(5, 3))

    def linear(u, p, t):
        return [sum(p["a"][i, j] * u[j] for j in range(3)) + p["b"][i] for i in range(3)]

    def states(a, b):
        problem = ODEProblem(linear, np.zeros(3), (0.0, 0.0), {"a": np.eye(3), "b": np.zeros(3)})
        return steady_state(EnsembleProblem(problem, p={"a": a, "b": b})).u

    exact = -np.linalg.solve(a, b[..., None])[..., 0]
    np.testing.assert_allclose(states(a, b), exact, rtol=1e-11)
    # u = -A⁻¹ b: the cotangent of b is -A⁻ᵀ w, that of A the same times uᵀ.
    by_b = -np.linalg.solve(np.swapaxes(a, 1, 2), weight[..., None])[..., 0]
    bars = mpiad.grad(lambda a, b: anp.sum(weight * states(a, b)), argnum=(0, 1), comm=ALONE)(a, b)
    np.testing.assert_allclose(bars[1], by_b, rtol=1e-10)
    np.testing.assert_allclose(bars[0], by_b[:, :, None] * exact[:, None], rtol=1e-9, atol=1e-12)
    da, db = rng.normal(size=a.shape), rng.normal(size=b.shape)
    tangent = mpiad.jvp(lambda x: states(a + x * da, b + x * db), np.array(0.0), np.array(1.0))[1]
    moved = -np.linalg.solve(a, (db + np.einsum("nij,nj->ni", da, exact))[..., None])[..., 0]
    np.testing.assert_allclose(tangent, moved, rtol=1e-10)


def by_scipy(i, u0):
    p = {"k": RATES[i], "feed": FEED[i]}
    return root(lambda u: np.array(reactions(u, p, 0.0)), u0, method="hybr", tol=1e-14).x


@pytest.mark.serial
def test_a_chemical_network_as_scipys_root():
    found = steady_state(EnsembleProblem(NETWORK, p={"k": RATES, "feed": FEED}))
    assert found.success.all() and (found.u > 0).all() and (found.eigenvalues().real < 0).all()
    for i, u in enumerate(found.u):
        np.testing.assert_allclose(u, by_scipy(i, 1.01 * u), rtol=1e-9)

    # Shared rates: their cotangents are sums over the trajectories.
    def total(feed, k):
        many = EnsembleProblem(NETWORK, lambda one, i, repeat: remake(one, p={"k": k, "feed": feed[i - 1]}))
        return anp.sum(steady_state(many, trajectories=6).u ** 2)

    by_feed, by_k = mpiad.grad(total, argnum=(0, 1), comm=ALONE)(FEED, RATES[0])
    h = 1e-5
    ends = [total(FEED, RATES[0] * (1 + sign * h * np.eye(4)[0])) for sign in (-1, 1)]
    assert by_k[0] == pytest.approx((ends[1] - ends[0]) / (2 * h * RATES[0, 0]), rel=1e-6)
    ends = [total(FEED + sign * h * np.eye(6)[3], RATES[0]) for sign in (-1, 1)]
    assert by_feed[3] == pytest.approx((ends[1] - ends[0]) / (2 * h), rel=1e-6)


def kinds(u, p, t):
    """By p[0]: two steady states, one of them stable; none; all states; one."""
    return [anp.where(p[0] == 0, 1 - u[0] ** 2, anp.where(p[0] == 1, 1 + u[0] ** 2, anp.where(p[0] == 2, 0 * u[0], -u[0])))]


@pytest.mark.serial
def test_codes_of_those_that_have_none(caplog):
    start, kind = np.array([[0.5], [0.5], [0.5], [np.inf], [3.0]]), np.array([[0.0], [1.0], [2.0], [3.0], [3.0]])
    many = EnsembleProblem(ODEProblem(kinds, [0.0], (0.0, 0.0)), u0=start, p=kind)
    with caplog.at_level(logging.WARNING, "mpiad"):
        found = steady_state(many)
    assert found.retcode[[0, 2, 3, 4]].tolist() == ["Success", "Success", "InitialFailure", "Success"]
    assert found.retcode[1] in ("ConvergenceFailure", "MaxIters")
    np.testing.assert_allclose(found.u[[0, 2, 4], 0], [1.0, 0.5, 0.0], atol=1e-9)
    assert np.isnan(found.u[[1, 3]]).all() and np.isnan(found.eigenvalues()[[1, 3]]).all()
    assert len(caplog.messages) == 1 and "2 of 5 trajectories ended without success" in caplog.messages[0]
    # Their cotangents aren't used, and harm nobody.
    bar = autograd.grad(lambda p: anp.sum(steady_state(remake(many, p=p)).u[0]))(kind)
    assert np.isfinite(bar).all()
    assert steady_state(many, max_iters=1).retcode[4] == "MaxIters"


@pytest.mark.one_rank
@pytest.mark.few(1)
@pytest.mark.parametrize("mpi", [False, True])
@pytest.mark.parametrize("alg", [RK45(), Rodas5P()], ids=["explicit", "implicit"])
@pytest.mark.parametrize("tspan", [(0.0, 0.0), (0.0, 9.0)], ids=["from u0", "after a solve"])
def test_a_circle_of_steady_states_is_approached_by_a_solve(tspan, alg, mpi):
    """Nothing linear is conserved: the steady state has the direction of the start."""
    circle = ODEProblem(lambda u, p, t: [-p[0] * x * (u[0] ** 2 + u[1] ** 2 - p[1] ** 2) for x in u], [0.3, 0.4], tspan)
    # All at the same rate, p[0] p[1]².
    u0, p = np.array([[0.9, 1.2], [0.9, -1.2], [0.1, 0.5]]), np.array([[1.0, 2.0], [4.0, 1.0], [16.0, 0.5]])
    way, weight = EnsembleMPI() if mpi else EnsembleVectorized(), np.arange(1.0, 7.0).reshape(3, 2)
    found = lambda u0, p: steady_state(EnsembleProblem(circle, u0=u0, p=p), alg, way).u  # noqa: E731
    exact = lambda u0, p: p[:, 1:] * u0 / anp.sqrt(anp.sum(u0**2, axis=1, keepdims=True))  # noqa: E731
    np.testing.assert_allclose(found(u0, p), exact(u0, p), rtol=1e-9, atol=1e-9)
    bars = [mpiad.grad(lambda *x, f=f: anp.sum(weight * f(*x)), argnum=(0, 1), shared=True)(u0, p) for f in (found, exact)]
    for bar, expected in zip(*bars):
        np.testing.assert_allclose(bar, expected, rtol=1e-8, atol=1e-8)
    x, y = (mpiad.jvp(lambda x, f=f: f(u0 + x, p * (1 + x)), 0.0, 1.0)[1] for f in (found, exact))
    np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("mass", [None, 3.0 * np.eye(2)], ids=["", "mass"])
@pytest.mark.parametrize("rate", [1e-3, 1.0, 100.0])
def test_starts_in_a_steady_state_that_is_not_isolated(rate, mass):
    """Tangents settle at this rate, although the states don't move."""
    p = np.array([[rate, 2.0], [rate, 0.5]])
    circle = ODEProblem(
        lambda u, p, t: [-p[0] * x * (u[0] ** 2 + u[1] ** 2 - p[1] ** 2) for x in u], [0.3, 0.4], (0.0, 0.0), p[0],
        mass_matrix=mass,
    )  # fmt: skip
    u0, weight = np.array([[1.2, 1.6], [0.3, -0.4]]), np.arange(1.0, 5.0).reshape(2, 2)
    found = lambda u0, p: steady_state(EnsembleProblem(circle, u0=u0, p=p), Rodas5P()).u  # noqa: E731
    exact = lambda u0, p: p[:, 1:] * u0 / anp.sqrt(anp.sum(u0**2, axis=1, keepdims=True))  # noqa: E731
    for place in (0, 1):
        bar, expected = (mpiad.grad(lambda *x, f=f: anp.sum(weight * f(*x) ** 2), place)(u0, p) for f in (found, exact))
        np.testing.assert_allclose(bar, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.serial
def test_where_every_state_is_steady_and_where_the_jacobian_is_singular_on_the_way():
    """f = 0, and u' = (-p u, -u³), whose limit is (0, v - u³ / (3 p))."""
    still = lambda u, p, t: [0 * p * u[0], 0 * u[1]]  # noqa: E731
    ends = lambda f: lambda u0, p: steady_state(ODEProblem(f, u0, (0.0, 0.0), p)).u  # noqa: E731
    u0 = np.array([1.0, 2.0])
    for f, exact in (
        (still, lambda u, p: u),
        (lambda u, p, t: [-p * u[0], -(u[0] ** 3)], lambda u, p: anp.array([0.0 * u[0], u[1] - u[0] ** 3 / (3 * p)])),
    ):
        for place in (0, 1):
            bars = [mpiad.grad(lambda *x, u=u: anp.sum(u(*x) ** 2), place)(u0, 1.5) for u in (ends(f), exact)]
            np.testing.assert_allclose(*bars, rtol=1e-6, atol=1e-6)


@pytest.mark.serial
def test_totals_where_f_is_not_finite_at_other_states():
    """The sum is conserved, but f isn't finite at states that are larger by a tenth, so that this isn't known."""

    def walled(u, p, t):
        flux = (p[0] * u[0] - u[1]) * anp.where(u[0] + u[1] > 1.6, np.nan, 1.0)
        return [-flux, flux]

    many = EnsembleProblem(ODEProblem(walled, [1.0, 0.5], (0.0, 1.0)), p=np.array([[0.7], [1.3]]))
    found = lambda p: steady_state(remake(many, p=p), Rodas5P()).u  # noqa: E731
    exact = lambda p: 1.5 * anp.concatenate([1 / (1 + p), p / (1 + p)], axis=1)  # noqa: E731
    p = np.array([[0.7], [1.3]])
    np.testing.assert_allclose(found(p), exact(p), rtol=1e-8)
    bars = [autograd.grad(lambda p, f=f: anp.sum(f(p) ** 3))(p) for f in (found, exact)]
    np.testing.assert_allclose(*bars, rtol=1e-8)


@pytest.mark.parametrize("gather, objective", [(True, "root"), (False, "sum")])
def test_over_the_ranks(gather, objective):
    def states(p, way):
        return steady_state(EnsembleProblem(LOGISTIC, p=p), ensemblealg=way)

    whole, mpi = states(P, EnsembleSerial()), EnsembleMPI(gather=gather)
    mine = states(P, mpi)
    for name in ("u", "retcode", "niter", "jacobian"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(whole, name)[mine.indices], err_msg=name)
    assert gather == (len(mine.u) == 7) or SIZE == 1
    loss = lambda p: anp.sum(states(p, mpi).u ** 3)  # noqa: E731
    bar = mpiad.grad(loss, shared=True, objective=objective)(P)
    np.testing.assert_allclose(bar, np.column_stack([0 * P[:, 1], 3 * P[:, 1] ** 2]), rtol=1e-10, atol=1e-10)
    for i in range(7):
        alone = states(P[i : i + 1], EnsembleSerial())
        np.testing.assert_array_equal(alone.u[0], whole.u[i])
    single = steady_state(remake(LOGISTIC, p=P[0]), ensemblealg=mpi)
    assert single.u == pytest.approx(P[0, 1:], rel=1e-12)
    assert (np.shape(single.retcode), np.shape(single.jacobian)) == ((), (1, 1))


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_trajectories_than_ranks(count):
    def loss(theta):
        # Dtypes and traced values come out of prob_func, which is called for nobody's sake on some ranks.
        many = EnsembleProblem(LOGISTIC, lambda one, i, repeat: remake(one, u0=np.float32([0.1]), p=theta))
        return anp.sum(steady_state(many, ensemblealg=EnsembleMPI(), trajectories=count).u ** 2)

    value, bar = mpiad.value_and_grad(loss, shared=True)(P[3])
    assert value == pytest.approx(count * P[3, 1] ** 2, rel=1e-5)
    np.testing.assert_allclose(bar, [0.0, count * 2 * P[3, 1]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype, rtol", [(float, 1e-10), (np.float32, 1e-6)])
def test_sparse_jacobians_on_ranks_without_trajectories(dtype, rtol):
    chain = ODEProblem(lambda u, p, t: [p + 0.1 * u[(i + 1) % 40] - u[i] for i in range(40)], np.ones(40), (0.0, 0.1), 0.9)
    one = EnsembleProblem(chain, u0=np.zeros((1, 40), dtype))
    np.testing.assert_allclose(steady_state(one, Rodas5P(), EnsembleMPI()).u, 1.0, rtol=rtol)


def test_other_states_on_another_rank():
    def member(one, i, repeat):
        return remake(one, u0=np.full(2 if i == 7 else 1, 0.1))

    same = remake(LOGISTIC, f=lambda u, p, t: u * (1 - u))
    with pytest.raises(ValueError, match=r"\(2,\)"):
        steady_state(EnsembleProblem(same, member), ensemblealg=EnsembleMPI(), trajectories=7)


REFUSED = {
    "max_iters": ({"max_iters": 0}, ValueError, "max_iters must be an integer above zero, but got 0"),
    "reltol": ({"reltol": 1e-6}, TypeError, "the argument is called rtol"),
    "t_eval": ({"t_eval": [0.5]}, TypeError, r"unexpected keyword argument 't_eval'\.$"),
    "rtol": ({"rtol": -1.0}, ValueError, "rtol must be zero or more"),
    "GPU": ({"ensemblealg": EnsembleMPI(EnsembleGPU())}, NotImplementedError, "EnsembleGPU isn't supported"),
    "reduction": ({"problem": EnsembleProblem(LOGISTIC, p=P, output_func=print)}, ValueError, "output_func"),
    "complex": ({"problem": EnsembleProblem(remake(LOGISTIC, u0=[1j]), p=P)}, NotImplementedError, "complex states"),
    "shape": ({"problem": EnsembleProblem(remake(LOGISTIC, f=lambda u, p, t: [u[0], u[0]]), p=P)}, ValueError, "shape"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused_on_all_ranks(case):
    changes, kind, text = REFUSED[case]
    with pytest.raises(kind, match=text):
        steady_state(**{"problem": EnsembleProblem(LOGISTIC, p=P), "ensemblealg": EnsembleMPI()} | changes)


@pytest.mark.serial
def test_what_has_no_derivative():
    with pytest.raises(NotImplementedError, match="second derivatives"):
        bar = autograd.grad(lambda p: anp.sum(steady_state(EnsembleProblem(LOGISTIC, p=p)).u ** 2))
        autograd.grad(lambda p: anp.sum(bar(p)))(P)
    with pytest.raises(NotImplementedError, match="tspan is traced"):
        autograd.grad(lambda t: steady_state(remake(LOGISTIC, tspan=(0.0, t), p=P[0])).u[0])(1.0)
    by_start = autograd.grad(lambda u0: anp.sum(steady_state(remake(LOGISTIC, u0=u0, p=P[0])).u) + 0 * u0[0])
    assert by_start(np.array([0.3])) == 0


def test_different_arguments_of_ranks():
    if SIZE > 1:
        with pytest.raises(ValueError, match="all ranks must give the same arguments"):
            steady_state(EnsembleProblem(LOGISTIC, p=P), ensemblealg=EnsembleMPI(), max_iters=10 + RANK)


def test_entries_that_are_not_finite_are_named(caplog):
    growth = ODEProblem(lambda u, p, t: [u[0] * (p[0] - u[0])], [0.1], (0.0, 2.0), [1.0])
    with caplog.at_level("WARNING", "mpiad"):
        steady_state(EnsembleProblem(growth, p=np.array([[1.0], [2.0], [np.nan]])), ensemblealg=EnsembleMPI())
    assert MPI.COMM_WORLD.rank > 0 or caplog.messages[-1].endswith("is number 3. For trajectory 3, p[0] is nan.")
