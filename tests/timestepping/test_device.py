"""Loops whose state is on a device: the numbers of the host, and states that are kept there, or in files by the host."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest
from device_double import DeviceArray, on_device, on_host, transfers

import mpiad
from mpiad.timestepping import CheckpointSchedule, scan
from mpiad.timestepping.snapshots import Snapshots

_STEPS, _N = 12, 5


def step(u, k, force, rate):
    return {"x": u["x"] + 0.1 * anp.sin(u["x"] * rate) + force, "v": u["v"] * 0.9 + anp.sum(u["x"])}


def seen(u, k, rate):
    return u["x"][1:3] * rate[1:3]


def _loss(put, checkpoints):
    def loss(start, force, rate):
        last, rows = scan(step, start, _STEPS, rate, inputs=force, observe=seen, checkpoints=checkpoints)
        weights = put(np.cos(np.arange(2.0 * _STEPS)).reshape(-1, 2))
        return anp.sum(last["x"] ** 2) + anp.sum(last["v"]) + anp.sum(rows * weights)

    return loss


def _arguments(put):
    rng = np.random.default_rng(4)
    start = {"x": put(rng.normal(size=_N)), "v": put(np.array(0.3))}
    return start, put(rng.normal(size=(_STEPS, _N))), put(rng.normal(size=_N))


@pytest.mark.serial
@pytest.mark.parametrize(
    "checkpoints", [None, 3, CheckpointSchedule(memory=1, disk=2), CheckpointSchedule(memory=3, recorded=2), _STEPS]
)
def test_derivatives_are_those_of_the_host(checkpoints):
    everything = (0, 1, 2)
    value, gradient = mpiad.value_and_grad(_loss(np.asarray, checkpoints), everything)(*_arguments(np.asarray))
    found, there = mpiad.value_and_grad(_loss(on_device, checkpoints), everything)(*_arguments(on_device))
    np.testing.assert_allclose(found, value, rtol=1e-12)
    for mine, known in zip((there[0]["x"], there[0]["v"], *there[1:]), (gradient[0]["x"], gradient[0]["v"], *gradient[1:])):
        assert type(mine) is DeviceArray
        np.testing.assert_allclose(on_host(mine), known, rtol=1e-10)
    along = _arguments(lambda x: np.cos(x))
    moved = {name: on_device(v) for name, v in along[0].items()}
    host, device = _arguments(np.asarray), _arguments(on_device)
    known = mpiad.jvp(lambda start: _loss(np.asarray, checkpoints)(start, *host[1:]), host[0], along[0])[1]
    tangent = mpiad.jvp(lambda start: _loss(on_device, checkpoints)(start, *device[1:]), device[0], moved)[1]
    np.testing.assert_allclose(on_host(tangent), known, rtol=1e-10)


@pytest.mark.serial
def test_states_in_memory_stay_on_the_device():
    arguments = _arguments(on_device)
    transfers.reset()
    mpiad.grad(_loss(lambda x: on_device(x), 3), 2)(*arguments)
    # The value of the loss, and the differences between repeated steps and the forward run.
    assert transfers.copies <= 2
    transfers.reset()
    mpiad.grad(_loss(on_device, CheckpointSchedule(memory=0, disk=3)), 2)(*arguments)
    assert 6 <= transfers.d2h <= 2 * _STEPS and 6 <= transfers.h2d <= 3 * _STEPS


@pytest.mark.serial
@pytest.mark.parametrize(
    "kept", [CheckpointSchedule(3, host=True), CheckpointSchedule(1, 2, host=True), CheckpointSchedule(3, compress=True)]
)
def test_states_are_kept_on_the_host_where_asked(kept, monkeypatch):
    """A state is copied when it is kept and each time that it is taken; 300 entries are more than a block."""
    homes = []
    keep = Snapshots.keep

    def noted(self, *args):
        keep(self, *args)
        for leaves in self._memory.values():
            homes.extend(type(array) for leaf in leaves for array in leaf.arrays)

    monkeypatch.setattr(Snapshots, "keep", noted)
    rate, start = np.linspace(0.5, 1.0, 300), np.cos(np.arange(300.0))

    def loss(put, checkpoints):
        return lambda rate: anp.sum(
            scan(lambda u, k, r: anp.sin(r * u), put(start), 12, rate, checkpoints=checkpoints) ** 2
        )

    known = mpiad.grad(loss(np.asarray, None))(rate)
    transfers.reset()
    found = mpiad.grad(loss(on_device, kept))(on_device(rate))
    assert set(homes) == {np.ndarray}
    assert transfers.d2h >= 3 and transfers.h2d >= 6
    np.testing.assert_allclose(on_host(found), known, rtol=0, atol=(1e-4 if kept.compress else 1e-13) * np.abs(known).max())


@pytest.mark.serial
def test_second_derivatives():
    host, device = _arguments(np.asarray), _arguments(on_device)
    of_rate = lambda put, rest: lambda rate: _loss(put, 3)(*rest, rate)  # noqa: E731
    known = mpiad.hvp(of_rate(np.asarray, host[:2]))(host[2], np.cos(host[2]))
    found = mpiad.hvp(of_rate(on_device, device[:2]))(device[2], on_device(np.cos(host[2])))
    np.testing.assert_allclose(on_host(found), known, rtol=1e-9)


@pytest.mark.serial
def test_parameters_on_the_host_may_travel_in_the_step():
    def loss(rate):
        step = lambda u, k, rate: u * mpiad.device.to_device(rate, like=u)  # noqa: E731
        return anp.sum(scan(step, on_device(np.ones(3)), 4, rate, checkpoints=2))

    rate = np.array([0.5, 1.0, 2.0])
    np.testing.assert_allclose(mpiad.grad(loss)(rate), 4 * rate**3, rtol=1e-12)


@pytest.mark.parametrize("checkpoints", [None, 2])
def test_steps_that_communicate(checkpoints):
    rank, size = mpiad.mpi_rank(), mpiad.mpi_size()

    def loss(put):
        def sums(x):
            last = scan(lambda u, k: 0.5 * u + mpiad.mpi_allreduce(anp.sin(u)) / size, x, 5, checkpoints=checkpoints)
            return anp.sum(last**2)

        return sums

    x = np.arange(3.0) + rank
    known = mpiad.grad(loss(np.asarray), objective="sum")(x)
    np.testing.assert_allclose(on_host(mpiad.grad(loss(on_device), objective="sum")(on_device(x))), known, rtol=1e-12)


@pytest.mark.serial
@pytest.mark.parametrize("checkpoints", [None, 2])
def test_a_step_may_write_into_its_state(checkpoints):
    def halved(u, k):
        u *= 0.5
        return u

    x = on_device(np.ones(3))
    last = scan(halved, x, 3, checkpoints=checkpoints)
    np.testing.assert_array_equal(on_host(last), np.full(3, 0.125))
    np.testing.assert_array_equal(on_host(x), np.ones(3))
