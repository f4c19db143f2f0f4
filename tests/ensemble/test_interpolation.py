"""Tables in f: values beside SciPy, derivatives beside differences and dense matrices, by columns and kernels."""

from __future__ import annotations

import functools
from functools import partial

import autograd.numpy as np
import numpy as onp
import pytest
from scipy import interpolate
from scipy.integrate import solve_ivp

import mpiad
from mpiad.compiling import cache
from mpiad.ensemble import (
    RK4,
    CubicSpline,
    EnsembleMPI,
    EnsembleProblem,
    ODEProblem,
    Rodas5P,
    Tsit5,
    interp,
    remake,
    solve,
)

RNG = onp.random.default_rng(5)
LENGTH = 90  # more entries than a kernel takes cotangents of
TIMES = 0.1 + 2.7 * onp.linspace(0.0, 1.0, LENGTH) ** 1.2  # the solves begin before the table and end after it
PLACES = onp.linspace(-1.0, 4.0, 9)
STARTS = RNG.uniform(0.5, 1.5, (4, 2))
FORCES = 1.2 + onp.sin(TIMES + onp.arange(4)[:, None])
RATES = 1.0 + 0.1 * PLACES**2 + 0.02 * RNG.normal(size=(4, len(PLACES)))


@pytest.fixture(params=[False, True], ids=["columns", "kernels"])
def compiled(request):
    return request.param


def by_numpy(u, p, t):
    return [np.interp(t, TIMES, p["force"]) - u[0] * np.interp(u[0], PLACES, p["rate"]), u[0] - u[1]]


def by_interp(u, p, t):
    return [interp(t, TIMES, p["force"]) - u[0] * interp(u[0], PLACES, p["rate"], right=3.0), u[0] - u[1]]


def by_splines(u, p, t):
    return [p["force"](t) - u[0] * p["rate"](u[0]), u[0] - u[1]]


def splines(force, rate):
    return {"force": CubicSpline(TIMES, force), "rate": CubicSpline(PLACES, rate, "natural")}


# By name: f, whether each trajectory has tables of its own, and the parameters made of both tables.
KINDS = {
    "numpy": (by_numpy, False, lambda force, rate: {"force": force, "rate": rate}),
    "interp": (by_interp, False, lambda force, rate: {"force": force, "rate": rate}),
    "interp, rows": (by_interp, True, lambda force, rate: {"force": force, "rate": rate}),
    "splines": (by_splines, False, splines),
    "splines, rows": (by_splines, True, splines),
}

# Tables of a trajectory's own have all derivatives that shared ones have; those of "numpy" are shared.
every_kind = [pytest.param(kind, marks=pytest.mark.thorough if kind in ("interp", "splines") else ()) for kind in KINDS]


def problem_of(kind, force=FORCES, rate=RATES):
    f, rows, make = KINDS[kind]
    one = ODEProblem(f, STARTS[0], (0.0, 3.0), make(FORCES[0], RATES[0]))
    if rows:
        return EnsembleProblem(one, u0=STARTS, p=make(force, rate))
    return EnsembleProblem(remake(one, p=make(force[0], rate[0])), u0=STARTS)


@functools.cache
def by_scipy(splines, row, i):
    """Return the state of trajectory i at the end, with the tables of a row."""
    if splines:
        force = interpolate.CubicSpline(TIMES, FORCES[row])
        rate = interpolate.CubicSpline(PLACES, RATES[row], bc_type="natural")
    else:
        force, rate = partial(onp.interp, xp=TIMES, fp=FORCES[row]), partial(onp.interp, xp=PLACES, fp=RATES[row])

    def fun(t, u):
        return [force(t) - u[0] * rate(u[0]), u[0] - u[1]]

    return solve_ivp(fun, (0.0, 3.0), STARTS[i], rtol=1e-9, atol=1e-11, max_step=0.05).y[:, -1]


@pytest.mark.serial
@pytest.mark.parametrize("alg", [Tsit5(), Rodas5P()], ids=["Tsit5", "Rodas5P"])
@pytest.mark.parametrize("kind", every_kind)
def test_as_scipy_with_tables_of_scipy(kind, alg, compiled):
    tight = {"rtol": 1e-9, "atol": 1e-11}  # steps across kinks have larger errors than the tolerance
    sol = solve(problem_of(kind), alg, compile=compiled, **tight)
    for i in (0, 3):
        row = i if KINDS[kind][1] else 0
        onp.testing.assert_allclose(sol.u_end[i], by_scipy("splines" in kind, row, i), rtol=1e-6)


@pytest.mark.few(1)
@pytest.mark.serial
@pytest.mark.parametrize("gradient", ["adjoint", pytest.param("tangent", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("kind", every_kind)
def test_gradient_with_respect_to_values(kind, gradient, compiled):
    if gradient == "tangent" and compiled:
        pytest.skip("a kernel with 99 tangents takes long to compile")
    fixed = {"alg": RK4(), "dt": 0.05, "compile": compiled}

    def loss(starts, force, rate, gradient=gradient):
        problem = remake(problem_of(kind, force, rate), u0=starts)
        return np.sum(np.array([1.0, -2.0]) * solve(problem, gradient=gradient, **fixed).u_end ** 2)

    at = (STARTS, FORCES, RATES)
    found = mpiad.grad(lambda at: loss(*at), objective="sum")(at)
    for k, bar in enumerate(found):
        along = RNG.normal(size=bar.shape)
        # The steps are short, since no state may move to another interval of the table.
        up, down = (loss(*at[:k], at[k] + step * along, *at[k + 1 :]) for step in (1e-6, -1e-6))
        assert onp.sum(bar * along) == pytest.approx((up - down) / 2e-6, rel=1e-8, abs=1e-8)


@pytest.mark.serial
def test_rosenbrock_gradient_and_few_values_in_a_kernel():
    few = onp.linspace(0.0, 3.0, 5)
    problem = ODEProblem(lambda u, p, t: [-p["rate"] * u[0] * p["force"](t)], [1.0], (0.0, 3.0), {"rate": 1.0})

    def loss(values, **options):
        one = remake(problem, p={"rate": 1.0, "force": CubicSpline(few, values)})
        return solve(EnsembleProblem(one, u0=onp.ones((2, 1))), Rodas5P(), **options).u_end[1, 0]

    values = 1.0 + 0.3 * onp.cos(few)
    # The solution is exp of minus the integral, which is linear in the values.
    integrals = interpolate.CubicSpline(few, onp.eye(5)).integrate(0.0, 3.0)
    expected = -onp.exp(-integrals @ values) * integrals
    for compiled in (False, True):
        for gradient in ("adjoint", "tangent"):
            options = {"compile": compiled, "gradient": gradient, "rtol": 1e-7, "atol": 1e-9}
            found = mpiad.grad(lambda values, options=options: loss(values, **options))(values)
            onp.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.serial
def test_other_numbers_need_no_other_kernel():
    cache._loaded.clear()
    counts = []
    for k in range(3):
        times, values = TIMES + 0.1 * k, RNG.normal(size=LENGTH)
        spline = CubicSpline(times, values)
        problem = ODEProblem(
            lambda u, p, t, a=times, b=values, c=spline: [interp(t, a, b) - u[0] + c(t)], [1.0], (0.0, 1.0)
        )
        found = solve(EnsembleProblem(problem, u0=onp.ones((3, 1))), RK4(), dt=0.1, compile=True).u_end
        onp.testing.assert_allclose(
            found, solve(EnsembleProblem(problem, u0=onp.ones((3, 1))), RK4(), dt=0.1).u_end, rtol=1e-12
        )
        counts.append(len(cache._loaded))
    assert counts == [1, 1, 1]


@pytest.mark.serial
@pytest.mark.parametrize("bc_type", ["not-a-knot", "natural", "clamped"])
@pytest.mark.parametrize("length", [2, 3, 4, 5, 40])
def test_splines_are_scipys(bc_type, length):
    x, y = onp.sort(RNG.uniform(0.0, 5.0, length)), RNG.normal(size=length)
    at, weights = RNG.uniform(-1.0, 6.0, 30), RNG.normal(size=30)
    other = interpolate.CubicSpline(x, y, bc_type=bc_type)
    onp.testing.assert_allclose(CubicSpline(x, y, bc_type)(at), other(at), rtol=1e-12, atol=1e-12 * abs(other(at)).max())
    # The spline is linear in y.
    matrix = interpolate.CubicSpline(x, onp.eye(length), bc_type=bc_type)(at)
    found = mpiad.grad(lambda y: np.sum(weights * CubicSpline(x, y, bc_type)(at)))(y)
    onp.testing.assert_allclose(found, weights @ matrix, rtol=1e-9, atol=1e-9 * abs(matrix).max())
    tangent = mpiad.jvp(lambda y: CubicSpline(x, y, bc_type)(at), y, x**2)[1]
    onp.testing.assert_allclose(tangent, matrix @ x**2, rtol=1e-9, atol=1e-9 * abs(matrix).max())
    slopes = mpiad.grad(lambda at: np.sum(weights * CubicSpline(x, y, bc_type)(at)))(at)
    onp.testing.assert_allclose(slopes, weights * other(at, 1), rtol=1e-9, atol=1e-9 * abs(other(at, 1)).max())


def test_rows_of_splines():
    x, y = onp.sort(RNG.uniform(0.0, 5.0, (2, 6)), axis=1), RNG.normal(size=(2, 6))
    rows = CubicSpline(x, y)
    for i in range(2):
        onp.testing.assert_allclose(rows.slopes[i], interpolate.CubicSpline(x[i], y[i])(x[i], 1), rtol=1e-12)
    onp.testing.assert_array_equal(CubicSpline(x[0], y).x, x[[0, 0]])


def test_interp_is_numpys():
    x = onp.array([-1.0, 0.0, 0.3, 1.0, 1.7, 2.0, 2.1, onp.nan])
    xp, fp = onp.array([0.0, 1.0, 2.0]), RNG.normal(size=(3, len(x)))
    for ends in ({}, {"left": 5.0, "right": -5.0}):
        expected = [onp.interp(x[j], xp, fp[:, j], **ends) for j in range(len(x))]
        onp.testing.assert_array_equal(interp(x, xp, fp, **ends), expected)
        onp.testing.assert_array_equal(interp(x, xp, fp[:, 0], **ends), onp.interp(x, xp, fp[:, 0], **ends))


@pytest.mark.serial
@pytest.mark.parametrize("kind", [onp.int8, onp.uint8, onp.uint64], ids=lambda kind: kind.__name__)
def test_tables_of_integers(kind):
    """Differences of their entries overflow, or become negative without a sign."""
    xp, fp, x = onp.array([2, 60, 127], kind), onp.array([100, 3, 120], kind), onp.array([5.0, 70.0, 200.0])
    values, slopes = onp.interp(x, xp.astype(float), fp.astype(float)), onp.array([-97 / 58, 117 / 67, 0.0])
    np_values, pull = mpiad.make_vjp(lambda x: np.interp(x, xp, fp))(x)[::-1]
    onp.testing.assert_allclose(np_values, values, 1e-14)
    onp.testing.assert_allclose(pull(onp.ones(3)), slopes, 1e-14)
    onp.testing.assert_allclose(mpiad.make_jvp(lambda x: np.interp(x, xp, fp))(x)(onp.ones(3))[1], slopes, 1e-14)
    columns = onp.stack([fp] * 3, axis=1)
    onp.testing.assert_allclose(interp(x, xp, columns), values, 1e-14)


def test_equal_on_all_ranks():
    problem = problem_of("splines, rows")

    def loss(force, alg):
        return np.sum(solve(remake(problem, p=splines(force, RATES)), ensemblealg=alg).u_end)

    found = mpiad.value_and_grad(lambda force: loss(force, EnsembleMPI()), shared=True)(FORCES)
    alone = mpiad.value_and_grad(lambda force: loss(force, EnsembleMPI().inner), shared=True)(FORCES)
    assert found[0] == alone[0]
    onp.testing.assert_array_equal(found[1], alone[1])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: interp(0.5, [0.0, 2.0, 1.0], onp.zeros(3)), "interp: the places of a table must be increasing"),
        (lambda: interp(0.5, [0.0, 1.0], [0.0, onp.nan]), "interp: the entries of a table must be finite"),
        (lambda: interp(0.5, [0.0, 1.0], onp.zeros((3, 2))), "as many places as values, at least ., but has 2 and 3"),
        (lambda: CubicSpline([0.0, 0.0, 1.0], onp.zeros(3)), "CubicSpline: the places of a table must be increasing"),
        (lambda: CubicSpline([0.0, onp.inf], onp.zeros(2)), "CubicSpline: the entries of a table must be finite"),
        (lambda: CubicSpline([0.0, 1.0], onp.zeros((2, 3))), "as many places as values, at least ., but has 2 and 3"),
        (lambda: CubicSpline([0.0, 1.0], [[0.0, 1.0], [0.0, 1.0, 2.0]]), "all tables must have the same length"),
        (lambda: CubicSpline([0.0, 1.0], onp.array([0.0, 1.0j])), "all tables must have the same length, and be real"),
        (lambda: CubicSpline([0.0], [1.0]), "CubicSpline: .* at least 2"),
        (lambda: CubicSpline([0.0, 1.0], onp.zeros(2), "periodic"), "bc_type must be 'not-a-knot'"),
        (lambda: CubicSpline(onp.zeros((1, 2)), onp.zeros(2)), r"must have shape \(K,\) or \(N, K\)"),
        (lambda: CubicSpline([0.0, 1.0], onp.zeros((3, 2)))(onp.zeros(4)), "one table per trajectory is called in f"),
    ],
)
def test_wrong_tables(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_tables_that_cannot_be_used():
    with pytest.raises(NotImplementedError, match="CubicSpline: x is traced"):
        mpiad.grad(lambda x: np.sum(CubicSpline(x, onp.zeros(2))(onp.zeros(1))))(onp.array([0.0, 1.0]))
    tables = [CubicSpline(onp.arange(3.0 + i), onp.zeros(3 + i)) for i in range(2)]
    one = ODEProblem(lambda u, p, t: [p(t)], [0.0], (0.0, 1.0), tables[0])
    with pytest.raises(ValueError, match="each array in p must have one shape in all trajectories"):
        solve(EnsembleProblem(one, prob_func=lambda prob, i, repeat: remake(prob, p=tables[i - 1])), trajectories=2)
    scaled = ODEProblem(lambda u, p, t: [np.interp(t, TIMES, p[0] * FORCES[0])], [0.0], (0.0, 1.0), [2.0])
    with pytest.raises(TypeError, match="computed values in the table"):
        solve(scaled, compile=True)
    periodic = ODEProblem(lambda u, p, t: [np.interp(t, TIMES, FORCES[0], period=1.0)], [0.0], (0.0, 1.0))
    with pytest.raises(TypeError, match="numpy.interp with period="):
        solve(periodic, compile=True)


@pytest.mark.parametrize("alg", [Tsit5(), Rodas5P()], ids=lambda alg: type(alg).__name__)
def test_tables_that_kernels_cannot_read(alg):
    # Components of u, and parameters per trajectory together with shared ones.
    of_states = ODEProblem(
        lambda u, p, t: [interp(p[0] + t, PLACES[:3], u) - u[0], -u[1], 0.0 * u[2]], [1.0, 2.0, 3.0], (0.0, 1.0)
    )
    offsets = onp.array([[0.0], [1.0]])
    shared, own = onp.array([1.0]), onp.array([[2.0, 5.0], [4.0, 3.0]])

    def mixed(u, p, t):
        first = np.broadcast_to(p["first"][:, None], (1, len(t)))
        return [interp(t, np.arange(3.0), np.concatenate([first, p["others"]])) - u[0]]

    template = ODEProblem(mixed, [0.0], (0.0, 2.0), {"first": shared, "others": own[0]})
    with_own = EnsembleProblem(template, lambda prob, i, repeat: remake(prob, p={"first": shared, "others": own[i - 1]}))
    for ensemble in (EnsembleProblem(of_states, p=offsets), with_own):
        with pytest.raises(TypeError, match="it looks up values in a table of"):
            solve(ensemble, alg, trajectories=2, compile=True)
        found = solve(ensemble, alg, trajectories=2, rtol=1e-9)
        expected = solve(ensemble, Tsit5(), trajectories=2, rtol=1e-10, atol=1e-12, compile=False)
        onp.testing.assert_allclose(found.u_end, expected.u_end, rtol=1e-4)
