"""Each method on every way to run: its steps, its order and its adjoint, beside those of a trajectory written out here."""

from __future__ import annotations

from functools import cache

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from unrolled_steps import unrolled

import mpiad
from mpiad.ensemble import BS3, EnsembleProblem, ODEProblem, Vern7, solve
from mpiad.ensemble.tableaus import explicit

pytestmark = pytest.mark.serial
every_way = pytest.mark.parametrize("solved_by", ["columns", "kernels", "device", "gpu"], indirect=True)

# Of each the orders of both solutions.
METHODS = {"BS3": (BS3(), 3, 2), "Vern7": (Vern7(), 7, 6)}
every_method = pytest.mark.parametrize("name", METHODS)

N, TIMES, END, TOLERANCES = 3, [0.0, 0.21, 0.63, 0.64, 1.0], 1.0, {"rtol": 1e-4, "atol": 1e-6}
U0 = np.random.default_rng(1).uniform(0.5, 1.5, (N, 2))
P = np.linspace([1.0, 0.2], [40.0, 0.9], N)
WEIGHTS = np.random.default_rng(2).normal(size=(N, len(TIMES), 2))


def forced(u, p, t):
    return [u[1], -p[0] * anp.sin(u[0]) - p[1] * u[1] + 3 * anp.cos(7 * t)]


def steps_by_hand(f, u, p, span, method, rtol, atol):
    """Return the times of the accepted steps, the number of rejected ones, and the last state.

    As the books have it: the first stage of each step is computed anew, and no stage is the next step's.
    """
    alg, order, embedded = method
    stages = len(alg.tableau.c) if alg.tableau.error[-1] else len(alg.tableau.c) - 1
    q = min(order, embedded) + 1
    (t, end), norm = span, lambda x: np.sqrt(np.mean(x**2))
    k, scale = np.array(f(u, p, t)), atol + rtol * np.abs(u)
    d0, d1 = norm(u / scale), norm(k / scale)
    h0 = min(0.01 * d0 / d1, end - t)
    d2 = norm((np.array(f(u + h0 * k, p, t + h0)) - k) / scale) / h0
    h = min(100 * h0, (0.01 / max(d1, d2)) ** (1 / q), end - t)
    times, rejected = [t], 0
    while t < end:
        shrunk = False
        while True:
            t_new = min(t + h, end)
            k = [np.array(f(u, p, t))]
            for row, c in zip(alg.tableau.a[: stages - 1], alg.tableau.c[1:]):
                k.append(np.array(f(u + (t_new - t) * sum(a * x for a, x in zip(row, k)), p, t + c * (t_new - t))))
            new = u + (t_new - t) * sum(b * x for b, x in zip(alg.tableau.a[-1], k))
            error = (t_new - t) * sum(e * x for e, x in zip(alg.tableau.error, k))
            size = norm(error / (atol + rtol * np.maximum(np.abs(u), np.abs(new))))
            factor = 0.9 * size ** (-1 / q)
            if size < 1:
                break
            h, shrunk, rejected = (t_new - t) * max(0.2, factor), True, rejected + 1
        h = (t_new - t) * min(1.0 if shrunk else 10.0, max(0.2, factor))
        t, u = t_new, new
        times.append(t)
    return np.array(times), rejected, u


@cache
def by_hand(name, i):
    """Return the counts of steps of trajectory i, its saved states and its end, and the gradient of `loss` by u0 and p."""
    alg = METHODS[name][0]
    times, rejected, end = steps_by_hand(forced, U0[i], P[i], (0.0, END), METHODS[name], **TOLERANCES)
    table = alg.tableau.a, alg.tableau.c, alg.tableau.dense

    def loss(given):
        saved, end = unrolled(forced, *given, times, TIMES, table)
        return sum(anp.sum(w * u) for w, u in zip(WEIGHTS[i], saved)) + anp.sum(end**2)

    saved, _ = unrolled(forced, U0[i], P[i], times, TIMES, table)
    return len(times) - 1, rejected, saved, end, autograd.grad(loss)((U0[i], P[i]))


@every_way
@every_method
def test_steps_and_gradients_are_those_by_hand(name, solved_by):
    def solved(u0, p, **more):
        ensemble = EnsembleProblem(ODEProblem(forced, U0[0], (0.0, END)), u0=u0, p=p)
        return solve(ensemble, METHODS[name][0], saveat=TIMES, **TOLERANCES, **more)

    def loss(u0, p):
        sol = solved(u0, p, gradient="adjoint")
        return anp.sum(WEIGHTS * sol.u) + anp.sum(sol.u_end**2)

    sol, gradients = solved(U0, P), mpiad.grad(loss, (0, 1))(U0, P)
    for i in range(N):
        accepted, rejected, saved, end, expected = by_hand(name, i)
        assert sol.naccept[i] == accepted and sol.nreject[i] == rejected
        np.testing.assert_allclose(sol.u_end[i], end, rtol=1e-9)
        np.testing.assert_allclose(sol.u[i], saved, rtol=1e-8, atol=1e-9)
        for found, gradient in zip(gradients, expected):
            np.testing.assert_allclose(found[i], gradient, rtol=1e-7, atol=1e-8 * np.abs(gradient).max())
    assert sum(sol.nreject) > 0


def swinging(u, p, t):
    return [u[1] * (1 + anp.cos(t)), -u[0] * (1 + anp.cos(t))]


@pytest.mark.parametrize("name, h", [("BS3", 0.06), ("Vern7", 0.2)])
def test_orders_by_slopes(name, h):
    phase, errors = 2 + np.sin(2), []
    for size in (h, h / 2):
        sol = solve(ODEProblem(swinging, [0.0, 1.0], (0.0, 2.0)), METHODS[name][0], dt=size, dtmax=size, rtol=1.0, atol=1.0)
        errors.append(np.linalg.norm(sol.u_end - [np.sin(phase), np.cos(phase)]))
    assert np.log2(errors[0] / errors[1]) == pytest.approx(METHODS[name][1], abs=0.15)


KUTTA = {"c": (0.0, 0.5, 1.0), "a": ((0.5,), (-1.0, 2.0)), "b": (1 / 6, 2 / 3, 1 / 6), "order": 3}


@pytest.mark.parametrize("wrong, text", [
    ({"a": ((0.5,), (-1.0, 2.1))}, "row 2"),
    ({"b": (1 / 6, 2 / 3, 1 / 6, 0.0)}, "4 weights b"),
    ({"b": (1 / 6, 2 / 3, 1 / 5)}, "row 3"),
    ({"a": ((0.5,),)}, "1 rows for 3 stages"),
    ({"error": (1 / 6, -1 / 3, 1 / 6)}, "embedded_order=None"),
    ({"error": (1 / 6, -1 / 3, 1 / 6, 0.1), "embedded_order": 2}, "the sum 0.1"),
    ({"error": (1 / 6, -1 / 6), "embedded_order": 2}, "2 weights"),
])  # fmt: skip
def test_tables_with_mistakes_are_refused(wrong, text):
    assert explicit(**KUTTA).stages == 4
    with pytest.raises(ValueError, match=text):
        explicit(**{**KUTTA, **wrong})
