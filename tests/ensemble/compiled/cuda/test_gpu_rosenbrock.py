"""Rosenbrock methods by `EnsembleGPU` on the stand-in for a device, beside columns of NumPy's arrays."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest
from device_double import on_device, on_host
from device_on_cpu import COMPILER
from stiff_systems import SYSTEMS

import mpiad
from mpiad.ensemble import (
    EnsembleGPU,
    EnsembleProblem,
    EnsembleVectorized,
    Event,
    ODEProblem,
    Rodas5P,
    Rosenbrock23,
    remake,
    solve,
)

pytestmark = [
    pytest.mark.serial,
    pytest.mark.skipif(COMPILER is None, reason="there is no compiler of C++"),
    pytest.mark.usefixtures("device"),
]
every_method = pytest.mark.parametrize("alg", [Rosenbrock23(), Rodas5P()], ids=lambda alg: type(alg).__name__)
FORCED, N = SYSTEMS["forced"], 9
U0 = np.random.default_rng(0).uniform(0.3, 1.8, (N, 2))
P = FORCED.p * np.random.default_rng(1).uniform(0.1, 1.0, (N, 2))
TIMES, TOLERANCES = [0.0, 0.11, 0.7, 2.0], {"rtol": 1e-4, "atol": 1e-7}
# One on the way, and one that some of them meet.
EVENTS = (Event(lambda u, p, t: u[0] + 0.4, terminal=False), Event(lambda u, p, t: u[1] - 1.27 - 0.1 * t))
MASS = np.array([[2.0, 0.0], [0.0, 0.0]])


def ensemble(u0=U0, p=P, mass=None, f=FORCED.f):
    return EnsembleProblem(ODEProblem(f, [1.0, 1.0], (0.0, 2.0), mass_matrix=mass), u0=u0, p=p)


def both(alg, problem, there=None, **options):
    """Solve on the device, and by columns of the host."""
    options = {"saveat": TIMES, **TOLERANCES, **options}
    sol = solve(problem if there is None else there, alg, EnsembleGPU(), **options)
    return sol, solve(problem, alg, EnsembleVectorized(), **{**options, "compile": False})


def assert_same(sol, expected, rtol=1e-9):
    for name in ("retcode", "naccept", "nreject", "nf", "njac", "nlu"):
        np.testing.assert_array_equal(getattr(sol, name), getattr(expected, name))
    np.testing.assert_allclose(sol.t_reached, expected.t_reached, rtol=rtol)
    np.testing.assert_allclose(on_host(sol.u), expected.u, rtol=rtol, atol=rtol)
    np.testing.assert_allclose(on_host(sol.u_end), expected.u_end, rtol=rtol, atol=rtol)


@pytest.mark.few(1)
@every_method
@pytest.mark.parametrize("place", [np.asarray, on_device])
def test_steps_counts_and_events_are_those_of_columns(alg, place, device):
    sol, expected = both(alg, ensemble(), ensemble(place(U0), place(P)), events=EVENTS)
    assert [launch[0] for launch in device.launches] == ["forward"]
    assert_same(sol, expected)
    assert {"Success", "Terminated"} == set(sol.retcode) and sol.nlu.min() > 0
    assert sorted(sol.events) == sorted(expected.events)
    for i, found in expected.events.items():
        assert [event for event, _ in sol.events[i]] == [event for event, _ in found]
        np.testing.assert_allclose([time for _, time in sol.events[i]], [time for _, time in found], rtol=1e-9)


def loss(backend, alg, u0, p, problem=None, **options):
    given = ensemble(u0, p) if problem is None else remake(problem, u0=u0, p=p)
    sol = solve(given, alg, backend, saveat=TIMES, **TOLERANCES, **options)
    alive, ended = sol.survivors, mpiad.stop_gradient(sol.t_reached)
    kept = anp.where((alive[:, None] & (sol.t <= ended[:, None]))[..., None], sol.u, 0.0)
    times = sum((i + event) * time for i, found in sol.events.items() if alive[i] for event, time in found)
    return anp.sum(kept**2) + anp.sum(anp.sin(anp.where(alive[:, None], sol.u_end, 0.0))) + times


def assert_same_gradients(alg, device, **options):
    """Compare the gradients by the reverse kernel with those by columns."""
    device.launches.clear()
    found = mpiad.grad(lambda *x: loss(EnsembleGPU(), alg, *x, **options), (0, 1))(U0, P)
    assert [launch[0] for launch in device.launches] == ["forward", "forward", "reverse"]
    expected = mpiad.grad(lambda *x: loss(EnsembleVectorized(), alg, *x, compile=False, **options), (0, 1))(U0, P)
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-9 * np.abs(b).max())


@pytest.mark.few(1)
@every_method
@pytest.mark.parametrize("events", [(), EVENTS], ids=["no events", "events"])
def test_gradients_are_those_of_columns(alg, events, device):
    assert_same_gradients(alg, device, events=events)


def algebraic(u, p, t):
    return [-p[1] * u[0] + u[1], u[1] - p[1] * anp.cos(u[0]) - t]


def test_a_mass_matrix_whose_start_is_made_consistent(device):
    problem = ensemble(mass=MASS, f=algebraic)
    sol, expected = both(Rodas5P(), problem)
    assert_same(sol, expected)
    np.testing.assert_allclose(sol.u[:, 0, 1], P[:, 1] * np.cos(U0[:, 0]), rtol=1e-12)
    assert_same_gradients(Rodas5P(), device, problem=problem)


@pytest.mark.thorough
def test_a_start_that_cannot_be_made_consistent_has_its_code():
    problem = ensemble(np.array([[1.0, 1.0]] * 2), np.array([[1.0, 0.5], [-1.0, 0.5]]), MASS, lambda u, p, t: [
        -u[0], u[1] ** 2 - p[0]
    ])  # fmt: skip
    sol, expected = both(Rodas5P(), problem)
    assert sol.retcode.tolist() == expected.retcode.tolist() == ["Success", "InitialFailure"]
    assert "InitialFailure" in sol.summary()


@pytest.mark.thorough
def test_single_precision():
    there = ensemble(U0.astype(np.float32), P.astype(np.float32))
    options = {"rtol": 1e-3, "atol": 1e-5, "saveat": [0.7, 2.0]}
    sol = solve(there, Rodas5P(), EnsembleGPU(), **options)
    assert sol.u.dtype == np.float32 and set(sol.retcode) == {"Success"}
    np.testing.assert_allclose(sol.u, solve(ensemble(), Rodas5P(), rtol=1e-8, atol=1e-10, saveat=[0.7, 2.0]).u, atol=5e-3)


@pytest.mark.thorough
def test_tangents_are_left_to_arrays(device, caplog):
    def along(backend):
        return mpiad.jvp(lambda u0: loss(backend, Rodas5P(), u0, P), U0, np.cos(U0))[1]

    found = along(EnsembleGPU())
    assert "kernels of Rosenbrock methods support only adjoints" in caplog.text and not device.launches
    np.testing.assert_allclose(found, along(EnsembleVectorized()), rtol=1e-7)


def test_what_is_refused():
    for given, options, text in (
        (ensemble(on_device(U0), on_device(P), MASS, algebraic), {}, "a mass matrix on the host only"),
        (ensemble(mass=MASS, f=algebraic), {"save_everystep": True}, "a mass matrix on the host only"),
    ):
        with pytest.raises(NotImplementedError, match=text):
            solve(given, Rodas5P(), EnsembleGPU(), **options)


def test_a_jacobian_with_too_many_operations(caplog, monkeypatch):
    """Both exceptions name the Jacobian, which arrays on a device need, too."""
    monkeypatch.setattr("mpiad.ensemble.field_jacobian._MOST_OPERATIONS", 8)
    given = ensemble(f=lambda u, p, t: [u[1] * p[0] - u[0] ** 3, anp.sin(u[0] * u[1]) - p[1] * u[1]])
    for alg in (Rosenbrock23(), Rodas5P()):
        with pytest.raises(TypeError, match=r"compile=True, but the Jacobian of f can't be compiled .*than 8 operations"):
            solve(given, alg, EnsembleGPU(), compile=True)
        with pytest.raises(TypeError, match="on a device a Rosenbrock method needs the Jacobian of a traced f"):
            solve(given, alg, EnsembleGPU())
    assert "the Jacobian of f can't be compiled" in caplog.text
