"""Compiled functions that branch on numbers among their arguments: one program for all numbers that lead to one branch."""

import logging

import autograd
import autograd.numpy as anp
import numpy as np
import pytest

import mpiad
from mpiad.timestepping import scan

X = np.linspace(0.1, 1.0, 5)
DIRECTION = np.cos(np.arange(5.0))
WEIGHTS = [1.0, 0.5, 0.25]


def first_step(u, k, a):
    if k == 0:
        return u + 0.5 * a * u**2
    return u + 0.1 * a * np_of(u).sin(u)


def every_fifth(u, k, a):
    u = u + 0.1 * a * np_of(u).sin(u)
    if k % 5 == 0 and k > 0:
        u = u * 0.9
    return u


def until(u, k, a):
    if 7 <= k < 23:
        u = u + 0.01 * a * np_of(u).sin(0.1 * k + u)
    return u * 0.99


def by_time(u, k, a):
    return u * 0.95 + (0.02 * a if 0.1 * k < 1.55 else 0.0)


def by_remainder(u, k, a):
    return u + 0.1 * WEIGHTS[k % 3] * a * np_of(u).sin(u)


def nested(u, k, a):
    if k % 2:
        if k > 11 or not k % 3:
            return u - 0.1 * a * u
        return u + 0.05 * u**2
    return u * np_of(u).cos(0.1 * u)


def truth(u, k, a):
    return u * 0.9 + (0.1 * a * u**2 if k & 1 else 0.05) if k else u + a


def as_number(u, k, a):
    return u + 0.1 * a * max(k - 20, 0) * u + 0.01 * (k > 3)


STEPS = [first_step, every_fifth, until, by_time, by_remainder, nested, truth, as_number]


def np_of(u):
    """Return the functions for plain and for complex numbers, or for traced values."""
    return np if type(u) is np.ndarray else anp


def by_python(step, u, a, steps, observe=None):
    rows = []
    for k in range(steps):
        u = step(u, k, a)
        if observe is not None:
            rows.append(observe(u, k))
    return u, rows


def objective(u):
    return (u**2).sum() + (u**3).sum() / 3.0


def derivatives(fun, x):
    """Return the gradient of a plain function by complex steps."""
    return np.array([fun(x + 1e-30j * e).imag / 1e-30 for e in np.eye(x.size)])


@pytest.mark.serial
@pytest.mark.parametrize("steps", [1, 31, 60])
@pytest.mark.parametrize("step", STEPS)
def test_loops_have_the_values_and_derivatives_of_python(step, steps, caplog):
    caplog.set_level(logging.WARNING, "mpiad")

    def plain(x, a=0.7):
        return objective(by_python(step, x, a, steps)[0])

    fused = mpiad.jit(step)
    ways = {
        "loop": lambda x, a=0.7: objective(scan(fused, x, steps, a)),
        "lambda": lambda x, a=0.7: objective(scan(lambda u, k, a: fused(u, k, a) * 1.0, x, steps, a)),
        "checkpoints": lambda x, a=0.7: objective(scan(fused, x, steps, a, checkpoints=3)),
    }
    if steps != 31:  # loops of one lambda with different functions become interpreted
        del ways["lambda"]
    expected = derivatives(plain, X)
    second = np.array(
        [(derivatives(plain, X + h * DIRECTION) - derivatives(plain, X - h * DIRECTION)) / (2 * h) for h in [1e-5]]
    )
    for loss in ways.values():
        for x in (X, X * 1.1, X):
            np.testing.assert_allclose(loss(x), plain(x), rtol=1e-13)
        for _ in range(2):
            value, gradient = mpiad.value_and_grad(loss)(X)
            np.testing.assert_allclose(value, plain(X), rtol=1e-13)
            np.testing.assert_allclose(gradient, expected, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(mpiad.jvp(loss, X, DIRECTION)[1], expected @ DIRECTION, rtol=1e-12)
        np.testing.assert_allclose(mpiad.hvp(loss)(X, DIRECTION), second[0], rtol=1e-6, atol=1e-7)
        by_rate = derivatives(lambda a: plain(X.astype(complex), a[0]), np.array([0.7]))
        np.testing.assert_allclose(mpiad.grad(loss, 1)(X, 0.7), by_rate[0], rtol=1e-12, atol=1e-14)
    assert not fused.is_interpreted and caplog.text == ""


@pytest.mark.serial
def test_observations_and_inputs_of_branches():
    def observe(u, k, a):
        return anp.sum(u**2) if k % 3 == 0 else anp.sum(u) * a

    def step(u, k, force, a):
        return u * 0.9 + (force if k > 4 else a * u)

    forces = np.linspace(0.0, 0.1, 40)[:, None] * np.ones(5)

    def plain(x, a=0.7):
        total = 0.0
        for k in range(40):
            x = x * 0.9 + (forces[k] if k > 4 else a * x)
            total = total + ((x**2).sum() if k % 3 == 0 else x.sum() * a) ** 2
        return total

    def loss(x, a=0.7, **options):
        return anp.sum(scan(mpiad.jit(step), x, 40, a, inputs=forces, observe=mpiad.jit(observe), **options)[1] ** 2)

    for options in ({}, {"checkpoints": 4}):
        value, gradient = mpiad.value_and_grad(lambda x, options=options: loss(x, **options))(X)
        np.testing.assert_allclose(value, plain(X), rtol=1e-13)
        np.testing.assert_allclose(gradient, derivatives(plain, X), rtol=1e-12)


@pytest.mark.serial
def test_calls_take_one_trace_per_branch():
    traces = []
    jitted = mpiad.jit(lambda u, k: every_fifth(u, k, 0.7))
    original = mpiad.programs.program_cache.entry_of_trace

    def counted(*args, **options):
        traces.append(args)
        return original(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mpiad.programs.program_cache, "entry_of_trace", counted)
        for k in [*range(40), 2**40, 0, 5]:
            np.testing.assert_array_equal(jitted(X, k), every_fifth(X, k, 0.7))
    # No number, 0, a multiple of 5, and others: `k % 5 == 0` and `k > 0`, which isn't asked for others.
    assert len(traces) == 3
    assert not jitted.is_interpreted


@pytest.mark.serial
def test_numbers_of_other_types_and_sizes():
    def fun(u, k):
        return u * 2.0 if k > 3 else u - k

    jitted = mpiad.jit(fun)
    for k in (1, 5, True, 2**70, np.int64(2), np.int64(7), 1, -(2**80), 2.5, 3.5, np.float64(1.0), np.array(2.0), 5):
        np.testing.assert_array_equal(jitted(X, k), fun(X, k))


@pytest.mark.serial
def test_a_float_that_is_an_argument_decides():
    def fun(u, rate):
        return anp.sum(u**2) * rate if rate > 0.5 else anp.sum(u) - rate**2

    jitted = mpiad.jit(fun)
    for rate in (0.2, 0.9, 0.3, 1.5, 0.2):
        np.testing.assert_allclose(jitted(X, rate), fun(X, rate), rtol=1e-15)
    assert not jitted.is_interpreted
    for rate in (0.2, 0.9, 0.3, 1.5, 0.2):
        expected = np.sum(X**2) if rate > 0.5 else -2 * rate
        np.testing.assert_allclose(mpiad.grad(jitted, 1)(X, rate), expected, rtol=1e-14)
        np.testing.assert_allclose(autograd.grad(jitted, 1)(X, rate), expected, rtol=1e-14)
        np.testing.assert_allclose(mpiad.jvp(lambda r: jitted(X, r), rate, 1.0)[1], expected, rtol=1e-14)


@pytest.mark.serial
def test_a_division_by_zero_in_a_condition_raises():
    jitted = mpiad.jit(lambda u, k: u * 2.0 if 7 // k > 1 else u)
    np.testing.assert_array_equal(jitted(X, 2), X * 2.0)
    np.testing.assert_array_equal(jitted(X, 7), X)
    with pytest.raises(ZeroDivisionError):
        jitted(X, 0)
    np.testing.assert_array_equal(jitted(X, 1), X * 2.0)


@pytest.mark.serial
def test_too_many_branches_are_interpreted(caplog):
    caplog.set_level(logging.WARNING, "mpiad")

    def fun(u, k):
        while k > 1:
            u, k = u * 0.9, k - 1
        return u

    jitted = mpiad.jit(fun)
    for k in range(60):
        np.testing.assert_allclose(jitted(X, k), X * 0.9 ** max(k - 1, 0), rtol=1e-13)
    assert jitted.is_interpreted and caplog.text.count("traced 32 times") == 1


def test_messages_of_some_steps(rank, size):
    """The sum over ranks occurs in every fourth step only, and an exchange in the first one."""
    scale = 1.0 + 0.1 * rank

    @mpiad.jit
    def step(u, k, a):
        u = u + 0.1 * a * anp.sin(u) * scale
        if k % 4 == 3:
            u = u / anp.sqrt(mpiad.mpi_allreduce(anp.sum(u**2)))
        if k == 0 and size > 1:
            u = u + 0.5 * mpiad.mpi_exchange(u, dest=(rank + 1) % size, source=(rank - 1) % size)
        return u

    x = [X + 0.05 * r for r in range(size)]

    def plain(*xs):
        us = list(xs)
        for k in range(26):
            us = [u + 0.1 * 0.7 * np.sin(u) * (1.0 + 0.1 * r) for r, u in enumerate(us)]
            if k % 4 == 3:
                norm = np.sqrt(sum((u**2).sum() for u in us))
                us = [u / norm for u in us]
            if k == 0 and size > 1:
                us = [us[r] + 0.5 * us[r - 1] for r in range(size)]
        return sum(((1.0 + r) * u**3).sum() for r, u in enumerate(us))

    def of_rank(y):
        return plain(*[y if r == rank else x[r] for r in range(size)])

    for options in ({}, {"checkpoints": 3}):

        def loss(u, options=options):
            return mpiad.mpi_allreduce(anp.sum((1.0 + rank) * scan(step, u, 26, 0.7, **options) ** 3))

        for _ in range(2):
            value, gradient = mpiad.value_and_grad(loss)(x[rank])
            np.testing.assert_allclose(value, plain(*x), rtol=1e-12)
            np.testing.assert_allclose(gradient, derivatives(of_rank, x[rank]), rtol=1e-11)
    assert not step.is_interpreted


OF_NUMBERS = {
    "sum": lambda x, k: x * (k + 3),
    "products": lambda x, k: x + (2 * k - 7) * k * 0.5,
    "remainder": lambda x, k: anp.where(k % 12 == 11, x, 2.0 * x),
    "quotient": lambda x, k: anp.where(-k // 5 > -3, x, x - k // 7),
    "comparison": lambda x, k: x * (k + 1 > 4) + (abs(-k - 2) <= 6),
    "single": lambda x, k: x.astype(np.float32) * (k + 1),
    "row": lambda x, k: x * TABLE[(k + 2) % 4],
    "conditions": lambda x, k: x * ((k > 1) + (k > 3)) + ((k > 5) + True) - (k > 2) * (k < 9) + ~(k > 4) * 0.5 - (-(k > 7)),
    "large": lambda x, k: x + (k - 2**53) + (k % 3) + (k > 2**53),
}
TABLE = np.arange(20.0).reshape(4, 5) ** 2


@pytest.mark.serial
@pytest.mark.parametrize("kind", OF_NUMBERS)
def test_numbers_are_computed_as_by_python(kind):
    """Loops compute the integers of a step with floats, which are exact up to 2**53."""
    fun = OF_NUMBERS[kind]
    exact = mpiad.jit(fun, exact=True)
    for k in [*range(-13, 40), 2**24 + 1, 2**53 - 5, 2**53 + 1, 2**60 + 1, -(2**53) - 3]:
        made, expected = exact(X, k), fun(X, k)
        assert made.dtype == expected.dtype
        np.testing.assert_array_equal(made, expected)
    jitted = mpiad.jit(fun)
    made = scan(jitted, X, 40) if kind != "single" else None
    if made is not None:
        expected = X
        for k in range(40):
            expected = fun(expected, k)
        np.testing.assert_allclose(made, expected, rtol=1e-13)
    assert exact.is_interpreted is False
