"""`sol(t)`: the states between the steps, beside SciPy's interpolants of the same steps, and their derivatives."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest
from ode_systems import forced_pendulum, lorenz
from scipy.integrate import RK45 as SciPyRK45
from scipy.integrate import OdeSolution, solve_ivp
from scipy.integrate._ivp.rk import RkDenseOutput

import mpiad
from mpiad.ensemble import (
    RK4,
    RK45,
    EnsembleMPI,
    EnsembleProblem,
    EnsembleSerial,
    Event,
    ODEProblem,
    Tsit5,
    remake,
    solve,
)

serial = pytest.mark.serial
both = pytest.mark.usefixtures("solved_by")
COARSE = {"rtol": 1e-4, "atol": 1e-7}
RHO = np.linspace(2, 21, 9)[:, None]
LORENZ = EnsembleProblem(ODEProblem(lorenz, [1.0, 0.5, 0.2], (0.0, 1.0)), p=RHO)


def scipys(f, p, t, u):
    """Return SciPy's interpolants of steps that were taken at times t from states u."""
    parts = []
    for j in range(len(t) - 1):
        h, k = t[j + 1] - t[j], np.empty((7, u.shape[1]))
        k[0] = f(u[j], p, t[j])
        for s in range(1, 6):
            k[s] = f(u[j] + h * (k[:s].T @ SciPyRK45.A[s, :s]), p, t[j] + SciPyRK45.C[s] * h)
        k[6] = f(u[j + 1], p, t[j + 1])
        parts.append(RkDenseOutput(t[j], t[j + 1], u[j], k.T @ SciPyRK45.P))
    return OdeSolution(t, parts)


@serial
@both
@pytest.mark.parametrize("tspan", [(0.0, 6.0), (2.0, -1.5)])
def test_equal_to_scipys_of_the_same_steps(tspan):
    p = np.linspace([1, 0.1], [9, 0.2], 4)
    ensemble = EnsembleProblem(ODEProblem(forced_pendulum, [0.5, 1.0], tspan), p=p)
    sol = solve(ensemble, save_everystep=True, dense_output=True, **COARSE)
    times = np.random.default_rng(0).permutation(np.linspace(*tspan, 83))
    found = sol(times)
    assert found.shape == (4, 83, 2)
    for i, row in enumerate(p):
        own = ~np.isnan(sol.t[i])
        expected = scipys(forced_pendulum, row, sol.t[i, own], sol.u[i, own])
        np.testing.assert_allclose(found[i], expected(times).T, rtol=1e-13, atol=1e-14)
        # At the steps themselves it is the states, bit for bit.
        np.testing.assert_array_equal(sol[i](sol.t[i, own]), sol.u[i, own])
    single = solve_ivp(lambda t, u: forced_pendulum(u, p[0], t), tspan, [0.5, 1.0], dense_output=True, **COARSE)
    np.testing.assert_allclose(found[0], single.sol(times).T, rtol=1e-8, atol=1e-9)


@serial
@both
def test_shapes():
    sol = solve(LORENZ, dense_output=True, **COARSE)
    assert sol(0.3).shape == (9, 3) and sol([0.3]).shape == (9, 1, 3) and sol([]).shape == (9, 0, 3)
    rows = np.linspace(0.1, 0.9, 18).reshape(9, 2)
    own = sol(rows)
    assert own.shape == (9, 2, 3)
    for i in (0, 8):
        np.testing.assert_array_equal(own[i], sol[i](rows[i]))
        np.testing.assert_array_equal(sol[i](rows[i, 0]), sol(rows[i, 0])[i])
    np.testing.assert_array_equal(sol([0.0, 1.0]), sol.u)
    batched = solve(LORENZ, dense_output=True, batch_size=4, **COARSE)
    np.testing.assert_array_equal(batched(rows), own)
    np.testing.assert_array_equal(batched[5](rows[5]), own[5])
    np.testing.assert_array_equal(solve(remake(LORENZ, p=RHO[:0]), dense_output=True)([0.5]), np.empty((0, 1, 3)))


@serial
@pytest.mark.parametrize("alg, more", [(RK45(), {}), (Tsit5(), {}), (RK4(), {"dt": 0.013})], ids=["RK45", "Tsit5", "RK4"])
def test_equal_to_what_is_saved(alg, more):
    times = np.array([0.0, 0.111, 0.5, 0.77, 1.0])
    sol = solve(LORENZ, alg, saveat=times, dense_output=True, **COARSE, **more)
    np.testing.assert_allclose(sol(times), sol.u, rtol=1e-14)
    assert (
        solve(LORENZ, alg, EnsembleSerial(), dense_output=True, **COARSE, **more)(times).tobytes() == sol(times).tobytes()
    )


@serial
def test_kinds_of_states():
    number = solve(ODEProblem(lambda u, p, t: -u, 2.0, (0.0, 1.0)), dense_output=True, rtol=1e-9, atol=1e-9)
    assert number(0.5).shape == () and number([0.5, 0.1]).shape == (2,)
    np.testing.assert_allclose(number([0.5, 0.1]), 2 * np.exp([-0.5, -0.1]), rtol=1e-8)
    turn = np.array([[0.0, 1.0], [-1.0, 0.0]])
    matrix = solve(ODEProblem(lambda u, p, t: turn @ u, np.eye(2), (0.0, 1.0)), dense_output=True, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(matrix(0.5), [[np.cos(0.5), np.sin(0.5)], [-np.sin(0.5), np.cos(0.5)]], rtol=1e-8)
    for dtype in (np.float32, np.complex128):
        rate = 1.0 if dtype is np.float32 else 1j
        one = solve(ODEProblem(lambda u, p, t, r=rate: -r * u, np.ones(1, dtype), (0.0, 1.0)), dense_output=True)
        assert one(0.3).dtype == dtype
        np.testing.assert_allclose(one(0.3), np.exp(-0.3 * rate), rtol=1e-3)
    still = solve(ODEProblem(lambda u, p, t: -u, [2.0], (1.0, 1.0)), dense_output=True)
    np.testing.assert_array_equal(still([1.0, 1.0]), [[2.0], [2.0]])


@serial
@both
def test_what_was_not_reached_is_nan(caplog):
    u0 = np.array([[0.5], [1.0], [-1.0]])
    ensemble = EnsembleProblem(ODEProblem(lambda u, p, t: u * u, u0[0], (0.0, 1.5)), u0=u0)
    sol = solve(ensemble, dense_output=True, rtol=1e-9, atol=1e-9)
    times = np.array([0.25, 0.75, 1.25])
    exact = u0 / (1 - u0 * times)
    exact[1, 2] = np.nan
    np.testing.assert_allclose(sol(times)[..., 0], exact, rtol=1e-7)
    np.testing.assert_array_equal(sol[1](sol.t_reached[1]), sol.u_end[1])


@serial
@both
def test_terminated():
    fall = ODEProblem(lambda u, p, t: [u[1], -9.81 + 0 * u[1]], [1.0, 0.0], (0.0, 3.0))
    sol = solve(fall, events=Event(lambda u, p, t: u[0]), dense_output=True, **COARSE)
    reached = np.sqrt(2 / 9.81)
    found = sol([0.2, reached - 1e-6, sol.t_reached, reached + 1e-6])
    np.testing.assert_allclose(found[:3, 0], [1 - 9.81 / 2 * 0.04, 4.43e-6, 0], atol=1e-8)
    assert np.isnan(found[3]).all()
    np.testing.assert_array_equal(found[2], sol.u_end)


def loss(u0, p, ends, times, ask, **more):
    ensemble = EnsembleProblem(ODEProblem(lorenz, u0[0], (ends[0], ends[1])), u0=u0, p=p)
    if ask:
        sol = solve(ensemble, dense_output=True, **COARSE, **more)
        states = sol(times)
    else:
        sol = solve(ensemble, saveat=times, **COARSE, **more)
        states = sol.u
    return anp.sum(anp.sin(states)) + anp.sum(sol.u_end**2)


@serial
@pytest.mark.limit(240)
@pytest.mark.parametrize("argnum, kernels", [((1,), False), ((0, 1, 2), False), ((1,), True)])
def test_derivatives_are_those_of_saved_values(argnum, kernels):
    x = np.random.default_rng(1).uniform(0.5, 1.5, (9, 3)), RHO, np.array([0.0, 1.0])
    times = np.array([0.0, 0.13, 0.5, 0.51, 1.0])
    found, expected = (mpiad.value_and_grad(loss, argnum)(*x, times, ask, compile=kernels) for ask in (True, False))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-13)
    for a, b in zip(found[1], expected[1]):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * np.abs(b).max())


@serial
def test_of_one_solution_twice_and_of_higher_order():
    def states(p):
        problem = ODEProblem(lambda u, p, t: [p[0] * u[0]], [1.0], (0.0, 1.0), p)
        sol = solve(problem, dense_output=True, rtol=1e-10, atol=1e-12)
        return sol(0.5)[0] + anp.sum(sol([0.25, 1.0]) ** 2)

    def exact(p):
        return anp.exp(0.5 * p[0]) + anp.exp(0.5 * p[0]) + anp.exp(2 * p[0])

    p = np.array([0.7])
    np.testing.assert_allclose(mpiad.grad(states)(p), mpiad.grad(exact)(p), rtol=1e-8)
    np.testing.assert_allclose(mpiad.hvp(states)(p, p), mpiad.hvp(exact)(p, p), rtol=1e-7)


@serial
@pytest.mark.parametrize("gradient", ["adjoint", "tangent"])
def test_times_of_one_step_apart_from_each_other(gradient):
    times, weights = np.array([0.2, 0.7, 0.2, 0.21]), np.arange(8.0).reshape(2, 4)
    problem = ODEProblem(lambda u, p, t: [p[0] * u[0]], [1.0], (0.0, 1.0), [1.0])

    def states(p):
        sol = solve(EnsembleProblem(problem, p=p), dense_output=True, gradient=gradient, rtol=1e-10, atol=1e-12)
        return anp.sum(weights * sol(times)[..., 0])

    p = np.array([[0.7], [-0.4]])
    expected = np.sum(weights * times * np.exp(p * times), axis=1, keepdims=True)
    np.testing.assert_allclose(mpiad.grad(states)(p), expected, rtol=1e-8)


@both
@pytest.mark.parametrize("gather", [True, False])
def test_over_the_ranks(gather, rank):
    mpi = EnsembleMPI(gather=gather)
    times = np.array([0.7, 0.1])
    alone = solve(LORENZ, dense_output=True, **COARSE)
    sol = solve(LORENZ, RK45(), mpi, dense_output=True, **COARSE)
    mine = slice(None) if gather else sol.indices
    np.testing.assert_array_equal(sol(times), alone(times)[mine])
    rows = np.linspace(0, 1, 18).reshape(9, 2)
    np.testing.assert_array_equal(sol(rows[mine]), alone(rows)[mine])
    if gather:
        np.testing.assert_array_equal(sol[4](times), alone[4](times))
        with pytest.raises(ValueError, match="lies outside"):
            sol(np.where(np.arange(9) == 8, 1.5, 0.5)[:, None])


@pytest.mark.parametrize("gather, objective", [(True, "root"), (False, "sum")])
def test_derivatives_over_the_ranks(gather, objective):
    mpi, times = EnsembleMPI(gather=gather), np.array([0.7, 0.1])

    def total(rho, backend):
        sol = solve(remake(LORENZ, p=rho), RK45(), backend, dense_output=True, **COARSE)
        return anp.sum(anp.sin(sol(times)))

    alone = mpiad.grad(total, shared=True)(RHO, EnsembleSerial())
    found = mpiad.grad(total, shared=True, objective=objective)(RHO, mpi)
    np.testing.assert_allclose(found, alone, rtol=1e-12)


@serial
def test_what_is_refused():
    sol = solve(LORENZ, dense_output=True)
    for t in (1.1, [-0.1], [0.5, np.nan], np.full((9, 1), 3.0)):
        with pytest.raises(ValueError, match=r"t must lie in tspan.*outside of \(0.0, 1.0\)"):
            sol(t)
    for t, text in ((np.zeros((3, 2)), r"\(N, n\) with N = 9, but has shape \(3, 2\)"), (np.zeros((9, 1, 1)), "shape")):
        with pytest.raises(ValueError, match=text):
            sol(t)
    with pytest.raises(ValueError, match=r"shape \(n,\), but has shape \(2, 2\)"):
        sol[0](np.zeros((2, 2)))
    with pytest.raises(TypeError, match="'end'"):
        sol("end")
    with pytest.raises(NotImplementedError, match=r"sol\(t\): t is traced.*mpiad.stop_gradient"):
        mpiad.grad(lambda t: anp.sum(sol(t)))(0.5)
    with pytest.raises(ValueError, match="dense_output=True"):
        solve(LORENZ)(0.5)
    with pytest.raises(ValueError, match="checkpoints=3"):
        solve(LORENZ, dense_output=True, checkpoints=3)
    outputs = remake(LORENZ, output_func=lambda sol, i: (sol(0.5)[0], False))
    made = solve(outputs, dense_output=True)
    np.testing.assert_array_equal(made.u, sol(0.5)[:, 0])
    with pytest.raises(ValueError, match="call the solutions that these functions receive"):
        made(0.5)
