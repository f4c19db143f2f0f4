"""Mass matrices: differential-algebraic systems of index 1 by Rodas5P, beside the same systems without."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI
from stiff_systems import SYSTEMS

import mpiad
from mpiad.ensemble import RK45, EnsembleMPI, EnsembleProblem, Event, ODEProblem, Rodas5P, Rosenbrock23, fit, remake, solve

WORLD = MPI.COMM_WORLD
both = pytest.mark.usefixtures("solved_by")
TIGHT = {"rtol": 1e-7, "atol": 1e-9}
P = np.array([[0.7, 2.0], [1.5, 0.4], [0.2, 1.0]])


def circuit(u, p, t):
    """Two components in time, and one by an equation: u2 = p1 sin(u0) + t."""
    return [u[1] + u[2], -p[0] * u[0], u[2] - p[1] * anp.sin(u[0]) - t]


def reduced(u, p, t):
    third = p[1] * anp.sin(u[0]) + t
    return [u[1] + third, -p[0] * u[0]]


# Of the first two components the derivatives are mixed: M u' = f has 2 u0' + u1' and u1' on its left.
MASS = np.array([[2.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])


def mixed(u, p, t):
    first, second, third = circuit(u, p, t)
    return [2 * first + second, second, third]


def dae(u0=(1.0, 0.2)):
    start = np.stack([np.array([*u0, p[1] * np.sin(u0[0])]) for p in P])
    return EnsembleProblem(ODEProblem(mixed, start[0], (0.0, 2.0), mass_matrix=MASS), u0=start, p=P)


ODE = EnsembleProblem(ODEProblem(reduced, [1.0, 0.2], (0.0, 2.0)), p=P)


@both
@pytest.mark.serial
def test_a_system_with_an_equation_is_the_one_without():
    times = [0.3, 1.1, 2.0]
    sol, expected = solve(dae(), Rodas5P(), saveat=times, **TIGHT), solve(ODE, Rodas5P(), saveat=times, **TIGHT)
    np.testing.assert_allclose(sol.u[..., :2], expected.u, atol=1e-7)
    np.testing.assert_allclose(sol.u[..., 2], P[:, 1:] * np.sin(sol.u[..., 0]) + times, atol=1e-7)
    # Backwards it comes to where it began.
    back = remake(dae(), problem=remake(dae().problem, tspan=(2.0, 0.0)), u0=sol.u_end)
    np.testing.assert_allclose(solve(back, Rodas5P(), **TIGHT).u_end, dae().u0, atol=1e-6)


@pytest.mark.serial
def test_order_by_slopes():
    one = remake(dae().problem, p=P[1], u0=dae().u0[1])
    exact = solve(remake(ODE.problem, p=P[1]), Rodas5P(), rtol=1e-13, atol=1e-13).u_end
    errors = []
    for h in (0.1, 0.05):
        sol = solve(one, Rodas5P(), dt=h, dtmax=h, rtol=1.0, atol=1.0)
        errors.append(np.linalg.norm(sol.u_end[:2] - exact))
    assert np.log2(errors[0] / errors[1]) == pytest.approx(5, abs=0.5)


@both
@pytest.mark.serial
def test_robertson_with_its_conservation():
    def kinetics(u, p, t):
        a, b, c = p[0] * u[0], p[1] * u[1] * u[2], p[2] * u[1] ** 2
        return [b - a, a - b - c, u[0] + u[1] + u[2] - 1]

    stiff = SYSTEMS["Robertson"]
    problem = ODEProblem(kinetics, stiff.u0, (0.0, stiff.end), mass_matrix=np.diag([1, 1, 0]))
    sol = solve(EnsembleProblem(problem, p=stiff.p[None]), Rodas5P(), **TIGHT)
    expected = solve(remake(problem, f=stiff.f, p=stiff.p, mass_matrix=None), Rodas5P(), **TIGHT)
    np.testing.assert_allclose(sol.u_end[0], expected.u_end, rtol=1e-6)


@pytest.mark.few(2)
@pytest.mark.serial
@pytest.mark.parametrize("options", [{"gradient": "adjoint"}, {"gradient": "tangent"}, {"compile": True}])
def test_gradients(options):

    def loss(p, start, ensemble, **more):
        # The third component starts where its equation has it.
        columns = [0.0 * p[:, 0] + x for x in (start[0], start[1], p[:, 1] * anp.sin(start[0]))]
        u0 = anp.stack(columns[: len(ensemble.problem.u0)], axis=1)
        sol = solve(remake(ensemble, u0=u0, p=p), Rodas5P(), saveat=[0.7, 2.0], **TIGHT, **more)
        return anp.sum(sol.u[..., :2] ** 2 * np.array([1.0, 3.0])) + anp.sum(anp.sin(sol.u_end[:, 0]))

    start = np.array([1.0, 0.2])
    found = mpiad.grad(loss, (0, 1))(P, start, dae(), **options)
    expected = mpiad.grad(loss, (0, 1))(P, start, ODE)
    for gradient, other in zip(found, expected):
        np.testing.assert_allclose(gradient, other, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.serial
def test_ways_to_the_gradient_agree():
    def ended(p, **options):
        return anp.sum(solve(remake(dae(), p=p), Rodas5P(), rtol=1e-4, **options).u_end ** 3)

    ways = [{"gradient": "adjoint"}, {"gradient": "tangent"}, {"compile": True}]
    found = [mpiad.grad(lambda p, way=way: ended(p, **way))(P) for way in ways]
    np.testing.assert_allclose(found[1:], [found[0]] * 2, rtol=1e-9, atol=1e-12)
    # Of the replay, which is NumPy's solutions differentiated by autograd.
    value = mpiad.hvp(lambda p: ended(p))(P, P)
    change = 1e-5
    moved = [mpiad.grad(lambda p: ended(p))(P * (1 + x)) for x in (change, -change)]
    np.testing.assert_allclose(value, (moved[0] - moved[1]) / (2 * change), rtol=1e-3, atol=1e-4)


@both
@pytest.mark.serial
def test_an_inconsistent_start_is_made_consistent():
    # What has no equation stays, and so does M u0 where an equation has a part of each component.
    started = np.concatenate([dae().u0[:, :2], [[7.0], [-3.0], [0.0]]], axis=1)
    sol = solve(remake(dae(), u0=started), Rodas5P(), **TIGHT)
    np.testing.assert_allclose(sol.u[:, 0], dae().u0, rtol=1e-14)
    np.testing.assert_allclose(sol.u_end, solve(dae(), Rodas5P(), **TIGHT).u_end, rtol=1e-12)

    def f(u, p, t):
        return [-u[0], u[1] ** 3 - p[0] - u[0]]

    mass = np.array([[1.0, 2.0], [0.5, 1.0]])  # both rows say the same of u': 0.5 f0 = f1
    sol = solve(EnsembleProblem(ODEProblem(f, [1.0, 1.5], (0.0, 0.1), mass_matrix=mass), p=P[:, 1:]), Rodas5P())
    start = sol.u[:, 0].T
    np.testing.assert_allclose(start[0] + 2 * start[1], 4.0, rtol=1e-14)
    np.testing.assert_allclose(start[1] ** 3 - P[:, 1] - 0.5 * start[0], 0, atol=1e-13)


@pytest.mark.serial
@pytest.mark.parametrize("options", [{"gradient": "adjoint"}, {"gradient": "tangent"}, {"compile": True}])
def test_derivatives_of_a_start_that_is_made_consistent(options):
    u0 = np.array([[1.0, 0.2, 7.0], [0.5, 0.3, 7.0], [0.1, 1.0, 7.0]])

    def loss(u0, p, ensemble, **more):
        sol = solve(remake(ensemble, u0=u0, p=p), Rodas5P(), **{**TIGHT, **more})
        return anp.sum(sol.u_end[:, :2] ** 2 * np.array([1.0, 3.0]))

    found = mpiad.grad(loss, (0, 1))(u0, P, dae(), **options)
    expected = mpiad.grad(loss, (0, 1))(u0[:, :2], P, ODE)
    np.testing.assert_allclose(found[0], np.pad(expected[0], ((0, 0), (0, 1))), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.serial
def test_second_derivatives_of_a_start_that_is_made_consistent():
    # The end is where it began: all that there is to differentiate is how the start was made.
    def f(u, p, t):
        return [0.0 * u[0], u[1] ** 3 - p[0] * u[0]]

    problem = ODEProblem(f, [2.0, 1.0], (0.0, 1e-6), mass_matrix=np.diag([1.0, 0.0]))
    p = np.array([[0.7], [1.5], [4.0]])
    cube = mpiad.hvp(lambda p: anp.sum(solve(EnsembleProblem(problem, p=p), Rodas5P(), dt=1e-6).u_end[:, 1]))(
        p, np.ones_like(p)
    )
    np.testing.assert_allclose(cube, -2 / 9 * 2 ** (1 / 3) * p ** (-5 / 3), rtol=1e-9)


@pytest.mark.serial
def test_fits_whose_start_moves_with_the_variables():
    def f(u, p, t):
        return [-p[0] * u[0] * u[1], u[1] ** 3 - p[1] * u[0]]

    # u0' = -k u0^(4/3) with k = p0 p1^(1/3).
    times, truth = np.linspace(0.25, 1.0, 4), np.array([[0.7, 1.5], [1.1, 0.6]])
    first = (1 + truth[:, :1] * np.cbrt(truth[:, 1:]) * times / 3) ** -3
    data = {"u": np.stack([first, np.cbrt(truth[:, 1:] * first)], axis=-1)}
    problem = ODEProblem(f, [1.0, 1.0], (0.0, 1.0), mass_matrix=np.diag([1.0, 0.0]))
    found = fit(problem, lambda u, p, data: u - data["u"], 1.3 * truth, Rodas5P(), data=data, saveat=times, **TIGHT)
    np.testing.assert_allclose(found.p, truth, rtol=1e-6)


@pytest.mark.few(1)
@both
@pytest.mark.serial
def test_a_start_that_cannot_be_made_consistent_has_a_code():
    def f(u, p, t):
        return [-u[0], u[1] ** 2 + p[0]]

    problem = ODEProblem(f, [1.0, 0.5], (0.0, 1.0), mass_matrix=np.diag([1.0, 0.0]))
    squares = np.array([[1.0], [-4.0], [-9.0]])  # u1² = -1 has no solution
    sol = solve(EnsembleProblem(problem, p=squares), Rodas5P())
    assert sol.retcode.tolist() == ["InitialFailure", "Success", "Success"]
    np.testing.assert_allclose(sol.u_end[1:, 1], [2, 3])
    end = mpiad.grad(lambda p: anp.sum(solve(EnsembleProblem(problem, p=p), Rodas5P()).u_end[:, 1]))(squares)
    np.testing.assert_allclose(end, [[0.0], [-1 / 4], [-1 / 6]])


@both
@pytest.mark.serial
def test_a_system_that_has_no_solution_ends_with_a_code():
    # No component has the second equation's: every W is singular.
    def f(u, p, t):
        return [-u[0], p[0] * u[1]]

    problem = ODEProblem(f, [1.0, 0.0], (0.0, 1.0), mass_matrix=np.diag([1.0, 0.0]))
    sol = solve(EnsembleProblem(problem, p=np.array([[0.0], [1.0]])), Rodas5P())
    assert sol.retcode.tolist() == ["Unstable", "Success"]
    assert sol.u_end[1] == pytest.approx([np.exp(-1), 0], abs=1e-4)


def leaning(u, p, t):
    return [-2 * p[0] * u[0], u[1] - (1 + t) * u[0] ** 2]


def doubled(u, p, t):
    first = 2 * u[0] + p[1]
    return [first, (1 + t) * first**2]


@both
@pytest.mark.serial
def test_events_at_given_times_with_no_step_between(solved_by):
    # One that moves: at the start, where another one has just been, and at the end.
    p = np.array([[0.7, 0.0], [1.3, 0.5], [0.4, 1.0]])
    doses = [Event(times=times, affect=doubled) for times in ([0.5], lambda p: [p[1]])]
    problem = ODEProblem(leaning, [1.0, 1.0], (0.0, 1.0), mass_matrix=np.diag([2.0, 0.0]))
    weights = np.array([[1.0, 0.3], [-0.5, 0.2], [0.7, -0.1]])

    def found(p, rtol=1e-8):
        return anp.sum(weights * solve(EnsembleProblem(problem, p=p), Rodas5P(), events=doses, rtol=rtol, atol=rtol).u_end)

    def exact(p):
        total = 0.0
        for i, order in enumerate([(1, 0), (0, 1), (0, 1)]):
            u, now = 1.0, 0.0
            for t in [*((0.5, p[i, 1])[k] for k in order), None]:
                u = u * anp.exp(-p[i, 0] * ((1.0 if t is None else t) - now))
                u, now = (u, now) if t is None else (2 * u + p[i, 1], t)
            total = total + weights[i, 0] * u + weights[i, 1] * 2 * u**2
        return total

    np.testing.assert_allclose(mpiad.grad(found)(p), mpiad.grad(exact)(p), rtol=1e-6)
    if solved_by == "columns":  # of the replay, which is so in any case
        loose = mpiad.hvp(lambda p: found(p, 1e-4))(p, P)
        np.testing.assert_allclose(loose, mpiad.hvp(exact)(p, P), rtol=1e-2)


@pytest.mark.serial
@pytest.mark.parametrize("algebraic", [False, True])
def test_conditions_that_affects_leave_at_their_roots(algebraic):
    # A ball; how it leaves the ground is told by u', which isn't f, or not all of it.
    def falls(u, p, t):
        return [0.01 * u[1], -0.01 * p[0] + 0 * u[0], *([u[2] - 2 * u[0]] if algebraic else [])]

    def bounces(u, p, t):
        return [u[0], -p[1] * u[1], *([2 * u[0]] if algebraic else [])]

    d = 2 + algebraic
    problem = ODEProblem(falls, [1.0, 0.0, 2.0][:d], (0.0, 3.0), np.array([9.81, 0.8]), np.diag([0.01, 0.01, 0.0][:d]))
    bounce = Event(lambda u, p, t: u[-1] if algebraic else u[0], affect=bounces)
    sol = solve(problem, Rodas5P(), events=bounce, **TIGHT)
    times = np.sqrt(2 / 9.81) * (2 * np.cumsum(0.8 ** np.arange(6)) - 1)
    np.testing.assert_allclose([time for _, time in sol.events], times, rtol=1e-9)
    with pytest.raises(NotImplementedError, match="mass_matrix together with an event"):
        solve(problem, Rodas5P(), events=bounce, compile=True)


def test_what_is_refused():
    ensemble = dae()
    for alg in (RK45(), Rosenbrock23()):
        with pytest.raises(ValueError, match="doesn't support the problem's mass_matrix"):
            solve(ensemble, alg, EnsembleMPI())
        WORLD.barrier()
    for mass, error, text in (
        (np.eye(2), ValueError, r"mass_matrix must have shape \(3, 3\)"), (np.ones(3), ValueError, "square matrix"),
        (np.full((3, 3), np.nan), ValueError, "finite"),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            solve(remake(ensemble, problem=remake(ensemble.problem, mass_matrix=mass)), Rodas5P(), EnsembleMPI())
        WORLD.barrier()
    with pytest.raises(ValueError, match="another mass_matrix for trajectory"):
        changed = EnsembleProblem(ensemble.problem, lambda prob, i, repeat: remake(prob, mass_matrix=np.eye(3), p=P[0]))
        solve(changed, Rodas5P(), EnsembleMPI(), trajectories=4)
    with pytest.raises(TypeError, match="constant array"):
        mpiad.grad(lambda m: solve(remake(ensemble.problem, mass_matrix=m), Rodas5P()).u_end[0])(MASS)
