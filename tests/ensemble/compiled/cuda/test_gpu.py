"""`EnsembleGPU` from `solve` to the kernels' launches, on the stand-in for a device: numbers, transfers, refusals."""

from __future__ import annotations

import logging
import re

import autograd.numpy as anp
import numpy as np
import ode_systems
import pytest
from device_double import DeviceArray, on_device, on_host, transfers, watched_memory
from device_on_cpu import COMPILER, launcher
from traced_right_hand_sides import sir

import mpiad
from mpiad.device import to_host
from mpiad.ensemble import (
    RK4,
    RK45,
    BatchSum,
    EnsembleGPU,
    EnsembleProblem,
    EnsembleVectorized,
    Event,
    ODEProblem,
    PIController,
    Tsit5,
    solve,
)
from mpiad.ensemble.compiled.cuda import gpu_solve
from mpiad.ensemble.compiled.cuda.gpu_solve import sample_batch
from mpiad.ensemble.members import members

pytestmark = [
    pytest.mark.serial,
    pytest.mark.skipif(COMPILER is None, reason="there is no compiler of C++"),
    pytest.mark.usefixtures("device"),
]
SELECTED = "mpiad.ensemble.backends.selected_arrays"
TIMES = [0.0, 0.3, 0.31, 0.9, 1.0]
RATE = 10.0


def lorenz(u, p, t):
    return [p[1] * (u[1] - u[0]), u[0] * (p[0] - u[2]) - u[1], u[0] * u[1] - 8 / 3 * u[2]]


def states(n, d=3, dtype=float):
    return (np.random.default_rng(0).random((n, d)) + 0.5).astype(dtype)


def parameters(n, *ranges, dtype=float):
    return np.stack([np.linspace(low, high, n) for low, high in ranges or ((20, 40), (8, 12))], axis=1).astype(dtype)


def ensemble(f, u0, p=None, shared=None, tspan=(0.0, 1.0)):
    return EnsembleProblem(ODEProblem(f, np.zeros(u0.shape[1], u0.dtype), tspan, shared), u0=u0, p=p)


def assert_same(sol, expected, rtol=1e-12):
    np.testing.assert_array_equal(sol.retcode, expected.retcode)
    np.testing.assert_allclose(sol.t_reached, expected.t_reached, rtol=rtol)
    known = ~np.isin(expected.retcode, ["DtLessThanMin", "Unstable"])
    for name in ("naccept", "nreject", "nf"):
        found, right = getattr(sol, name), getattr(expected, name)
        np.testing.assert_array_equal(found[known], right[known])
        # How often a step is halved in front of a singularity depends on the last bit of its size.
        np.testing.assert_allclose(found, right, rtol=0.05)
    for found, right in ((sol.u[known], expected.u[known]), (sol.u_end[known], expected.u_end[known])):
        np.testing.assert_allclose(found, right, rtol=rtol, atol=rtol * np.nanmax(np.abs(right)))


# ---- Forward ---------------------------------------------------------------------------------------------------------
# Of each: f, components, ranges of parameters or what all share, and what solve is told.
CASES = {
    "tight": (lorenz, 3, ((20, 40), (8, 12)), None, {"rtol": 1e-8, "atol": [1e-9, 1e-10, 1e-9]}),
    "shared": (ode_systems.lotka_volterra, 2, None, [1.5, 1.0, 0.7, 3.0], {}),
    "nest": (sir, 3, None, {"beta": 0.4, "gamma": 0.1}, {"tspan": (0.0, 30.0), "saveat": [7.0, 22.0]}),
    "backwards": (ode_systems.forced_pendulum, 2, ((5, 12), (0.1, 0.9)), None, {"tspan": (1.0, -0.5), "saveat": [0.4]}),
    "ends": (ode_systems.van_der_pol, 2, ((1, 9),), None, {"alg": Tsit5(), "saveat": None}),
    "PI": (ode_systems.van_der_pol, 2, ((1, 30),), None, {"alg": RK45(controller=PIController()), "dtmax": 0.2}),
    "fixed": (ode_systems.van_der_pol, 2, ((1, 3),), None, {"alg": RK4(), "dt": 0.07}),
    "cut short": (lorenz, 3, ((20, 40), (8, 12)), None, {"max_steps": 12}),
    "blows up": (lambda u, p, t: u * u * p[0], 2, ((0.1, 2),), None, {}),
    "ends, cut short": (lorenz, 3, ((20, 40), (8, 12)), None, {"max_steps": 12, "saveat": None}),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("place", [np.asarray, on_device])
def test_numbers_are_those_of_the_vectorised_path(name, place, caplog):
    f, d, ranges, shared, options = CASES[name]
    options = {"alg": RK45(), "tspan": (0.0, 1.0), "saveat": TIMES, **options}
    alg, tspan = options.pop("alg"), options.pop("tspan")
    u0, p = states(41, d), None if ranges is None else parameters(41, *ranges)
    expected = solve(ensemble(f, u0, p, shared, tspan), alg, compile=False, **options)
    sol = solve(ensemble(f, place(u0), None if p is None else place(p), shared, tspan), alg, EnsembleGPU(), **options)
    assert isinstance(sol.u, DeviceArray) == isinstance(sol.u_end, DeviceArray) == (place is on_device)
    sol.u, sol.u_end = on_host(sol.u), on_host(sol.u_end)
    assert_same(sol, expected)
    some_fail = name.endswith(("cut short", "blows up"))
    assert not some_fail or {"Success"} != set(sol.retcode)
    failed = [record.message for record in caplog.records if "failed" in record.message]
    assert len(failed) == 2 * some_fail and len(set(failed)) <= 1
    np.testing.assert_array_equal(sol.t, expected.t)


@pytest.mark.thorough
def test_states_at_both_ends_from_one_initial_state_for_all():
    p = parameters(41)

    def loss(p, backend):
        one = ODEProblem(lorenz, states(1)[0], (0.0, 1.0))
        sol = solve(EnsembleProblem(one, p=p), RK45(), backend, gradient="adjoint")
        return anp.sum(sol.u[:, 0]) + anp.sum(anp.sin(sol.u[:, 1]))

    (value, found), (right, expected) = (
        mpiad.value_and_grad(lambda p: loss(p, backend))(x)  # noqa: B023
        for backend, x in ((EnsembleGPU(), on_device(p)), (EnsembleVectorized(), p))
    )
    np.testing.assert_allclose(value, right, rtol=1e-12)
    assert_close([on_host(found)], [expected])


@pytest.mark.thorough
@pytest.mark.parametrize("place", [np.asarray, on_device])
def test_no_saved_times(place):
    u0, p = states(41), parameters(41)
    sol = solve(ensemble(lorenz, place(u0), place(p)), RK45(), EnsembleGPU(), saveat=[])
    assert sol.u.shape == (41, 0, 3) and sol.t.shape == (0,)
    np.testing.assert_allclose(on_host(sol.u_end), solve(ensemble(lorenz, u0, p)).u_end, rtol=1e-12)


def test_numbers_are_those_of_the_kernels_on_the_cpu():
    u0, p = states(70), parameters(70)
    expected = solve(ensemble(lorenz, u0, p), saveat=TIMES, compile=True)
    assert_same(solve(ensemble(lorenz, u0, p), RK45(), EnsembleGPU(), saveat=TIMES), expected)


def test_a_number_that_changes_from_solve_to_solve_is_an_argument():
    sources = set()
    for number in (2.5, 2.6, 2.7, 2.8):

        def f(u, p, t):
            return [p[0] * (u[1] - u[0]), u[0] * (number - u[2]) - u[1], u[0] * u[1] - 2.0 * u[2]]  # noqa: B023

        problem = ensemble(f, states(41), parameters(41, (5, 10)))
        sol = solve(problem, RK45(), EnsembleGPU(), saveat=TIMES)
        assert_same(sol, solve(problem, RK45(), compile=False, saveat=TIMES))
        sources.add(sol.problem.kernel_source())
    assert len(sources) == 2


class Rates:
    def __init__(self, fast):
        self.fast = fast


def _options_of_the_base():
    return {"u0": states(5), "p": parameters(5), "tspan": (0.0, 1.0), "alg": RK45(), "gpu": EnsembleGPU(), "saveat": TIMES}


# Of each: what changes between solves.
CHANGES = {
    "rtol": {"rtol": 1e-6},
    "rtol per component": {"rtol": np.array([1e-3, 1e-5, 1e-4])},
    "atol": {"atol": 1e-9},
    "atol per component": {"atol": np.array([1e-2, 1e-9, 1e-4])},
    "dt": {"dt": 0.01},
    "dtmax": {"dtmax": 0.02},
    "max_steps": {"max_steps": 9},
    "method": {"alg": Tsit5()},
    "controller": {"alg": RK45(controller=PIController())},
    "saved times": {"saveat": [0.1, 0.2, 0.6]},
    "saved times at the end": {"saveat": [1.0]},
    "saved times per trajectory": {"saveat": np.linspace(0, 1, 15).reshape(5, 3)},
    "both ends": {"saveat": None},
    "tspan": {"tspan": (0.0, 0.7), "saveat": [0.1, 0.7]},
    "sign of a zero": {"tspan": (-0.0, 1.0)},
    "dtype": {"u0": states(5, dtype=np.float32), "p": parameters(5, dtype=np.float32)},
    "block": {"gpu": EnsembleGPU(block=64)},
    "NVRTC's options": {"gpu": EnsembleGPU(contract=False)},
    "states": {"u0": 1.5 * states(5)},
    "parameters": {"p": 1.1 * parameters(5)},
    "trajectories": {"u0": states(7), "p": parameters(7)},
    "events": {"events": Event(lambda u, p, t: u[0] - 1.2)},
    "events that end": {"events": Event(lambda u, p, t: u[0] - 1.2, terminal=True)},
    "direction of events": {"events": Event(lambda u, p, t: u[0] - 1.2, direction=-1)},
}


def _changed(changes, backend, f=lorenz):
    options = {**_options_of_the_base(), **changes}
    u0, p, tspan, alg, gpu = (options.pop(name) for name in ("u0", "p", "tspan", "alg", "gpu"))
    if backend is EnsembleGPU:
        sol = solve(ensemble(f, on_device(u0), on_device(p), None, tspan), alg, gpu, **options)
    else:
        sol = solve(ensemble(f, u0, p, None, tspan), alg, backend(), compile=False, **options)
    sol.u, sol.u_end = on_host(sol.u), on_host(sol.u_end)
    return sol


@pytest.mark.parametrize("name", list(CHANGES))
def test_what_changes_between_solves_counts(name, device):
    """The spec and the kernels of a signature are found again, so all that they depend on must be part of it."""
    first = _changed({}, EnsembleGPU)
    sol, expected = _changed(CHANGES[name], EnsembleGPU), _changed(CHANGES[name], EnsembleVectorized)
    assert_same(sol, expected, rtol=1e-4 if name == "dtype" else 1e-12)
    assert sol.u.dtype == expected.u.dtype
    assert name.startswith("events") <= any(expected.events.values()) and sorted(sol.events) == sorted(expected.events)
    for i, found in expected.events.items():
        np.testing.assert_allclose(np.reshape(sol.events[i], (-1, 2)), np.reshape(found, (-1, 2)), rtol=1e-9)
    if name == "block":
        assert device.launches[-1][2] == 64
    if name == "NVRTC's options":
        assert device.options[-1] == EnsembleGPU(contract=False).options
    # In the other order, the base finds what the changed solve has prepared.
    gpu_solve._prepared.clear()
    _changed(CHANGES[name], EnsembleGPU)
    again = _changed({}, EnsembleGPU)
    np.testing.assert_array_equal(again.u, first.u)
    np.testing.assert_array_equal(again.naccept, first.naccept)


@pytest.mark.parametrize("kind", ["variable", "array", "attribute", "global"])
def test_what_f_reads_and_changes_between_solves_counts(kind):
    rate, rates, box = 10.0, np.array([10.0]), Rates(10.0)
    of_module = globals()
    of_module["RATE"] = 10.0
    reads = {"variable": lambda: rate, "array": lambda: rates[0], "attribute": lambda: box.fast, "global": lambda: RATE}
    read = reads[kind]

    def f(u, p, t):
        return [read() * (u[1] - u[0]), u[0] * (p[0] - u[2]) - u[1], u[0] * u[1] - p[1] * u[2]]

    results = []
    for value in (10.0, 10.0, 7.0, 5.0, 10.0):
        rate = rates[0] = box.fast = of_module["RATE"] = value
        sol = _changed({}, EnsembleGPU, f)
        assert_same(sol, _changed({}, EnsembleVectorized, f))
        results.append(sol.u)
    assert np.abs(results[2] - results[1]).max() > 1e-3 and np.abs(results[3] - results[2]).max() > 1e-3


def test_a_solve_with_the_signature_of_an_earlier_one_prepares_nothing(monkeypatch):
    calls = []
    make = gpu_solve.kernel_spec_of
    monkeypatch.setattr(gpu_solve, "kernel_spec_of", lambda *args: calls.append(args) or make(*args))
    gpu_solve._prepared.clear()
    for k in range(4):
        changes = {"u0": states(5 + k), "p": parameters(5 + k), "rtol": 1e-3 / (k + 1), "tspan": (0.0, 1.5 + k)}
        _changed(changes, EnsembleGPU)
    assert len(calls) == 1
    _changed({"alg": Tsit5()}, EnsembleGPU)
    assert len(calls) == 2


def test_single_precision():
    u0, p = states(33, dtype=np.float32), parameters(33, dtype=np.float32)
    expected = solve(ensemble(lorenz, u0, p), saveat=TIMES, compile=False)
    sol = solve(ensemble(lorenz, u0, p), RK45(), EnsembleGPU(), saveat=TIMES)
    assert sol.u.dtype == sol.u_end.dtype == np.float32
    np.testing.assert_array_equal(sol.naccept, expected.naccept)
    np.testing.assert_allclose(sol.u, expected.u, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("n, block, grid", [
    (1, None, (1, 32)), (31, None, (1, 32)), (33, None, (2, 32)), (384, None, (6, 64)), (768, None, (6, 128)),
    (70, 64, (2, 64)), (64, 64, (1, 64)), (257, 256, (2, 256)),
])  # fmt: skip
def test_every_trajectory_has_its_thread(n, block, grid, device):
    u0, p = states(n), parameters(n)
    sol = solve(ensemble(lorenz, u0, p, tspan=(0.0, 0.1)), RK45(), EnsembleGPU(block=block))
    expected = solve(ensemble(lorenz, u0, p, tspan=(0.0, 0.1)), compile=False)
    assert_same(sol, expected)
    assert [launch[1:3] for launch in device.launches] == [grid]


def test_times_of_each_trajectory():
    times = np.sort(np.random.default_rng(1).random((35, 4)), axis=1)
    u0, p = states(35), parameters(35)
    expected = solve(ensemble(lorenz, u0, p), saveat=times, compile=False)
    assert_same(solve(ensemble(lorenz, u0, p), RK45(), EnsembleGPU(), saveat=times), expected)


def test_problems_of_a_function_and_batches():
    def problem(base, i, repeat):
        return mpiad.ensemble.remake(base, u0=base.u0 + 0.01 * i, p=np.array([20.0 + i, 10.0]), tspan=(0.0, 0.5 + 0.01 * i))

    given = EnsembleProblem(ODEProblem(lorenz, np.ones(3), (0.0, 1.0), np.array([28.0, 10.0])), problem)
    expected = solve(given, trajectories=9, compile=False)
    assert_same(solve(given, RK45(), EnsembleGPU(), trajectories=9, batch_size=4), expected)


def test_states_that_are_matrices_and_numbers():
    for u0 in (states(5, 4).reshape(5, 2, 2), states(5, 1)[:, 0]):
        given = EnsembleProblem(ODEProblem(lambda u, p, t: -p * u, u0[0], (0.0, 1.0), 0.7), u0=u0)
        assert_same(solve(given, RK45(), EnsembleGPU()), solve(given, compile=False))


def test_no_trajectories():
    sol = solve(ensemble(lorenz, states(0), parameters(0)), RK45(), EnsembleGPU())
    assert sol.u.shape == (0, 0, 3) or sol.u.shape[0] == 0
    assert len(sol) == 0 and len(sol.retcode) == 0 and not launcher.launches


# ---- Gradients -------------------------------------------------------------------------------------------------------
def weighted(n, seed=3):
    rng = np.random.default_rng(seed)
    saved, end = rng.normal(size=(n, len(TIMES), 3)), rng.normal(size=(n, 3))

    def loss(ensemblealg, u0, p, shared=None, times=TIMES, **options):
        sol = solve(ensemble(lorenz, u0, p, shared), RK45(), ensemblealg, saveat=times, **options)
        alive = np.asarray(sol.retcode) == "Success"
        kept = anp.where(alive[:, None, None], sol.u, 0.0) ** 2
        return anp.sum(saved[:, : len(times)] * kept) + anp.sum(end * anp.where(alive[:, None], sol.u_end, 0.0))

    return loss


def assert_close(found, expected, rtol=1e-10):
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max())


@pytest.mark.few(1)
@pytest.mark.parametrize("d", [1, 2])
def test_states_at_both_ends_are_those_of_the_solve(d):
    """They are computed late, and the arrays that they depend on may have been changed."""
    u0 = on_device(states(5, d))
    problem = ensemble(lambda u, p, t: -u, u0)
    sol = solve(problem, RK45(), EnsembleGPU())
    start, end = on_host(u0).copy(), on_host(sol.u_end).copy()
    u0[...] = sol.u_end
    sol.u_end[...] = 0.0
    np.testing.assert_array_equal(on_host(sol.u), np.stack([start, end], axis=1))


@pytest.mark.parametrize("gradient", ["adjoint", "tangent"])
def test_a_shared_parameter_without_entries(gradient):
    def loss(p):
        problem = ensemble(lambda u, p, t: [-p["rate"] * u[0]], states(5, 1), None, {"rate": 2.0, "more": p})
        return anp.sum(solve(problem, RK45(), EnsembleGPU(), gradient=gradient).u_end)

    assert mpiad.grad(loss, objective="sum")(np.empty(0)).shape == (0,)


@pytest.mark.few(2)
@pytest.mark.parametrize("gradient", [None, "adjoint", "tangent"])
@pytest.mark.parametrize("times", [TIMES, [0.0, 1.0]])
def test_gradients_are_those_of_the_vectorised_path(gradient, times):
    u0, p, loss = states(35), parameters(35), weighted(35)
    value, found = mpiad.value_and_grad(
        lambda *x: loss(EnsembleGPU(), *x, times=times, gradient=gradient), (0, 1)
    )(u0, p)  # fmt: skip
    right, expected = mpiad.value_and_grad(
        lambda *x: loss(EnsembleVectorized(), *x, times=times, compile=False), (0, 1)
    )(u0, p)  # fmt: skip
    np.testing.assert_allclose(value, right, rtol=1e-12)
    assert_close(found, expected)


@pytest.mark.parametrize("gradient", ["adjoint", "tangent"])
def test_gradients_of_device_arrays_are_the_same_and_stay_there(gradient):
    u0, p = states(35), parameters(35)
    weights = np.random.default_rng(3).normal(size=(35, len(TIMES), 3))

    def loss(u0, p, weights):
        sol = solve(ensemble(lorenz, u0, p), RK45(), EnsembleGPU(), saveat=TIMES, gradient=gradient)
        return anp.sum(weights * sol.u**2) + anp.sum(sol.u_end * weights[:, 0])

    expected = mpiad.grad(loss, (0, 1))(u0, p, weights)
    given = on_device(u0), on_device(p), on_device(weights)
    transfers.reset()
    value, found = mpiad.value_and_grad(loss, (0, 1))(*given)
    assert all(isinstance(g, DeviceArray) for g in found)
    for a, b in zip(found, expected):
        np.testing.assert_allclose(on_host(a), b, rtol=1e-13)
    # Saved times, tolerances and tspan are those of the first gradient; the number of failures, the largest number of
    # steps, and the value.
    assert (transfers.h2d_bytes, transfers.d2h_bytes) == (0, 8 * 3)


@pytest.mark.thorough
@pytest.mark.parametrize("gradient", ["adjoint", "tangent"])
def test_gradients_by_what_all_share(gradient):
    u0, p, loss = states(35), np.array([28.0, 10.0]), weighted(35)
    options = {"gradient": gradient}
    found = mpiad.grad(lambda p: loss(EnsembleGPU(), u0, None, p, **options))(p)
    assert_close([found], [mpiad.grad(lambda p: loss(EnsembleVectorized(), u0, None, p, compile=False))(p)])


def test_which_kernels_a_gradient_takes(device):
    u0, p, loss = states(35), parameters(35), weighted(35)
    # Two numbers of each trajectory, three, and five.
    for argnum, launches in ((1, ["forward"]), (0, ["forward"]), ((0, 1), ["forward", "forward", "reverse"])):
        device.launches.clear()
        mpiad.grad(lambda *x: loss(EnsembleGPU(), *x), argnum)(u0, p)
        assert [launch[0] for launch in device.launches] == launches


@pytest.mark.parametrize("gradient", ["adjoint", "tangent"])
def test_one_that_failed_has_no_gradient(gradient):
    u0, p, loss = states(35), parameters(35), weighted(35)
    options = {"max_steps": 17, "gradient": gradient}
    found = mpiad.grad(lambda *x: loss(EnsembleGPU(), *x, **options), (0, 1))(u0, p)
    expected = mpiad.grad(lambda *x: loss(EnsembleVectorized(), *x, compile=False, **options), (0, 1))(u0, p)
    assert_close(found, expected)
    failed = ~found[0].any(axis=1)
    assert 0 < failed.sum() < 35 and not found[1][failed].any()


def test_steps_beyond_the_memory_go_share_by_share(device):
    u0, p, loss = states(300), parameters(300), weighted(300)
    # One takes ten times the steps of the others.
    p[170] = 400.0, 60.0
    whole = mpiad.grad(lambda *x: loss(EnsembleGPU(), *x, gradient="adjoint"), (0, 1))(u0, p)
    steps = solve(ensemble(lorenz, u0, p), RK45(), EnsembleGPU()).naccept
    assert steps[170] > 3 * np.median(steps)
    device.launches.clear()
    room = 40 * int(steps.max()) * 5
    parts = mpiad.grad(lambda *x: loss(EnsembleGPU(tape_bytes=room), *x, gradient="adjoint"), (0, 1))(u0, p)
    for a, b in zip(parts, whole):
        np.testing.assert_array_equal(a, b)
    back = [numbers for name, _, _, numbers in device.launches if name == "reverse"]
    assert len(back) > 4 and sum(count for _, _, count in back) == 300
    assert all(steps[first : first + count].max() * count * 40 <= room for _, first, count in back)


def test_steps_of_one_that_have_no_room_at_all():
    u0, p, loss = states(5), parameters(5), weighted(5)
    with pytest.raises(MemoryError, match=r"take \d+ bytes .* the limit is 100\. Raise tape_bytes="):
        mpiad.grad(lambda u0: loss(EnsembleGPU(tape_bytes=100), u0, p, gradient="adjoint"))(u0)


def test_forward_mode():
    u0, p, loss = states(35), parameters(35), weighted(35)
    for argnum, v in ((0, states(35) - 1), (1, parameters(35) / 10)):
        args = [u0, p]

        def along(backend, argnum=argnum, args=args, v=v, **options):
            def fun(x):
                return loss(backend, *[x if k == argnum else arg for k, arg in enumerate(args)], **options)

            return mpiad.jvp(fun, args[argnum], v)[1]

        np.testing.assert_allclose(along(EnsembleGPU()), along(EnsembleVectorized(), compile=False), rtol=1e-11)


@pytest.mark.thorough
@pytest.mark.parametrize("put", [np.asarray, on_device])
def test_second_derivatives_are_those_of_arrays(put):
    def loss(backend, u0, p, **options):
        sol = solve(ensemble(lorenz, u0, p, tspan=(0.0, 0.1)), RK45(), backend, saveat=[0.03], **options)
        return anp.sum(sol.u**2) / 100 + anp.sum(anp.sin(sol.u_end))

    u0, p = states(3), parameters(3)
    expected = mpiad.hvp(lambda *x: loss(EnsembleVectorized(), *x, compile=False), (0, 1))(u0, p, (u0, p))
    there = put(u0), put(p)
    found = mpiad.hvp(lambda *x: loss(EnsembleGPU(), *x), (0, 1))(*there, there)
    assert_close([on_host(x) for x in found], expected, rtol=1e-9)
    assert not launcher.launches

    def by_both(p, u0):
        return anp.sum(mpiad.grad(lambda u0: loss(EnsembleGPU(), u0, p))(u0) ** 2)

    slope = mpiad.grad(lambda p: anp.sum(mpiad.grad(lambda x: loss(EnsembleVectorized(), x, p, compile=False))(u0) ** 2))(p)
    assert_close([on_host(mpiad.grad(by_both)(*there[::-1]))], [slope], rtol=1e-9)


def test_single_precision_gradient():
    u0, p, loss = states(33, dtype=np.float32), parameters(33, dtype=np.float32), weighted(33)
    found = mpiad.grad(lambda *x: loss(EnsembleGPU(), *x), (0, 1))(u0, p)
    assert [g.dtype for g in found] == [np.float32] * 2
    expected = mpiad.grad(lambda *x: loss(EnsembleGPU(), *x), (0, 1))(u0.astype(float), p.astype(float))
    assert_close(found, expected, rtol=2e-2)


# ---- What travels ----------------------------------------------------------------------------------------------------
def test_a_solve_of_host_arrays_moves_arguments_and_results_alone():
    u0, p = states(70), parameters(70)
    sol = solve(ensemble(lorenz, u0, p), RK45(), EnsembleGPU(), saveat=TIMES)
    # u0, p, and in one copy the saved times, three tolerances and tspan; all states at once, the number of failures and the
    # largest number of steps.
    assert (transfers.h2d, transfers.d2h) == (3, 2)
    assert transfers.h2d_bytes == u0.nbytes + p.nbytes + (5 + 3 + 2) * 8 and transfers.d2h_bytes == 70 * 6 * 3 * 8 + 16
    assert sol.u.shape == (70, 5, 3)


def test_a_solve_of_device_arrays_moves_no_states():
    u0, p = on_device(states(70)), on_device(parameters(70))
    sol = solve(ensemble(lorenz, u0, p), RK45(), EnsembleGPU(), saveat=TIMES)
    assert (transfers.h2d_bytes, transfers.d2h_bytes) == ((5 + 3 + 2) * 8, 16)
    # What went how comes when it is asked for, once.
    sol.naccept, sol.naccept, sol.retcode  # noqa: B018
    assert (transfers.h2d, transfers.d2h) == (1, 3)
    # What all trajectories share is copied once, and again if it has changed.
    for atol, copies in ((1e-6, 1), (1e-7, 2), (1e-6, 2)):
        solve(ensemble(lorenz, u0, p), RK45(), EnsembleGPU(), saveat=TIMES, atol=atol)
        assert transfers.h2d == copies


def test_a_gradient_of_host_arrays_moves_cotangents_and_gradients_besides():
    u0, p = states(70), parameters(70)
    mpiad.grad(lambda *x: anp.sum(solve(ensemble(lorenz, *x), RK45(), EnsembleGPU()).u_end ** 2), (0, 1))(u0, p)
    # Besides those of the solve: one cotangent of all results; two gradients.
    assert (transfers.h2d, transfers.d2h) == (3 + 1, 2 + 2)


def test_a_kernel_is_compiled_once(device):
    u0, p = states(4), parameters(4)
    alg = EnsembleGPU(contract=False, fast_math=True)
    for _ in range(2):
        solve(ensemble(lorenz, u0, p, tspan=(0.0, 0.1)), RK45(), alg)
    assert device.options.count(("--std=c++14", "--fmad=false", "--use_fast_math")) == 1


def test_the_kernel_can_be_read():
    sol = solve(ensemble(lorenz, states(4), parameters(4)), RK45(), EnsembleGPU())
    assert "__global__" in sol.problem.kernel_source()


def test_batches_and_statistics_on_the_device():
    u0, p = states(9), parameters(9)

    def loss(u0, p, **options):
        sol = solve(ensemble(lorenz, u0, p), RK45(), EnsembleGPU(), **options)
        return anp.sum(sol.mean() ** 2) + anp.sum(sol.std())

    expected = mpiad.grad(lambda *x: loss(*x), (0, 1))(u0, p)
    found = mpiad.grad(lambda *x: loss(*x, batch_size=4), (0, 1))(on_device(u0), on_device(p))
    assert_close(map(on_host, found), expected)
    host, there = (solve(ensemble(lorenz, *x), RK45(), EnsembleGPU()) for x in ((u0, p), (on_device(u0), on_device(p))))
    assert there.summary() == host.summary() and there[3].retcode == "Success"


# The reference is the loss of one solve of all trajectories on the host.
SUMMED = BatchSum(lambda sol, I, w: w * anp.sum(sol.u_end**2), np.float64(0.5))


def summed(u0, p, w, backend, n=None, **options):
    """Return the sum over batches; u0 and p: of each trajectory, or with n shared by n trajectories."""
    shared = {"p": p} if n is None else {}
    ode = ODEProblem(lorenz, np.zeros(3) if n is None else u0, (0.0, 0.4), None if n is None else p)
    problem = EnsembleProblem(ode, u0=u0 if n is None else None, reduction=BatchSum(SUMMED.fun, w), **shared)
    return solve(problem, RK45(), backend, trajectories=n, rtol=1e-8, atol=1e-8, **options).u


@pytest.mark.parametrize("gradient", [None, "adjoint", "tangent"])
@pytest.mark.parametrize("place", [np.asarray, on_device])
@pytest.mark.parametrize("n", [None, 19])
def test_a_sum_over_batches(n, place, gradient):
    u0, p = (states(19), parameters(19)) if n is None else (states(1)[0], np.array([28.0, 10.0]))

    def kept(u0, p, w):
        rows = (u0, p) if n is None else (anp.ones((n, 1)) * u0, anp.ones((n, 1)) * p)
        sol = solve(ensemble(lorenz, *rows, tspan=(0.0, 0.4)), RK45(), compile=False, rtol=1e-8, atol=1e-8)
        return w * anp.sum(sol.u_end**2)

    J, expected = mpiad.value_and_grad(kept, (0, 1, 2))(u0, p, 0.5)
    loss = lambda *x: summed(*x, EnsembleGPU(), n, batch_size=8, gradient=gradient)  # noqa: E731
    found_J, found = mpiad.value_and_grad(loss, (0, 1, 2))(place(u0), place(p), 0.5)
    np.testing.assert_allclose(on_host(found_J), J, rtol=1e-10)
    assert isinstance(found[1], DeviceArray) == (place is on_device) and not isinstance(found[2], DeviceArray)
    assert_close([on_host(g) if isinstance(g, DeviceArray) else g for g in found], expected)
    tangents = tuple(place(np.ones_like(x)) for x in (u0, p)), 1.0
    tangent = mpiad.jvp(lambda x: loss(*x[0], x[1]), ((place(u0), place(p)), 0.5), tangents)[1]
    np.testing.assert_allclose(on_host(tangent), sum(np.sum(g) for g in expected), rtol=1e-8)


@pytest.mark.parametrize("gradient", ["adjoint", "tangent"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_the_memory_of_a_sum_does_not_grow_with_the_number_of_batches(gradient, outputs, device):
    u0, p, peaks = on_device(states(1)[0]), on_device(np.array([28.0, 10.0])), []

    def loss(u0, p, batches):
        total = BatchSum(lambda sol, I: [anp.sum(sol.u_end**2), anp.sum(sol.u_end)][:outputs])
        problem = EnsembleProblem(ODEProblem(lorenz, u0, (0.0, 0.1), p), reduction=total)
        sums = solve(problem, RK45(), EnsembleGPU(), trajectories=16 * batches, batch_size=16, gradient=gradient).u
        return sums[0] + sums[-1]

    for batches in (8, 8, 32):
        device.launches.clear()
        with watched_memory() as memory:
            loss(u0, p, batches)
            before = memory.peak
            mpiad.value_and_grad(lambda p, n=batches: loss(u0, p, n))(p)
        peaks.append((before, memory.peak))
        # The batches are solved once for the value and gradient of one number, otherwise again.
        per_batch = {"tangent": 1, "adjoint": 3}[gradient]
        assert len(device.launches[batches:]) == batches * (per_batch + outputs - 1)
    assert peaks[1] == peaks[2]  # the first copies what later solves use again
    assert peaks[2][1] >= 16 * 3 * 8


# ---- Events ----------------------------------------------------------------------------------------------------------
RIM = Event(lambda u, p, t: u[0] - 0.1 * p[0] + t, terminal=False, direction=-1)
WALL = Event(lambda u, p, t: u[1] + anp.sqrt(p[1]) * anp.sin(9 * t))
FLOOR = Event(lambda u, p, t: u[0] * u[1] + 0.3)


def swing(u, p, t):
    return [u[1] * p[1], -p[0] * anp.sin(u[0]) + 0.1 * anp.cos(t)]


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [
    {"events": (RIM, WALL), "saveat": TIMES}, {"events": (WALL, RIM, FLOOR, FLOOR)},
    {"events": RIM, "alg": RK4(), "dt": 0.05}, {"events": (FLOOR, RIM), "tspan": (1.0, -1.0), "max_steps": 14},
])  # fmt: skip
@pytest.mark.parametrize("place", [np.asarray, on_device])
def test_events_are_those_of_the_vectorised_path(options, place, device):
    options = {"alg": Tsit5(), "tspan": (0.0, 1.0), **options}
    alg, tspan = options.pop("alg"), options.pop("tspan")
    u0, p = states(41, 2), parameters(41, (1, 20), (0.5, 3))
    expected = solve(ensemble(swing, u0, p, tspan=tspan), alg, compile=False, **options)
    transfers.reset()
    sol = solve(ensemble(swing, place(u0), place(p), tspan=tspan), alg, EnsembleGPU(), **options)
    assert [launch[0] for launch in device.launches] == ["forward"]
    if place is on_device:  # the numbers of failures and of events; what happened comes when it is asked for
        assert (transfers.d2h, transfers.d2h_bytes) == (2, 24)
    sol.u, sol.u_end = on_host(sol.u), on_host(sol.u_end)
    assert_same(sol, expected)
    assert 10 < sum(map(len, sol.events.values())) and sorted(sol.events) == sorted(expected.events)
    for i, found in expected.events.items():
        assert [event for event, _ in sol.events[i]] == [event for event, _ in found]
        np.testing.assert_allclose([time for _, time in sol.events[i]], [time for _, time in found], rtol=1e-11)


def by_events(backend, u0, p, shared=None, **options):
    sol = solve(ensemble(swing, u0, p, shared, (0.0, 2.0)), RK45(), backend, saveat=[0.0, 0.4, 0.41, 2.0], **options)
    alive, ended = sol.survivors, mpiad.stop_gradient(sol.t_reached)
    kept = anp.where((alive[:, None] & (sol.t <= ended[:, None]))[..., None], sol.u, 0.0)
    times = sum((i + event) * time**2 for i, found in sol.events.items() if alive[i] for event, time in found)
    ends = anp.where(alive[:, None], sol.u_end, 0.0)
    return anp.sum(kept**2) + anp.sum(anp.sin(ends)) + times + anp.sum(anp.where(alive, sol.t_reached, 0.0) ** 3)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [
    {"events": (RIM, WALL)}, {"events": (FLOOR, RIM, FLOOR), "max_steps": 12}, {"events": RIM}
])  # fmt: skip
@pytest.mark.parametrize("room", [None, 40 * 60])
def test_gradients_through_events_are_those_of_the_vectorised_path(options, room, device):
    u0, p = states(41, 2), parameters(41, (1, 20), (0.5, 3))
    value, found = mpiad.value_and_grad(lambda *x: by_events(EnsembleGPU(tape_bytes=room), *x, **options), (0, 1))(u0, p)
    assert {launch[0] for launch in device.launches} == {"forward", "reverse"}
    assert (len(device.launches) > 3) == (room is not None)
    options = {**options, "compile": False}
    right, expected = mpiad.value_and_grad(lambda *x: by_events(EnsembleVectorized(), *x, **options), (0, 1))(u0, p)
    np.testing.assert_allclose(value, right, rtol=1e-12)
    assert_close(found, expected)


@pytest.mark.thorough
def test_gradients_through_events_by_what_all_share_of_device_arrays(monkeypatch, device):
    monkeypatch.setattr("mpiad.ensemble.compiled.cuda.gpu_solve._ROWS", -100)  # too little room at first
    u0, p = states(35, 2), np.array([9.0, 2.0])

    def loss(backend, u0, p, **options):
        sol = solve(ensemble(swing, u0, None, p, (0.0, 4.0)), RK45(), backend, events=(RIM, WALL), **options)
        times = sum((i + event) * time**2 for i, found in sol.events.items() for event, time in found)
        return times + to_host(anp.sum(anp.sin(sol.u_end))) + anp.sum(sol.t_reached)

    found = mpiad.grad(lambda *x: loss(EnsembleGPU(), *x), (0, 1))(on_device(u0), on_device(p))
    assert [launch[0] for launch in device.launches] == ["forward", "forward", "forward", "reverse"]
    expected = mpiad.grad(lambda *x: loss(EnsembleVectorized(), *x, compile=False), (0, 1))(u0, p)
    assert_close(map(on_host, found), expected)


@pytest.mark.thorough
def test_events_in_single_precision():
    u0, p = states(33, 2, np.float32), parameters(33, (1, 20), (0.5, 3), dtype=np.float32)
    expected = solve(ensemble(swing, u0, p), events=FLOOR, compile=False)
    sol = solve(ensemble(swing, u0, p), RK45(), EnsembleGPU(), events=FLOOR)
    np.testing.assert_array_equal(sol.retcode, expected.retcode)
    assert "Terminated" in sol.retcode and sol.u_end.dtype == np.float32
    np.testing.assert_allclose(sol.t_reached, expected.t_reached, rtol=2e-5)

    def total(u0, p):
        return anp.sum(solve(ensemble(swing, u0, p), RK45(), EnsembleGPU(), events=FLOOR).t_reached)

    found, right = (mpiad.grad(total, (0, 1))(*x) for x in ((u0, p), (u0.astype(float), p.astype(float))))
    assert [g.dtype for g in found] == [np.float32] * 2
    assert_close(found, right, rtol=2e-2)


def test_tangents_with_events_are_left_to_arrays(caplog, device):
    u0, p = states(9, 2), parameters(9, (1, 20), (0.5, 3))
    along = mpiad.jvp(lambda u0: by_events(EnsembleGPU(), u0, p, events=(RIM, WALL)), u0, np.cos(u0))[1]
    assert "the solve is differentiated by tangents" in caplog.text and not device.launches
    expected = mpiad.jvp(lambda u0: by_events(EnsembleVectorized(), u0, p, events=(RIM, WALL)), u0, np.cos(u0))[1]
    np.testing.assert_allclose(along, expected, rtol=1e-10)


# ---- What a kernel can't do ------------------------------------------------------------------------------------------
REFUSED = {
    "events": ({"events": Event(lambda u, p, t: np.sort(u, axis=0)[0] - 1.0)}, "a condition of the events can't be"),
    "every step": ({"save_everystep": True}, "save_everystep=True"),
    "complex states": ({"u0": states(6) * (1 + 1j)}, "u0 has dtype complex128"),
    "complex parameters": (
        {"f": lambda u, p, t: -np.real(p[0]) * u, "p": parameters(6) * (1 + 1j)},
        "p has complex numbers",
    ),
    "function": ({"f": lambda u, p, t: -p[0] * np.sort(u, axis=0)}, r"test_gpu.py:\d+: .*numpy.sort"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_a_kernel_cannot_do_is_said_once_and_done_by_arrays(name, caplog):
    options, reason = REFUSED[name]
    options = dict(options)
    u0, p = options.pop("u0", states(6)), options.pop("p", parameters(6))
    given = ensemble(options.pop("f", lambda u, p, t: -p[0] * u), u0, p)
    with caplog.at_level(logging.WARNING, "mpiad"):
        for _ in range(2):
            sol = solve(given, RK45(), EnsembleGPU(), **options)
    warnings = [record.message for record in caplog.records]
    assert len(warnings) == 1
    assert re.search(reason, warnings[0])
    assert_same(sol, solve(given, compile=False, **options))
    with pytest.raises((ValueError, TypeError), match=reason):
        solve(given, RK45(), EnsembleGPU(), compile=True, **options)
    assert not launcher.launches


def test_a_large_condition_is_named(caplog, monkeypatch):
    monkeypatch.setattr("mpiad.ensemble.compiled.cuda.gpu_solve.MOST_OPERATIONS", 10)
    event = Event(lambda u, p, t: sum(u[0] ** k for k in range(1, 20)) - 30.0)
    given = ensemble(lambda u, p, t: -p[0] * u, states(6), parameters(6))
    sol = solve(given, RK45(), EnsembleGPU(), events=event)
    assert "a condition of the events has" in caplog.text and "up to 10 fit into a CUDA kernel" in caplog.text
    assert not launcher.launches
    assert_same(sol, solve(given, RK45(), compile=False, events=event))


def test_gradients_by_arrays_on_the_device(caplog):
    u0, p = states(6), parameters(6)

    def loss(u0, p, backend):
        return anp.sum(solve(ensemble(lorenz, u0, p), RK45(), backend, compile=False).u_end ** 2)

    found = mpiad.grad(lambda *x: loss(*x, EnsembleGPU()), (0, 1))(u0, p)
    assert transfers.h2d > 4 and not launcher.launches and not caplog.records
    assert_close(found, mpiad.grad(lambda *x: loss(*x, EnsembleVectorized()), (0, 1))(u0, p))


def test_by_tspan_arrays_are_differentiated(caplog):
    u0, p = states(5), parameters(5)

    def loss(end, backend):
        return anp.sum(solve(ensemble(lorenz, u0, p, tspan=(0.0, end)), RK45(), backend, compile="auto").u_end)

    found = mpiad.grad(lambda end: loss(end, EnsembleGPU()))(1.0)
    np.testing.assert_allclose(found, mpiad.grad(lambda end: loss(end, EnsembleVectorized()))(1.0), rtol=1e-12)
    assert "tspan" in caplog.text


def test_a_kernel_too_large_for_registers(device, monkeypatch, caplog):
    monkeypatch.setattr(device, "local_bytes", lambda text: 9000)

    def f(u, p, t):
        return [-p[0] * u[0] * 1.25, u[0], u[1]]

    given = ensemble(f, states(4), parameters(4))
    sol = solve(given, RK45(), EnsembleGPU())
    assert "9000 bytes" in caplog.text and "EnsembleVectorized" in caplog.text and not device.launches
    assert_same(sol, solve(given, compile=False))
    solve(given, RK45(), EnsembleGPU(), compile=True)
    assert len(device.launches) == 1


@pytest.mark.thorough
def test_a_kernel_too_large_with_tangents_takes_the_adjoint(device, monkeypatch, caplog):
    monkeypatch.setattr(device, "local_bytes", lambda text: 9000 * ("void df0" in text))

    def f(u, p, t):
        return [-p[0] * u[0] * 1.75, u[0], u[1]]

    def loss(p, backend, **options):
        return anp.sum(solve(ensemble(f, states(4), p), RK45(), backend, **options).u_end ** 2)

    found = mpiad.grad(lambda p: loss(p, EnsembleGPU()))(parameters(4))
    assert_close([found], [mpiad.grad(lambda p: loss(p, EnsembleVectorized(), compile=False))(parameters(4))])
    assert [launch[0] for launch in device.launches] == ["forward", "forward", "reverse"] and not caplog.records


def test_without_a_gpu_the_error_says_what_to_install_and_what_runs_on_the_cpu(monkeypatch):
    given = ensemble(lorenz, states(2), parameters(2))
    monkeypatch.undo()
    monkeypatch.setattr("mpiad.transport.devices.device_arrays.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install mpiad\[gpu\].*EnsembleVectorized\(\) with compile=True"):
        solve(given, RK45(), EnsembleGPU())

    def none(device):
        raise RuntimeError("CuPy finds no GPU")

    monkeypatch.setattr(SELECTED, none)
    with pytest.raises(RuntimeError, match=r"finds no GPU.*EnsembleVectorized\(\) with compile=True"):
        solve(given, RK45(), EnsembleGPU())


def test_saved_times_on_the_device_are_refused_by_name():
    with pytest.raises(TypeError, match=r"times on the host, but got DeviceArray on device 0 .* of shape \(2,\)"):
        solve(ensemble(lorenz, states(2), parameters(2)), RK45(), EnsembleGPU(), saveat=on_device([0.0, 1.0]))


@pytest.mark.parametrize("wrong", [{"block": 100}, {"block": 1024}, {"tape_bytes": 0}])
def test_arguments_that_cannot_be(wrong):
    with pytest.raises(ValueError, match=rf"{next(iter(wrong))} must be .*{next(iter(wrong.values()))}"):
        EnsembleGPU(**wrong)


def test_a_sample_has_each_integer_where_it_was():
    """f may count by one and choose by another; few trajectories are repeated, of many there are the first."""
    for count in (3, 40):
        p = np.stack([np.arange(count), 100 + np.arange(count)], axis=1)
        ensemble = EnsembleProblem(ODEProblem(lambda u, p, t: -u * p[0], [1.0], (0.0, 1.0)), p=p)
        (leaf,) = sample_batch(members(ensemble, range(1, count + 1), 1, 0, count)).p.leaves
        assert leaf.dtype == int and np.array_equal(leaf, [np.arange(5) % count, 100 + np.arange(5) % count])
