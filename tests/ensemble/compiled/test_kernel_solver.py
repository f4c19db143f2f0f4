"""Kernels solve as the vectorised path does: the same steps, codes and counts, and numbers that agree to rounding."""

from __future__ import annotations

import copy
import pickle

import autograd.numpy as np
import numpy as onp
import pytest
from ode_systems import forced_pendulum, lorenz, van_der_pol

import mpiad
from mpiad.ensemble import (
    RK4,
    RK45,
    EnsembleProblem,
    EnsembleSerial,
    EnsembleThreads,
    ODEProblem,
    PIController,
    Tsit5,
    remake,
    solve,
)
from mpiad.ensemble.compiled import kernel_solver

# Some tests compile many kernels, which takes long on a busy machine.
pytestmark = [pytest.mark.serial, pytest.mark.limit(240)]

N = 41
RNG = onp.random.default_rng(7)
U0 = RNG.normal(size=(N, 2))
OWN = RNG.uniform(0.5, 2.0, size=N)
SHARED = onp.array([0.3, 1.7])
SPANS = onp.stack([RNG.uniform(-1, 1, N), RNG.uniform(2, 4, N)], axis=1)
SPANS[::3] = SPANS[::3, ::-1]  # some go backwards
SPANS[5] = 0.5, 0.5
TIGHT = {"rtol": 1e-7, "atol": onp.array([1e-9, 1e-8])}


def driven(u, p, t):
    own, shared = p
    return [u[1] * shared[1], -own * np.sin(u[0]) - shared[0] * np.abs(np.sin(u[1])) + np.where(t > 1, np.cos(t), 0.5 * t)]


def ensemble(u0=U0, own=OWN, shared=SHARED, spans=SPANS, rows=range(N)):
    base = ODEProblem(driven, u0[0], (0.0, 1.0), (own[0], shared))
    rows = list(rows)

    def member(prob, i, repeat):
        i = rows[i - 1]
        return remake(prob, u0=u0[i], p=(own[i], shared), tspan=(spans[i, 0], spans[i, 1]))

    return EnsembleProblem(base, member)


def check_alike(a, b, rtol=1e-9):
    for name in ("retcode", "naccept", "nreject", "nf", "t"):
        onp.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    for name in ("u", "u_end", "t_reached"):
        onp.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=rtol, atol=rtol, err_msg=name)


def both(problem, *args, **kwargs):
    return [solve(problem, *args, compile=choice, **kwargs) for choice in (False, True)]


TIMES = onp.sort(SPANS[:, :1] + (SPANS[:, 1:] - SPANS[:, :1]) * RNG.uniform(size=(N, 4)), axis=1)
TIMES = onp.where(SPANS[:, :1] > SPANS[:, 1:], TIMES[:, ::-1], TIMES)
TIMES[:, 3] = SPANS[:, 1]


def test_both_directions_rows_of_times_and_tolerances():
    check_alike(*both(ensemble(), trajectories=N, saveat=TIMES, **TIGHT))
    check_alike(*both(ensemble(), trajectories=N, saveat=TIMES, dt=0.3, dtmax=0.1, **TIGHT))


@pytest.mark.parametrize("rtol", [1e-3, 1e-6, 1e-9])
def test_adaptive_steps_of_smooth_systems_agree_to_rounding(rtol):
    rho = onp.linspace(0, 21, 300)[:, None]
    problem = EnsembleProblem(ODEProblem(lorenz, [1.0, 0.0, 0.0], (0.0, 1.0)), p=rho)
    columns, kernels = both(problem, rtol=rtol, atol=1e-3 * rtol)
    assert columns.nreject.any()
    onp.testing.assert_array_equal(kernels.naccept, columns.naccept)
    onp.testing.assert_array_equal(kernels.nreject, columns.nreject)
    # None differs by more, relative to its largest component.
    largest = onp.abs(columns.u_end).max(axis=1, keepdims=True)
    assert (onp.abs(kernels.u_end - columns.u_end) / largest).max() < 1e-12


@pytest.mark.parametrize("alg", [Tsit5(PIController(beta=0.3)), RK4()], ids=["Tsit5, PI", "RK4"])
def test_methods(alg):
    mu = onp.linspace(0.1, 30, 20)[:, None]
    problem = EnsembleProblem(ODEProblem(van_der_pol, [2.0, 0.0], (0.0, 3.0)), p=mu)
    dt = {"dt": 0.0123} if alg == RK4() else {}
    first, second = both(problem, alg, trajectories=20, rtol=1e-6, **dt)
    # Fixed steps leave nothing that could differ but the functions in f, of which van der Pol's has none.
    check_alike(first, second, rtol=1e-15 if dt else 1e-9)


def test_failures():
    def sick(u, p, t):
        stiff = van_der_pol(u, [1000.0], t)
        rate = np.where(p[0] == 1, u[0] ** 2, np.where(p[0] == 2, np.where(t > 0.5, np.nan, -u[0]), stiff[0]))
        return [rate, np.where(p[0] == 3, stiff[1], -u[1])]

    problem = EnsembleProblem(ODEProblem(sick, [1.0, 0.5], (0.0, 2.0)), p=onp.array([[0.0], [1.0], [2.0], [3.0]] * 7))
    first, second = both(problem, saveat=[0.25, 0.5, 1.5], max_steps=1000, rtol=1e-8, atol=1e-10)
    assert set(first.retcode) == {"Success", "DtLessThanMin", "Unstable", "MaxIters"}
    # Near the pole of u' = u², what is left of time decides on digits.
    for name in ("retcode", "nf", "naccept"):
        onp.testing.assert_array_equal(getattr(first, name)[first.survivors], getattr(second, name)[first.survivors])
    onp.testing.assert_array_equal(first.retcode, second.retcode)
    onp.testing.assert_allclose(first.u, second.u, rtol=1e-8)
    onp.testing.assert_allclose(first.t_reached, second.t_reached, rtol=1e-6)
    onp.testing.assert_allclose(first.u_end[::2], second.u_end[::2], rtol=1e-6)


def test_a_trajectory_alone_in_a_thread_and_in_any_lane(monkeypatch):
    whole = solve(ensemble(), trajectories=N, saveat=TIMES, compile=True, **TIGHT)
    monkeypatch.setattr(kernel_solver, "_BLOCK", 2)
    for backend in (EnsembleSerial(), EnsembleThreads(3)):
        again = solve(ensemble(), RK45(), backend, trajectories=N, saveat=TIMES, compile=True, batch_size=7, **TIGHT)
        assert again.u.tobytes() == whole.u.tobytes()
    still = onp.array(SPANS)
    still[4:37] = 0.5
    few = solve(ensemble(spans=still), RK45(), EnsembleThreads(2), trajectories=N, compile=True, **TIGHT)
    moving = still[:, 0] != still[:, 1]
    assert few.u_end[moving].tobytes() == whole.u_end[moving].tobytes()
    assert (few.u_end[~moving] == U0[~moving]).all()
    order = RNG.permutation(N)
    moved = solve(ensemble(rows=order), trajectories=N, saveat=TIMES[order], compile=True, **TIGHT)
    assert moved.u.tobytes() == whole.u[order].tobytes() and moved.u_end.tobytes() == whole.u_end[order].tobytes()


def loss(u0, own, shared, spans, **more):
    sol = solve(ensemble(u0, own, shared, spans), trajectories=N, **TIGHT, **more)
    weights = np.cos(np.arange(sol.u.size)).reshape(sol.u.shape)
    return np.sum(weights * sol.u**2) + np.sum(sol.u_end**3 * OWN[:, None])


def test_kinks_by_the_same_steps_are_the_same_to_the_bit():
    # By steps that are controlled the last digit of a power makes steps differ, and more so at each kink.
    def kinked(u, p, t):
        largest = np.maximum(-u[0], -0.3) + np.max(u, axis=0)
        return [np.abs(u[1]) - 0.5 * u[0], largest + p * np.where(u[1] > 0.2, 1.0, -1.0) * np.sqrt(np.abs(u[0]) + 1.0)]

    problem = EnsembleProblem(ODEProblem(kinked, U0[0], (0.0, 4.0), OWN[0]), u0=U0, p=OWN)
    columns, kernels = (solve(problem, RK4(), dt=0.03, compile=choice).u_end for choice in (False, True))
    onp.testing.assert_array_equal(columns, kernels)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("argnums", "saveat", "way"),
    [((0,), None, None), ((0, 1), TIMES, None), ((0, 1, 2, 3), TIMES, None), ((2,), None, "adjoint")],
    ids=["carried", "carried inside", "all, inside", "shared"],
)
def test_gradients(argnums, saveat, way):
    found = [
        mpiad.value_and_grad(loss, argnums)(U0, OWN, SHARED, SPANS, saveat=saveat, compile=choice, gradient=way)
        for choice in (False, True)
    ]
    onp.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-10)
    for a, b in zip(found[0][1], found[1][1]):
        onp.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8 * onp.abs(a).max())


@pytest.mark.thorough
def test_states_saved_inside_the_last_step_by_the_ends_of_tspan():
    times = SPANS[:, :1] + (SPANS[:, 1:] - SPANS[:, :1]) * onp.array([0.5, 0.98, 0.999])
    found, expected = (
        mpiad.grad(loss, (0, 1, 2, 3))(U0, OWN, SHARED, SPANS, saveat=times, compile=choice) for choice in (True, False)
    )
    for a, b in zip(found, expected):
        onp.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8 * onp.abs(b).max())


@pytest.mark.parametrize("every", [1, 2, 5, 1000])
def test_fewer_steps_at_a_time(every):
    found, expected = (
        mpiad.grad(loss, (0, 1, 2, 3))(U0, OWN, SHARED, SPANS, saveat=TIMES, compile=True, checkpoints=k)
        for k in (every, None)
    )
    for a, b, own in zip(found, expected, (True, True, False, True)):
        # What all share is a sum over the trajectories, here of the sums of parts.
        if own:
            onp.testing.assert_array_equal(a, b)
        else:
            onp.testing.assert_allclose(a, b, rtol=1e-13)
    u0, u0_again = (
        mpiad.grad(loss, 0)(U0, OWN, SHARED, SPANS, saveat=None, compile=True, checkpoints=k) for k in (every, None)
    )
    onp.testing.assert_array_equal(u0, u0_again)  # carried: nothing is kept in any case


def test_steps_are_recorded_part_by_part(monkeypatch):
    rows = []
    first = kernel_solver.Solver._run
    monkeypatch.setattr(
        kernel_solver.Solver,
        "_run",
        lambda solver, spec, record: (rows.append((record, solver.batch.size)), first(solver, spec, record))[1],
    )
    mpiad.grad(loss, (0, 1, 2, 3))(U0, OWN, SHARED, SPANS, saveat=TIMES, compile=True, checkpoints=2)
    assert rows == [(False, N), (True, N // 2), (True, N - N // 2)]


def test_forward_mode_and_second_order_after_a_kernel():
    v = onp.cos(onp.arange(N))

    def products(choice):
        by_own = lambda own: loss(U0, own, SHARED, 0.3 * SPANS, compile=choice)  # noqa: E731
        return [*mpiad.jvp(by_own, OWN, v), mpiad.hvp(by_own)(OWN, v)]

    for a, b in zip(products(False), products(True)):
        onp.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8 * onp.abs(a).max())


def test_a_record_that_outgrows_its_room(monkeypatch):
    wide = mpiad.grad(loss, 2)(U0, OWN, SHARED, SPANS, compile=True, gradient="adjoint")
    monkeypatch.setattr(kernel_solver, "_STEPS", 1)
    narrow = mpiad.grad(loss, 2)(U0, OWN, SHARED, SPANS, compile=True, gradient="adjoint")
    assert wide.tobytes() == narrow.tobytes()


def test_numbers_and_matrices_as_states():
    def check(f, u0, **more):
        check_alike(*both(EnsembleProblem(ODEProblem(f, u0[0], (0.0, 1.5)), u0=u0), rtol=1e-8, **more))

    check(lambda u, p, t: -u * np.sin(t), onp.linspace(1.0, 2.0, 20))
    matrix = onp.array([[0.0, 1.0], [-1.0, -0.1]])
    check(lambda u, p, t: np.dot(matrix, u) * (1 + t), RNG.normal(size=(18, 2, 2)))


def test_no_trajectory_and_one_problem():
    problem = ODEProblem(forced_pendulum, [0.5, 1.0], (0.0, 3.0), [2.0, 0.1])
    first, second = both(problem, rtol=1e-8)
    onp.testing.assert_allclose(first.u, second.u, rtol=1e-10)
    assert "def forward(" in second.problem.kernel_source()
    assert len(solve(EnsembleProblem(problem, u0=onp.empty((0, 2))), compile=True)) == 0


def test_solutions_can_be_pickled():
    rho = onp.linspace(0, 21, 300)[:, None]
    sol = solve(EnsembleProblem(ODEProblem(lorenz, [1.0, 0.0, 0.0], (0.0, 1.0)), p=rho), compile=True)
    for again in (pickle.loads(pickle.dumps(sol)), copy.deepcopy(sol)):
        onp.testing.assert_array_equal(again.u, sol.u)
        assert again.problem.kernel_source() == sol.problem.kernel_source()
