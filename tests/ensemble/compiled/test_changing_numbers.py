"""Numbers that f closes over and that change from solve to solve: one kernel takes them as arguments."""

from __future__ import annotations

import time

import autograd.numpy as np
import numpy as onp
import pytest
from scipy.integrate import solve_ivp

from mpiad import value_and_grad
from mpiad.compiling import cache
from mpiad.ensemble import EnsembleProblem, Event, ODEProblem, Rodas5P, solve

pytestmark = [pytest.mark.serial, pytest.mark.limit(240)]

P = onp.linspace(0.5, 1.0, 1000).reshape(-1, 1)
TIGHT = {"rtol": 1e-9, "atol": 1e-11}


@pytest.fixture(autouse=True)
def _no_kernels():
    cache._loaded.clear()
    yield
    cache._loaded.clear()


def end(f, p=P, u0=(1.0,), **options):
    """Return the sum of all components at t = 0.5, by a kernel, and its gradient with respect to p."""
    problem = ODEProblem(f, onp.array(u0), (0.0, 0.5), onp.ones(1))

    def total(p):
        return np.sum(solve(EnsembleProblem(problem, p=p), compile=True, **TIGHT, **options).u_end)

    return value_and_grad(total)(p)


def decay(rate):
    """With u' = -p (rate + 1/2) u: the constants beside the rate stay in the program."""
    return lambda u, p, t: [-p[0] * (rate * u[0] + 0.5 * u[0])]


@pytest.mark.few(1)
@pytest.mark.parametrize("gradient", ["adjoint", "tangent"])
def test_one_kernel_has_all_values(gradient):
    made = []
    for k in range(40):
        rate = 1.0 + 0.01 * k
        value, bar = end(decay(rate), gradient=gradient)
        exact = onp.exp(-P * (rate + 0.5) * 0.5)
        onp.testing.assert_allclose(value, exact.sum(), rtol=1e-8)
        onp.testing.assert_allclose(bar, -(rate + 0.5) * 0.5 * exact, rtol=1e-6)
        made.append(len(cache._loaded))
    # With the number of the first solve in it (1, which is no operation), of the second, and with any.
    assert made[3] == made[-1] and made[-1] <= 3 * made[0]


def test_several_numbers_and_arrays_change_one_after_the_other():
    def linear(a, b):
        matrix, shift = onp.array(a), b
        return lambda u, p, t: matrix @ u + p[0] * shift

    made = set()
    for k in range(12):
        a, b = [[-0.7, 0.3 + 0.01 * k], [0.2, -0.9 + 0.02 * (k > 4)]], 0.45 + 0.001 * k * (k > 7)
        value, bar = end(linear(a, b), u0=(1.0, 2.0))
        one, free = (
            solve_ivp(lambda t, y, a, b: onp.array(a) @ y + b, (0, 0.5), [1.0, 2.0], args=(a, c), rtol=1e-11, atol=1e-12).y[
                :, -1
            ]
            for c in (b, 0.0)
        )
        # Linear in p: u = free + p (one - free).
        onp.testing.assert_allclose(value, onp.sum(free.sum() + P * (one - free).sum()), rtol=1e-7)
        onp.testing.assert_allclose(bar, (one - free).sum(), rtol=1e-6)
        made.add(len(cache._loaded))
    assert max(made) <= 8


def test_python_decides_by_a_number():
    """A branch, an exponent and a number of terms are parts of the program, whose kernels are used again."""

    def f(k):
        def f(u, p, t):
            rate = k if k > 0.3 else 2 * k + 0.1
            return [-p[0] * rate * u[0] ** (1 if k > 0.6 else 2)]

        return f

    for k in (0.2, 0.25, 0.4, 0.5, 0.7, 0.8, 0.22, 0.45, 0.75):
        rate = k if k > 0.3 else 2 * k + 0.1
        x = P * rate * 0.5
        value, bar = end(f(k))
        onp.testing.assert_allclose(value, onp.sum(onp.exp(-x) if k > 0.6 else 1 / (1 + x)), rtol=1e-7)
        onp.testing.assert_allclose(bar, rate * 0.5 * (-onp.exp(-x) if k > 0.6 else -1 / (1 + x) ** 2), rtol=1e-6)


def test_conditions_affects_and_rosenbrock_methods():
    made = []
    for k in range(6):
        level, kick, rate = 0.9 - 0.01 * k, 0.3 + 0.01 * k, 0.8 + 0.015 * k
        event = Event(lambda u, p, t: u[0] - level, terminal=True)  # noqa: B023
        sol = solve(
            EnsembleProblem(ODEProblem(decay(rate), [1.0], (0.0, 2.0), onp.ones(1)), p=P),
            compile=True,
            events=event,
            **TIGHT,
        )
        onp.testing.assert_allclose(sol.t_reached, -onp.log(level) / (P[:, 0] * (rate + 0.5)), rtol=1e-6)
        jump = Event(times=[0.25], affect=lambda u, p, t: [u[0] + kick])  # noqa: B023
        value, bar = end(decay(rate), events=jump)
        x = P * (rate + 0.5)
        onp.testing.assert_allclose(value, onp.sum(onp.exp(-0.5 * x) + kick * onp.exp(-0.25 * x)), rtol=1e-7)
        found = -(rate + 0.5) * (0.5 * onp.exp(-0.5 * x) + 0.25 * kick * onp.exp(-0.25 * x))
        onp.testing.assert_allclose(bar, found, rtol=1e-6)
        value, bar = end(decay(rate), alg=Rodas5P())
        onp.testing.assert_allclose(value, onp.sum(onp.exp(-0.5 * x)), rtol=1e-6)
        onp.testing.assert_allclose(bar, -0.5 * (rate + 0.5) * onp.exp(-0.5 * x), rtol=1e-5)
        made.append(len(cache._loaded))
    assert made[1] == made[-1]


def test_single_precision():
    p = P.astype(onp.float32)
    for k in range(4):
        problem = ODEProblem(decay(0.7 + 0.1 * k), onp.ones(1, onp.float32), (0.0, 0.5), onp.ones(1, onp.float32))
        found = solve(EnsembleProblem(problem, p=p), compile=True, rtol=1e-5, atol=1e-6).u_end
        assert found.dtype == onp.float32
        onp.testing.assert_allclose(found, onp.exp(-P * (1.2 + 0.1 * k) * 0.5), rtol=1e-4)


def test_random_numbers_are_refused_still():
    """Also in the place of a number that changed from solve to solve before."""
    draw = onp.random.default_rng(1).random
    f = lambda number: lambda u, p, t: [-p[0] * number() * u[0]]  # noqa: E731
    for k in (0.5, 0.6, 0.7):
        end(f(lambda: k))  # noqa: B023
    for source in (draw, lambda: draw()):
        with pytest.raises((TypeError, ValueError), match="called again|must not depend on each other"):
            end(f(source))


def test_the_number_of_kernels_is_bounded(monkeypatch):
    monkeypatch.setattr(cache, "_MAX_LOADED", 4)

    def operations(n):
        def f(u, p, t):
            x = u[0]
            for _ in range(n):
                x = np.sin(x)
            return [-p[0] * x]

        return f

    for n in (1, 2, 3, 1):
        value, _ = end(operations(n))
        assert len(cache._loaded) <= 4
        if n == 1:
            # u' = -p sin u: tan(u / 2) = tan(1 / 2) exp(-p t)
            onp.testing.assert_allclose(value, onp.sum(2 * onp.arctan(onp.tan(0.5) * onp.exp(-0.5 * P))), rtol=1e-7)


@pytest.mark.thorough
def test_gradients_with_changing_numbers_take_as_long():
    """The processor's time of this thread: 10,000 trajectories, of which a gradient takes some ms."""
    p = onp.linspace(0.5, 1.0, 10_000).reshape(-1, 1)
    end(decay(0.8), p), end(decay(0.9), p), end(decay(0.95), p)
    spent = {True: [], False: []}
    for k in range(12):
        for changing in spent:
            begun = time.thread_time()
            end(decay(0.96 + 1e-4 * k if changing else 0.8), p)
            spent[changing].append(time.thread_time() - begun)
    assert onp.median(spent[True]) < 1.5 * onp.median(spent[False])
