"""Complex states and parameters: two quantum levels, beside their closed form, SciPy's steps, and real numbers by hand."""

from __future__ import annotations

import autograd.numpy as np
import numpy as onp
import pytest
from scipy.integrate import solve_ivp

import mpiad
from mpiad.ensemble import EnsembleProblem, Event, ODEProblem, solve

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("solved_by")]

N = 5
RNG = onp.random.default_rng(4)


def draws(*shape):
    return RNG.normal(size=shape) + 1j * RNG.normal(size=shape)


U0, COUPLING, DETUNING = draws(N, 2), draws(N), RNG.normal(size=N)
TIMES = onp.array([0.0, 0.3, 0.31, 0.6, 1.0])
SAVED, LAST, ALONG = draws(N, 5, 2), draws(N, 2), (draws(N, 2), draws(N), RNG.normal(size=N))
TIGHT = {"rtol": 1e-10, "atol": 1e-12}


def levels(u, p, t):
    coupling, half = p["coupling"], 0.5 * p["detuning"]
    return [-1j * (half * u[0] + coupling * u[1]), -1j * (np.conj(coupling) * u[0] - half * u[1])]


def ensemble(u0=U0, coupling=COUPLING, detuning=DETUNING, span=(0.0, 1.0)):
    return EnsembleProblem(
        ODEProblem(levels, onp.ones(2, u0.dtype), span), u0=u0, p={"coupling": coupling, "detuning": detuning}
    )


def exact(u0, coupling, detuning, t):
    """Return the states at a time: cos(wt) u - i sin(wt)/w H u."""
    half, w = 0.5 * detuning, np.sqrt(0.25 * detuning**2 + np.abs(coupling) ** 2)
    turned = np.stack([half * u0[:, 0] + coupling * u0[:, 1], np.conj(coupling) * u0[:, 0] - half * u0[:, 1]], axis=1)
    return np.cos(w * t)[:, None] * u0 - 1j * (np.sin(w * t) / w)[:, None] * turned


def loss_of(saved, last):
    return np.sum(np.real(SAVED * saved) ** 2) + np.sum(np.abs(last) ** 3) + np.sum(np.imag(LAST * last))


def loss(u0, coupling, detuning, **more):
    sol = solve(ensemble(u0, coupling, detuning), saveat=TIMES, **{**TIGHT, **more})
    return loss_of(sol.u, sol.u_end)


def exact_loss(u0, coupling, detuning):
    states = [exact(u0, coupling, detuning, t) for t in TIMES]
    return loss_of(np.stack(states, axis=1), states[-1])


def test_steps_are_scipys_by_moduli():
    # The norm of the error is the mean over two moduli, not over four parts; each component has its own tolerance.
    given = {"rtol": 1e-5, "atol": onp.array([1e-6, 1e-8])}
    sol = solve(ensemble(), saveat=TIMES, **given)
    for i in range(N):
        p = {"coupling": COUPLING[i], "detuning": DETUNING[i]}
        expected = solve_ivp(lambda t, u, p=p: levels(u, p, t), (0, 1), U0[i], **given)
        assert (sol.naccept[i], sol.nf[i]) == (len(expected.t) - 1, expected.nfev)
        onp.testing.assert_allclose(sol.u_end[i], expected.y[:, -1], rtol=1e-10)


@pytest.mark.few(2)
@pytest.mark.parametrize("argnums, more", [((0,), {"gradient": "tangent"}), ((0, 1, 2), {"gradient": "adjoint"}),
                                           ((0, 1, 2), {"checkpoints": 2})])  # fmt: skip
def test_gradients_of_the_closed_form(argnums, more):
    args = U0, COUPLING, DETUNING
    value, gradient = mpiad.value_and_grad(lambda *given: loss(*given, **more), argnums)(*args)
    onp.testing.assert_allclose(value, exact_loss(*args), rtol=1e-9)
    for found, expected in zip(gradient, mpiad.grad(exact_loss, argnums)(*args)):
        onp.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-8 * onp.abs(expected).max())


@pytest.mark.few(1)
def test_forward_mode_and_the_ends_of_tspan():
    value, tangent = mpiad.jvp(lambda x: loss(*x), (U0, COUPLING, DETUNING), ALONG)
    pushed = mpiad.jvp(lambda x: exact_loss(*x), (U0, COUPLING, DETUNING), ALONG)
    onp.testing.assert_allclose([value, tangent], pushed, rtol=1e-8)

    def by_ends(ends):
        return np.sum(np.real(LAST * solve(ensemble(span=(ends[0], ends[1])), **TIGHT).u_end) ** 3)

    later = mpiad.grad(lambda t: np.sum(np.real(LAST * exact(U0, COUPLING, DETUNING, t)) ** 3))(1.0)
    onp.testing.assert_allclose(mpiad.grad(by_ends)(onp.array([0.5, 1.5])), [-later, later], rtol=1e-7)


def by_hand(t, x, a, b, detuning):
    """Return the derivative of the parts of both levels."""
    first, first_i, second, second_i = x
    half = 0.5 * detuning
    real, imag = half * first + a * second - b * second_i, half * first_i + a * second_i + b * second
    real_2, imag_2 = a * first + b * first_i - half * second, a * first_i - b * first - half * second_i
    return [imag, -real, imag_2, -real_2]


def test_central_differences_of_real_numbers_by_hand():
    def value(x0, a, b):
        end = solve_ivp(by_hand, (0, 1), x0, method="DOP853", rtol=1e-12, atol=1e-13, args=(a, b, DETUNING[0])).y[:, -1]
        return end[0] ** 2 * end[3] + end[1] * end[2]

    def ours(u0, coupling):
        last = solve(ensemble(u0, coupling, DETUNING[:1]), **TIGHT).u_end[0]
        return np.real(last[0]) ** 2 * np.imag(last[1]) + np.imag(last[0]) * np.real(last[1])

    numbers = [*U0[0].view(float), COUPLING[0].real, COUPLING[0].imag]
    step, slopes = 1e-4, []
    for k in range(6):
        ends = (value(x[:4], *x[4:]) for x in (numbers + sign * step * onp.eye(6)[k] for sign in (1, -1)))
        slopes.append((next(ends) - next(ends)) / (2 * step))
    # autograd's convention: ∂/∂a - i ∂/∂b.
    expected = onp.array(slopes[::2]) - 1j * onp.array(slopes[1::2])
    found = mpiad.grad(ours, (0, 1))(U0[:1], COUPLING[:1])
    onp.testing.assert_allclose(onp.concatenate([found[0][0], found[1]]), expected, rtol=1e-6, atol=1e-7)


HALF = Event(lambda u, p, t: np.abs(u[1]) ** 2 - 0.5)
QUARTER = Event(lambda u, p, t: np.real(u[1] * np.conj(u[1])) - 0.25, terminal=False)


def test_events_of_real_conditions():
    start, coupling = onp.tile([1.0 + 0j, 0], (N, 1)), COUPLING * 3 / onp.abs(COUPLING)

    def times(coupling, detuning):
        sol = solve(ensemble(start, coupling, detuning), events=(HALF, QUARTER), **TIGHT)
        assert (sol.retcode == "Terminated").all()
        return np.sum(sol.t_reached**2) + sum(time for found in sol.events.values() for event, time in found if event == 1)

    def closed(coupling, detuning):
        w, size = np.sqrt(0.25 * detuning**2 + np.abs(coupling) ** 2), np.abs(coupling)
        half, quarter = (np.arcsin(np.sqrt(part) * w / size) / w for part in (0.5, 0.25))
        return np.sum(half**2) + np.sum(quarter)

    args = coupling, DETUNING
    onp.testing.assert_allclose(times(*args), closed(*args), rtol=1e-9)
    for found, expected in zip(mpiad.grad(times, (0, 1))(*args), mpiad.grad(closed, (0, 1))(*args)):
        onp.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-8)


def test_single_precision():
    u0, coupling = U0.astype(onp.complex64), COUPLING.astype(onp.complex64)
    args = u0, coupling, DETUNING.astype(onp.float32)

    def single(*given):
        sol = solve(ensemble(*given), saveat=TIMES, rtol=1e-5, atol=1e-6)
        assert sol.u.dtype == sol.u_end.dtype == onp.complex64
        return loss_of(sol.u, sol.u_end)

    value, found = mpiad.value_and_grad(single, (0, 1, 2))(*args)
    onp.testing.assert_allclose(value, exact_loss(U0, COUPLING, DETUNING), rtol=1e-3)
    assert [g.dtype for g in found] == [onp.complex64, onp.complex64, onp.float32]
    for g, expected in zip(found, mpiad.grad(exact_loss, (0, 1, 2))(U0, COUPLING, DETUNING)):
        onp.testing.assert_allclose(g, expected, rtol=0, atol=1e-3 * onp.abs(expected).max())


def test_states_between_steps_and_after_each():
    sol = solve(ensemble(), dense_output=True, save_everystep=True, **TIGHT)
    onp.testing.assert_allclose(sol(0.77), exact(U0, COUPLING, DETUNING, 0.77), rtol=1e-8)
    for i in range(N):
        steps = onp.flatnonzero(~onp.isnan(sol.t[i]))
        states = [exact(U0[i : i + 1], COUPLING[i : i + 1], DETUNING[i : i + 1], t)[0] for t in sol.t[i, steps]]
        onp.testing.assert_allclose(sol.u[i, steps], states, rtol=1e-8)


def test_real_states_with_complex_parameters():
    def decaying(u, p, t):
        return [-np.real(p[0] ** 2) * u[0]]

    u0, p = RNG.uniform(0.5, 1.5, (N, 1)), 1.5 + 0.3 * draws(N, 1)

    def ends(u0, p):
        return np.sum(solve(EnsembleProblem(ODEProblem(decaying, [1.0], (0.0, 1.0)), u0=u0, p=p), **TIGHT).u_end ** 2)

    def closed(u0, p):
        return np.sum((u0 * np.exp(-np.real(p**2))) ** 2)

    for found, expected in zip(mpiad.grad(ends, (0, 1))(u0, p), mpiad.grad(closed, (0, 1))(u0, p)):
        onp.testing.assert_allclose(found, expected, rtol=1e-7)
    with pytest.raises(TypeError, match="complex128 for u of float64"):
        solve(EnsembleProblem(ODEProblem(lambda u, p, t: [p[0] * u[0]], [1.0], (0.0, 1.0)), u0=u0, p=p))


def test_a_complex_condition_is_refused():
    for condition in (lambda u, p, t: u[0] - 0.5, lambda u, p, t: u[0] * np.conj(u[0]) - 0.5):
        with pytest.raises(TypeError, match="condition returned complex128, but a real number"):
            solve(ensemble(), events=Event(condition))
