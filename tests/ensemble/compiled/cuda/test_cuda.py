"""The CUDA kernels as C++: compared number for number with the vectorised path. See `test_ptx` for GPUs' compilers."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import ode_systems
import pytest
from kernels_on_cpu import COMPILER, Kernels, parameters_of, plan_of
from stiff_systems import coupled, forced, robertson
from traced_right_hand_sides import sir

import mpiad
from mpiad.ensemble import RK4, RK45, EnsembleProblem, ODEProblem, PIController, Rodas5P, Rosenbrock23, Tsit5, solve

pytestmark = pytest.mark.serial
compiled = pytest.mark.skipif(COMPILER is None, reason="there is no compiler of C++")


def states(d, n, seed=0):
    return np.random.default_rng(seed).random((d, n)) + 0.5


def both(f, u0, p, *, alg=None, tspan=(0.0, 1.0), times=None, shared=None, directions=(), **options):
    """Solve by the vectorised path, and by the kernel; p has shape (m, n), or `shared` is the same for all."""
    alg = RK45() if alg is None else alg
    problem = ODEProblem(f, np.zeros(len(u0), u0.dtype), tspan, shared)
    times = np.array(tspan) if times is None else np.asarray(times)
    sol = solve(EnsembleProblem(problem, u0=u0.T, p=None if p is None else p.T), alg, saveat=times, **options)
    given = parameters_of(shared, False) if p is None else parameters_of(p, True)
    plan = plan_of(f, given, u0, alg, directions=directions)
    kernels = Kernels(plan)
    out = kernels.forward(u0, given, *tspan, times, capacity=int(sol.naccept.max()), **options)
    return sol, out, kernels


def assert_equal(sol, out, rtol=1e-12):
    np.testing.assert_array_equal(out.naccept, sol.naccept)
    np.testing.assert_array_equal(out.nreject, sol.nreject)
    np.testing.assert_allclose(out.t_reached, sol.t_reached, rtol=rtol)
    # One that ended beside a singularity multiplies each rounding by 1e14.
    known = ~np.isin(sol.retcode, ["DtLessThanMin", "Unstable"])
    ends = (out.u_end[:, known], sol.u_end.T[:, known])
    for found, expected in ((out.saved, np.moveaxis(sol.u, 0, -1)), ends):
        scale = np.nanmax(np.abs(expected))
        np.testing.assert_allclose(found / scale, expected / scale, rtol=rtol, atol=rtol)


TIMES = [0.0, 0.3, 0.31, 0.9, 1.0]
# Of each: f, components, each trajectory's parameters or the shared ones, and what solve is told.
CASES = {
    "lorenz": (ode_systems.lorenz, 3, [[20.0, 40.0]], None, {}),
    "tight": (ode_systems.lorenz, 3, [[20.0, 40.0]], None, {"rtol": 1e-9, "atol": 1e-10}),
    "shared parameters": (ode_systems.lotka_volterra, 2, None, [1.5, 1.0, 0.7, 3.0], {}),
    "time": (ode_systems.forced_pendulum, 2, [[5.0, 12.0], [0.1, 0.9]], None, {"rtol": 1e-6}),
    "backwards": (ode_systems.forced_pendulum, 2, [[5.0, 12.0], [0.1, 0.9]], None, {"tspan": (1.0, -0.5),
                  "times": [1.0, 0.4, -0.1]}),
    "Tsitouras": (ode_systems.van_der_pol, 2, [[1.0, 9.0]], None, {"alg": Tsit5()}),
    "PI": (ode_systems.van_der_pol, 2, [[1.0, 30.0]], None, {"alg": RK45(controller=PIController()), "tspan": (0.0, 3.0)}),
    "fixed": (ode_systems.van_der_pol, 2, [[1.0, 3.0]], None, {"alg": RK4(), "dt": 0.07}),
    "first step": (ode_systems.van_der_pol, 2, [[1.0, 9.0]], None, {"dt": 0.2, "dtmax": 0.15}),
    "nest": (sir, 3, None, {"beta": 0.4, "gamma": 0.1}, {"tspan": (0.0, 30.0), "times": [7.0, 22.0]}),
    "cut short": (ode_systems.lorenz, 3, [[20.0, 40.0]], None, {"max_steps": 12}),
    "blows up": (lambda u, p, t: u * u * p[0], 2, [[0.1, 2.0]], None, {}),
    "undefined": (lambda u, p, t: [anp.log(p[0] - t) + u[0]], 1, [[0.4, 1.5]], None, {}),
    "stiff": (robertson, 3, [[0.02, 0.08], [5e3, 2e4], [1e7, 6e7]], None, {"alg": Rodas5P(), "tspan": (0.0, 30.0),
              "times": [0.0, 0.4, 17.0]}),
    "stiff and backwards": (forced, 2, [[-80.0, -20.0], [0.5, 0.9]], None, {"alg": Rosenbrock23(), "tspan": (0.3, -0.4),
                            "times": [0.2, -0.1, -0.4]}),
    # Its factors are loops over an array, and rows are exchanged.
    "stiff and larger": (coupled, 11, None, [30.0], {"alg": Rodas5P(), "tspan": (0.0, 0.3), "times": [0.11, 0.3]}),
}  # fmt: skip


def parameters(ranges, n):
    return None if ranges is None else np.stack([np.linspace(low, high, n) for low, high in ranges])


# The steps of these are shown by `test_gpu.py`, too, in whole solves.
SHOWN = ("tight", "shared parameters", "backwards", "PI", "fixed", "nest", "cut short", "blows up")


def cases(*names):
    return [pytest.param(name, marks=pytest.mark.thorough if name in SHOWN else ()) for name in names]


@pytest.mark.few(2)
@compiled
@pytest.mark.parametrize("name", cases(*CASES))
def test_the_steps_are_those_of_the_vectorised_path(name):
    f, d, ranges, shared, options = CASES[name]
    sol, out, _ = both(f, states(d, 7), parameters(ranges, 7), shared=shared, **{"times": TIMES, **options})
    assert_equal(sol, out)
    names = np.array(["Success", "Terminated", "MaxIters", "DtLessThanMin", "Unstable"])
    np.testing.assert_array_equal(names[out.codes], sol.retcode)
    assert name not in ("cut short", "blows up", "undefined") or {"Success"} != set(sol.retcode)


@compiled
def test_times_of_each_trajectory():
    times = np.sort(np.random.default_rng(1).random((5, 4)), axis=1)
    sol, out, _ = both(ode_systems.decay, states(1, 5), parameters([[0.5, 4.0]], 5), times=times)
    assert_equal(sol, out)


@compiled
def test_single_precision():
    u0 = states(2, 6).astype(np.float32)
    p = parameters([[1.0, 3.0]], 6).astype(np.float32)
    sol, out, _ = both(ode_systems.van_der_pol, u0, p, times=TIMES)
    assert out.u_end.dtype == np.float32
    assert_equal(sol, out, rtol=3e-6)


# ---- Gradients -------------------------------------------------------------------------------------------------------
def cotangents(sol, seed=5):
    """Return what a loss weighs saved and last states with; nothing for trajectories that failed."""
    rng = np.random.default_rng(seed)
    saved, end = rng.normal(size=sol.u.shape), rng.normal(size=sol.u_end.shape)
    alive = np.asarray(sol.retcode) == "Success"
    return alive, saved * alive[:, None, None], end * alive[:, None]


def gradient(f, u0, p, shared, weights, alg, tspan, times, options):
    """Return the vectorised path's derivatives of a weighted sum of states by u0 (n, d) and p."""
    _, saved, end = weights

    def loss(u0, p):
        problem = ODEProblem(f, np.zeros(u0.shape[1]), tspan, p if shared is not None else None)
        ensemble = EnsembleProblem(problem, u0=u0, p=None if shared is not None else p)
        sol = solve(ensemble, alg, saveat=times, gradient="adjoint", **options)
        return anp.sum(saved * anp.where(np.isfinite(saved), sol.u, 0.0)) + anp.sum(end * sol.u_end)

    return mpiad.grad(loss, (0, 1))(u0.T, p.T if shared is None else shared)


@pytest.mark.few(2)
@compiled
@pytest.mark.parametrize("name", [
    "lorenz", "shared parameters", "time", "backwards", "Tsitouras", "PI", "fixed", "nest", "stiff", "stiff and backwards",
    "stiff and larger",
])  # fmt: skip
def test_the_adjoint_is_that_of_the_vectorised_path(name):
    f, d, ranges, shared, options = CASES[name]
    options = {"times": TIMES, "tspan": (0.0, 1.0), "alg": RK45(), **options}
    u0, p = states(d, 7), parameters(ranges, 7)
    shared = np.array(shared) if isinstance(shared, list) else shared
    sol, out, kernels = both(f, u0, p, shared=shared, **options)
    weights = alive, saved, end = cotangents(sol)
    alg, tspan, times = (options.pop(key) for key in ("alg", "tspan", "times"))
    expected_u0, expected_p = gradient(f, u0, p, shared, weights, alg, tspan, times, options)
    u0_bar, p_bar, s_bar = kernels.reverse(out, alive, end.T.copy(), np.moveaxis(saved, 0, -1).copy())
    np.testing.assert_allclose(u0_bar.T, expected_u0, rtol=1e-10, atol=1e-11 * np.abs(expected_u0).max())
    if shared is None:
        np.testing.assert_allclose(p_bar.T, expected_p, rtol=1e-10, atol=1e-11 * np.abs(expected_p).max())
    else:
        flat = [expected_p[key] for key in sorted(expected_p)] if isinstance(expected_p, dict) else expected_p
        np.testing.assert_allclose(s_bar.sum(axis=1), flat, rtol=1e-10)


@pytest.mark.few(1)
@compiled
@pytest.mark.parametrize("name", ["lorenz", "time", "backwards", "Tsitouras", "fixed"])
def test_tangents_and_adjoint_are_transposed(name):
    f, d, ranges, _, options = CASES[name]
    u0, p = states(d, 7), parameters(ranges, 7)
    directions = (("p", len(ranges) - 1), ("u", 0))
    sol, out, kernels = both(f, u0, p, directions=directions, **{"times": TIMES, **options})
    assert_equal(sol, out)
    alive, saved, end = cotangents(sol)
    saved, end = np.moveaxis(saved, 0, -1).copy(), end.T.copy()
    u0_bar, p_bar, _ = kernels.reverse(out, alive, end, saved)
    products = np.einsum("mscn,scn->mn", out.dsaved, saved) + np.einsum("mcn,cn->mn", out.du_end, end)
    np.testing.assert_allclose(products, [p_bar[-1], u0_bar[0]], rtol=1e-10, atol=1e-11 * np.abs(products).max())


@pytest.mark.thorough
@compiled
def test_one_that_failed_has_no_gradient():
    f, d, ranges, _, _ = CASES["blows up"]
    sol, out, kernels = both(f, states(d, 7), parameters(ranges, 7), times=TIMES)
    alive, saved, end = cotangents(sol)
    assert 0 < alive.sum() < 7
    end[~alive] = np.nan
    u0_bar, p_bar, _ = kernels.reverse(out, alive, end.T.copy(), np.moveaxis(saved, 0, -1).copy())
    assert np.isfinite(u0_bar).all() and not u0_bar[:, ~alive].any() and not p_bar[:, ~alive].any()
    assert u0_bar[:, alive].all()


@compiled
def test_steps_beyond_the_capacity_are_counted():
    u0, p = states(3, 4), parameters([[20.0, 40.0]], 4)
    given = parameters_of(p, True)
    kernels = Kernels(plan_of(ode_systems.lorenz, given, u0, RK45()))
    whole, few = (kernels.forward(u0, given, 0.0, 1.0, [1.0], capacity=capacity) for capacity in (100, 3))
    np.testing.assert_array_equal(few.naccept, whole.naccept)
    np.testing.assert_array_equal(few.steps_u, whole.steps_u[:3])
    assert few.naccept.min() > 3
