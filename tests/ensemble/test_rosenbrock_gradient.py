"""Derivatives of Rosenbrock solves: exact for the steps taken, as complex steps through the papers' formulas show."""

from __future__ import annotations

from functools import cache, partial

import autograd.numpy as anp
import numpy as np
import pytest
from autograd.tracer import getval
from mpi4py import MPI
from rosenbrock_by_hand import rodas5p, rosenbrock23
from stiff_systems import SYSTEMS, System

import mpiad
from mpiad.ensemble import EnsembleMPI, EnsembleProblem, Event, ODEProblem, Rodas5P, Rosenbrock23, fit, remake, solve

WORLD = MPI.COMM_WORLD
METHODS = {"Rosenbrock23": (Rosenbrock23(), rosenbrock23), "Rodas5P": (Rodas5P(), rodas5p)}
every_method = pytest.mark.parametrize("name", METHODS)

FORCED = SYSTEMS["forced"]
TOLERANCES, TIMES, SPAN = {"rtol": 1e-3, "atol": 1e-5}, np.array([0.21, 0.6, 0.61]), (0.1, 0.9)
U0 = np.array([[0.5, 1.5], [0.9, -0.4], [1.2, 0.3]])
P = np.array([[2e3, 0.7], [50.0, 1.9], [1.0, -0.8]])
WEIGHTS = np.random.default_rng(3).normal(size=(3, len(TIMES), 2))
ENSEMBLE = EnsembleProblem(ODEProblem(FORCED.f, U0[0], SPAN), u0=U0, p=P)


def untraced(u, p, t):
    """The same f, in a form that no program has: it asks for numbers."""
    assert np.isfinite(np.asarray(getval(u), float)).all()
    return FORCED.f(u, p, t)


def loss(saved, end, weights):
    return anp.sum(weights * saved) + anp.sum(end**2)


def loss_by_hand(step, sizes, weights, u0, p, start=0.0, end=0.0, system=FORCED):
    """Return the loss by steps of given sizes, of which the last one ends where tspan does; both ends may be moved."""
    t, u, saved, last = SPAN[0] + start, np.asarray(u0), [], len(sizes) - 1
    for n, h in enumerate(sizes):
        size = h + (end - start if n == last else 0)
        due = [x for x in TIMES if np.real(t) < x <= np.real(t + size)]
        new, _, inside = step(*system.by_hand, u, p, t, size)
        saved += [inside((x - t) / size) for x in due]
        t, u = t + size, new
    return np.sum(weights * np.array(saved)) + np.sum(u**2)


def by_complex_steps(fun, *args):
    """Return the gradient of a function by each argument."""
    found = []
    for k, given in enumerate(args):
        gradient = np.zeros(np.shape(given))
        for index in np.ndindex(gradient.shape):
            moved = [np.array(x, complex) for x in args]
            moved[k][index] += 1e-40j
            gradient[index] = fun(*moved).imag / 1e-40
        found.append(gradient)
    return found


@cache
def sizes_of(alg):
    sol = solve(ENSEMBLE, alg, save_everystep=True, **TOLERANCES)
    return [np.diff(row[~np.isnan(row)]) for row in sol.t]


@cache
def gradients_by_hand(name):
    """Return each trajectory's gradient by its state and parameters."""
    alg, step = METHODS[name]
    return [
        by_complex_steps(partial(loss_by_hand, step, sizes, WEIGHTS[i]), U0[i], P[i])
        for i, sizes in enumerate(sizes_of(alg))
    ]


def solved_loss(ensemble, alg, weights, **options):
    sol = solve(ensemble, alg, saveat=TIMES, **TOLERANCES, **options)
    return loss(sol.u, sol.u_end, weights)


@pytest.mark.few(5)
@pytest.mark.each_combination
@pytest.mark.serial
@every_method
@pytest.mark.parametrize("way", ["adjoint", "checkpoints", "tangent", "untraced", "kernel", "kernel and checkpoints"])
def test_gradients_by_states_and_parameters(name, way):
    alg, given = METHODS[name][0], {"tangent": {"gradient": "tangent"}, "untraced": {}}
    options = given.get(way, {"compile": "kernel" in way, "checkpoints": 3 if "checkpoints" in way else None})
    ensemble = remake(ENSEMBLE, problem=remake(ENSEMBLE.problem, f=untraced)) if way == "untraced" else ENSEMBLE
    found = mpiad.grad(lambda u0, p: solved_loss(remake(ensemble, u0=u0, p=p), alg, WEIGHTS, **options), (0, 1))(U0, P)
    for i, expected in enumerate(gradients_by_hand(name)):
        for whole, gradient in zip(found, expected):
            np.testing.assert_allclose(whole[i], gradient, rtol=1e-9, atol=1e-11)


@pytest.mark.serial
@every_method
@pytest.mark.parametrize("way", ["adjoint", "tangent", "kernel"])
def test_gradients_by_the_ends_of_tspan(name, way):
    alg, step = METHODS[name]

    def solved(start, end):
        problem = ODEProblem(FORCED.f, U0[0], (start, end))
        ensemble, given = EnsembleProblem(problem, p=P[:1]), {"compile": True} if way == "kernel" else {"gradient": way}
        sol = solve(ensemble, alg, saveat=TIMES, **given, **TOLERANCES)
        return loss(sol.u[0], sol.u_end[0], WEIGHTS[0])

    found, sizes = mpiad.grad(solved, (0, 1))(*SPAN), sizes_of(alg)[0]
    expected = by_complex_steps(lambda *ends: loss_by_hand(step, sizes, WEIGHTS[0], U0[0], P[0], *ends), 0.0, 0.0)
    np.testing.assert_allclose(found, expected, rtol=1e-8)


# Where it is stiff the last row is the pivot of the second.
SPRING = System(
    lambda u, p, t: [anp.cos(t) - u[0], u[2], u[0] - p[0] * u[1] - p[1] * u[2]],
    lambda u, p, t: [[-1, 0, 0], [0, 0, 1], [1, -p[0], -p[1]]],
    lambda u, p, t: [-np.sin(t), 0, 0],
    np.array([0.5, 1.0, 0.0]), np.array([1e4, 200.0]), SPAN[1],
)  # fmt: skip


@pytest.mark.serial
def test_gradients_by_the_ends_of_tspan_where_kernels_exchange_rows():
    alg, step = METHODS["Rosenbrock23"]

    def solved(start, end, **options):
        ensemble = EnsembleProblem(ODEProblem(SPRING.f, SPRING.u0, (start, end)), p=SPRING.p[None])
        return solve(ensemble, alg, **options, **TOLERANCES)

    def total(*ends):
        sol = solved(*ends, saveat=TIMES, compile=True)
        return loss(sol.u[0], sol.u_end[0], 1.0)

    by_hand = partial(loss_by_hand, step, np.diff(solved(*SPAN, save_everystep=True).t[0]), 1.0, SPRING.u0, SPRING.p)
    expected = by_complex_steps(lambda *ends: by_hand(*ends, system=SPRING), 0.0, 0.0)
    np.testing.assert_allclose(mpiad.grad(total, (0, 1))(*SPAN), expected, rtol=1e-8)


STIFF = SYSTEMS["Van der Pol"]
STIFF_ENSEMBLE = EnsembleProblem(ODEProblem(STIFF.f, STIFF.u0, (0.0, STIFF.end)), p=STIFF.p[None])
STIFF_TOLERANCES = {"rtol": 1e-3, "atol": 1e-7}


@cache
def slope_with_more_digits(name, compiled):
    """Return the derivative of the last state's first component, by a tangent at the states that were computed."""
    alg = METHODS[name][0]
    sol = solve(STIFF_ENSEMBLE, alg, save_everystep=True, compile=compiled, **STIFF_TOLERANCES)
    table, long, states = alg.tableau, np.clongdouble, sol.u[0]
    p, along = long(STIFF.p[0]) + 1e-30j * long(1), np.zeros(2, long)
    for u, h in zip(states, np.diff(np.asarray(sol.t, np.longdouble).ravel())):
        u = u.astype(long) + 1j * along.imag
        (a, b), (c, d) = np.eye(2) / np.longdouble(table.gamma) - h * np.array(STIFF.jacobian(u, [p], 0.0), long)
        k = [np.zeros(2, long)]
        for row, coupling in zip(table.a, table.coupling):
            y = u + h * sum(np.longdouble(w) * x for w, x in zip(row, k))
            right = np.array(STIFF.f(y, [p], 0.0), long) + sum(np.longdouble(w) * x for w, x in zip(coupling, k))
            k.append(np.array([d * right[0] - b * right[1], a * right[1] - c * right[0]]) / (a * d - b * c))
        along = u + h * sum(np.longdouble(w) * x for w, x in zip(table.a[-1], k))
    return float(along.imag[0] / 1e-30)


@pytest.mark.few(1)
@pytest.mark.serial
@pytest.mark.skipif(np.finfo(np.longdouble).eps == np.finfo(float).eps, reason="long doubles have no more digits")
@pytest.mark.parametrize("way", ["adjoint", pytest.param("tangent", marks=pytest.mark.thorough), "kernel"])
@every_method
def test_an_ill_conditioned_gradient_is_that_of_the_computed_states(name, way):
    # Of Van der Pol's equation at 1e3 the rounding of the states alone moves the gradient by 2e-8, so that two programs
    # agree no better; at the states that were computed, a tangent with more digits is the same to 1e-9.
    options = {**STIFF_TOLERANCES, **({"compile": True} if way == "kernel" else {"compile": False, "gradient": way})}
    loss = lambda p: solve(remake(STIFF_ENSEMBLE, p=p), METHODS[name][0], **options).u_end[0, 0]  # noqa: E731
    slope = mpiad.grad(loss)(STIFF.p[None])[0, 0]
    assert slope == pytest.approx(slope_with_more_digits(name, way == "kernel"), rel=5e-9)


@pytest.mark.thorough
@pytest.mark.serial
@pytest.mark.limit(240)
def test_kernels_of_larger_systems():
    alg, step = METHODS["Rodas5P"]
    stiff = SYSTEMS["coupled"]
    u0 = stiff.u0 * np.array([[1.0], [0.9], [1.1]])
    ensemble = EnsembleProblem(ODEProblem(stiff.f, u0[0], (0.0, stiff.end), stiff.p), u0=u0)

    def solved(u0, p, **options):
        problem = remake(ensemble.problem, p=p)
        return solve(remake(ensemble, problem=problem, u0=u0), alg, compile=True, **TOLERANCES, **options)

    found = mpiad.grad(lambda *given: anp.sum(solved(*given).u_end ** 2), (0, 1))(u0, stiff.p)
    times, total = solved(u0, stiff.p, save_everystep=True).t, 0.0

    def by_hand(u, p, sizes):
        for h in sizes:
            u = step(*stiff.by_hand, u, p, 0.0, h)[0]
        return np.sum(u**2)

    for i, row in enumerate(times):
        expected = by_complex_steps(partial(by_hand, sizes=np.diff(row[~np.isnan(row)])), u0[i], stiff.p)
        np.testing.assert_allclose(found[0][i], expected[0], rtol=1e-8, atol=1e-10)
        total += expected[1]
    np.testing.assert_allclose(found[1], total, rtol=1e-8)


@pytest.mark.serial
def test_tangents_and_second_derivatives():
    alg, step = METHODS["Rodas5P"]
    fun, direction = (lambda p: solved_loss(remake(ENSEMBLE, p=p), alg, WEIGHTS)), 0.3 * P
    value, tangent = mpiad.jvp(fun, P, direction)
    product = mpiad.hvp(fun)(P, direction)
    for i, sizes in enumerate(sizes_of(alg)):
        gradient = partial(by_complex_steps, partial(loss_by_hand, step, sizes, WEIGHTS[i], U0[i]))
        change = 1e-5 * direction[i]
        (slope,) = gradient(P[i])
        tangent = tangent - slope @ direction[i]
        difference = gradient(P[i] + change)[0] - gradient(P[i] - change)[0]
        np.testing.assert_allclose(product[i], difference / 2e-5, rtol=1e-6, atol=1e-8)
    assert abs(tangent) < 1e-9 and value == pytest.approx(fun(P), rel=1e-14)


@pytest.mark.serial
def test_a_terminal_event_moves_with_its_trajectory():
    half = Event(lambda u, p, t: u[0] - p[1])

    def ended(p, **options):
        decay = ODEProblem(lambda u, p, t: [-p[0] * u[0] * (1 + 0 * t)], [1.0], (0.0, 9.0), p)
        sol = solve(decay, Rodas5P(), events=half, rtol=1e-10, atol=1e-10, **options)
        return sol.t_reached + 3 * sol.u_end[0]

    p = np.array([3.0, 0.5])
    ways = [{"gradient": "adjoint"}, {"gradient": "tangent"}, {"compile": True}]
    found = [mpiad.grad(lambda p, way=way: ended(p, **way))(p) for way in ways]
    np.testing.assert_allclose(found[1:], [found[0]] * 2, rtol=1e-9)
    # The event is at log(1 / p1) / p0, and the state there p1.
    np.testing.assert_allclose(found[0], [-np.log(2) / 9, -2 / 3 + 3], rtol=1e-7)


@pytest.mark.serial
def test_fits_of_stiff_kinetics():
    def kinetics(u, k, t):
        forth, back = k[0] * u[1], k[1] * u[2]
        return [1e5 * (u[1] - u[0]), back - forth, forth - back]

    rates, times = np.array([[0.5, 1.5], [1.2, 0.7], [2.0, 1.0]]), np.linspace(0.2, 3.0, 8)
    # Of u' = back - forth with u + v = 1; the first follows u, 1e-5 behind it.
    total = rates.sum(axis=1, keepdims=True)
    share = rates[:, 1:] / total
    measured = share + (1 - share) * np.exp(-total * times)
    problem = ODEProblem(kinetics, [1.0, 1.0, 0.0], (0.0, 3.0), rates[0])
    options = {"data": measured, "saveat": times, "rtol": 1e-6, "atol": 1e-8}
    found = fit(problem, lambda u, p, data: u[:, 0] - data, 1.4 * rates, Rodas5P(), **options)
    assert set(found.retcode) == {"Success"}
    np.testing.assert_allclose(found.p, rates, rtol=1e-3)


@pytest.mark.serial
def test_what_fails_drops_out():
    def f(u, p, t):
        return [p[0] * u[0] ** 2 - u[1], -u[1]]

    ensemble = EnsembleProblem(ODEProblem(f, [1.0, 0.1], (0.0, 2.0)), p=np.array([[0.1], [3.0], [0.2]]))

    def total(p):
        return anp.sum(solve(remake(ensemble, p=p), Rodas5P(), compile=False).u_end)

    found, alive = mpiad.grad(total)(ensemble.p), mpiad.grad(total)(ensemble.p[::2])
    assert found[1] == 0 and found[::2].tobytes() == alive.tobytes()


def test_shared_parameters_over_ranks():
    shared = np.array([300.0, 0.7])
    ensemble = EnsembleProblem(ODEProblem(FORCED.f, U0[0], SPAN, shared), u0=U0)

    def solved(p, backend=None):
        given = {} if backend is None else {"ensemblealg": backend}
        return solved_loss(remake(ensemble, problem=remake(ensemble.problem, p=p)), Rodas5P(), WEIGHTS, **given)

    found = mpiad.grad(lambda p: solved(p, EnsembleMPI()), shared=True)(shared)
    expected = mpiad.grad(solved, shared=True)(shared)
    assert len(set(WORLD.allgather(found.tobytes()))) == 1
    np.testing.assert_allclose(found, expected, rtol=1e-10)
