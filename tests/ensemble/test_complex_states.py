"""Complex states by a Rosenbrock method, on each way to run, beside closed forms; f has no complex derivative."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest

import mpiad
from mpiad.device import to_host
from mpiad.ensemble import RK45, EnsembleProblem, Event, ODEProblem, Rodas5P, solve

pytestmark = pytest.mark.serial
N, TIMES, TIGHT = 3, np.array([0.0, 0.4, 1.0]), {"rtol": 1e-8, "atol": 1e-11}
RNG = np.random.default_rng(4)
U0 = RNG.normal(size=(N, 2)) + 1j * RNG.normal(size=(N, 2))
P = np.array([[1e4, 0.7], [30.0, 2.0], [5e2, 1.1]])
WEIGHTS = RNG.normal(size=(N, len(TIMES), 2)) + 1j * RNG.normal(size=(N, len(TIMES), 2))


def f(u, p, t):
    return [-p[0] * (u[0] - anp.exp(1j * t)), -p[1] * anp.conj(u[1])]


def exact(u0, p):
    k, a, t = p[:, :1], p[:, 1:], TIMES
    c = k / (k + 1j)
    first = (u0[:, :1] - c) * anp.exp(-k * t) + c * anp.exp(1j * t)
    second = anp.real(u0[:, 1:]) * anp.exp(-a * t) + 1j * anp.imag(u0[:, 1:]) * anp.exp(a * t)
    return anp.stack([first, second], axis=-1)


def ensemble(u0=U0, p=P, **changes):
    return EnsembleProblem(ODEProblem(f, u0[0], (0.0, 1.0), **changes), u0=u0, p=p)


def loss_of(u):
    return anp.sum(anp.real(WEIGHTS * u)) + anp.sum(anp.abs(u) ** 3)


@pytest.mark.parametrize("solved_by", ["columns", "kernels", "device", "gpu"], indirect=True)
def test_states_and_gradients_are_those_of_closed_forms(solved_by):
    sol = solve(ensemble(), Rodas5P(), saveat=TIMES, **TIGHT)
    assert sol.u.dtype == complex and set(sol.retcode) == {"Success"}
    np.testing.assert_allclose(sol.u, exact(U0, P), atol=2e-7)
    np.testing.assert_allclose(sol.u_end, exact(U0, P)[:, -1], atol=2e-7)
    given = EnsembleProblem(ODEProblem(f, U0[0], (0.0, 1.0)))

    def loss(u0, p):
        return loss_of(to_host(solve(EnsembleProblem(given.problem, u0=u0, p=p), Rodas5P(), saveat=TIMES, **TIGHT).u))

    found, expected = (mpiad.grad(fun, (0, 1))(U0, P) for fun in (loss, lambda u0, p: loss_of(exact(u0, p))))
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_numbers_and_matrices():
    start = np.array([[0.2 + 0.5j, 1.0], [0.3j, -0.4]])
    for rate, u0 in ((lambda u, p, t: -p * anp.abs(u) ** 2 * u, 0.3 + 0.4j), (lambda u, p, t: -p * anp.dot(u, u), start)):
        problem = ODEProblem(rate, np.complex64(u0) if np.ndim(u0) == 0 else u0, (0.0, 1.0), 2.0)
        sol, expected = (solve(problem, alg, saveat=0.5, rtol=1e-6, atol=1e-8) for alg in (Rodas5P(), RK45()))
        assert sol.u.shape == expected.u.shape and sol.u.dtype == expected.u.dtype
        np.testing.assert_allclose(sol.u, expected.u, atol=1e-5)


def test_events_tolerances_and_an_algebraic_equation():
    # The second component falls to a half of its real part at t = log(2) / a, and is turned there.
    turned = Event(lambda u, p, t: anp.real(u[1]) - 0.5, affect=lambda u, p, t: [u[0], 1j * u[1]], direction=-1)
    u0, p = np.array([[1.0, 1.0 + 0.0j]]), np.array([[50.0, 1.0]])
    sol = solve(ensemble(u0, p), Rodas5P(), events=turned, rtol=1e-8, atol=np.array([1e-9, 1e-10]))
    np.testing.assert_allclose(sol.events[0][0][1], np.log(2), rtol=1e-7)
    np.testing.assert_allclose(sol.u_end[0, 1], 0.25j * np.e, rtol=1e-6)

    def algebraic(u, p, t):
        return [1j * u[1], u[1] - p[0] * u[0]]

    problem = ODEProblem(algebraic, [1.0 + 0j, 0.0], (0.0, 1.0), mass_matrix=np.diag([1.0, 0.0]))
    found = solve(EnsembleProblem(problem, p=np.array([[2.0], [3.0]])), Rodas5P(), **TIGHT).u_end
    np.testing.assert_allclose(found, np.exp([[2j], [3j]]) * [[1, 2], [1, 3]], atol=1e-8)
