"""What a jitted function keeps has Python's value, or raises where it is used: derivatives around it would leave it out."""

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from autograd.tracer import getval

import mpiad

pytestmark = pytest.mark.serial

X = np.array([0.5, 1.0, 2.0])
KEPT = {}


class Kept:
    y = None


def keeping(x):
    KEPT["y"] = anp.sin(x)
    return anp.sum(KEPT["y"])


def keeping_in_class(x):
    Kept.y = anp.sin(x)
    return anp.sum(Kept.y)


def outside(evaluate, fun):
    evaluate(fun)(X)
    return kept_by(fun) * 2.0


def kept_by(fun):
    return KEPT["y"] if fun is keeping else Kept.y


def with_kept(fun):
    return autograd.grad(lambda x: mpiad.jit(fun)(mpiad.stop_gradient(x)) + anp.sum(x * kept_by(fun)))(X)


SINES = np.sin(X)
# Uses of what a function has kept, and their values.
USES = {
    "outside": (lambda fun: outside(mpiad.jit, fun), 2.0 * SINES),
    "outside, of a gradient": (lambda fun: outside(lambda fun: mpiad.jit(mpiad.grad(fun)), fun), 2.0 * SINES),
    "communicated": (lambda fun: mpiad.mpi_allreduce(outside(mpiad.jit, fun) / 2.0), SINES),
    "as numbers": (lambda fun: np.asarray(outside(mpiad.jit, fun)), 2.0 * SINES),
    "plain autograd": (with_kept, SINES),
    "another jitted function": (
        lambda fun: (mpiad.grad(mpiad.jit(fun))(X), mpiad.jit(lambda x: x + kept_by(fun))(X))[1],
        X + SINES,
    ),
}
AROUND = {
    "gradient": lambda loss: mpiad.grad(loss)(X),
    "vjp": lambda loss: mpiad.make_vjp(loss)(X)[0](1.0),
    "jvp": lambda loss: mpiad.jvp(loss, X, X),
    "hvp": lambda loss: mpiad.hvp(loss)(X, X),
}


@pytest.mark.parametrize("fun", [keeping, keeping_in_class])
@pytest.mark.parametrize("use", USES)
def test_it_has_its_value(use, fun):
    KEPT.clear()
    Kept.y = None
    made, expected = USES[use][0](fun), USES[use][1]
    np.testing.assert_allclose(getval(made), expected, rtol=1e-15)


def test_what_an_adjoint_keeps_raises_with_the_line_and_what_to_write():
    kept = []
    sine = mpiad.extend.custom_operator(np.sin)
    mpiad.extend.defvjp(sine, lambda ans, x: lambda g: (kept.append(g), g * np.cos(x))[1])
    gradient = mpiad.grad(mpiad.jit(lambda x: anp.sum(sine(x) ** 2)))
    for _ in range(4):
        np.testing.assert_allclose(gradient(X), np.sin(2.0 * X), rtol=1e-14)
    with pytest.raises(RuntimeError, match=r"test_kept_values.py:\d+ in .* Return the value .*, y, kept = f\(x\)"):
        print([g + 1.0 for g in kept])


@pytest.mark.parametrize("around", AROUND)
def test_a_derivative_is_right_or_raises(around):
    KEPT.clear()
    jitted = mpiad.jit(keeping)

    def loss(x, inner=jitted):
        return inner(x) + anp.sum(KEPT["y"] ** 2)

    expected = AROUND[around](lambda x: loss(x, keeping))
    KEPT.clear()
    for _ in range(3):
        try:
            found = AROUND[around](loss)
        except RuntimeError as error:
            assert "test_kept_values.py" in str(error) and "in loss uses a value" in str(error)
        else:
            np.testing.assert_allclose(found, expected, rtol=1e-13)


def test_what_is_returned_is_right():
    jitted = mpiad.jit(lambda x: (keeping(x), KEPT["y"]))

    def loss(x):
        value, y = jitted(x)
        return value + anp.sum(y**2)

    for x in (X, 2 * X):
        np.testing.assert_allclose(mpiad.grad(loss)(x), np.cos(x) + np.sin(2 * x), rtol=1e-13)
