"""`EnsembleGPU` on a GPU, by CuPy, beside kernels and arrays of the CPU. Where there is none, `test_gpu` runs it all."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import ode_systems
import pytest
from device_kinds import why_no_gpu

import mpiad
import mpiad.device
from mpiad.device import to_device, to_host
from mpiad.ensemble import RK45, EnsembleGPU, EnsembleProblem, EnsembleVectorized, Event, ODEProblem, Tsit5, solve

pytestmark = pytest.mark.skipif(bool(why_no_gpu()), reason=why_no_gpu() or "there is a GPU")
N, TIMES = 1000, [0.0, 0.31, 1.0]


def given(d, *ranges, dtype=float):
    u0 = np.random.default_rng(0).random((N, d)) + 0.5
    return u0.astype(dtype), np.stack([np.linspace(low, high, N) for low, high in ranges], axis=1).astype(dtype)


def solved(f, u0, p, backend, alg=None, **options):
    problem = ODEProblem(f, np.zeros(u0.shape[1], u0.dtype), (0.0, 1.0))
    options = {"saveat": TIMES, "rtol": 1e-7, "atol": 1e-9, **options}
    return solve(EnsembleProblem(problem, u0=u0, p=p), alg or RK45(), backend, **options)


CASES = [
    (ode_systems.lorenz, 3, ((20, 30),), None), (ode_systems.van_der_pol, 2, ((1, 9),), Tsit5()),
    (ode_systems.forced_pendulum, 2, ((5, 12), (0.1, 0.9)), None),
]  # fmt: skip


@pytest.mark.parametrize("f, d, ranges, alg", CASES)
def test_numbers_are_those_of_the_cpu(f, d, ranges, alg):
    u0, p = given(d, *ranges)
    expected = solved(f, u0, p, EnsembleVectorized(), alg, compile=False)
    # Without contraction all is rounded as on the CPU, but for functions; then steps are the same.
    for backend, rtol in ((EnsembleGPU(contract=False), 1e-11), (EnsembleGPU(), 1e-6)):
        sol = solved(f, to_device(u0), to_device(p), backend, alg)
        np.testing.assert_allclose(to_host(sol.u), expected.u, rtol=rtol, atol=rtol * np.abs(expected.u).max())
        assert set(sol.retcode) == {"Success"}
        assert np.abs(sol.naccept - expected.naccept).max() <= 1


@pytest.mark.parametrize("gradient", ["adjoint", "tangent"])
@pytest.mark.parametrize("place", [np.asarray, to_device])
def test_gradients_are_those_of_the_cpu(gradient, place):
    u0, p = given(3, (20, 30))

    def loss(u0, p, backend, **options):
        sol = solved(ode_systems.lorenz, u0, p, backend, **options)
        return anp.sum(sol.u**2) + anp.sum(sol.u_end)

    expected = mpiad.grad(lambda *x: loss(*x, EnsembleVectorized(), compile=False), (0, 1))(u0, p)
    for backend in (EnsembleGPU(contract=False), EnsembleGPU(contract=False, tape_bytes=200_000)):
        found = mpiad.grad(lambda *x: loss(*x, backend, gradient=gradient), (0, 1))(place(u0), place(p))  # noqa: B023
        for a, b in zip(found, expected):
            assert type(a) is type(place(np.zeros(1)))
            np.testing.assert_allclose(to_host(a), b, rtol=1e-8, atol=1e-9 * np.abs(b).max())


@pytest.mark.parametrize("place", [np.asarray, to_device])
def test_events_are_those_of_the_cpu(place):
    u0, p = given(2, (5, 12), (0.1, 0.9))
    events = Event(lambda u, p, t: u[0] - 0.2, direction=-1), Event(lambda u, p, t: u[1] + 0.1 * p[0], terminal=False)

    def loss(u0, p, backend, **options):
        sol = solved(ode_systems.forced_pendulum, u0, p, backend, events=events, **options)
        return anp.sum(sol.t_reached**2) + sum(i * time for i, found in sol.events.items() for _, time in found)

    value, expected = mpiad.value_and_grad(lambda *x: loss(*x, EnsembleVectorized(), compile=False), (0, 1))(u0, p)
    found = mpiad.value_and_grad(lambda *x: loss(*x, EnsembleGPU(contract=False)), (0, 1))(place(u0), place(p))
    np.testing.assert_allclose(found[0], value, rtol=1e-10)
    for a, b in zip(found[1], expected):
        np.testing.assert_allclose(to_host(a), b, rtol=1e-7, atol=1e-8 * np.abs(b).max())


def test_single_precision():
    u0, p = given(3, (20, 30), dtype=np.float32)
    sol = solved(ode_systems.lorenz, u0, p, EnsembleGPU(), rtol=1e-4, atol=1e-5)
    expected = solved(ode_systems.lorenz, u0.astype(float), p.astype(float), EnsembleVectorized())
    assert sol.u.dtype == np.float32
    np.testing.assert_allclose(sol.u, expected.u, rtol=1e-2, atol=1e-2)
