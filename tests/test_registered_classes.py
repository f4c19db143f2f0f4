"""Registered dataclasses and named tuples as variables, compared with dicts of the same arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad.parallel import SGD, Adam, DistributedOptimizer, load_checkpoint, save_checkpoint, synchronize
from mpiad.pytrees import _CLASSES, FIELDS, children, flatten, named_leaves, register, same_form
from mpiad.testing import check_grads
from mpiad.vi import VI, MeanFieldGaussian

COMM = MPI.COMM_WORLD


@register
class Layer(NamedTuple):
    weight: np.ndarray
    bias: float


@register
@dataclass(frozen=True, slots=True)
class Net:
    scale: np.ndarray  # not in alphabetical order
    layers: list[Layer]
    name: str = "net"

    def __post_init__(self):
        if not isinstance(self.scale, np.ndarray):
            raise TypeError("scale isn't an array")  # traced values and None aren't, and must be accepted


def net():
    return Net(np.array([0.5, -1.0]), [Layer(np.array([1.0, 2.0]), 0.3), Layer(np.ones(2), -0.1)])


def as_dict(x):
    """Return the same arrays in a dict whose keys are in the order of the fields."""
    return {"0 scale": x.scale, "1 layers": [tuple(layer) for layer in x.layers], "2 name": x.name}


def output(scale, layers, x):
    for weight, bias in layers:
        x = anp.tanh(x * weight * scale + bias)
    return anp.mean(x**2)


def loss(p, x):
    return output(p.scale, p.layers, x)


def loss_of_dict(p, x):
    return output(p["0 scale"], p["1 layers"], x)


X = np.random.default_rng(0).normal(size=(5, 2))


def assert_equal(found, expected):
    assert type(found) is Net
    assert all(type(layer) is Layer for layer in found.layers)
    for leaf, other in zip(*(flatten(tree)[0] for tree in (found, expected)), strict=True):
        assert type(leaf) is type(other)
        np.testing.assert_array_equal(leaf, other)


def test_gradients_and_products():
    for derivative in (mpiad.grad, mpiad.hvp):
        args, args_of_dict = (net(),), (as_dict(net()),)
        found, expected = (
            derivative(lambda p, f=f: f(p, X) / COMM.size, objective="sum", shared=True)(
                *(a * (1 + (derivative is mpiad.hvp)))
            )
            for f, a in ((loss, args), (loss_of_dict, args_of_dict))
        )
        assert_equal(found, expected)
        assert found.name is None
    check_grads(lambda p: loss(p, X), net(), objective="sum", shared=True)
    assert mpiad.grad(lambda p: anp.sum(mpiad.stop_gradient(p).scale * p.scale), objective="sum")(net()).scale[1] == -1.0


def test_jit_distinguishes_them_from_dicts_and_one_another():
    compiled = mpiad.jit(lambda p: anp.sum((p if isinstance(p, Layer) else p.layers[0]).weight) * 2.0, strict=True)
    assert compiled(net()) == 6.0
    assert compiled(net().layers[1]) == 4.0
    gradient = mpiad.jit(mpiad.grad(lambda p, x: loss(p, x) / COMM.size, objective="sum", shared=True), strict=True)
    np.testing.assert_allclose(
        gradient(net(), X).scale, mpiad.grad(loss, objective="mean", shared=True)(net(), X).scale, 1e-13
    )


def test_minimize():
    found = mpiad.minimize(loss, net() if COMM.rank == 0 else None, args=(X,), objective="mean", options={"maxiter": 4}).x
    start = as_dict(net()) if COMM.rank == 0 else None
    assert_equal(found, mpiad.minimize(loss_of_dict, start, args=(X,), objective="mean", options={"maxiter": 4}).x)


def test_training_and_its_checkpoints(tmp_path):
    path, results = COMM.bcast(tmp_path) / "run.npz", []
    for function, params in ((loss, net()), (loss_of_dict, as_dict(net()))):
        optimizer, params = DistributedOptimizer(Adam(0.1)), synchronize(params)
        state = optimizer.setup(params)
        for k in range(6):
            state, params, _ = optimizer.step(state, params, function, X + 0.1 * COMM.rank + 0.01 * k)
            if k == 2:
                save_checkpoint(path, {"params": params, "state": state}, own=params)
        results.append(params)
        state, params = (load_checkpoint(path, like=params).tree[name] for name in ("state", "params"))
        for k in range(3, 6):
            state, params, _ = optimizer.step(state, params, function, X + 0.1 * COMM.rank + 0.01 * k)
        results.append(params)
    assert_equal(results[0], results[2])
    assert_equal(results[1], results[3])
    assert_equal(results[0], results[1])


@register
@dataclass
class Moments:
    mean: np.ndarray
    log_sd: np.ndarray


class Posterior(MeanFieldGaussian):
    """The mean-field Gaussian, with a dataclass instead of a dict."""

    def initial(self, rng):
        return Moments(**super().initial(rng))

    def draw(self, params, noise):
        return super().draw({"mean": params.mean, "log_sd": params.log_sd}, noise)

    def log_prob(self, params, theta):
        return super().log_prob({"mean": params.mean, "log_sd": params.log_sd}, theta)

    def moments(self, params):
        return super().moments({"mean": params.mean, "log_sd": params.log_sd})


def test_variational_inference():
    fitted = [
        VI(
            lambda theta, x: anp.sum((theta - x) ** 2),
            family(2),
            ("norm", 0.0, 1.0),
            SGD(0.01),
            1.0,
            4,
            divergence="path",
            rng=0,
        )
        for family in (Posterior, MeanFieldGaussian)
    ]
    found, expected = (fit.run(X[0], 3).params for fit in fitted)
    assert type(found) is Moments
    np.testing.assert_array_equal(found.mean, expected["mean"])
    np.testing.assert_array_equal(found.log_sd, expected["log_sd"])


@pytest.mark.serial
def test_structure():
    assert [path for path, _ in named_leaves(net(), "p")] == [
        "p.scale", "p.layers[0].weight", "p.layers[0].bias", "p.layers[1].weight", "p.layers[1].bias", "p.name"
    ]  # fmt: skip
    assert same_form(net(), net())
    assert not same_form(net(), as_dict(net()))
    assert not same_form(as_dict(net()), net())
    assert not same_form(1.0, net())
    assert not same_form(net(), 1.0)
    assert children(1.0, "x") is None
    leaves, build = flatten(net())
    assert build([2 * leaf for leaf in leaves]).layers[0].bias == 0.6


@pytest.mark.serial
def test_other_classes_are_refused(tmp_path):
    for other in (int, dict, 3, net()):
        with pytest.raises(TypeError, match="expected a dataclass or named tuple with fields"):
            register(other)

    @dataclass
    class Local:
        x: float

    with pytest.raises(TypeError, match=r"argument 0\[1\] is Local .*mpiad.pytrees.register"):
        mpiad.grad(lambda p: p[0] * p[1].x)([1.0, Local(1.0)])
    with pytest.raises(TypeError, match="a checkpoint may only hold"):
        save_checkpoint(tmp_path / "c.npz", Local(1.0))
    name = f"{__name__}.{Local.__qualname__}"
    save_checkpoint(tmp_path / "c.npz", register(Local)(2.0))
    assert load_checkpoint(tmp_path / "c.npz").tree.x == 2.0
    FIELDS[Local] = ("y",)
    with pytest.raises(ValueError, match=r"Local with the fields \('x',\), but a class with the fields \('y',\)"):
        load_checkpoint(tmp_path / "c.npz")
    del _CLASSES[name], FIELDS[Local]
    with pytest.raises(ValueError, match="but no class is registered"):
        load_checkpoint(tmp_path / "c.npz")
