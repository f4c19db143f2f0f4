"""Forward mode and second derivatives of solves."""

from __future__ import annotations

from functools import cache, partial

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from ode_systems import lorenz
from scipy.integrate import solve_ivp
from unrolled_steps import unrolled

import mpiad
from mpiad.ensemble import BS3, RK4, RK45, EnsembleProblem, Event, ODEProblem, Rodas5P, Rosenbrock23, Tsit5, Vern7, solve

pytestmark = pytest.mark.serial
both = pytest.mark.usefixtures("solved_by")

TIGHT = {"rtol": 1e-5, "atol": 1e-8}
SAVED = [0.0, 0.13, 0.13, 0.3, 0.31, 0.42, 0.5]


def draws(*shape, seed=0):
    return np.random.default_rng(seed).uniform(0.5, 1.5, shape)


def forced(u, p, t):
    return [u[1], -p[0] * anp.sin(u[0]) - p[1] * u[1] * anp.exp(-t) + 0.3 * anp.cos(3 * t)]


def forced_states(x):
    """Return all results of an ensemble as a function of initial states, parameters and tspan."""
    ensemble = EnsembleProblem(ODEProblem(forced, np.ones(2), (x["span"][0], x["span"][1]), x["p"]), u0=x["u0"])
    sol = solve(ensemble, saveat=[0.1, 0.45, 0.9], **TIGHT)
    return anp.concatenate([anp.ravel(sol.u), anp.ravel(sol.u_end)])


def decay(u, p, t):
    return [-p[0] * u[0]]


VARIABLES = {"u0": draws(4, 2), "p": draws(2, seed=1), "span": np.array([0.1, 0.9])}
ALONG = {"u0": draws(4, 2, seed=2) - 1, "p": draws(2, seed=3) - 1, "span": np.array([0.3, -0.2])}


def without_span(x):
    return {"u0": x["u0"], "p": x["p"], "span": VARIABLES["span"]}


def test_tangents_of_many_trajectories_are_those_of_the_closed_form():
    def saved(p):
        return solve(
            EnsembleProblem(ODEProblem(decay, [1.0], (0.0, 1.0)), p=p), saveat=[0.5, 1.0], compile=False, **TIGHT
        ).u

    p, v = np.linspace(0.5, 1.5, 1100)[:, None], np.cos(np.arange(1100.0))[:, None]
    exact = -np.array([0.5, 1.0]) * np.exp(-p * [0.5, 1.0]) * v
    np.testing.assert_allclose(mpiad.jvp(saved, p, v)[1][..., 0], exact, rtol=1e-4, atol=1e-7)


@both
@pytest.mark.parametrize("chosen", [lambda x: x, without_span], ids=["with tspan", "without"])
def test_tangent_and_adjoint_are_transposes(chosen):
    def fun(x):
        return forced_states(chosen(x))

    weights = draws(32, seed=4) - 1
    value, tangent = mpiad.jvp(fun, VARIABLES, ALONG)
    vjp, same = mpiad.make_vjp(fun)(VARIABLES)
    back = vjp(weights)
    np.testing.assert_array_equal(value, same)
    there, here = np.sum(weights * tangent), sum(np.sum(back[name] * ALONG[name]) for name in back)
    assert abs(there - here) <= 1e-12 * np.sum(np.abs(weights * tangent))


@both
@pytest.mark.parametrize("chosen", [lambda x: x, without_span], ids=["with tspan", "without"])
def test_products_with_the_hessian(chosen):
    def loss(x):
        return anp.sum(forced_states(chosen(x)) ** 3)

    def slope(x):
        g = mpiad.grad(loss)(x)
        return sum(anp.sum(g[name] * ALONG[name]) for name in ("u0", "p", "span"))

    found, reverse = mpiad.hvp(loss)(VARIABLES, ALONG), mpiad.grad(slope)(VARIABLES)
    for name in found:
        np.testing.assert_allclose(found[name], reverse[name], rtol=1e-11, atol=1e-11)


def test_second_derivatives_by_hand():
    u0, rho, tolerances = np.array([1.0, 0.5, 0.2]), np.array([15.0]), {"rtol": 1e-3, "atol": 1e-6}
    times = solve(ODEProblem(lorenz, u0, (0.0, 0.5), rho), save_everystep=True, **tolerances).t
    assert len(times) > 5

    def by_hand(rho):
        saved, end = unrolled(lorenz, u0, rho, times, SAVED)
        return sum(anp.sum(u**2) for u in saved) + anp.sum(end)

    def loss(rho):
        sol = solve(ODEProblem(lorenz, u0, (0.0, 0.5), rho), saveat=SAVED, **tolerances)
        return anp.sum(sol.u**2) + anp.sum(sol.u_end)

    expected = autograd.grad(lambda rho: autograd.grad(by_hand)(rho)[0])(rho)
    second = [
        mpiad.grad(lambda rho: mpiad.grad(loss)(rho)[0])(rho),
        mpiad.hvp(loss)(rho, np.ones(1)),
        autograd.grad(lambda rho: autograd.grad(loss)(rho)[0])(rho),
        mpiad.grad(lambda rho: mpiad.jvp(loss, rho, np.ones(1))[1])(rho),
    ]
    for found in second:
        np.testing.assert_allclose(found, expected, rtol=1e-11)


def test_third_derivative():
    def loss(p):
        problem = ODEProblem(lambda u, p, t: [-p[0] * u[0] ** 2], [1.0], (0.0, 1.0), p)
        return solve(problem, Vern7(), rtol=1e-9, atol=1e-11).u_end[0]

    def derivative(fun):
        return lambda p: mpiad.grad(fun)(p)[0]

    # u(1) = 1 / (1 + p); the steps of a solver that tight are nearly those of the function itself.
    p = np.array([0.7])
    assert abs(derivative(derivative(derivative(loss)))(p) + 6 / 1.7**4) < 1e-7


# ---- forward mode in kernels, compared with the replay by arrays

DOSE = Event(times=lambda p: [p[2] * 0.2, 0.35], affect=lambda u, p, t: [u[0] + 0.1 * p[0], u[1], u[2]])
REFLECTED = Event(lambda u, p, t: u[0] - 0.75, affect=lambda u, p, t: [u[0], -0.5 * p[1] * u[1], u[2] + 0.1 * t])
CLOCK = Event(lambda u, p, t: t - 0.2 * p[2], affect=lambda u, p, t: [u[0] * p[0], u[1], u[2]])
CROSSINGS = (
    Event(lambda u, p, t: u[0] - 0.75, terminal=False),
    Event(lambda u, p, t: u[1] - 0.2 * p[1] - 1.1, terminal=False),
)
ENDS = Event(lambda u, p, t: u[0] - 1.14 - 0.02 * p[2] - 0.05 * t, terminal=True)
SENSITIVITIES = {  # per case: the options, and whether p is shared by all trajectories
    "carried": ({}, False),
    "carried, shared parameters": ({}, True),
    "recorded": ({"gradient": "adjoint"}, False),
    "shared parameters": ({"gradient": "adjoint"}, True),
    "checkpoints": ({"gradient": "adjoint", "checkpoints": 2}, False),
    "implicit": ({"alg": Rodas5P()}, False),
    "implicit, shared parameters": ({"alg": Rosenbrock23(), "rtol": 1e-4}, True),
    "doses": ({"events": DOSE}, False),
    "doses, implicit": ({"events": DOSE, "alg": Rodas5P()}, False),
    "crossings": ({"events": CROSSINGS}, False),
    "crossings, implicit": ({"events": CROSSINGS, "alg": Rodas5P()}, False),
    "crossings and an end": ({"events": (*CROSSINGS, ENDS)}, True),
    "crossings and an end, implicit": ({"events": (*CROSSINGS, ENDS), "alg": Rodas5P()}, False),
    "doses and crossings": ({"events": (DOSE, *CROSSINGS)}, False),
    "clock": ({"events": (CLOCK, *CROSSINGS)}, False),
    "reflections": ({"events": (DOSE, REFLECTED)}, False),
    "reflections, implicit": ({"events": (DOSE, REFLECTED), "alg": Rodas5P()}, True),
    "every step": ({"save_everystep": True, "saveat": None}, False),
    "every step, crossings": ({"save_everystep": True, "saveat": None, "events": CROSSINGS}, False),
    # The sizes of steps that Rosenbrock methods choose depend on rounding; dtmax makes them equal.
    "every step, implicit": (
        {"save_everystep": True, "saveat": None, "alg": Rodas5P(), "rtol": 1e-2, "atol": 1.0, "dt": 0.02, "dtmax": 0.02},
        True,
    ),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SENSITIVITIES)
@pytest.mark.parametrize("spans", [False, True], ids=["", "with tspan"])
def test_forward_mode_in_kernels(name, spans, monkeypatch):
    options, shared = SENSITIVITIES[name]
    x = {"u0": draws(3, 3), "p": draws(3, seed=1) if shared else draws(3, 3, seed=1), "end": np.array(0.5)}
    v = {key: np.cos(1.0 + np.arange(leaf.size)).reshape(leaf.shape) for key, leaf in x.items()}
    if not spans:
        del x["end"], v["end"]

    def results(compile):
        def fun(x):
            problem = ODEProblem(lorenz_of_three, np.ones(3), (0.0, x.get("end", 0.5)), x["p"] if shared else np.ones(3))
            ensemble = EnsembleProblem(problem, u0=x["u0"], p=None if shared else x["p"])
            sol = solve(ensemble, **{"saveat": [0.1, 0.3, 0.45], **TIGHT, **options}, compile=compile)
            times = [time for rows in sol.events.values() for _, time in rows] if "events" in options else []
            assert times or "events" not in options
            parts = [sol.u, sol.u_end, sol.t_reached, *times]
            return anp.concatenate([anp.ravel(anp.where(np.isnan(mpiad.stop_gradient(part)), 0.0, part)) for part in parts])

        return fun

    def linearized(fun, x, v):
        record = mpiad.linearize(fun)(x)
        return record.value, record.jvp(v)

    value, expected = mpiad.jvp(results(False), x, v)
    monkeypatch.setattr("mpiad.ensemble.directions.push_run", None)
    for call in (mpiad.jvp, linearized):
        with monkeypatch.context() as patch:
            if (
                call is mpiad.jvp and name.startswith("crossings") and not spans
            ):  # the forward kernel propagates the tangents
                patch.setattr("mpiad.ensemble.compiled.kernel_solver.Solver.recorded", None)
            found = call(results(True), x, v)
        np.testing.assert_allclose(found[0], value, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(found[1], expected, rtol=1e-8, atol=1e-9 * np.abs(expected).max())


# ---- tangents through doses at constant times, compared with complex steps through SciPy's solve

# The second one isn't linear.
DOSES = [
    ([0.2, 0.35], lambda u, p, t: [u[0], u[1] + 0.5 * p[1], 0.9 * u[2]]),
    ([0.35, 0.1], lambda u, p, t: [u[0] + p[0] * t * u[1], 0.1 * u[1] * u[1], u[2]]),
]
ACCURATE = {"rtol": 1e-9, "atol": 1e-11}
FINE = {
    RK45: ACCURATE,
    Tsit5: ACCURATE,
    Vern7: ACCURATE,
    Rodas5P: ACCURATE,
    BS3: {"rtol": 1e-10, "atol": 1e-12},
    Rosenbrock23: ACCURATE,
    RK4: {"dt": 1e-3},
}
INSTANTS = np.array([0.0, 0.05, 0.2, 0.3, 0.5])


def dosed(u0, p, doses):
    """Return the states at the times INSTANTS, after doses, by SciPy."""
    acting = sorted([(t, n) for n, (times, _) in enumerate(doses) for t in times])
    u, now, rows = u0, 0.0, {}
    for t, n in [*acting, (0.5, None)]:
        if t > now:
            times = sorted({t, *(x for x in INSTANTS if now <= x <= t)})
            f = lambda t, u: np.array(lorenz_of_three(u, p, t))  # noqa: E731
            sol = solve_ivp(f, (now, t), u, "DOP853", times, rtol=1e-12, atol=1e-13)
            rows |= {x: sol.y[:, k] for k, x in enumerate(times)}
            u, now = sol.y[:, -1], t
        if n is not None:
            u = np.array(doses[n][1](u, p, t))
            rows |= {x: u for x in INSTANTS if x == t}
    return np.array([rows[x] for x in INSTANTS])


CASES = {alg.__name__: (alg(), False) for alg in FINE} | {"at the start": (Tsit5(), True)}
DOSED, TOWARDS = ({"u0": draws(3, 3, seed=k), "p": draws(3, 3, seed=k + 1)} for k in (0, 2))


def doses_of(start):
    return DOSES if not start else [*DOSES, ([0.0, 0.3], DOSES[1][1])]


@cache
def along_by_scipy(start):
    """Return the derivatives of the states along TOWARDS, and with respect to each parameter."""

    def along(v):
        rows = zip(DOSED["u0"], DOSED["p"], v["u0"], v["p"])
        doses = doses_of(start)
        return np.array([dosed(u + 1e-30j * du, p + 1e-30j * dp, doses).imag / 1e-30 for u, p, du, dp in rows])

    units = [along({"u0": np.zeros((3, 3)), "p": np.tile(unit, (3, 1))}) for unit in np.eye(3)]
    return along(TOWARDS), units


@pytest.mark.few(1)
@pytest.mark.parametrize("alg, start", CASES.values(), ids=CASES)
def test_tangents_through_doses(alg, start, monkeypatch):
    events = tuple(Event(times=times, affect=affect) for times, affect in doses_of(start))
    x, v = DOSED, TOWARDS

    def states(x, saved=True):
        ensemble = EnsembleProblem(ODEProblem(lorenz_of_three, np.ones(3), (0.0, 0.5), np.ones(3)), **x)
        more = {"saveat": INSTANTS} if saved else {}
        sol = solve(ensemble, alg, events=events, compile=True, **FINE[type(alg)], **more)
        return sol.u if saved else sol.u_end

    expected, units = along_by_scipy(start)
    if not start:  # the forward kernel propagates the tangents
        monkeypatch.setattr("mpiad.ensemble.compiled.kernel_solver.Solver.recorded", None)
    close = partial(np.testing.assert_allclose, rtol=2e-7, atol=2e-7 * np.abs(expected).max())
    close(mpiad.jvp(states, x, v)[1], expected)
    close(mpiad.jvp(partial(states, saved=False), x, v)[1], expected[:, -1])
    if alg.tableau.implicit:
        monkeypatch.undo()  # gradients by Rosenbrock methods are computed by an adjoint
    weights = draws(*expected.shape, seed=4) - 1
    gradient = mpiad.grad(lambda p: np.sum(weights * states({"u0": x["u0"], "p": p})))(x["p"])
    close(gradient, np.stack([np.sum(weights * unit, axis=(1, 2)) for unit in units], axis=1))


def of_many(u, p, t):
    return [sum(p[k] * anp.sin(k * u[0]) for k in range(70)) / 70, -u[1] * p[69] * p[3]]


def chain(u, p, t):
    terms = [p[i % 5] * anp.sin(u[i]) + p[5 + i] * u[(i + 1) % 20] * u[i] for i in range(20)]
    return [term * anp.cos(t) for term in terms]


LARGE = {
    "parameters per trajectory": (of_many, 2, 70, False),
    "shared parameters": (of_many, 2, 70, True),
    "a large state": (chain, 20, 70, True),
    "a large state, parameters per trajectory": (chain, 20, 25, False),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("alg", [Tsit5(), Rodas5P()], ids=lambda alg: type(alg).__name__)
@pytest.mark.parametrize("name", LARGE)
def test_tangents_of_many_numbers_in_kernels(name, alg, monkeypatch):
    f, d, m, shared = LARGE[name]
    x = {"u0": draws(3, d), "p": draws(m, seed=1) if shared else draws(3, m, seed=1)}
    v = {key: draws(*leaf.shape, seed=2) - 1 for key, leaf in x.items()}

    def results(compile):
        def fun(x):
            problem = ODEProblem(f, np.ones(d), (0.0, 0.3), x["p"] if shared else np.ones(m))
            sol = solve(
                EnsembleProblem(problem, u0=x["u0"], p=None if shared else x["p"]), alg, saveat=[0.2], compile=compile
            )
            return anp.concatenate([anp.ravel(sol.u), anp.ravel(sol.u_end)])

        return fun

    expected = mpiad.jvp(results(False), x, v)[1]
    monkeypatch.setattr("mpiad.ensemble.directions.push_run", None)
    for found in (mpiad.jvp(results(True), x, v)[1], mpiad.linearize(results(True))(x).jvp(v)):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-10)


def lorenz_of_three(u, p, t):
    return [p[0] * (u[1] - u[0]), u[0] * (3.0 * p[1] - u[2]) - u[1], u[0] * u[1] - p[2] * u[2] * anp.cos(t)]


@pytest.mark.parametrize("events", [(), Event(lambda u, p, t: u[0].real - 1.2 * p[0].real)], ids=["", "with an event"])
def test_complex_tangents_in_kernels(events):
    x = {"u0": draws(2, 2) + 1j * draws(2, 2, seed=1), "p": draws(2, 1, seed=2) - 0.3j}
    v = {"u0": draws(2, 2, seed=3) - 1j, "p": draws(2, 1, seed=4) + 0.7j}

    def results(compile):
        def fun(x):
            problem = ODEProblem(lambda u, p, t: [p[0] * u[1], -u[0] * u[1]], np.ones(2, complex), (0.0, 1.0), np.ones(1))
            options = {"saveat": [0.4], "events": events, "compile": compile, **TIGHT}
            sol = solve(EnsembleProblem(problem, u0=x["u0"], p=x["p"]), **options)
            times = [time for rows in sol.events.values() for _, time in rows]
            assert len(times) == (1 if events else 0)
            return anp.concatenate(
                [anp.ravel(sol.u), anp.ravel(sol.u_end), sol.t_reached, *(t * np.ones(1) for t in times)]
            )

        return fun

    expected = mpiad.jvp(results(False), x, v)[1]
    for found in (mpiad.jvp(results(True), x, v)[1], mpiad.linearize(results(True))(x).jvp(v)):
        np.testing.assert_allclose(found, expected, rtol=1e-10)


@both
def test_a_linearized_solve_can_be_differentiated():
    # The products with J and its transpose are linear in the direction, also in a trace of the direction.
    record = mpiad.linearize(without_span_states)(VARIABLES["u0"])
    weights = draws(32, seed=4) - 1
    np.testing.assert_allclose(
        mpiad.grad(lambda v: anp.sum(weights * record.jvp(v)))(ALONG["u0"]), record.vjp(weights), rtol=1e-12, atol=1e-13
    )
    np.testing.assert_allclose(
        mpiad.jvp(record.vjp, weights, weights**2)[1], record.vjp(weights**2), rtol=1e-12, atol=1e-13
    )


def without_span_states(u0):
    return forced_states({**VARIABLES, "u0": u0})
