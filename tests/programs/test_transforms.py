"""Derivatives of programs: rules of the user, constants, and the number of traces and their memory."""

import gc
import weakref

import autograd.numpy as anp
import numpy as np
import pytest
from autograd.extend import defjvp, defvjp, primitive
from jitted import assert_same

import mpiad
from mpiad.programs.recorder import Recorder


@primitive
def straight_through(x):
    """The sign of x, with the derivative 3."""
    return np.sign(x)


defvjp(straight_through, lambda ans, x: lambda g: 3.0 * g)
defjvp(straight_through, lambda g, ans, x: 3.0 * g)

# By hand, with the derivative 3 of the sign and constants c = x and ⌊x⌋: values, gradients and products with the Hessian.
FUNCTIONS = {
    "rule of the user": (
        lambda x: straight_through(x) * x,
        lambda x: np.sign(x) * x,
        lambda x: np.sign(x) + 3.0 * x,
        lambda x, v: 6.0 * v,
    ),
    "stopped gradient": (
        lambda x: mpiad.stop_gradient(anp.sin(x)) * x**3,
        lambda x: np.sin(x) * x**3,
        lambda x: np.sin(x) * 3.0 * x**2,
        lambda x, v: np.sin(x) * 6.0 * x * v,
    ),
    "rounding and masks": (
        lambda x: anp.floor(2.0 * x) * anp.where(x > 0.2, x**2, 0.5 * x) * (x < 1.5),
        lambda x: np.floor(2.0 * x) * np.where(x > 0.2, x**2, 0.5 * x) * (x < 1.5),
        lambda x: np.floor(2.0 * x) * np.where(x > 0.2, 2.0 * x, 0.5) * (x < 1.5),
        lambda x, v: np.floor(2.0 * x) * np.where(x > 0.2, 2.0 * v, 0.0) * (x < 1.5),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rules_and_constants_hold_in_all_derivatives(name, rank):
    fun, value, slope, curved = FUNCTIONS[name]
    x = np.linspace(-1.3, 2.1, 7 + rank)
    v = np.cos(np.arange(x.size) + rank)

    def loss(x):
        return mpiad.mpi_allreduce(anp.sum(fun(x)))

    compiled = mpiad.jit(loss, strict=True)
    total = mpiad.mpi_allreduce(np.sum(value(x)))
    weights = slope(x)
    for _ in range(2):
        found, gradient = mpiad.value_and_grad(compiled)(x)
        assert_same((found, gradient), (total, weights), 1e-13)
        assert_same(mpiad.jvp(compiled, x, v)[1], mpiad.mpi_allreduce(np.sum(weights * v)), 1e-13)
        assert_same(mpiad.hvp(compiled)(x, v), curved(x, v), 1e-13)
        assert_same(mpiad.make_hvp(compiled)(x)[2](v), curved(x, v), 1e-13)


@pytest.mark.parametrize("used", ["both", "one", "none"])
def test_second_derivatives_with_respect_to_arguments_without_influence(used, rank):
    x, y = np.linspace(-1.0, 0.5, 5 + rank), np.linspace(0.2, 1.7, 3 + rank)
    v, w = np.cos(np.arange(x.size) + rank), np.sin(np.arange(y.size) - rank)
    factor = {"both": 1.0, "one": 1.0 if rank % 2 == 0 else 0.0, "none": 0.0}[used]

    def loss(given):
        x, y = given
        found = anp.sum(y) * 3.0
        if used == "both" or used == "one" and rank % 2 == 0:
            found = found + anp.sum(anp.sin(y) ** 2)
        return mpiad.mpi_allreduce(found)

    jitted, curvature = mpiad.jit(loss, strict=True), 2.0 * factor * np.cos(2.0 * y)
    for given in ((x, y), (2.0 * x, y)):
        product = mpiad.make_hvp(jitted)(given).product
        assert_same(product((v, w)), (np.zeros(x.size), curvature * w), 1e-13)
        both = np.stack([w, 2.0 * w - 1.0])
        several = product((np.stack([v, -v]), both), batch=True)
        assert_same(several, (np.zeros((2, x.size)), curvature * both), 1e-13)
        gradient = 3.0 + factor * np.sin(2.0 * y)
        point = mpiad.linearize(jitted)(given)
        assert_same(point.vjp(1.5), (np.zeros(x.size), 1.5 * gradient * mpiad.mpi_size()), 1e-13)
        assert_same(point.jvp((v, w)), mpiad.mpi_allreduce(gradient @ w), 1e-13)


def test_second_derivatives_of_slices_whose_lengths_change(rank, size):
    def loss(x, start, stop):
        total = mpiad.mpi_allreduce(x)  # isn't repeated when the function is interpreted, since the length has changed
        return mpiad.mpi_allreduce(anp.sum(total[start:stop] ** 3))

    jitted = mpiad.jit(loss)
    x, v = np.linspace(1.0, 2.0, 40) + rank, np.cos(np.arange(40.0) + rank)
    total, along = mpiad.mpi_allreduce(x), mpiad.mpi_allreduce(v)
    for start, stop in ((0, 3), (1, 4), (2, 8), (0, 40), (7, 8)):
        inside = (np.arange(40) >= start) & (np.arange(40) < stop)
        product = mpiad.make_hvp(lambda x: jitted(x, start, stop), objective="sum")(x).product  # noqa: B023
        assert_same(product(v), size**2 * 6.0 * total * along * inside, 1e-13)


@pytest.mark.unguarded
def test_first_and_second_derivatives_need_one_trace_of_the_function(rank, monkeypatch):
    traces, arguments = [], Recorder.arguments

    def noted(self, given):
        traces.append(given)
        return arguments(self, given)

    monkeypatch.setattr(Recorder, "arguments", noted)

    def fun(x, y):
        return mpiad.mpi_allreduce(anp.sum(anp.exp(x) * y**2))

    x, y, v = np.linspace(0.1, 0.7, 4 + rank), np.linspace(1.0, 2.0, 4 + rank), np.ones(4 + rank)
    jitted = mpiad.jit(fun, strict=True)
    loss = lambda x: jitted(x, y)  # noqa: E731
    for _ in range(2):
        assert_same(mpiad.grad(loss)(x), np.exp(x) * y**2, 1e-13)
        assert_same(mpiad.hvp(loss)(x, v), np.exp(x) * y**2 * v, 1e-13)
        assert_same(mpiad.make_hvp(loss)(x)[2](v), np.exp(x) * y**2 * v, 1e-13)
    assert len(traces) == 1


@pytest.mark.unguarded
def test_arrays_that_the_function_writes_into(rank):
    def fun(x, c):
        y, w = np.zeros(4) * c, np.ones(4)
        first = anp.sum(x**2 * y) + anp.sum(x**2 * w)
        y[0], w[1] = 5.0 * c[0], 7.0
        return first + anp.sum(anp.sin(x) * y) + anp.sum(x**3 * w)

    x, c, v = np.linspace(0.1, 0.9, 4) + rank, np.linspace(1.0, 2.0, 4), np.cos(np.arange(4.0))
    y, w = np.array([5.0, 0.0, 0.0, 0.0]), np.array([1.0, 7.0, 1.0, 1.0])
    jitted = mpiad.jit(fun, strict=True)
    for _ in range(2):
        gradient = mpiad.grad(lambda x: jitted(x, c), objective="sum")(x)
        assert_same(gradient, 2 * x + np.cos(x) * y + 3 * x**2 * w, 1e-13)
        product = mpiad.hvp(lambda x: jitted(x, c), objective="sum")(x, v)
        assert_same(product, (2 - np.sin(x) * y + 6 * x * w) * v, 1e-13)


def test_a_changed_closure_is_traced_again(rank):
    factors = np.array([2.0, 3.0])
    jitted = mpiad.jit(lambda x: anp.sum(anp.sin(factors * x)), strict=True)
    gradient, product = mpiad.grad(jitted, objective="sum"), mpiad.hvp(jitted, objective="sum")
    x = np.array([0.3, 0.4]) + 0.1 * rank
    for _ in range(4):
        assert_same(gradient(x), factors * np.cos(factors * x), 1e-13)
        factors[1] += 0.5
        assert_same(product(x, x), -(factors**2) * np.sin(factors * x) * x, 1e-13)
        factors[0] += 0.5


@pytest.mark.unguarded
def test_programs_keep_no_arguments():
    jitted = mpiad.jit(lambda x, y: anp.sum(anp.tanh(x * y)) + anp.sum(y[1:] * x[:-1]), strict=True)
    arguments = [np.linspace(0.0, 1.0, 20000), np.linspace(1.0, 2.0, 20000)]
    mpiad.grad(jitted, argnum=(0, 1), objective="sum")(*arguments)
    mpiad.hvp(jitted, objective="sum")(*arguments, arguments[0])
    kept = [weakref.ref(x) for x in arguments]
    arguments.clear()
    gc.collect()
    assert [ref() for ref in kept] == [None, None]
