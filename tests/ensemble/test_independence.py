"""A trajectory's numbers depend on nothing but itself, bit for bit."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest
from ode_systems import forced_pendulum, lorenz, van_der_pol

import mpiad
from mpiad.ensemble import (
    RK4,
    RK45,
    EnsembleProblem,
    EnsembleSerial,
    EnsembleThreads,
    EnsembleVectorized,
    Event,
    ODEProblem,
    PIController,
    Tsit5,
    remake,
    solve,
    working_set,
)

pytestmark = pytest.mark.serial
# Both ways of solving make the same promises, each for itself.
both = pytest.mark.usefixtures("solved_by")

RHO = np.linspace(0, 21, 700)[:, None]
LORENZ = EnsembleProblem(ODEProblem(lorenz, [1.0, 0.0, 0.0], (0.0, 1.0)), p=RHO)
COARSE = {"rtol": 1e-4, "atol": 1e-7}


def same(a, b, rows=slice(None)):
    for name in ("u_end", "u", "t_reached", "naccept", "nreject", "nf", "retcode"):
        x, y = getattr(a, name)[rows], getattr(b, name)
        assert x.shape == y.shape and (x.tobytes() == y.tobytes()), name


@both
@pytest.mark.limit(240)
def test_alone_and_in_any_company():
    whole = solve(LORENZ, saveat=0.1, **COARSE)
    for start, stop in [(0, 1), (5, 6), (0, 2), (3, 6), (100, 165), (650, 700)]:
        part = solve(remake(LORENZ, p=RHO[start:stop]), saveat=0.1, **COARSE)
        same(whole, part, slice(start, stop))
    np.testing.assert_array_equal(whole.u[:, -1], whole.u_end)
    order = np.random.default_rng(1).permutation(len(RHO))
    same(solve(remake(LORENZ, p=RHO[order]), saveat=0.1, **COARSE), whole, np.argsort(order))


@both
def test_derivatives_beside_doses_at_the_start_of_others():
    # The dose of the first trajectory is at its start.
    times = np.array([[0.0], [0.3], [0.6]])
    dose = Event.doses(lambda p: [p["time"][0]], 2.0, 0)

    def derivatives(rows):
        def loss(rho):
            p = {"rho": rho, "time": times[rows]}
            one = ODEProblem(lambda u, p, t: lorenz(u, p["rho"], t), [1.0, 0.0, 0.0], (0.0, 1.0))
            return solve(EnsembleProblem(one, p=p), saveat=0.25, events=dose, **COARSE).u

        rho = 10.0 + times[rows]
        tangent = mpiad.jvp(loss, rho, np.cos(rho))[1]
        return tangent, mpiad.grad(lambda rho: anp.sum(loss(rho) ** 2))(rho)

    for part, whole in zip(derivatives(slice(1, 3)), derivatives(slice(0, 3))):
        assert part.tobytes() == whole[1:].tobytes()


@pytest.mark.parametrize("alg", [RK45(), RK45(PIController()), Tsit5(), RK4()], ids=["RK45", "PI", "Tsit5", "RK4"])
def test_backends_agree(alg):
    some = remake(LORENZ, p=RHO[::35])
    dt = 0.05 if alg == RK4() else None
    vectorized = solve(some, alg, EnsembleVectorized(), saveat=0.25, dt=dt, **COARSE)
    for backend in (EnsembleSerial(), EnsembleThreads(3)):
        same(vectorized, solve(some, alg, backend, saveat=0.25, dt=dt, **COARSE))


def test_more_trajectories_than_the_working_set_holds():
    # 10,922 columns of three components are one working set.
    many, columns = remake(LORENZ, p=np.concatenate([RHO] * 17)), {"compile": False, **COARSE}
    same(solve(many, **columns), solve(LORENZ, **columns), slice(4 * len(RHO), 5 * len(RHO)))
    same(solve(many, batch_size=7000, **columns), solve(many, **columns))


def test_those_that_wait_take_the_places_of_those_that_end(monkeypatch):
    def solved():
        kept = []
        gradient = mpiad.grad(lambda p: anp.sum(kept.append(solve(remake(some, p=p), **options)) or kept[0].u ** 2))(some.p)
        return solve(some, **options), gradient

    some, options = remake(LORENZ, p=RHO[::12]), {"compile": False, "saveat": [0.3, 0.71], **COARSE}
    whole, expected = solved()
    for name, few in (("_BLOCK", 1), ("_LEAST_COLUMNS", 7), ("_IDLE", 1)):
        monkeypatch.setattr(working_set, name, few)
    found, gradient = solved()
    same(found, whole)
    np.testing.assert_array_equal(gradient, expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128])
@pytest.mark.parametrize("d", [1, 2, 7, 40])
def test_any_number_of_components(d, dtype):
    rng = np.random.default_rng(d)
    u0 = (rng.standard_normal((50, d)) * (1 + 0.5j if dtype is np.complex128 else 1)).astype(dtype)
    ensemble = EnsembleProblem(ODEProblem(lambda u, p, t: -u * u * u + np.sin(t), u0[0], (0.0, 2.0)), u0=u0)
    whole = solve(ensemble)
    for i in (0, 17, 49):
        same(whole, solve(remake(ensemble, u0=u0[i : i + 1]), ensemblealg=EnsembleSerial()), slice(i, i + 1))


def test_mixed_directions():
    spans = [(0.0, 3.0), (3.0, 0.0), (1.0, 1.0), (-1.0, -4.0)] * 10
    base = ODEProblem(forced_pendulum, [0.5, 1.0], (0.0, 1.0), [2.0, 0.1])
    ensemble = EnsembleProblem(base, prob_func=lambda prob, i, repeat: remake(prob, tspan=spans[i - 1]))
    sol = solve(ensemble, trajectories=len(spans))
    for i in range(4):
        alone = solve(remake(base, tspan=spans[i]))
        assert alone.u_end.tobytes() == sol.u_end[i].tobytes() and alone.t_reached == sol.t_reached[i] == spans[i][1]
        np.testing.assert_array_equal(sol.t[i], spans[i])


def sick(u, p, t):
    """Three right-hand sides in one: p[0] chooses blow-up, NaN after t = 0.5, a stiff van der Pol, or a good one."""
    kind = p[0]
    stiff = van_der_pol(u, [1000.0], t)
    first = np.where(kind == 0, -u[0] + np.sin(t), np.where(kind == 1, u[0] ** 2, stiff[0]))
    second = np.where(kind == 0, u[0] - u[1], np.where(kind == 1, 0.0, stiff[1]))
    return [np.where((kind == 2) & (t > 0.5), np.nan, first), second]


@both
@pytest.mark.limit(240)
def test_failed_ones_harm_nobody():
    kinds = np.zeros(1003)
    kinds[[100, 500, 900]] = 1, 2, 3
    u0 = np.linspace([0.5, 0.1], [2.0, 1.0], 1003)
    u0[100] = 1.0, 0.0
    ensemble = EnsembleProblem(ODEProblem(sick, u0[0], (0.0, 2.0)), u0=u0, p=kinds[:, None])
    sol = solve(ensemble, saveat=[0.25, 0.5, 1.5, 2.0], max_steps=1000, rtol=1e-8, atol=1e-10)
    good = kinds == 0
    alone = solve(remake(ensemble, u0=u0[good], p=kinds[good][:, None]), saveat=[0.25, 0.5, 1.5, 2.0],
                  max_steps=1000, rtol=1e-8, atol=1e-10)  # fmt: skip
    same(sol, alone, good)
    assert list(sol.retcode[~good]) == ["DtLessThanMin", "Unstable", "MaxIters"]
    assert np.isfinite(sol.u_end).all()
    # u' = u², u(0) = 1 is 1 / (1 - t): it gets as far as time can resolve, and no further.
    t, u = sol.t_reached[100], sol.u_end[100, 0]
    assert 1 - 1e-6 < t < 1 + 1e-6 and u > 1e6
    assert 0.5 - 1e-9 < sol.t_reached[500] < 0.5 + 1e-9
    assert 0 < sol.t_reached[900] < 2
    # Saved times are there up to where a trajectory came, and NaN beyond.
    assert np.isfinite(sol.u[100, :2]).all() and np.isnan(sol.u[100, 2:]).all()
    np.testing.assert_allclose(sol.u[100, :2, 0], [4 / 3, 2], rtol=1e-6)
    assert sol.naccept[900] + sol.nreject[900] == 1000
