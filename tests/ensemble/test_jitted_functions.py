"""Ensembles whose f, conditions, affects, times and amounts are jitted, or call jitted functions, beside closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest

import mpiad
from mpiad.ensemble import RK45, Event, ODEProblem, Rodas5P, fit, solve

pytestmark = pytest.mark.serial
P, V = np.array([1.25, 0.5]), np.array([0.75, -2.0])

rate = mpiad.jit(lambda u, p: -p[0] * u)
FIELDS = {
    "jitted": mpiad.jit(lambda u, p, t: [-p[0] * u[0]]),
    "around a jitted function": lambda u, p, t: [rate(u[0], p)],
}


@pytest.mark.few(1)
@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("alg", [RK45(), Rodas5P()], ids=["RK45", "Rodas5P"])
@pytest.mark.parametrize("f", FIELDS.values(), ids=FIELDS)
def test_derivatives(f: Callable, alg: Any, compile: bool) -> None:
    """Of a trajectory u' = -p u with a dose of p₁ u at t = 0.5."""
    dose = Event(times=mpiad.jit(lambda p: [0.4 * p[0]]), affect=mpiad.jit(lambda u, p, t: [u[0] * (1.0 + p[1])]))
    below = Event(mpiad.jit(lambda u, p, t: u[0] - 0.01))

    def end(p: Any) -> Any:
        problem = ODEProblem(f, [1.0], (0.0, 1.0), p)
        return anp.sin(solve(problem, alg, rtol=1e-8, atol=1e-10, events=(dose, below), compile=compile).u_end[0])

    def exact(p: Any) -> Any:
        return anp.sin(anp.exp(-p[0]) * (1.0 + p[1]))

    u = np.exp(-P[0]) * (1.0 + P[1])
    gradient = np.cos(u) * np.array([-u, np.exp(-P[0])])
    np.testing.assert_allclose(end(P), exact(P), rtol=1e-8)
    np.testing.assert_allclose(mpiad.grad(end)(P), gradient, rtol=1e-7)
    np.testing.assert_allclose(mpiad.jvp(end, P, V)[1], gradient @ V, rtol=1e-7)
    np.testing.assert_allclose(mpiad.linearize(end)(P).jvp(V), gradient @ V, rtol=1e-7)


@pytest.mark.parametrize("f", FIELDS.values(), ids=FIELDS)
def test_a_fit(f: Callable) -> None:
    times = np.linspace(0.0, 1.0, 6)
    problem = ODEProblem(f, [1.0], (0.0, 1.0), [1.0])
    found = fit(problem, lambda u, p, d: u[:, 0] - d, np.array([[0.5]]), data=np.exp(-2.0 * times)[None], saveat=times)
    np.testing.assert_allclose(np.ravel(found.p), [2.0], rtol=1e-3)


@pytest.mark.parametrize("compile", [True, False])
def test_a_variable_of_f_that_changes_between_gradients(compile: bool) -> None:
    factors = {"decay": 1.0}
    f = mpiad.jit(lambda u, p, t: [-p[0] * factors["decay"] * u[0]])

    def end(p: Any) -> Any:
        return solve(ODEProblem(f, [1.0], (0.0, 1.0), p), rtol=1e-8, atol=1e-10, compile=compile).u_end[0]

    for decay in (1.0, 2.0, 3.0):
        factors["decay"] = decay
        np.testing.assert_allclose(mpiad.grad(end)(P[:1])[0], -decay * np.exp(-decay * P[0]), rtol=1e-7)


@pytest.mark.parametrize("derivative", ["grad", "jvp", "hvp"])
def test_plain_arguments_give_plain_results(derivative: str) -> None:
    """Also if Python decides by them; those that depend on a closed-over variable are traced."""
    sine, seen = mpiad.jit(anp.sin), []

    def loss(x: Any) -> Any:
        scaled = mpiad.jit(lambda y: x * y)
        for _ in range(2):
            seen.append(type(sine(2.0)))
            factor = 3.0 if float(sine(0.5)) > 0.4 else 5.0
        return anp.sum(scaled(np.arange(3.0)) ** 2) * factor * sine(x)

    x, v = 0.75, 1.5
    values = [15.0 * np.sin(x) * x**2, 15.0 * (np.cos(x) * x**2 + 2.0 * x * np.sin(x))]
    second = 15.0 * (-np.sin(x) * x**2 + 4.0 * x * np.cos(x) + 2.0 * np.sin(x))
    if derivative == "grad":
        np.testing.assert_allclose(mpiad.value_and_grad(loss)(x), values, rtol=1e-13)
    elif derivative == "jvp":
        np.testing.assert_allclose(mpiad.jvp(loss, x, v), [values[0], values[1] * v], rtol=1e-13)
    else:
        np.testing.assert_allclose(mpiad.hvp(loss)(x, v), second * v, rtol=1e-13)
    assert set(seen) == {np.float64}
