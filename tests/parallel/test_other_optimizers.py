"""Optimizers that aren't the library's: anything with `setup` and `update`, in trainings and in inference."""

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

from mpiad import jit
from mpiad.parallel import SGD, DistributedOptimizer, ParameterGroups
from mpiad.vi import VI, MeanFieldGaussian

COMM = MPI.COMM_WORLD
ROOT = COMM.size - 1


class HeavyBall:
    """Descent with a state that is no nest, written into in place; it keeps every gradient that it was given."""

    def __init__(self, rate, momentum):
        self.rate, self.momentum = rate, momentum

    def setup(self, params):
        return Velocity({name: np.zeros_like(value) for name, value in params.items()})

    def update(self, state, params, gradient):
        state.gradients.append(gradient)
        for name, g in gradient.items():
            state.velocity[name] = self.momentum * state.velocity[name] + g
        return state, {name: value - self.rate * state.velocity[name] for name, value in params.items()}


class Velocity:
    def __init__(self, velocity):
        self.velocity, self.gradients = velocity, []


class Selfish(HeavyBall):
    """One that writes into the gradient and into the parameters that it gets."""

    def update(self, state, params, gradient):
        for name, g in gradient.items():
            state.velocity[name] = self.momentum * state.velocity[name] + g
            g[...] = np.nan
            params[name] -= self.rate * state.velocity[name]
        return state, params


def loss(p, x):
    return anp.mean((anp.sin(p["w"]) * x + p["b"]) ** 4)


def exact_steps(x, count):
    """Heavy ball's steps on one rank with the derivative by hand."""
    w, b, v, u = np.array([0.4, -0.3]), np.array([0.2]), np.zeros(2), np.zeros(1)
    gradients = []
    for _ in range(count):
        inner = 4 * (np.sin(w) * x + b) ** 3 / x.size
        gradients.append((np.sum(inner * np.cos(w) * x, axis=0), np.array([inner.sum()])))
        v, u = 0.5 * v + gradients[-1][0], 0.5 * u + gradients[-1][1]
        w, b = w - 0.1 * v, b - 0.1 * u
    return w, b, gradients


@pytest.mark.parametrize("kind", [HeavyBall, Selfish])
@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 8}], ids=str)
def test_a_training_by_another_optimizer(kind, options):
    x = np.random.default_rng(0).normal(size=(2 * COMM.size + 1, 2))
    p = {"w": np.array([0.4, -0.3]), "b": np.array([0.2])}
    optimizer = DistributedOptimizer(kind(0.1, 0.5), **options)
    state = optimizer.setup(p)
    for _ in range(4):
        state, p, _ = optimizer.step(state, p, loss, x[COMM.rank :: COMM.size])
    w, b, gradients = exact_steps(x, 4)
    np.testing.assert_allclose(p["w"], w, rtol=1e-13)
    np.testing.assert_allclose(p["b"], b, rtol=1e-13)
    # Those of earlier steps are still what they were.
    for kept, (by_w, by_b) in zip(state["optimizer"].gradients, gradients):
        np.testing.assert_allclose(kept["w"], by_w, rtol=1e-13)
        np.testing.assert_allclose(kept["b"], by_b, rtol=1e-13)


class Counting(SGD):
    """An optimizer of the library with another state, whose `update` has no further arguments."""

    def setup(self, params):
        return {"rule": super().setup(params), "calls": 0}

    def update(self, state, params, gradient):
        rule, params = super().update(state["rule"], params, gradient)
        return {"rule": rule, "calls": state["calls"] + 1}, params


@pytest.mark.parametrize("groups", [False, True])
def test_a_compiled_loss_is_minimized_by_a_class_of_the_users(groups):
    rule, start = Counting(0.25), np.array([1.0, -1.0])
    optimizer = DistributedOptimizer(ParameterGroups({"all": rule}, lambda path: "all") if groups else rule)
    state, x, _ = optimizer.step(optimizer.setup(start), start, jit(lambda x: anp.sum(x**2)))
    assert x.tolist() == [0.5, -0.5]
    inner = state["optimizer"]["all"] if groups else state["optimizer"]
    assert inner["calls"] == 1


def test_its_own_gradients_are_left_alone_by_an_update():
    """What the user hands in is reduced in memory of its own."""
    optimizer, p = DistributedOptimizer(Selfish(1.0, 0.0), reduction="sum"), {"w": np.zeros(3)}
    g = {"w": np.full(3, COMM.rank + 1.0)}
    _, p = optimizer.update(optimizer.setup(p), p, g)
    assert g["w"].tolist() == [COMM.rank + 1.0] * 3
    assert p["w"].tolist() == [-sum(range(1, COMM.size + 1))] * 3


def test_inference_by_another_optimizer():
    """The closed divergence with a negligible loss, whose gradient doesn't depend on the draws, in one step."""
    posterior = MeanFieldGaussian(2, mean=1.0, sd=0.5)
    optimizer = HeavyBall(0.3, 0.5)
    inference = VI(lambda theta, data: 1e-30 * anp.sum(theta), posterior, ("norm", 0.2, 2.0), optimizer, root=ROOT)
    result = inference.run(None, 1)
    np.testing.assert_allclose(result.params["mean"], 1.0 - 0.3 * (1.0 - 0.2) / 4, rtol=1e-13)
    np.testing.assert_allclose(result.params["log_sd"], np.log(0.5) - 0.3 * (0.25 / 4 - 1), rtol=1e-13)
    assert len(set(COMM.allgather(result.params["mean"].tobytes()))) == 1


def test_inference_refuses_an_optimizer_that_all_ranks_call():
    with pytest.raises(TypeError, match="only the root makes updates, so pass the SGD of the DistributedOptimizer instead"):
        VI(lambda theta, data: anp.sum(theta), MeanFieldGaussian(1), ("norm",), DistributedOptimizer(SGD(0.1)))


class Broken(HeavyBall):
    def update(self, state, params, gradient):
        raise ArithmeticError("no step today")


def test_what_another_optimizer_raises_is_raised_on_all_ranks():
    inference = VI(lambda theta, data: anp.sum(theta**2), MeanFieldGaussian(1), ("norm",), Broken(1, 0), root=ROOT)
    with pytest.raises(ArithmeticError, match="no step today"):
        inference.run(None, 3)
    optimizer, p = DistributedOptimizer(Broken(1, 0)), {"w": np.zeros(1)}
    with pytest.raises(ArithmeticError, match="no step today"):
        optimizer.step(optimizer.setup(p), p, lambda p: anp.sum(p["w"]))
