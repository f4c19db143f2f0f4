"""Steady states of systems that conserve totals: compared with long solves of SciPy, and complex steps through these."""

from __future__ import annotations

import autograd.numpy as np
import numpy as onp
import pytest
from mpi4py import MPI
from scipy.integrate import solve_ivp

import mpiad
from mpiad.ensemble import EnsembleMPI, EnsembleProblem, EnsembleSerial, ODEProblem, Rodas5P, remake, solve, steady_state

ALONE = MPI.COMM_SELF


def enzyme(u, p, t):
    """E + S <-> C -> E + P -> E + S: the enzyme and the substrate are conserved, bound or free."""
    binding, turnover, back = p[0] * u[0] * u[1] - p[1] * u[2], p[2] * u[2], p[3] * u[3]
    return [turnover - binding, back - binding, binding - turnover, turnover - back]


def compartments(u, p, t):
    """A substance between two volumes, p[0] and p[1], as concentrations; in the second one it binds."""
    flux, binding = p[2] * u[0] - p[3] * u[1], 0.5 * u[1] * u[2] - 0.2 * u[3]
    return [-flux / p[0], flux / p[1] - binding, -binding, binding]


ENZYME = ODEProblem(enzyme, [1.0, 5.0, 0.0, 0.0], (0.0, 1.0), [2.0, 0.3, 1.5, 0.7])
COMPARTMENTS = ODEProblem(compartments, [3.0, 0.0, 1.0, 0.2], (0.0, 1.0), [1.0, 3.0, 0.8, 0.4])
LONG = {"method": "DOP853", "rtol": 1e-12, "atol": 1e-13}


def approached(problem, u0=None, p=None, stop=80.0):
    """Return the state after a long time, by SciPy."""
    u0, p = (problem.u0 if u0 is None else u0), (problem.p if p is None else p)
    u0 = onp.asarray(u0) + 0 * p[0]  # complex, if p is
    return solve_ivp(lambda t, u: onp.stack(problem.f(u, p, t)), (0.0, stop), u0, **LONG).y[:, -1]


def slopes(fun, x):
    """Return the derivatives of a vector with respect to each number, by complex steps."""
    return onp.stack([fun(x + unit).imag / 1e-30 for unit in 1e-30j * onp.eye(len(x))], axis=1)


@pytest.mark.serial
@pytest.mark.parametrize(
    "problem", [pytest.param(ENZYME, id="enzyme", marks=pytest.mark.thorough), pytest.param(COMPARTMENTS, id="two volumes")]
)
def test_are_the_states_after_a_long_time_with_derivatives(problem):
    sol = steady_state(problem, Rodas5P())
    assert sol.retcode == "Success"
    onp.testing.assert_allclose(sol.u, approached(problem), rtol=1e-8)
    weight = onp.arange(1.0, 5.0)
    loss = lambda u0, p: np.sum(weight * steady_state(remake(problem, u0=u0, p=p), Rodas5P()).u)  # noqa: E731
    by_u0, by_p = mpiad.grad(loss, argnum=(0, 1), comm=ALONE)(problem.u0, problem.p)
    # No component of the initial state is below zero here, which the solve wouldn't mind.
    expected = weight @ slopes(lambda u0: approached(problem, u0=u0), problem.u0)
    onp.testing.assert_allclose(by_u0, expected, rtol=2e-8, atol=2e-8)
    expected = weight @ slopes(lambda p: approached(problem, p=p), problem.p)
    onp.testing.assert_allclose(by_p, expected, rtol=2e-8, atol=2e-8)
    du, dp = onp.cos(weight), onp.sin(weight)
    tangent = mpiad.jvp(lambda x: loss(problem.u0 + x * du, problem.p + x * dp), onp.array(0.0), onp.array(1.0))[1]
    assert tangent == pytest.approx(by_u0 @ du + by_p @ dp, rel=1e-12)


@pytest.mark.thorough
def test_numbers_of_totals_may_differ_between_trajectories():
    """Without turnover the product is conserved by itself; all ranks find what one process finds, bit for bit."""
    p = onp.tile(ENZYME.p, (5, 1))
    p[1:3, 2:] = [[0.0, 0.0], [1.5, 0.0]]
    p[:, 0] *= onp.linspace(0.5, 2.0, 5)
    u0 = onp.tile(ENZYME.u0, (5, 1)) + onp.linspace(0.0, 0.4, 5)[:, None] * [0, 1, 2, 3]
    states = lambda p, u0, way: steady_state(EnsembleProblem(ENZYME, u0=u0, p=p), Rodas5P(), way)  # noqa: E731
    whole = states(p, u0, EnsembleSerial())
    assert whole.success.all()
    for i in (0, 1, 3, 4):
        onp.testing.assert_allclose(whole.u[i], approached(ENZYME, u0[i], p[i]), rtol=1e-8, atol=1e-12)
        onp.testing.assert_array_equal(states(p[i : i + 1], u0[i : i + 1], EnsembleSerial()).u[0], whole.u[i])
    # Everything becomes product, slowly at the end.
    onp.testing.assert_allclose(whole.u[2], [u0[2][[0, 2]].sum(), 0.0, 0.0, u0[2][1:].sum()], atol=1e-8)
    onp.testing.assert_array_equal(states(p, u0, EnsembleMPI()).u, whole.u)
    onp.testing.assert_array_equal(whole.u[1, 3], u0[1, 3])
    bars = mpiad.grad(lambda p, u0: np.sum(states(p, u0, EnsembleMPI()).u ** 2), argnum=(0, 1), shared=True)(p, u0)
    alone = mpiad.grad(lambda p, u0: np.sum(states(p, u0, EnsembleSerial()).u ** 2), argnum=(0, 1), comm=ALONE)(p, u0)
    for bar, other in zip(bars, alone):
        onp.testing.assert_allclose(bar, other, rtol=1e-12, atol=1e-13)


def ring(u, p, t):
    """A cycle of 48 conversions, sparse, in which the sum is conserved."""
    flux = [p[i] * u[i] for i in range(48)]
    return [flux[i - 1] - flux[i] for i in range(48)]


@pytest.mark.serial
def test_sparse_jacobians():
    rates = onp.linspace(1.0, 4.0, 48)
    states = lambda p: steady_state(ODEProblem(ring, onp.ones(48), (0.0, 0.1), p), Rodas5P()).u  # noqa: E731
    exact = lambda p: 48 / p / np.sum(1 / p)  # noqa: E731
    onp.testing.assert_allclose(states(rates), exact(rates), rtol=1e-11)
    weight = onp.cos(onp.arange(48.0))
    bars = [mpiad.grad(lambda p, f=f: np.sum(weight * f(p)), comm=ALONE)(rates) for f in (states, exact)]
    onp.testing.assert_allclose(*bars, rtol=1e-10, atol=1e-12)


@pytest.mark.serial
def test_mass_matrices():
    """M u' = f conserves lᵀ M u; here M contains the volumes, so that f consists of amounts."""

    def amounts(u, p, t):
        flux = p[0] * u[0] - p[1] * u[1]
        return [-flux, flux, u[0] ** 2 - u[2]]

    problem = ODEProblem(amounts, [3.0, 0.5, 0.0], (0.0, 0.1), [0.8, 0.4], mass_matrix=onp.diag([1.0, 2.0, 0.0]))
    value = lambda u0, p: steady_state(remake(problem, u0=u0, p=p), Rodas5P()).u  # noqa: E731

    def exact(u0, p):
        first = (u0[0] + 2 * u0[1]) * p[1] / (p[1] + 2 * p[0])
        return np.array([first, first * p[0] / p[1], first**2])

    onp.testing.assert_allclose(value(problem.u0, problem.p), exact(problem.u0, problem.p), rtol=1e-9)
    weight = onp.array([1.0, 2.0, 3.0])
    derivatives = [
        mpiad.grad(lambda u0, p, f=f: np.sum(weight * f(u0, p)), argnum=(0, 1), comm=ALONE)(problem.u0, problem.p)
        for f in (value, exact)
    ]
    for bar, expected in zip(*derivatives):
        onp.testing.assert_allclose(bar, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.serial
def test_totals_that_change_before_the_end_are_not_conserved():
    """The sum is conserved at the end, but something is added before t = 1, so that u0 doesn't determine it."""
    fed = ODEProblem(lambda u, p, t: [u[1] - u[0] + np.maximum(1 - t, 0.0), u[0] - u[1]], [1.0, 0.0], (0.0, 2.0))
    assert steady_state(fed).u == pytest.approx([0.75, 0.75], rel=1e-8)  # the final state of a solve from t = 0
    assert steady_state(remake(fed, tspan=(1.0, 2.0))).u == pytest.approx([0.5, 0.5], rel=1e-9)


@pytest.mark.serial
def test_a_sum_that_grows_has_no_steady_state():
    grows = ODEProblem(lambda u, p, t: [u[1] - u[0] + 1.0, u[0] - u[1]], [1.0, 0.0], (0.0, 2.0))
    assert steady_state(grows).retcode in ("ConvergenceFailure", "MaxIters", "Singular")
    assert onp.isnan(steady_state(grows).u).all()


# Equilibrium before an experiment, which then takes place with other parameters.
BEFORE, AFTER = onp.array([[2.0, 0.3, 1.5, 0.7], [1.0, 0.5, 1.0, 0.4]]), onp.array([2.5, 0.2, 0.5, 1.1])


def experiment(i, p, change):
    """Return the final state of an experiment, by SciPy."""
    return approached(ENZYME, approached(ENZYME, p=p), p + change, stop=0.5 + i)


@pytest.mark.parametrize("mpi", [False, True])
@pytest.mark.parametrize("rows", [False, True])
def test_experiments_that_start_in_equilibrium(mpi, rows):
    way, spans = EnsembleMPI() if mpi else EnsembleSerial(), onp.array([[0.0, 0.5], [0.0, 1.5]])

    def ends(p):
        many = EnsembleProblem(ENZYME, p=p)
        if not rows:  # the problem with other rates is another one, whose p the function reads
            many = EnsembleProblem(ENZYME, lambda one, i, repeat: remake(one, p=p[i - 1]))
        found = steady_state(many, Rodas5P(), way, trajectories=2)
        after = found.continued(spans, p + AFTER) if rows else found.continued(spans)
        return solve(after, Rodas5P(), way, trajectories=2, rtol=1e-10, atol=1e-12).u_end

    expected = onp.array([experiment(i, BEFORE[i], AFTER * rows) for i in range(2)])
    onp.testing.assert_allclose(ends(BEFORE), expected, rtol=1e-8, atol=1e-9)
    if rows:
        options = {"shared": True} if mpi else {"comm": ALONE}
        bars = mpiad.grad(lambda p: np.sum(onp.arange(1.0, 5.0) * ends(p)), **options)(BEFORE)
        expected = onp.arange(1.0, 5.0) @ slopes(lambda p: experiment(1, p, AFTER), BEFORE[1])
        onp.testing.assert_allclose(bars[1], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.serial
def test_continued_problems():
    single = steady_state(ENZYME, Rodas5P()).continued((0.0, 1.0), p=ENZYME.p)
    onp.testing.assert_allclose(solve(single, Rodas5P()).u_end, single.u0, rtol=1e-9)
    # No steady state: the trajectory fails, and has no derivatives; the other one is unaffected.
    grows = ODEProblem(lambda u, p, t: [p[0] - p[1] * u[0]], [0.5], (0.0, 0.5), onp.ones(2))
    p = onp.array([[1.0, 2.0], [1.0, 0.0]])
    after = lambda p: steady_state(EnsembleProblem(grows, p=p)).continued((0.0, 1.0))  # noqa: E731
    assert solve(after(p)).survivors.tolist() == [True, False]
    bars = mpiad.grad(lambda p: np.sum(solve(after(p), rtol=1e-10, atol=1e-12).u_end[0]), comm=ALONE)(p)
    onp.testing.assert_allclose(bars, [[0.5, -0.25], [0.0, 0.0]], atol=1e-9)
    with pytest.raises(ValueError, match="prob_func, which determines p"):
        steady_state(EnsembleProblem(ENZYME, lambda one, i, repeat: one), trajectories=1).continued((0.0, 1.0), p=p)


def test_shares_are_not_continued():
    found = steady_state(EnsembleProblem(ENZYME, p=BEFORE), ensemblealg=EnsembleMPI(gather=False))
    with pytest.raises(ValueError, match=r"share of the steady states. .*gather=True"):
        found.continued((0.0, 1.0))
