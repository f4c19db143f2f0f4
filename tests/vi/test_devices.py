"""A device for each rank: names that don't fit, and models that run on a device."""

from functools import partial

import autograd.numpy as anp
import numpy as np
import pytest
from device_double import DeviceArray, on_device, on_host, transfers
from mpi4py import MPI

import mpiad
from mpiad import vi
from mpiad.parallel import Adam
from mpiad.vi import FullRankGaussian, MeanFieldGaussian, elbo, inference

# All fits have the draws of one key, but for those to which a test gives another `rng`.
VI = partial(vi.VI, rng=0)

COMM = MPI.COMM_WORLD
ROOT = COMM.size - 1
SCALES = np.array([1.0, 3.0])


@pytest.fixture
def two_gpus(monkeypatch):
    """Two devices, whose arrays are the stand-in's."""

    def select(number):
        if number > 1:
            raise ValueError(f"select: ids={number} names GPU {number}, but this process sees 2.")
        return number

    monkeypatch.setattr(inference, "select", select)
    monkeypatch.setattr(elbo, "to_device", lambda x, device, like: on_device(x))


def bowl(theta, data):
    where = mpiad.stop_gradient(theta)
    scales = on_device(SCALES) if isinstance(where, DeviceArray) else SCALES
    return anp.sum(scales * (theta - 0.5) ** 4)


def run(loss=bowl, names=None, **options):
    posterior = FullRankGaussian(2, sd=0.3)
    inference = VI(loss, posterior, ("norm",), Adam(0.1), 1.0, 2 * COMM.size + 1, devices=names, root=ROOT, **options)
    return inference.run(None, 3), inference


@pytest.mark.parametrize("gradient", ["pathwise", "score"])
@pytest.mark.parametrize("schedule", ["even", "dynamic"])
def test_a_rank_on_a_device_finds_what_one_on_the_cpu_finds(two_gpus, gradient, schedule):
    names = ["cuda:0" if rank % 2 == 0 else "cpu" for rank in range(COMM.size)]
    kinds = set()

    def loss(theta, data):
        kinds.add(type(mpiad.stop_gradient(theta)))
        return bowl(theta, data)

    exact, _ = run(gradient=gradient, schedule=schedule)
    transfers.reset()
    found, _ = run(loss, names, gradient=gradient, schedule=schedule)
    np.testing.assert_allclose(found.history["objective"], exact.history["objective"], rtol=1e-13)
    np.testing.assert_allclose(found.params["below"], exact.params["below"], rtol=1e-12)
    assert kinds <= {DeviceArray if names[COMM.rank] == "cuda:0" else np.ndarray}
    assert kinds or schedule == "dynamic"
    if not kinds or names[COMM.rank] == "cpu":
        assert transfers.copies == 0


def test_the_evidence_is_estimated_there_too(two_gpus):
    result, inference = run(names=["cuda:1"] * COMM.size)
    _, alone = run()
    assert inference.elbo(result.params, None, 9) == pytest.approx(alone.elbo(result.params, None, 9), rel=1e-12)


@pytest.mark.parametrize("change", [1, -1, 5])
def test_names_must_be_as_many_as_ranks(change):
    count = max(COMM.size + change, 0)
    with pytest.raises(ValueError, match=f"devices has {count} names, but there are {COMM.size} ranks"):
        run(names=["cpu"] * count)
    assert run(names=["cpu"] * COMM.size)[0].epochs == 3


@pytest.mark.parametrize("name, text", [("cuda:7", "names GPU 7.* sees 2"), ("gpu", "names are"), ("cuda:-1", "names are")])
def test_a_device_that_is_not_there_is_refused_on_all_ranks(two_gpus, name, text):
    names = ["cpu"] * (COMM.size - 1) + [name]
    with pytest.raises(ValueError, match=f"rank {COMM.size - 1} has no device '{name}': .*{text}"):
        run(names=names)


def test_without_cupy_a_gpu_is_not_there(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    with pytest.raises(ValueError, match=f"rank {COMM.size - 1} has no device 'cuda:0': .*CuPy can't be loaded"):
        run(names=["cpu"] * (COMM.size - 1) + ["cuda:0"])


@pytest.mark.parametrize("wrong", ["cpu", 3, [0, 1]])
def test_names_are_a_list_of_strings(wrong):
    with pytest.raises(TypeError, match="devices must be a list"):
        run(names=wrong)


@pytest.mark.skipif(COMM.size < 2, reason="needs two ranks")
def test_all_ranks_give_the_same_names():
    with pytest.raises(ValueError, match="devices"):
        run(names=["cpu"] * COMM.size if COMM.rank == ROOT else None)


@pytest.mark.serial
def test_the_epidemic_among_agents_runs_on_a_device(monkeypatch):
    """The model of the example, its values and its gradient, with the graph as a matrix there."""
    pytest.importorskip("networkx")
    monkeypatch.syspath_prepend("examples")
    from sir_vi import epidemic, logistic

    graph = np.zeros((30, 30))
    for step in (1, 2):
        graph += np.roll(np.eye(30), step, axis=1) + np.roll(np.eye(30), -step, axis=1)
    theta = np.log10([0.2, 0.3, 0.2])

    noise = logistic(np.random.default_rng(1), 4, 30)

    def misfit(theta, graph, noise):
        return anp.sum(epidemic(theta, graph, noise) ** 2)

    def misfit_on_device(theta):
        return mpiad.device.to_host(misfit(theta, on_device(graph), on_device(noise)))

    exact, slope = mpiad.value_and_grad(lambda t: misfit(t, graph, noise))(theta)
    found, there = mpiad.value_and_grad(misfit_on_device)(on_device(theta))
    assert found == pytest.approx(exact, rel=1e-12)
    np.testing.assert_allclose(on_host(there), slope, rtol=1e-10)
    assert np.all(slope != 0)


def test_the_cpu_costs_nothing(monkeypatch):
    monkeypatch.setattr(inference, "select", None)
    posterior = MeanFieldGaussian(2)
    assert VI(bowl, posterior, ("norm",), Adam(0.1), devices=["cpu"] * COMM.size).run(None, 1).epochs == 1
