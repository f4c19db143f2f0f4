"""Trainings whose parameters are device arrays: the same numbers as on the host, and nothing of their length is copied."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest
from device_double import on_device, on_host, transfers

import mpiad
from mpiad.parallel import (
    SGD,
    Adam,
    AdamW,
    DistributedDataContainer,
    DistributedOptimizer,
    allreduce_,
    bcast_,
    iallreduce_,
    load_checkpoint,
    reduce_,
    save_checkpoint,
    synchronize,
    value_and_grad,
)

_RANK, _SIZE = mpiad.mpi_rank(), mpiad.mpi_size()


def _params(put, dtype=float):
    rng = np.random.default_rng(2)
    w, b = rng.normal(size=(3, 4)).astype(dtype), rng.normal(size=4).astype(dtype)
    return {"w": put(w), "b": put(b), "scale": put(np.array(0.5, dtype)), "steps": 3}


def _batch(put, rank=_RANK, count=None, dtype=float):
    rng = np.random.default_rng(10 + rank)
    count = 2 + rank if count is None else count
    return put(rng.normal(size=(count, 3)).astype(dtype)), put(rng.normal(size=(count, 4)).astype(dtype))


def loss(params, x, y):
    return anp.mean((anp.tanh(x @ params["w"] + params["b"]) * params["scale"] - y) ** 2)


def _close(found, wanted, rtol=1e-12):
    found = on_host(found)
    assert found.keys() == wanted.keys()
    for name in found:
        if wanted[name] is None:
            assert found[name] is None
        else:
            np.testing.assert_allclose(found[name], wanted[name], rtol=rtol, atol=1e-14)


@pytest.mark.serial
@pytest.mark.parametrize(
    "optimizer", [Adam(0.1), AdamW(0.1, weight_decay=0.2), SGD(0.1), SGD(0.1, momentum=0.9), SGD(0.1, 0.9, nesterov=True)]
)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.complex64])
def test_updates_are_those_of_the_host(optimizer, dtype):
    host, there = (_params(put, dtype) for put in (np.asarray, on_device))
    states = optimizer.setup(host), optimizer.setup(there)
    for step in range(3):
        g = {name: np.asarray(np.cos(step + 1 + value)) for name, value in host.items() if name != "steps"}
        own = {name: on_device(np.asarray(value)) for name, value in g.items()}
        transfers.reset()
        state, there = optimizer.update(states[1], there, {**own, "steps": None})
        assert transfers.copies == 0
        before, host = optimizer.update(states[0], host, {**g, "steps": None})
        states = before, state
    assert all(there[name].dtype == dtype and there[name].shape == np.shape(host[name]) for name in own)
    _close(there, host, 1e-12 if dtype == np.float64 else 2e-6)


@pytest.mark.unguarded
def test_the_gradient_is_that_of_the_host():
    wanted = value_and_grad(loss)(_params(np.asarray), *_batch(np.asarray))
    transfers.reset()
    mean, gradient = value_and_grad(loss)(_params(on_device), *_batch(on_device))
    assert isinstance(mean, float)
    np.testing.assert_allclose(mean, wanted[0], rtol=1e-12)
    _close(gradient, wanted[1])
    # The loss, and one bucket to all ranks and back.
    assert transfers.d2h <= 2 and transfers.h2d <= 1


def test_the_gradient_is_that_of_all_samples():
    together = [np.concatenate(parts) for parts in zip(*[_batch(np.asarray, rank) for rank in range(_SIZE)])]
    wanted = mpiad.grad(lambda params: loss(params, *together), objective="sum")(_params(np.asarray))
    found = value_and_grad(loss, bucket_bytes=64)(_params(on_device), *_batch(on_device))[1]
    _close({name: found[name] for name in "wb"}, {name: wanted[name] for name in "wb"}, 1e-10)


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.1}, {"accumulate": 2}, {"reduction": "sum", "bucket_bytes": 64}])
def test_steps_are_those_of_the_host(settings):
    host, there = _params(np.asarray), _params(on_device)
    ours, theirs = DistributedOptimizer(Adam(0.05), **settings), DistributedOptimizer(Adam(0.05), **settings)
    state, of_host = theirs.setup(there), ours.setup(host)
    for k in range(4):
        of_host, host, value = ours.step(of_host, host, loss, *_batch(np.asarray, _RANK + 7 * k))
        state, there, found = theirs.step(state, there, loss, *_batch(on_device, _RANK + 7 * k))
        np.testing.assert_allclose(found, value, rtol=1e-10)
    _close(there, host, 1e-10)
    own = mpiad.grad(loss)(host, *_batch(np.asarray))
    moved = {name: on_device(g) for name, g in own.items() if name != "steps"}
    _, updated = theirs.update(state, there, {**moved, "steps": 0})
    _close(updated, ours.update(of_host, host, own)[1], 1e-9)


def test_a_rank_without_samples_takes_part():
    count = 0 if _RANK == _SIZE - 1 and _SIZE > 1 else 3
    wanted = value_and_grad(loss)(_params(np.asarray), *_batch(np.asarray, count=count))
    found = value_and_grad(loss)(_params(on_device), *_batch(on_device, count=count))
    _close(found[1], wanted[1])


@pytest.mark.serial
def test_the_norm_of_a_long_gradient_is_found_by_one_copy():
    from mpiad.parallel.distributed_optimizer import clipping, norm_of

    def clipped(arrays, max_norm):
        return [array * clipping(norm, max_norm) for norm in [norm_of(arrays)] for array in arrays]

    arrays = [np.full(5, 3.0, np.float32), np.full((2, 2), 4.0 + 3j)]
    moved = list(map(on_device, arrays))
    transfers.reset()
    found = clipped([*moved, np.full(2, 1.0)], 1.5)
    assert transfers.d2h == 1 and transfers.h2d == 0
    for one, other in zip(found, clipped([*arrays, np.full(2, 1.0)], 1.5)):
        np.testing.assert_allclose(on_host(one), other, rtol=1e-6)
    large = clipped([on_device(np.full(4, 1e30, np.float32))], 2.0)
    np.testing.assert_allclose(on_host(large[0]), np.ones(4), rtol=1e-6)
    broken = clipped([on_device(np.array([1.0, np.inf]))], 2.0)
    np.testing.assert_array_equal(on_host(broken[0]), [1.0, np.inf])


def test_arrays_are_combined_in_place():
    x = on_device(np.arange(3.0) + _RANK)
    inner = {"x": x, "more": [on_device(np.float32(1 + _RANK)[None])]}
    assert allreduce_(inner) is inner and inner["x"] is x
    np.testing.assert_array_equal(on_host(x), _SIZE * np.arange(3.0) + sum(range(_SIZE)))
    np.testing.assert_array_equal(on_host(inner["more"][0]), [sum(range(1, _SIZE + 1))])
    y = on_device(np.ones(2) * _RANK)
    bcast_(y, root=_SIZE - 1)
    np.testing.assert_array_equal(on_host(y), [_SIZE - 1.0] * 2)
    reduce_(y, root=_SIZE - 1)
    np.testing.assert_array_equal(on_host(y), [(_SIZE if _RANK == _SIZE - 1 else 1) * (_SIZE - 1.0)] * 2)
    pending = iallreduce_(x)
    assert pending.wait() is x
    np.testing.assert_array_equal(on_host(x), _SIZE * (_SIZE * np.arange(3.0) + sum(range(_SIZE))))


def test_all_ranks_get_the_parameters_of_the_root():
    root = _SIZE - 1
    mine = {"w": on_device(np.arange(4.0) + _RANK), "host": np.ones(2) * _RANK, "f": on_device(np.float32([_RANK]))}
    found = synchronize(mine, root)
    np.testing.assert_array_equal(on_host(found["w"]), np.arange(4.0) + root)
    np.testing.assert_array_equal(found["host"], [root, root])
    assert on_host(found["f"]) == root and found["f"].dtype == np.float32


@pytest.mark.mpi(min_size=2)
@pytest.mark.unguarded
def test_places_that_differ_are_named_on_all_ranks():
    mine = {"w": on_device(np.ones(2)) if _RANK else np.ones(2)}
    with pytest.raises(ValueError, match="on rank [1-9] .*float64 on a device, and on the root"):
        synchronize(mine)
    with pytest.raises(
        ValueError, match="same structure, shapes and dtypes, but on rank [1-9] .* on a device, and on the root"
    ):
        value_and_grad(lambda params: anp.sum(params["w"]))(mine)


@pytest.mark.serial
def test_a_gradient_on_the_host_is_refused_for_parameters_on_a_device():
    params = {"w": on_device(np.ones(2))}
    with pytest.raises(ValueError, match="shape .2,. and dtype float64 on a device of .*, but has shape .2,. and dtype"):
        Adam().update(Adam().setup(params), params, {"w": np.ones(2)})


def test_samples_stay_on_the_device():
    x, y = np.arange(20.0).reshape(10, 2), np.arange(10)
    host = DistributedDataContainer((x, y), batch_size=4, shuffle=True, rng=3)
    there = DistributedDataContainer((on_device(x), on_device(y)), batch_size=4, shuffle=True, rng=3)
    for mine, theirs in zip(there, host):
        transfers.reset()
        there[0]
        assert transfers.h2d == 1 and transfers.d2h == 0  # the numbers of the samples
        np.testing.assert_array_equal(on_host(mine[0]), theirs[0])
        np.testing.assert_array_equal(on_host(mine[1]), theirs[1])
    one = DistributedDataContainer(on_device(x))
    np.testing.assert_array_equal(on_host(one[0]), DistributedDataContainer(x)[0])


def test_a_checkpoint_brings_arrays_back_to_the_device(tmp_path_factory):
    path = _shared(tmp_path_factory)
    params = _params(on_device, np.float32)
    state = Adam().setup(params)
    save_checkpoint(path, {"params": params, "state": state, "epoch": 4}, own={"mine": on_device(np.ones(2) * _RANK)})
    found = load_checkpoint(path, like=params)
    _close(found.tree["params"], on_host(params))
    assert found.tree["params"]["w"].dtype == np.float32 and found.tree["epoch"] == 4
    np.testing.assert_array_equal(on_host(found.own["mine"]), [_RANK, _RANK])
    Adam().update(found.tree["state"], found.tree["params"], params)
    with pytest.raises(ValueError, match="was saved from a device. Pass like="):
        load_checkpoint(path)


def _shared(tmp_path_factory):
    from mpi4py import MPI

    mine = str(tmp_path_factory.mktemp("training") / "run.npz") if _RANK == 0 else None
    return MPI.COMM_WORLD.bcast(mine, 0)


def test_parameters_may_be_in_both_places():
    def mixed(params, x, y):
        return params["gain"] * loss({**params, "scale": 1.0}, x, y)

    host, there = ({**_params(put), "gain": 0.7} for put in (np.asarray, on_device))
    for one in (host, there):
        del one["scale"]
    wanted, found = value_and_grad(mixed)(host, *_batch(np.asarray)), value_and_grad(mixed)(there, *_batch(on_device))
    _close(found[1], wanted[1])
    assert isinstance(found[1]["gain"], float)
