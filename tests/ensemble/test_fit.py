"""`fit`: each trajectory's least squares beside SciPy's, alone, in company and over the ranks, by columns and kernels."""

from __future__ import annotations

import logging
import math
from functools import cache

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI
from scipy.integrate import solve_ivp
from scipy.optimize import curve_fit, least_squares

from mpiad.ensemble import (
    RK45,
    EnsembleGPU,
    EnsembleMPI,
    EnsembleProblem,
    EnsembleSerial,
    EnsembleThreads,
    Event,
    ODEProblem,
    Rodas5P,
    Vern7,
    fit,
    remake,
)
from mpiad.ensemble.fit import SensitivitySolve

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
TIMES = np.linspace(0.0, 5.0, 20)
TRUTH = np.array([[1.5, 1.0, 3.0, 1.0], [1.52, 0.9, 3.3, 1.01]])
FIELDS = ("p", "cost", "optimality", "active_mask", "nfev", "njev", "retcode")
TIGHT = {"alg": Vern7(), "saveat": TIMES, "rtol": 1e-12, "atol": 1e-12, "ftol": 1e-15, "xtol": 1e-11, "gtol": 1e-11}


@pytest.fixture(params=[False, True], ids=["columns", "kernels"])
def compiled(request):
    return request.param


def predators(u, p, t):
    return [p[0] * u[0] - p[1] * u[0] * u[1], p[3] * u[0] * u[1] - p[2] * u[1]]


def difference(u, p, data):
    return u - data


PREY = ODEProblem(predators, [1.0, 1.0], (0.0, 5.0))


def populations(p):
    """Return the solution for one trajectory's parameters, by SciPy, shape (20, 2)."""
    start = np.ones(2, np.asarray(p).dtype)
    found = solve_ivp(lambda t, u: predators(u, p, t), (0, 5), start, "DOP853", TIMES, rtol=1e-11, atol=1e-11)
    return found.y.T


@cache
def measured():
    # The cost at the minimum is small, since the minimum is found only to the root of the rounding errors of the cost.
    noise = 1 + 0.005 * np.random.default_rng(1).normal(size=(2, 20, 2))
    return np.stack([populations(p) for p in TRUTH]) * noise


@cache
def by_scipy(i, upper=None):
    """Return SciPy's least squares for one trajectory, computed on one rank."""
    found = None
    if RANK == 0:
        bounds = (0, np.inf if upper is None else np.array(upper))
        found = least_squares(
            lambda p: (populations(p) - measured()[i]).ravel(), np.minimum(TRUTH[i] * 1.005, bounds[1]),
            lambda p: np.stack([populations(p + step).ravel().imag / 1e-30 for step in 1e-30j * np.eye(4)], axis=1),
            bounds=bounds, method="dogbox", ftol=1e-15, xtol=1e-12, gtol=1e-12,
        )  # fmt: skip
    return MPI.COMM_WORLD.bcast(found)


BOX = (1.497, np.inf, np.inf, 0.998)


@pytest.mark.one_rank
@pytest.mark.parametrize(
    "compiled, upper",
    [*(pytest.param(*pair, marks=pytest.mark.thorough) for pair in ((True, None), (False, BOX))), (True, BOX)],
    indirect=["compiled"],
)
def test_as_scipys_least_squares(compiled, upper):
    bounds = (0.0, np.inf if upper is None else np.array(upper))
    start = np.minimum(TRUTH * np.array([1.4, 0.7, 1.3, 0.8]), bounds[1])
    found = fit(PREY, difference, start, data=measured(), bounds=bounds, compile=compiled, **TIGHT)
    assert (found.retcode == "Success").all() and found.success.all()
    for i in range(2):
        exact = by_scipy(i, upper)
        np.testing.assert_allclose(found.p[i], exact.x, rtol=2e-7)
        np.testing.assert_allclose(found.cost[i], exact.cost, rtol=1e-8)
        np.testing.assert_array_equal(found.active_mask[i], exact.active_mask)
    assert found.active_mask.any() == (upper is not None)


def line(u, p, t):
    return [p[0] + p[1] * t + p[2] * t * t]


@pytest.mark.serial
def test_covariance_is_that_of_linear_regression(compiled):
    # Steps of order 5 are exact for a cubic, so the model is one of linear regression.
    rng, t = np.random.default_rng(2), np.linspace(0, 1, 9)
    data = rng.normal(size=(5, 9))
    parabola = ODEProblem(line, [0.0], (0.0, 1.0))
    misfit, start = lambda u, p, data: u[:, 0] - data, np.zeros((5, 3))
    found = fit(parabola, misfit, start, data=data, saveat=t, ftol=1e-14, gtol=1e-13, compile=compiled)
    powers = np.stack([t, t**2 / 2, t**3 / 3], 1)
    exact, squares = np.linalg.lstsq(powers, data.T)[:2]
    np.testing.assert_allclose(found.p, exact.T, rtol=1e-8)
    inverse = np.linalg.inv(powers.T @ powers)
    np.testing.assert_allclose(found.covariance(absolute_sigma=True), np.tile(inverse, (5, 1, 1)), rtol=1e-8)
    np.testing.assert_allclose(found.covariance(), inverse * (squares / (9 - 3))[:, None, None], rtol=1e-8)


def oscillation(u, p, t):
    return [p["a"] * u[1] - p["c"] * u[0], -p["b"][0] * u[0] - p["b"][1] * u[1]]


@pytest.mark.serial
def test_initial_states_and_known_parameters(compiled):
    rng, count, t = np.random.default_rng(3), 6, np.linspace(0, 3, 13)
    known = rng.uniform(0, 0.2, count)
    truth = np.column_stack([rng.uniform(0.8, 1.2, (count, 3)), rng.uniform(0.5, 1.5, count)])
    matrices = np.array([[[-c, a], [-b, -e]] for c, (a, b, e, _) in zip(known, truth)])
    values, vectors = np.linalg.eig(matrices.astype(complex))
    weights = np.linalg.solve(vectors, np.array([[u, 0.0] for u in truth[:, 3]])[..., None])[..., 0]
    data = np.einsum("nij,nj,njt->nti", vectors, weights, np.exp(values[..., None] * t)).real
    one = ODEProblem(oscillation, [1.0, 0.0], (0.0, 3.0), {"a": 1.0, "b": np.ones(2), "c": 0.0})
    ones = np.ones(count)
    many = EnsembleProblem(one, p={"a": ones, "b": np.ones((count, 2)), "c": known})

    def placed(problem, x):
        return remake(problem, u0=[x[3], 0 * x[3]], p={"a": x[0], "b": x[1:3], "c": problem.p["c"]})

    found = fit(
        many, difference, truth * rng.uniform(0.8, 1.2, truth.shape), data=data, saveat=t, prob_generator=placed,
        alg=Vern7(), rtol=1e-10, atol=1e-10, compile=compiled,
    )  # fmt: skip
    assert found.success.all()
    np.testing.assert_allclose(found.p, truth, rtol=1e-7)


def decay(u, p, t):
    return [-p[0] * u[0] + p[1] * u[0] * u[0]]


DECAY = ODEProblem(decay, [1.0], (0.0, 2.0))
T = np.linspace(0.0, 2.0, 11)
# u' = -a u + b u²: 1 / u = b / a + (1 - b / a) exp(a t)
RATES = np.column_stack([np.linspace(0.5, 2.0, 8), np.linspace(0.4, -0.3, 8)])
CURVES = 1 / (RATES[:, 1:] / RATES[:, :1] + (1 - RATES[:, 1:] / RATES[:, :1]) * np.exp(RATES[:, :1] * T))
WEIGHTS = np.where(np.arange(8) == 2, 0.0, 1.0)
START = np.where((np.arange(8) == 5)[:, None], [0.0, 9.0], [1.0, 0.1])


def weighted(u, p, data):
    return data["weight"] * (u[:, 0] - data["u"])


def fitted(rows=slice(None), **more):
    data = {"u": CURVES[rows], "weight": WEIGHTS[rows]}
    return fit(DECAY, weighted, START[rows], **{"data": data, "saveat": T, "rtol": 1e-6, "atol": 1e-6} | more)


@pytest.mark.few(1)
@pytest.mark.serial
def test_the_hopeless_harm_nobody(compiled, caplog):
    # The data of the third say nothing; the sixth begins where its solution becomes infinite at t = 1 / 9.
    with caplog.at_level(logging.WARNING, "mpiad"):
        found = fitted(compile=compiled, alg=Vern7(), rtol=1e-9, atol=1e-9)
    assert found.retcode.tolist() == ["Success"] * 2 + ["Singular"] + ["Success"] * 2 + ["InitialFailure"] + ["Success"] * 2
    assert caplog.messages == [
        "fit: 2 of 8 fits ended without success (1 Singular, 1 InitialFailure); the first is number 3."
    ]
    good = found.success
    np.testing.assert_allclose(found.p[good], RATES[good], rtol=1e-6, atol=1e-7)
    assert np.isnan(found.cost[5]) and np.isnan(found.covariance()[[2, 5]]).all()
    assert np.isfinite(found.covariance()[good]).all()
    few = fitted(compile=compiled, max_nfev=2)
    assert (few.retcode[good] == "MaxIters").all() and (few.nfev <= 2).all()


def test_depends_neither_on_company_nor_on_ranks(compiled, size):
    whole = fitted(compile=compiled)
    ways = [{"ensemblealg": EnsembleMPI()}]
    if size == 1:
        ways += [{"batch_size": 3}, {"ensemblealg": EnsembleThreads(2)}, {"ensemblealg": EnsembleSerial()}]
    for way in ways:
        other = fitted(compile=compiled, **way)
        for name in FIELDS:
            np.testing.assert_array_equal(getattr(other, name), getattr(whole, name), err_msg=name)
    for i in (0, 2, 5) if size == 1 else ():  # one that succeeds, and the two hopeless ones
        alone = fitted(slice(i, i + 1), compile=compiled)
        for name in FIELDS:
            np.testing.assert_array_equal(getattr(alone, name)[0], getattr(whole, name)[i], err_msg=name)


def test_shares_of_the_ranks(caplog):
    whole, mpi = fitted(), EnsembleMPI(gather=False)
    caplog.clear()
    for _ in range(2):  # the second time divided by the steps of the first
        with caplog.at_level(logging.WARNING, "mpiad"):
            mine = fitted(ensemblealg=mpi)
        every = np.concatenate(MPI.COMM_WORLD.allgather(mine.indices))
        assert every.tolist() == list(range(8)) and len(mine) == len(mine.indices)
        np.testing.assert_array_equal(mine.p, whole.p[mine.indices])
    assert len([text for text in caplog.messages if "2 of 8" in text]) == 2 * (RANK == 0)
    none = fit(DECAY, weighted, np.empty((0, 2)), ensemblealg=EnsembleMPI())
    assert none.p.shape == (0, 2) and none.covariance().shape == (0, 2, 2)


def erf(u):
    """Return Python's own, which no trace sees."""
    return np.vectorize(math.erf)(u)


@pytest.mark.serial
def test_constants_among_the_states_of_a_generator(compiled):
    chain = ODEProblem(lambda u, p, t: [-p[0] * u[0], p[1] * u[0] - u[1]], [1.0, 0.0], (0.0, 2.0), np.ones(2))
    t, amounts, rates = np.linspace(0.2, 2, 7), np.array([1.0, 2.0, 0.7]), np.array([0.5, 0.7, 1.4])
    data = amounts[:, None] * 0.3 / (1 - rates[:, None]) * (np.exp(-np.outer(rates, t)) - np.exp(-t))
    found = fit(
        chain, lambda u, p, data: u[:, 1] - data, np.ones((3, 2)) * [1.2, 0.9], data=data, saveat=t, alg=Vern7(),
        rtol=1e-9, atol=1e-9,
        prob_generator=lambda problem, x: remake(problem, u0=[x[0], 0.0], p=[x[1], 0.3]), compile=compiled,
    )  # fmt: skip
    np.testing.assert_allclose(found.p, np.stack([amounts, rates], axis=1), rtol=1e-5)


@pytest.mark.parametrize("alg", [RK45(), Rodas5P()])
@pytest.mark.parametrize("doubled", [False, True])
@pytest.mark.parametrize("span", [(0.0, 1.0), (0.0, -1.0)])
def test_generators_that_use_no_variable(span, doubled, alg, compiled):
    # The variable is only a scale of the measurement.
    decay, t = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], span, np.array([0.7])), span[1] * np.array([0.2, 0.5, 1.0])
    events = Event(times=[span[1] * 0.3], affect=lambda u, p, t: [2.0 * u[0]]) if doubled else ()
    scales, exact = np.array([[2.0], [3.0]]), np.exp(-0.7 * t) * np.where(doubled & (np.abs(t) > 0.3), 2.0, 1.0)
    found = fit(
        decay, lambda u, x, data: x[0] * u[:, 0] - data, np.ones((2, 1)), alg, data=scales * exact, saveat=t, events=events,
        prob_generator=lambda problem, x: problem, compile=compiled, rtol=1e-9, atol=1e-11,
    )  # fmt: skip
    np.testing.assert_allclose(found.p, scales, rtol=1e-8)
    np.testing.assert_allclose(found.covariance(True).ravel(), 1 / np.sum(exact**2), rtol=1e-8)


def rows(u, p, data):
    return u[:, 0] - np.ones(11)


REFUSED = {
    "p0": ({"p0": np.ones(8)}, ValueError, r"p0 must be real numbers of shape \(N, m\).*\(8,\)"),
    "data": ({"data": np.ones((7, 11))}, ValueError, r"data must have one row.*8 rows like p0.*\(7, 11\)"),
    "bounds": ({"bounds": (0.2, 1.0)}, ValueError, r"variable 1 of trajectory 1 starts at .*0.1.*bounds .*0.2"),
    "shape of bounds": ({"bounds": (np.zeros(3), 1.0)}, ValueError, r"lower bounds must be one number.*\(2,\)"),
    "x_scale": ({"x_scale": -1.0}, ValueError, "x_scale must be 'jac' or numbers above zero"),
    "ftol": ({"ftol": -1.0}, ValueError, "ftol must be a number, zero or more, but got -1.0"),
    "t_eval": ({"t_eval": [0.5]}, TypeError, "the argument is called saveat"),
    "rtol": ({"rtol": -1.0}, ValueError, "rtol must be zero or more, and finite, but got -1.0"),
    "columns": ({"residuals": rows}, ValueError, r"can't compute with columns.*\(11, 1, \d+\).*an axis for trajectories"),
    "coupled": ({"residuals": lambda u, p, data: u[:, 0] - anp.sum(u)}, ValueError, "depend on other trajectories"),
    "one number": ({"residuals": lambda u, p, data: anp.sum(u)}, ValueError, r"shape \(\), but \(..., \d+\) was expected"),
    "math": ({"residuals": lambda u, p, data: [erf(u)[:, 0]]}, TypeError, "can't be differentiated.*autograd.numpy"),
    "complex": ({"residuals": lambda u, p, data: 1j * u[:, 0]}, TypeError, "must be real numbers, but are complex128"),
    "max_nfev": ({"max_nfev": 0}, ValueError, "max_nfev must be an integer above zero, but got 0"),
    "residuals": ({"residuals": 3}, TypeError, r"must be a function residuals\(u, p, data\), but got 3"),
    "no generator": ({"prob_generator": 3}, TypeError, "prob_generator must be a function of a problem and x, but got 3"),
    "one bound": ({"bounds": 3.0}, ValueError, "bounds must be a pair of lower and upper bounds, but got 3.0"),
    "states": (
        {"prob_generator": lambda one, x: remake(one, u0=np.ones((1, 7)))}, ValueError, r"u0 of shape \(1, 7\), but \(1",
    ),
    "generator": ({"prob_generator": lambda problem, x: x}, TypeError, "prob_generator must return its problem"),
    "sum in it": ({"prob_generator": lambda one, x: remake(one, p=[anp.sum(x), x[1]])}, ValueError, "np.sum.x, axis=0"),
    "coupled generator": (
        {"prob_generator": lambda one, x: remake(one, u0=[x[0] / anp.sum(x)])}, ValueError, "u0 or p that prob_.*depends",
    ),
    "coupled by the mean": ({"residuals": lambda u, p, data: u[:, 0] - anp.mean(u)}, ValueError, "on other trajectories"),
    "largest rate": (
        {"prob_generator": lambda one, x: remake(one, p=[x[0] * 0 + anp.max(x[0]), x[1]])}, ValueError, "prob_gen.*depends",
    ),
    "GPU": ({"ensemblealg": EnsembleMPI(EnsembleGPU())}, NotImplementedError, "EnsembleGPU isn't supported"),
    "output_func": ({"ensemble": EnsembleProblem(DECAY, output_func=lambda sol, i: (0, False))}, ValueError, "output_func"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused_on_all_ranks(case):
    changes, kind, text = REFUSED[case]
    given = {"ensemble": DECAY, "residuals": lambda u, p, data: u[:, 0] - data, "p0": START[:5].repeat(2, axis=0)[:8]}
    given |= {"data": CURVES, "saveat": T, "ensemblealg": EnsembleMPI()} | changes
    with pytest.raises(kind, match=text):
        fit(**given)


def test_different_arguments_of_ranks():
    if SIZE > 1:
        with pytest.raises(ValueError, match="all ranks must give the same arguments"):
            fit(DECAY, weighted, START + (RANK == SIZE - 1), saveat=T, ensemblealg=EnsembleMPI())


def test_a_failure_on_one_rank():
    def fails(u, p, data):
        if np.any(data == 7):  # the last trajectory's, on the rank that has it
            raise RuntimeError("no such thing")
        return u[:, 0]

    with pytest.raises(RuntimeError, match="no such thing"):
        fit(DECAY, fails, START, data=np.arange(8.0), saveat=T, ensemblealg=EnsembleMPI())


@pytest.mark.serial
def test_traced_arguments():
    with pytest.raises(NotImplementedError, match=r"p0 is traced.*mpiad.stop_gradient"):
        autograd.grad(lambda p0: fit(DECAY, weighted, p0, saveat=T).p.sum())(START)
    with pytest.raises(NotImplementedError, match="traced"):
        autograd.grad(lambda u0: fitted_from(u0))(np.ones((8, 1)))


def fitted_from(u0):
    return fit(EnsembleProblem(DECAY, u0=u0), lambda u, p, data: u, START, saveat=T).p.sum()


def branching(u, p, t):
    """Decay as `decay`, with a branch on values, so that no program can be made of it."""
    return decay(u, p, t) if np.all(u[0] > -1e3) else [0.0]


def decayed(u0, a, b, t):
    """Return the closed form of `decay`."""
    return 1 / (b / a + (1 / u0 - b / a) * np.exp(a * t))


# From the variables to initial state and rates, with what puts them there.
GENERATORS = {
    "parameters": (None, lambda x: (1.0, x[0], x[1])),
    "turned": (lambda one, x: remake(one, p=[x[1], 0.3 * x[0]]), lambda x: (1.0, x[1], 0.3 * x[0])),
    "states": (lambda one, x: remake(one, u0=[0.4 * x[0] + 0.1 * x[1]]), lambda x: (0.4 * x[0] + 0.1 * x[1], 0.9, 0.2)),
    "both": (
        lambda one, x: remake(one, u0=[0.5 * x[0] * x[1]], p=[x[0], one.p[1] + x[1]]),
        lambda x: (0.5 * x[0] * x[1], x[0], 0.2 + x[1]),
    ),
    "one state for all": (lambda one, x: remake(one, u0=np.full(1, 0.8), p=x), lambda x: (0.8, x[0], x[1])),
}  # fmt: skip
SAVED = [0.0, 0.7, 1.0]


@pytest.mark.serial
@pytest.mark.parametrize(
    "way, saveat, name",
    [
        *(("kernels", SAVED[::2], name) for name in GENERATORS), ("kernels", SAVED, "both"), ("columns", SAVED, "both"),
        *(("Rodas5P of a branch", SAVED, name) for name in ("parameters", "both")),
    ],
)  # fmt: skip
def test_saved_states_with_their_derivatives(way, saveat, name, monkeypatch):
    """Beside complex steps of the closed form: inside and at the ends, by whatever the variables are put into."""
    x, seen = np.array([[0.6, 0.4], [1.1, 0.2], [1.7, 0.3]]), []
    states = SensitivitySolve.states
    monkeypatch.setattr(SensitivitySolve, "states", lambda *args: seen.append(states(*args)) or seen[-1])
    generator, placed = GENERATORS[name]
    stiff = way not in ("columns", "kernels")
    fit(
        ODEProblem(branching if stiff else decay, [1.0], (0.0, 1.0), [0.9, 0.2]), lambda u, p, data: u, x,
        Rodas5P() if stiff else Vern7(), saveat=saveat, rtol=1e-6 if stiff else 1e-9, atol=1e-9,
        prob_generator=generator, compile=way == "kernels", max_nfev=1,
    )  # fmt: skip
    exact, t = 1e-4 if stiff else 1e-7, np.array(saveat)
    assert seen[0].tangents.shape == (2, 3, len(saveat), 1)
    for i, one in enumerate(x):
        np.testing.assert_allclose(seen[0].u[i, :, 0], decayed(*placed(one), t), exact)
        for j, step in enumerate(1e-30j * np.eye(2)):
            expected = decayed(*placed(one + step), t).imag / 1e-30
            np.testing.assert_allclose(seen[0].tangents[j, i, :, 0], expected, exact, exact)


@pytest.mark.parametrize("place", ["variables", "initial state"])
def test_entries_that_are_not_finite_are_named(place, caplog):
    start, u0, generator = np.ones((3, 1)), np.ones((3, 1)), None
    if place == "variables":
        start[2] = np.nan
    else:
        u0[2], generator = np.inf, lambda one, x: remake(one, p=x)
    problem = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (0.0, 1.0), [1.0])
    with caplog.at_level(logging.WARNING, "mpiad"):
        fit(
            EnsembleProblem(problem, u0=u0), lambda u, p, data: u[:, 0] - data, start, RK45(), EnsembleMPI(),
            data=np.full((3, 1), 0.5), saveat=[1.0], prob_generator=generator,
        )  # fmt: skip
    entry = "p[0] is nan" if place == "variables" else "u0[0] is inf"
    assert RANK > 0 or caplog.messages[-1].endswith(f"the first is number 3. For trajectory 3, {entry}.")


@pytest.mark.serial
@pytest.mark.parametrize("scale", [[1.0, 10.0], np.full((2, 2), 2.0)], ids=["all", "each"])
def test_scales_of_the_users_own(scale):
    found = fitted(slice(0, 2), x_scale=scale, rtol=1e-7)
    np.testing.assert_allclose(found.p, RATES[:2], rtol=1e-5)


@pytest.mark.serial
def test_methods_for_stiff_systems():
    # Their tangents are those of a replay, also of what lies in initial states.
    rows = slice(0, 2)
    found = fitted(rows, alg=Rodas5P(), rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(found.p, RATES[rows], rtol=1e-6)
    # 1 / u0 is the third: u = 1 / (b / a + (x - b / a) exp(a t))
    truth = np.column_stack([RATES, np.linspace(1.5, 2.0, 8)])[rows]
    ratio = truth[:, 1:2] / truth[:, :1]
    curves = 1 / (ratio + (truth[:, 2:] - ratio) * np.exp(truth[:, :1] * T))
    found = fit(
        DECAY, lambda u, p, data: u[:, 0] - data, truth + 0.1, Rodas5P(), data=curves, saveat=T, rtol=1e-8, atol=1e-8,
        gtol=1e-12, prob_generator=lambda one, x: remake(one, u0=[1 / x[2]], p=x[:2]),
    )  # fmt: skip
    np.testing.assert_allclose(found.p, truth, rtol=1e-6)


# ---- doses: two compartments, each patient with doses of its own

LEVELS = np.linspace(1.0, 24.0, 9)
DOSES = np.array([[0.0, 6.0, 11.0], [0.0, 8.0, np.inf], [2.0, 9.5, 14.5], [0.5, 12.0, 20.0]])
PATIENT_RATES = np.array([[0.3, 0.5, 0.4, 10.0], [0.25, 0.4, 0.5, 8.0], [0.4, 0.3, 0.3, 12.0], [0.35, 0.45, 0.35, 9.0]])


def compartments(u, p, t):
    out, there, back = p["x"][0], p["x"][1], p["x"][2]
    return [back * u[1] - (out + there) * u[0], there * u[0] - back * u[1]]


DOSE = Event(times=lambda p: [p["times"][i] for i in range(3)], affect=lambda u, p, t: [u[0] + p["x"][3], u[1]])
PATIENTS = EnsembleProblem(
    ODEProblem(compartments, [0.0, 0.0], (0.0, 24.0), {"x": np.ones(4), "times": np.zeros(3)}),
    p={"x": PATIENT_RATES, "times": DOSES},
)
# The solutions are more accurate than what the fits are compared with: their errors are noise in the cost.
ACCURATE = {"saveat": LEVELS, "rtol": 1e-10, "atol": 1e-11, "ftol": 1e-13, "xtol": 1e-10, "gtol": 1e-10}


def levels(x, times):
    """Return the closed form of a patient's levels."""
    # The first entry of the exponential of [[-a, x[2]], [x[1], -x[2]]].
    a = x[0] + x[1]
    root = np.sqrt((a - x[2]) ** 2 + 4 * x[1] * x[2])
    fast, slow = (-a - x[2] - root) / 2, (-a - x[2] + root) / 2
    since = LEVELS[:, None] - np.asarray(times)
    t = np.maximum(since, 0.0)
    left = ((a + slow) * np.exp(fast * t) - (a + fast) * np.exp(slow * t)) / root
    return x[3] * np.sum(np.where(since >= 0, left, 0.0), axis=1)


MEASURED = np.array([levels(*row) for row in zip(PATIENT_RATES, DOSES)]) + 0.05 * np.random.default_rng(3).normal(
    size=(4, 9)
)


def first_component(u, p, data):
    return u[:, 0] - data


def fitted_doses(problem=PATIENTS, backend=None, first=None, **options):
    """Return the fits of the rates and the size of the doses, and from `first` of the time of the first dose."""

    def generator(problem, x):
        times = problem.p["times"] if first is None else anp.concatenate([x[4:5], problem.p["times"][1:]])
        return remake(problem, p={"x": x[:4], "times": times})

    start = np.tile([0.25, 0.4, 0.35, 9.0], (4, 1))
    start = start if first is None else np.concatenate([start, first], axis=1)
    options = {"events": DOSE, "data": MEASURED, "prob_generator": generator, **ACCURATE, **options}
    return fit(problem, first_component, start, Vern7(), backend or EnsembleMPI(), **options)


@pytest.mark.parametrize("compiled", [pytest.param(False, marks=pytest.mark.thorough), True], indirect=True)
@pytest.mark.parametrize("timed", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["dose", "time"])
def test_doses_as_scipys_least_squares(compiled, timed):
    # The first dose of the other patients is at the start of tspan, where a time has no derivative.
    chosen = [2, 3] if timed else [0, 1, 2, 3]
    found = fitted_doses(first=np.array([[1.0], [1.0], [1.9], [0.6]]) if timed else None, compile=compiled)
    assert found.success[chosen].all()
    for i in chosen[-2:] if RANK == 0 else []:

        def fun(x, i=i):
            return levels(x[:4], [*x[4:], *DOSES[i][len(x[4:]) :]]) - MEASURED[i]

        start = np.append(PATIENT_RATES[i], DOSES[i][:1] if timed else [])
        expected = least_squares(fun, start, "3-point", xtol=1e-13, ftol=1e-13, gtol=1e-13)
        np.testing.assert_allclose(found.p[i], expected.x, rtol=1e-6)
        covariance = np.linalg.inv(expected.jac.T @ expected.jac)
        np.testing.assert_allclose(found.covariance(absolute_sigma=True)[i], covariance, rtol=1e-4)


@pytest.mark.thorough
def test_doses_alike_on_all_ranks(compiled):
    found, alone = (
        fitted_doses(backend=backend, compile=compiled, max_nfev=3, rtol=1e-5, atol=1e-6)
        for backend in (EnsembleMPI(), EnsembleThreads())
    )
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(found, name), getattr(alone, name))


def test_doses_outside_of_the_data():
    late = np.where([[False], [False], [True], [False]], DOSES + 30.0, DOSES)
    with pytest.raises(ValueError, match=r"events of trajectory 3, \[32.*\], lie outside of its data, .* 24.0"):
        # The other ranks' fits, which come first, are short.
        fitted_doses(remake(PATIENTS, p={"x": PATIENT_RATES, "times": late}), max_nfev=1, rtol=1e-5, atol=1e-6)


def test_doses_with_saved_times_of_different_lengths():
    # The second trajectory ends later, so the saved times of the first one are padded with NaN.
    decay = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (0.0, 1.0), [1.0])
    ensemble = EnsembleProblem(decay, lambda prob, i, repeat: remake(prob, tspan=(0.0, float(i))))
    dose = Event(times=[0.25], affect=lambda u, p, t: [u[0] + 1.0])
    rates, times = np.array([[0.5], [0.8]]), 0.5 * np.arange(5)
    expected = np.exp(-rates * times) + (times > 0.25) * np.exp(-rates * (times - 0.25))
    measured = np.where(times <= [[1.0], [2.0]], expected, 0.0)
    found = fit(
        ensemble, lambda u, p, data: anp.where(anp.isnan(u[:, 0]), 0.0, u[:, 0]) - data, np.ones((2, 1)), data=measured,
        saveat=0.5, events=dose, rtol=1e-9, atol=1e-12,
    )  # fmt: skip
    np.testing.assert_allclose(found.p, rates, rtol=1e-6)


def test_events_with_and_without_effects(compiled):
    # A root of a condition changes the state, too; an event without effect changes nothing.
    stop = Event(lambda u, p, t: u[0] - 1.0, direction=1, affect=lambda u, p, t: [0.5 * u[0]])
    watch = Event(lambda u, p, t: u[0] - 0.9, terminal=False)
    growth = ODEProblem(lambda u, p, t: [p[0] * u[0]], [0.5], (0.0, 2.0), [1.0])
    times = np.array([0.5, 1.0, 1.5, 2.0])
    truth = np.array([[0.9], [1.1]])
    exact = 0.5 * np.exp(truth * times) * 0.5 ** np.floor(truth * times / math.log(2))
    options = {"data": exact, "saveat": times, "rtol": 1e-10, "atol": 1e-12, "compile": compiled}
    found = fit(growth, first_component, truth + 0.02, Vern7(), events=(stop, watch), **options)
    np.testing.assert_allclose(found.p, truth, rtol=1e-7)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.serial
def test_values_that_are_left_out_do_not_count(compiled):
    """The covariance is that of `curve_fit` with the other values; their numbers differ between trajectories."""
    rng, t = np.random.default_rng(0), np.linspace(0.1, 3.0, 40)
    rates = np.array([0.5, 0.7, 1.1])
    y = np.exp(-rates[:, None] * t) + 0.05 * rng.normal(size=(3, 40))
    seen = np.arange(40) % np.array([[1], [4], [10]]) == 0
    y[~seen] = np.nan
    decay = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (0.0, 3.0), [1.0])
    found = fit(
        EnsembleProblem(decay), lambda u, p, data: anp.where(data["seen"], u[:, 0] - data["y"], 0.0), np.ones((3, 1)),
        data={"y": y, "seen": seen}, saveat=t, alg=Vern7(), rtol=1e-9, atol=1e-11, compile=compiled,
    )  # fmt: skip
    for k in range(3):
        x, covariance = curve_fit(lambda t, r: np.exp(-r * t), t[seen[k]], y[k, seen[k]], p0=[1.0], xtol=1e-12)
        np.testing.assert_allclose(found.p[k], x, rtol=1e-5)
        np.testing.assert_allclose(found.covariance()[k], covariance, rtol=1e-3)
