"""Rosenbrock methods: their steps beside those by the papers' formulas, their orders; stiff systems beside Radau."""

from __future__ import annotations

import dataclasses
from functools import cache

import autograd.numpy as anp
import numpy as np
import pytest
from autograd.tracer import getval
from device_double import on_device, on_host
from kernels_on_cpu import parameters_of
from mpi4py import MPI
from rosenbrock_by_hand import rodas5p, rosenbrock23, solved_by_hand
from scipy.integrate import solve_ivp
from stiff_systems import SYSTEMS, robertson

import mpiad
from mpiad.device import to_device
from mpiad.ensemble import (
    EnsembleMPI,
    EnsembleProblem,
    EnsembleSerial,
    EnsembleThreads,
    Event,
    ODEProblem,
    Rodas5P,
    Rosenbrock23,
    remake,
    solve,
)
from mpiad.ensemble.column_lu import ColumnLU
from mpiad.ensemble.compiled.trace import trace
from mpiad.ensemble.field_jacobian import jacobian_program
from mpiad.ensemble.tableaus import rosenbrock

WORLD = MPI.COMM_WORLD
# Of each its formulas, the order of its error estimate, and its orders: of the solution, the embedded one, states between.
METHODS = {"Rosenbrock23": (Rosenbrock23(), rosenbrock23, 3, (2, 3, 2)), "Rodas5P": (Rodas5P(), rodas5p, 5, (5, 4, 4))}
every_method = pytest.mark.parametrize("name", METHODS)
both = pytest.mark.usefixtures("solved_by")


def problem_of(system, **changes):
    return remake(ODEProblem(system.f, system.u0, (0.0, system.end), system.p), **changes)


@cache
def radau(name):
    system = SYSTEMS[name]
    f, jacobian, _ = system.by_hand
    found = solve_ivp(
        lambda t, u: f(u, system.p, t), (0, system.end), system.u0, "Radau", rtol=1e-8, atol=1e-13,
        jac=lambda t, u: jacobian(u, system.p, t),
    )  # fmt: skip
    return found.y[:, -1]


@pytest.mark.serial
@every_method
@pytest.mark.parametrize("system", SYSTEMS)
def test_steps_and_ends_are_those_by_hand(name, system):
    alg, step, order, _ = METHODS[name]
    stiff, tolerances = SYSTEMS[system], {"rtol": 1e-3, "atol": 1e-7}
    times, rejected, end = solved_by_hand(step, order, stiff.by_hand, stiff.u0, stiff.p, (0.0, stiff.end), **tolerances)
    sol = solve(problem_of(stiff), alg, save_everystep=True, **tolerances)
    assert abs(sol.naccept - (len(times) - 1)) <= 0.01 * len(times) and abs(sol.nreject - rejected) <= 1 + 0.1 * rejected
    np.testing.assert_allclose(sol.u_end, end, rtol=2e-5)
    # The first ones, before rounding has grown.
    np.testing.assert_allclose(sol.t[:8], times[:8], rtol=1e-6)


@pytest.mark.few(2)
@pytest.mark.serial
@every_method
@pytest.mark.parametrize("system", ["Robertson", "Van der Pol", "HIRES"])
def test_ends_beside_radau(name, system):
    expected, rtol = radau(system), 1e-4 if name == "Rosenbrock23" else 1e-6
    sol = solve(problem_of(SYSTEMS[system]), METHODS[name][0], rtol=rtol, atol=1e-5 * rtol)
    assert sol.retcode == "Success"
    np.testing.assert_allclose(sol.u_end, expected, rtol=1e-2 if name == "Rosenbrock23" else 1e-5, atol=1e-12)


def oscillating(u, p, t):
    return [u[1] * (1 + anp.cos(t)), -u[0] * (1 + anp.cos(t))]


OSCILLATING = (
    lambda u, p, t: np.array(oscillating(u, p, t)),
    lambda u, p, t: np.array([[0, 1 + np.cos(t)], [-1 - np.cos(t), 0]]),
    lambda u, p, t: np.array([-np.sin(t) * u[1], np.sin(t) * u[0]]),
)


def at(t):
    phase = t + np.sin(t)
    return np.array([np.sin(phase), np.cos(phase)])


@pytest.mark.serial
@every_method
def test_orders_by_slopes(name):
    alg, step, error_order, (order, embedded, between) = METHODS[name]
    errors = []
    for h in (0.1, 0.05):
        sol = solve(ODEProblem(oscillating, at(0.0), (0.0, 2.0)), alg, dt=h, dtmax=h, rtol=1.0, atol=1.0)
        one = solve(ODEProblem(oscillating, at(1.0), (1.0, 1.0 + h)), alg, dt=h, saveat=[1 + 0.4 * h], rtol=1.0, atol=1.0)
        new, error, _ = step(*OSCILLATING, at(1.0), None, 1.0, h)
        assert (sol.naccept, one.naccept) == (round(2 / h), 1)
        found = [sol.u_end - at(2.0), new - error - at(1 + h) if embedded < order else new + error - at(1 + h)]
        errors.append([np.linalg.norm(x) for x in (*found, one.u[0] - at(1 + 0.4 * h))])
    slopes = np.log2(np.divide(*errors))
    np.testing.assert_allclose(slopes, [order, embedded + 1, between + 1], atol=0.25)
    assert alg.tableau.error_order == error_order


@both
@pytest.mark.serial
@every_method
def test_a_stiff_linear_system_forwards_and_backwards(name):
    # Prothero and Robinson's, with a coupling: u follows g(t), however fast what isn't on it decays (or, backwards, grows).
    rate = np.array([[1.0], [1e3], [1e6]])

    def f(u, p, t):
        return [-p[0] * (u[0] - anp.sin(t)) + anp.cos(t), u[0] - u[1]]

    def exact(t):
        return np.array([np.sin(t), (np.sin(t) - np.cos(t)) / 2 + np.exp(-t)])

    tolerances = {"rtol": 1e-8, "atol": 1e-8} if name == "Rodas5P" else {"rtol": 1e-5, "atol": 1e-5}
    for span, sign in (((0.0, 2.0), 1), ((2.0, 0.0), -1)):
        times = [0.3, 1.0, 1.7][::sign]
        ensemble = EnsembleProblem(ODEProblem(f, exact(span[0]), span), p=sign * rate)
        sol = solve(ensemble, METHODS[name][0], saveat=times, dense_output=True, **tolerances)
        np.testing.assert_allclose(sol.u_end, [exact(span[1])] * 3, atol=100 * tolerances["atol"])
        np.testing.assert_allclose(sol.u, [[exact(t) for t in times]] * 3, atol=100 * tolerances["atol"])
        np.testing.assert_allclose(sol(times), sol.u, rtol=1e-12, atol=1e-13)
        assert sol.naccept.max() < 300  # stability would bound an explicit method's to a million


@pytest.mark.serial
@every_method
def test_the_jacobian_by_tangents_gives_the_same(name):
    for system in ("forced", "HIRES"):
        stiff = SYSTEMS[system]
        problems = [problem_of(stiff, f=f, tspan=(0.0, 0.1 * stiff.end)) for f in (stiff.f, by_values(stiff.f))]
        sols = [solve(problem, METHODS[name][0]) for problem in problems]
        assert sols[0].naccept == sols[1].naccept
        np.testing.assert_allclose(sols[0].u_end, sols[1].u_end, rtol=1e-9, atol=1e-12)


def by_values(f):
    """Return f in a form that no program has: it asks for numbers."""
    return lambda u, p, t: f(u if float(getval(u)[0, 0]) < 1e9 else None, p, t)


@pytest.mark.serial
def test_states_of_other_shapes_and_dtypes():
    decay = np.array([[1e4, 1.0], [2.0, 30.0]])
    for f in (lambda u, p, t: -p * u + anp.cos(t), by_matrix):
        sol = solve(ODEProblem(f, np.ones((2, 2)), (0.0, 1.0), decay), Rodas5P(), rtol=1e-8, atol=1e-8)
        expected = (decay * np.cos(1.0) + np.sin(1.0)) / (decay**2 + 1)
        expected = expected + np.exp(-decay) * (1 - decay / (decay**2 + 1))
        np.testing.assert_allclose(sol.u_end, expected, atol=1e-7)
    number = solve(ODEProblem(lambda u, p, t: -1e3 * (u - p), np.float32(0.0), (0.0, 1.0), np.float32(2.0)), Rodas5P())
    assert number.u_end.dtype == np.float32
    np.testing.assert_allclose(number.u_end, 2.0, rtol=1e-4)


def by_matrix(u, p, t):
    float(getval(u)[0, 0])
    return -p * u + anp.cos(t)


@pytest.mark.serial
@pytest.mark.parametrize("system", SYSTEMS)
def test_no_entry_of_a_jacobian_is_zero_everywhere(system):
    stiff = SYSTEMS[system]
    program = trace(stiff.f, stiff.u0.shape, parameters_of(stiff.p, False), float)
    expected = stiff.jacobian(stiff.u0 + 0.3, stiff.p, 0.4), stiff.slope(stiff.u0 + 0.3, stiff.p, 0.4)
    found = jacobian_program(program)
    assert sorted(found.places) == sorted(map(tuple, np.argwhere(expected[0]).tolist()))
    assert found.slopes == tuple(np.flatnonzero(expected[1]))


# Each system with one method: a kernel's text has the stages of the method, and the Jacobian and factors of the system.
IN_KERNELS = {"Rosenbrock23": ("Robertson", "coupled"), "Rodas5P": ("Van der Pol", "HIRES", "forced")}
PAIRS = [
    pytest.param(name, system, marks=() if system in IN_KERNELS[name] else pytest.mark.thorough)
    for name in METHODS
    for system in SYSTEMS
]


@pytest.mark.few(1)
@pytest.mark.serial
@pytest.mark.limit(240)
@pytest.mark.parametrize(("name", "system"), PAIRS)
def test_kernels_take_the_same_steps(name, system):
    stiff = SYSTEMS[system]
    p = stiff.p * np.random.default_rng(0).uniform(0.5, 2.0, (20, len(stiff.p)))
    ensemble = EnsembleProblem(problem_of(stiff), p=p)
    options = {"rtol": 1e-3, "atol": 1e-7, "saveat": [0.3 * stiff.end, stiff.end]}
    sols = [solve(ensemble, METHODS[name][0], compile=compiled, **options) for compiled in (True, False)]
    assert "jacobian" in sols[0].problem.kernel_source()
    for field in ("naccept", "nreject"):
        np.testing.assert_array_equal(*[getattr(sol, field) for sol in sols])
    np.testing.assert_allclose(sols[0].u, sols[1].u, rtol=1e-6, atol=1e-10)


@pytest.mark.serial
def test_kernels_in_single_precision():
    problem = ODEProblem(lambda u, p, t: [-p[0] * (u[0] - u[1]), -u[1] * t], np.ones(2, np.float32), (0.0, 1.0))
    ensemble = EnsembleProblem(problem, p=np.array([[1e2], [1e4]], np.float32))
    sol = solve(ensemble, Rodas5P(), compile=True, saveat=[0.5, 1.0])
    assert sol.u.dtype == np.float32
    np.testing.assert_allclose(sol.u[..., 1], [np.exp([-0.125, -0.5])] * 2, rtol=1e-3)


RATES = np.geomspace(1.0, 1e4, 1200)[:, None]
COMPANY = EnsembleProblem(ODEProblem(SYSTEMS["Van der Pol"].f, [2.0, 0.0], (0.0, 2.0)), p=RATES)


@both
@pytest.mark.serial
@every_method
def test_alone_and_in_any_company(name):
    alg = METHODS[name][0]
    whole = solve(COMPANY, alg, saveat=0.25)

    def same(part, rows):
        for field in ("u", "u_end", "t_reached", "naccept", "nreject", "nf", "njac", "nlu", "retcode"):
            assert getattr(part, field).tobytes() == getattr(whole, field)[rows].tobytes(), field

    for rows in (slice(0, 1), slice(7, 9), slice(600, 700)):
        same(solve(remake(COMPANY, p=RATES[rows]), alg, saveat=0.25), rows)
    rows = slice(0, 1200, 171)
    for backend in (EnsembleSerial(), EnsembleThreads(3)):
        same(solve(remake(COMPANY, p=RATES[rows]), alg, backend, saveat=0.25), rows)
    assert set(whole.retcode) == {"Success"} and whole.nreject.any()


@both
def test_over_ranks():
    sol = solve(COMPANY, Rodas5P(), EnsembleMPI(), saveat=0.25)
    alone = solve(COMPANY, Rodas5P(), saveat=0.25)
    for field in ("u", "u_end", "naccept", "nreject", "nf", "njac", "nlu"):
        assert getattr(sol, field).tobytes() == getattr(alone, field).tobytes(), field


@both
@pytest.mark.serial
@every_method
def test_what_fails_fails_alone(name):
    alg = METHODS[name][0]
    # W = 1/γ - h λ is exactly zero in the first step of the second one, and of the third the Jacobian is infinite.
    rates, starts = np.array([1.0, 1 / alg.tableau.gamma, 1.0, 0.5]), np.array([1.0, 1.0, 0.0, 1.0])

    def f(u, p, t):
        return [anp.where(p[1] > 0, p[0] * u[0], 1 - anp.sqrt(anp.abs(u[0])))]

    p = np.stack([rates, np.array([1.0, 1, -1, 1])], axis=1)
    ensemble = EnsembleProblem(ODEProblem(f, [1.0], (0.0, 1.0)), u0=starts[:, None], p=p)
    sol = solve(ensemble, alg, dt=1.0, rtol=1e-6, atol=1e-6)
    assert sol.retcode.tolist() == ["Success", "Success", "Unstable", "Success"]
    assert sol.nreject[1] > 0 and sol.naccept[2] == 0
    np.testing.assert_allclose(sol.u_end[[0, 1, 3], 0], np.exp(rates[[0, 1, 3]]), rtol=1e-3)
    others = solve(remake(ensemble, u0=starts[[0, 3], None], p=p[[0, 3]]), alg, dt=1.0, rtol=1e-6, atol=1e-6)
    assert others.u.tobytes() == sol.u[[0, 3]].tobytes()


@pytest.mark.serial
@every_method
def test_counts(name):
    calls = 0

    def f(u, p, t):
        nonlocal calls
        calls += type(u) is np.ndarray and u.dtype == float
        return robertson(u, p, t)

    counted = []
    stiff = SYSTEMS["Robertson"]
    for most in (1, 5, 25):
        calls = 0
        sol = solve(problem_of(stiff, f=f), METHODS[name][0], max_steps=most)
        counted.append((calls, sol.nf, sol.njac, sol.nlu))
    # What f is tried with before a solve is the same for both; the first one traces it, too.
    each, nf, njac, nlu = np.subtract(counted[2], counted[1])
    assert (each, njac, nlu) == (nf, 20, 20) and sol.retcode == "MaxIters" and solve(problem_of(stiff)).njac == 0


@both
@pytest.mark.serial
def test_events():
    fall = Event(lambda u, p, t: u[0] - 0.5)
    decay = ODEProblem(lambda u, p, t: [-p * u[0]], [1.0], (0.0, 9.0), 3.0)
    sol = solve(decay, Rodas5P(), events=fall, rtol=1e-9, atol=1e-9)
    assert sol.retcode == "Terminated"
    assert sol.t_reached == pytest.approx(np.log(2) / 3, abs=1e-8) and sol.u_end[0] == pytest.approx(0.5, abs=1e-12)


@pytest.mark.serial
def test_factors_beside_numpy():
    rng = np.random.default_rng(0)
    matrices, right = rng.normal(size=(6, 6, 50)), rng.normal(size=(6, 50))
    matrices[0, 0, ::3] = 0.0
    by_columns = np.moveaxis(matrices, -1, 0)
    lu = ColumnLU(matrices.copy())
    for transposed, flat in ((False, by_columns), (True, np.swapaxes(by_columns, 1, 2))):
        x = right.copy()
        lu.solve(x, transposed)
        np.testing.assert_allclose(x, np.linalg.solve(flat, right.T[..., None])[..., 0].T, rtol=1e-10)


@pytest.mark.few(1)
@pytest.mark.serial
@every_method
def test_steps_on_a_device_are_those_of_the_host(name):
    def spring(u, p, t):  # where it is stiff the second row is the pivot
        return [u[1] + anp.sin(t), p[2] * u[0] * u[2] - p[0] * u[0] - p[1] * u[1], u[0] ** 2 - u[2]]

    rng, alg = np.random.default_rng(5), METHODS[name][0]
    p, u0 = np.array([1e3, 30.0, 3.0]) * rng.random((7, 3)) ** 3, 1 + rng.random((7, 3))
    for tspan, more in (((0.0, 1.0), {"saveat": 0.3}), ((1.0, 0.9), {"saveat": [0.97]}), ((0.0, 1.0), {"max_steps": 40})):
        events = Event(lambda u, p, t: u[2] - 0.9 - 0.1 * t) if "max_steps" in more else ()
        sols = [
            solve(
                EnsembleProblem(ODEProblem(spring, np.ones(3), tspan), u0=place(u0), p=place(p)), alg, events=events, **more
            )
            for place in (np.array, on_device)
        ]
        host, found = sols
        for field in ("retcode", "naccept", "nreject", "nf"):
            np.testing.assert_array_equal(getattr(found, field), getattr(host, field))
        np.testing.assert_allclose(on_host(found.u), host.u, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(on_host(found.u_end), host.u_end, rtol=1e-9, atol=1e-12)


@pytest.mark.thorough
@pytest.mark.one_rank
@pytest.mark.parametrize(
    ("alg", "rtol"), [pytest.param(Rosenbrock23(), 1e-2, marks=pytest.mark.thorough), (Rodas5P(), 1e-3)]
)
def test_second_derivatives_on_a_device_are_those_of_the_host(alg, rtol):
    stiff, found = problem_of(SYSTEMS["forced"], tspan=(0.0, 0.3)), []
    assert solve(stiff, alg, rtol=rtol, atol=rtol / 100).naccept > 5
    for place in (lambda x: x, lambda x: to_device(x, like=on_device(0.0))):

        def total(x):
            sol = solve(remake(stiff, u0=x[0], p=x[1]), alg, saveat=[0.1, 0.25], rtol=rtol, atol=rtol / 100)  # noqa: B023
            return anp.sum(sol.u**3) + anp.sum(sol.u_end**2)

        x = place(stiff.u0.astype(float)), place(stiff.p.astype(float))
        found.append([on_host(g) for g in mpiad.hvp(total, objective="root", shared=True)(x, x)])
    for host, device in zip(*found):
        np.testing.assert_allclose(device, host, rtol=1e-9, atol=1e-9 * np.abs(host).max())


def refused(problem, error, text, alg=None, **options):
    with pytest.raises(error, match=text):
        solve(problem, alg or Rodas5P(), **options)
    WORLD.barrier()


def test_what_is_refused():
    stiff = problem_of(SYSTEMS["Robertson"])
    many = EnsembleProblem(stiff, p=np.tile(stiff.p, (6, 1)))
    mpi = EnsembleMPI()
    there = remake(stiff, u0=to_device(stiff.u0, like=on_device(0.0)))
    refused(remake(there, mass_matrix=np.eye(3)), NotImplementedError, "supports a mass matrix on the host only")
    weights = on_device(np.ones(3))[:, None]
    closed = remake(there, f=lambda u, p, t: -weights * u, p=None)
    refused(closed, TypeError, "on a device a Rosenbrock method needs the Jacobian")
    opaque = remake(stiff, f=lambda u, p, t: [-np.array(list(map(float, u[0]))) * u[0], u[1], u[2]])
    refused(remake(many, problem=opaque), TypeError, "needs the Jacobian of f", ensemblealg=mpi)


TABLE = {field.name: getattr(Rosenbrock23.tableau, field.name) for field in dataclasses.fields(Rosenbrock23.tableau)}


@pytest.mark.serial
@pytest.mark.parametrize("change", [
    {"c": (0.0, 0.4, 1.0)}, {"slopes": (0.29, 0.0, -0.29)}, {"error": (0.1, 0.1, 0.2)}, {"b": (1.0, 1.0, 0.0)},
    {"a": ((1.0,),)},
])  # fmt: skip
def test_tables_with_mistakes_are_refused(change):
    given = {
        "gamma": TABLE["gamma"], "c": TABLE["c"][1:-1], "a": [row[1:] for row in TABLE["a"][1:-1]],
        "coupling": [row[1:] for row in TABLE["coupling"][1:]], "slopes": TABLE["slopes"], "b": TABLE["a"][-1][1:],
        "error": TABLE["error"][1:-1], "dense": TABLE["dense"][1:-1], "order": 2, "embedded_order": 3,
    }  # fmt: skip
    assert rosenbrock(**given).a == Rosenbrock23.tableau.a
    with pytest.raises(ValueError, match="table"):
        rosenbrock(**{**given, **change})


@pytest.mark.parametrize("alg", [Rosenbrock23(), Rodas5P()])
def test_complex_states_are_refused(alg):
    stiff = problem_of(SYSTEMS["Robertson"])
    turning = remake(stiff, u0=stiff.u0 + 0j)
    many = EnsembleProblem(turning, p=np.tile(stiff.p, (6, 1)))
    text = rf"{type(alg).__name__} needs real states, but u0 is complex128. Take a Runge-Kutta .* real and imaginary parts"
    there = remake(turning, u0=to_device(turning.u0, like=on_device(0.0)), p=on_device(stiff.p))
    for problem, options in (
        (turning, {}), (many, {"ensemblealg": EnsembleMPI()}), (many, {"compile": True}), (many, {"dense_output": True}),
        (remake(turning, mass_matrix=np.eye(3)) if alg.tableau.takes_mass else turning, {}), (there, {}),
    ):  # fmt: skip
        refused(problem, NotImplementedError, text, alg, **options)
    with pytest.raises(NotImplementedError, match=text):
        mpiad.grad(lambda p: anp.sum(anp.abs(solve(remake(turning, p=p), alg).u_end)))(stiff.p)
    mpiad.reset()
