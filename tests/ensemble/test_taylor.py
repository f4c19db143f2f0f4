"""Taylor tests of solves: the remainder of what is really solved again shrinks at the rate of a right derivative.

The gradient is that of steps whose sizes are fixed, so the solves here take such: RK4's, or an adaptive pair's whose steps
are held at `dtmax` by a tolerance that they meet easily. The last step ends where tspan does, or holds the event: it moves.
With steps of free size differences see the controller too; there the gradient is compared with that of the exact solution,
to which it comes as near as the tolerance says.
"""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest

import mpiad
from mpiad import testing
from mpiad.ensemble import (
    RK4,
    RK45,
    EnsembleMPI,
    EnsembleProblem,
    EnsembleVectorized,
    Event,
    ODEProblem,
    Tsit5,
    remake,
    solve,
)  # fmt: skip

COUNT = 3
SAVED = [0.31, 0.52, 0.77]
ALGORITHMS = {
    "RK4": (RK4(), {"dt": 0.23}),
    "RK45": (RK45(), {"dt": 0.23, "dtmax": 0.23, "rtol": 0.1, "atol": 0.1}),
    "Tsit5": (Tsit5(), {"dt": 0.23, "dtmax": 0.23, "rtol": 0.1, "atol": 0.1}),
}
WAYS = pytest.mark.parametrize("way", ["adjoint", "tangent"])


def forced(u, p, t):
    return [u[1], -p[0] * anp.sin(u[0]) - p[1] * u[1] * anp.exp(-t) + 0.3 * anp.cos(3 * t)]


U0 = np.array([[1.0, 0.2], [1.3, -0.1], [0.8, 0.4]])
P = np.array([[2.0, 0.3], [1.5, 0.5], [2.5, 0.2]])
SPAN = np.array([0.02, 0.95])
# Passed on the way, and the end of some.
LEVEL = Event(lambda u, p, t: u[0] * u[1] - 0.1 * p[1], terminal=False)
FALLS = Event(lambda u, p, t: u[0] - 0.5 * p[1] - 0.2 * t, direction=-1)


def solved(u0, p, span, alg, backend, way, events):
    def member(prob, i, repeat):
        return remake(prob, u0=u0[i - 1], p=p[i - 1], tspan=(span[0], span[1] * (1 + 0.1 * i)))

    ensemble = EnsembleProblem(ODEProblem(forced, U0[0], (0.0, 1.0), P[0]), prob_func=member)
    alg, more = ALGORITHMS[alg]
    return solve(ensemble, alg, backend, trajectories=COUNT, saveat=SAVED, gradient=way, events=events, **more)


def loss(u0, p, span, alg="RK4", backend=None, way=None, events=()):
    sol = solved(u0, p, span, alg, backend or EnsembleVectorized(), way, events)
    saved = anp.where(np.isnan(mpiad.stop_gradient(sol.u)), 0.0, sol.u)
    value = anp.sum(anp.sin(saved) ** 2) + anp.sum(sol.u_end**3)
    if not events:
        return value
    return value + anp.sum(sol.t_reached**2) + sum(time**3 for found in sol.events.values() for _, time in found)


def steps_of(**more):
    alg, options = ALGORITHMS["RK45"]
    return solve(EnsembleProblem(ODEProblem(forced, U0[0], tuple(SPAN)), u0=U0, p=P), alg, **options, **more)


def test_steps_are_held():
    sol = steps_of(save_everystep=True)
    steps = np.diff(sol.t)
    np.testing.assert_allclose(steps[:, :-1], 0.23, rtol=1e-12)
    assert (steps[:, -1] < 0.229).all()
    assert not steps_of().nreject.any()


@pytest.mark.few(1)
@pytest.mark.serial
@pytest.mark.parametrize("alg", ALGORITHMS)
def test_first_and_second_derivatives(alg):
    order = 2 if alg == "RK45" else 1
    testing.check_grads(lambda *args: loss(*args, alg), U0, P, SPAN, argnum=(0, 1, 2), step=1e-2, order=order)


@pytest.mark.few(1)
@pytest.mark.serial
@WAYS
def test_through_terminal_events(way):
    sol = solved(U0, P, SPAN, "RK45", EnsembleVectorized(), None, (FALLS, LEVEL))
    assert {"Terminated", "Success"} == set(sol.retcode)
    assert {0, 1} == {event for found in sol.events.values() for event, _ in found}
    testing.check_grads(
        lambda *args: loss(*args, "RK45", way=way, events=(FALLS, LEVEL)), U0, P, SPAN, argnum=(0, 1, 2), step=2e-3,
        order=2 if way == "adjoint" else 1,
    )  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.serial
@WAYS
def test_both_ways(way):
    testing.check_grads(lambda *args: loss(*args, "RK45", way=way), U0, P, SPAN, argnum=(0, 1), step=1e-2, order=1)


@pytest.mark.serial
def test_a_wrong_gradient_is_caught():
    def wrong(u0, p):
        return loss(u0, p, SPAN) + 1e-3 * anp.sum(mpiad.stop_gradient(p) * u0)

    with pytest.raises(testing.GradientError):
        testing.check_grads(wrong, U0, P, argnum=1, order=1, step=1e-2)


@pytest.mark.few(1)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "gather, objective, events, order", [(True, "root", (), 1), (False, "sum", (FALLS, LEVEL), 2)], ids=["", "events"]
)
def test_over_the_ranks(gather, objective, events, order):
    mpi = EnsembleMPI(gather=gather)

    def over(u0, p, span):
        return loss(u0, p, span, "RK45", mpi, events=events)

    testing.check_grads(over, U0, P, SPAN, argnum=(0, 1, 2), shared=True, objective=objective, step=2e-3, order=order)


@pytest.mark.serial
@pytest.mark.parametrize("alg", [RK45(), Tsit5()], ids=["RK45", "Tsit5"])
def test_with_steps_of_free_size_the_gradient_comes_as_near_as_the_tolerance(alg):
    # u = u0 / (u0 + (1 - u0) exp(-p t)), and saved at times between the steps.
    times = np.linspace(0.1, 2.0, 7)

    def exact(x):
        u = x[0] / (x[0] + (1 - x[0]) * anp.exp(-x[1] * times))
        return anp.sum(u**2)

    def computed(x, rtol):
        problem = ODEProblem(lambda u, p, t: p * u * (1 - u), anp.reshape(x[0], (1,)), (0.0, 2.0), x[1])
        return anp.sum(solve(problem, alg, saveat=times, rtol=rtol, atol=rtol).u ** 2)

    x = np.array([0.1, 3.0])
    expected = mpiad.grad(exact)(x)
    tolerances = 10.0 ** -np.arange(4, 12, 2)
    errors = [np.abs(1 - mpiad.grad(lambda x, rtol=rtol: computed(x, rtol))(x) / expected).max() for rtol in tolerances]
    assert (np.array(errors) < 30 * tolerances).all(), errors
