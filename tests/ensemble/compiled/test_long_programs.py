"""Kernels of functions with many operations and parameters, which call f instead of repeating it at each stage."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest

from mpiad import jvp, value_and_grad
from mpiad.compiling import cache, rerolling
from mpiad.ensemble import RK4, EnsembleProblem, Event, ODEProblem, Rodas5P, Rosenbrock23, Tsit5, remake, solve
from mpiad.ensemble.compiled import kernel_spec, traced_problem
from mpiad.ensemble.compiled.kernel_texts import kernel_code

pytestmark = pytest.mark.serial


def network(u, p, t):
    first, second, last = p
    return last @ anp.tanh(second @ anp.tanh(first @ u)) - u * anp.cos(t)


def weights(width, dtype=float):
    rng = np.random.default_rng(width)
    shapes = (width, 2), (width, width), (2, width)
    return [(rng.normal(size=shape) / np.sqrt(shape[1])).astype(dtype) for shape in shapes]


def loss_of(alg, compile, dtype=float, **options):
    u0s = np.random.default_rng(1).normal(size=(19, 2)).astype(dtype)

    def loss(p, u0s=u0s):
        ensemble = EnsembleProblem(ODEProblem(network, u0s[0], (0.0, 1.0), p), u0=u0s)
        sol = solve(ensemble, alg, saveat=[0.4, 1.0], compile=compile, **options)
        return anp.sum(sol.u[:, 0] ** 2) + anp.sum(sol.u_end**3)

    return loss, u0s


@pytest.mark.few(1)
@pytest.mark.parametrize(("alg", "width", "dtype"), [
    (Tsit5(), 16, float), (Rodas5P(), 8, float), (Tsit5(), 8, np.float32),
])  # fmt: skip
def test_values_and_gradients_agree_with_arrays(alg, width, dtype):
    found = []
    for compile in (True, False):
        loss, u0s = loss_of(alg, compile, dtype, rtol=1e-5)
        value, bars = value_and_grad(loss, argnum=(0, 1))(weights(width, dtype), u0s)
        found.append([value, *bars[0], bars[1]])
    for kernel, arrays in zip(*found):
        rtol, atol = (2e-3, 1e-4) if dtype is np.float32 else (1e-8, 0.0)
        np.testing.assert_allclose(kernel, arrays, rtol=rtol, atol=atol)


def test_gradients_agree_with_differences():
    loss, _ = loss_of(RK4(), True, dt=0.125)
    p = weights(12)
    _, bars = value_and_grad(loss)(p)
    direction = [np.cos(x) for x in p]
    along = lambda x: loss([a + x * b for a, b in zip(p, direction)])  # noqa: E731
    h = 1e-3
    expected = (8 * (along(h) - along(-h)) - (along(2 * h) - along(-2 * h))) / (12 * h)
    found = sum(np.sum(bar * b) for bar, b in zip(bars, direction))
    np.testing.assert_allclose(found, expected, rtol=1e-8)


@pytest.mark.thorough
def test_weights_of_each_trajectory():
    rng = np.random.default_rng(3)
    base = ODEProblem(lambda u, p, t: anp.tanh(anp.sum(p * u, axis=1)), np.ones(12), (0.0, 1.0), np.ones((12, 12)))
    matrices = rng.normal(size=(8, 12, 12)) * 0.3

    def loss(matrices, compile):
        return anp.sum(solve(EnsembleProblem(base, p=matrices), Tsit5(), rtol=1e-5, compile=compile).u_end ** 2)

    (kernel, kernel_bar), (arrays, arrays_bar) = (
        value_and_grad(lambda x, compile=compile: loss(x, compile))(matrices) for compile in (True, False)
    )
    np.testing.assert_allclose(kernel, arrays, rtol=1e-8)
    np.testing.assert_allclose(kernel_bar, arrays_bar, rtol=1e-8, atol=1e-12)


def test_repeated_operations_count_once(monkeypatch, caplog):
    monkeypatch.setattr(traced_problem, "MOST_OPERATIONS", 120)

    def irregular(u, p, t):
        x, y = u
        for k in range(60):
            x, y = y, anp.sin(x) * y + 0.01 * k if k % 7 else anp.cos(x - y)
        return [x, y]

    for f, p, fits in ((network, weights(8), True), (irregular, None, False)):
        caplog.clear()
        solve(ODEProblem(f, np.array([1.0, 2.0]), (0.0, 1e-3), p), RK4(), dt=1e-3, compile=True)
        assert fits != ("operations; up to 120 fit into a kernel" in caplog.text)


@pytest.mark.thorough
@pytest.mark.parametrize("width", [8, 12])
def test_loops_have_the_values_of_scalars(monkeypatch, width):
    u0s, found = np.random.default_rng(2).normal(size=(17, 2)), []

    def loss(p):
        ensemble = EnsembleProblem(ODEProblem(network, u0s[0], (0.0, 1.0), p), u0=u0s)
        return anp.sum(solve(ensemble, Tsit5(), compile=True).u_end ** 2)

    for short in (rerolling.SHORT, 10**9):
        monkeypatch.setattr(rerolling, "SHORT", short)
        kernel_code.cache_clear()
        found.append(value_and_grad(loss)(weights(width)))
    kernel_code.cache_clear()
    np.testing.assert_array_equal(found[0][0], found[1][0])
    for loops, scalars in zip(*(bars for _, bars in found)):
        np.testing.assert_array_equal(loops, scalars)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "alg, dtype",
    [
        (Tsit5(), np.float32),
        (Rodas5P(), float),
        pytest.param(Tsit5(), float, marks=pytest.mark.thorough),
        pytest.param(Rodas5P(), np.float32, marks=pytest.mark.thorough),
    ],
)
def test_components_in_loops_have_the_values_of_scalars(monkeypatch, alg, dtype):
    monkeypatch.setattr(cache, "optimization_level", 0)
    d, rng = 4, np.random.default_rng(4)
    pairs = rng.integers(0, d, (4, 2))

    def f(u, p, t):
        rates = [p[0] * u[i] * u[j] * anp.cos(t) for i, j in pairs]
        return [sum(rates[k] for k in range(d) if k % 3 == c % 3) - p[c % 3] * (u[c] - u[c - 1]) for c in range(d)]

    base = ODEProblem(f, np.ones(d, dtype), (0.0, 1.0), np.array([0.5, 0.8, 1.1], dtype))
    u0s, atol = rng.uniform(0.5, 1.5, (9, d)).astype(dtype), 1e-5 * np.arange(1.0, d + 1)
    kick = Event(lambda u, p, t: t - 0.3 - 0.1 * p[1], affect=lambda u, p, t: u * u + p[2])
    cases = [{"atol": atol, "saveat": [0.4, 1.0]}, {"events": kick, "saveat": [0.4, 1.0]}, {"gradient": "tangent"}]
    if dtype is np.float32:  # times of events are double
        cases = cases[:1]

    def loss(p, end, options):
        sol = solve(EnsembleProblem(remake(base, p=p, tspan=(0.0, end)), u0=u0s), alg, rtol=1e-4, compile=True, **options)
        return anp.sum(sol.u_end**2) + (anp.sum(sol.u[:, 0] ** 3) if "saveat" in options else 0.0)

    for options in cases:
        found = []
        for most in (100, 2):
            monkeypatch.setattr(kernel_spec, "MOST_UNROLLED", (most, most))
            kernel_code.cache_clear()
            value, bars = value_and_grad(loss, argnum=(0, 1))(base.p, dtype(1.0), options)
            found.append([value, *bars])
        for loops, scalars in zip(*found, strict=True):
            np.testing.assert_array_equal(loops, scalars)
    kernel_code.cache_clear()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "alg", [*(pytest.param(alg, marks=pytest.mark.thorough) for alg in (Tsit5(), Rodas5P())), Rosenbrock23()]
)  # the last has the fewest stages, and its kernels the shortest texts
def test_parameters_per_trajectory_in_an_array_have_the_values_of_scalars(monkeypatch, alg):
    monkeypatch.setattr(cache, "optimization_level", 0)
    monkeypatch.setattr(kernel_spec, "MOST_UNROLLED", (2, 2))
    rows, directions = np.random.default_rng(5).uniform(0.5, 1.5, (2, 9, 4))
    kick = Event(lambda u, p, t: t - 0.3 - 0.1 * p[1], affect=lambda u, p, t: u * p[3] + p[2])
    base = ODEProblem(lambda u, p, t: [-p[0] * u[0], p[0] * u[0] - p[1] * u[1], p[2] * u[1]], [1.0, 0.5, 0.0], (0.0, 1.0))

    def loss(p, options):
        sol = solve(EnsembleProblem(base, p=p), alg, rtol=1e-4, saveat=[0.4, 1.0], compile=True, **options)
        return anp.sum(sol.u**3)

    for options in ({}, {"events": kick}):
        found = []
        for most in (100, 2):
            # Cotangents are summed in the same way on both sides.
            monkeypatch.setattr(kernel_spec, "MOST_SCALARS", most)
            kernel_code.cache_clear()
            forward = lambda p, options=options: loss(p, options)  # noqa: E731
            found.append([*value_and_grad(forward)(rows), *jvp(forward, rows, directions)])
        for array, scalars in zip(*found, strict=True):
            np.testing.assert_allclose(array, scalars, rtol=1e-14, atol=1e-15)
    kernel_code.cache_clear()


def test_a_gradient_of_large_states_needs_one_more_kernel(monkeypatch, tmp_path):
    monkeypatch.setattr(kernel_spec, "MOST_UNROLLED", (2, 2))
    kernel_code.cache_clear()
    problem = ODEProblem(
        lambda u, p, t: [-p[0] * u[0], p[0] * u[0] - p[1] * u[1], p[1] * u[1]], [1.0, 0.5, 0.0], (0.0, 1.0)
    )
    names, code_of = [], cache.code_of
    monkeypatch.setattr(
        cache, "code_of", lambda sources, fast="": (names.extend(x.name for x in sources), code_of(sources, fast))[1]
    )
    monkeypatch.setattr(cache, "optimization_level", 0)
    monkeypatch.setenv("MPIAD_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "_loaded", {})

    def loss(p):
        return anp.sum(solve(remake(problem, p=p), Rodas5P(), compile=True).u_end ** 2)

    p = np.array([0.7, 1.3])
    value = loss(p)
    again, _ = value_and_grad(loss)(p)
    assert (value, names) == (again, ["forward", "reverse"])
    kernel_code.cache_clear()
