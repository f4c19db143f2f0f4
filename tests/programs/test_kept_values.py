"""What a jitted function keeps of its trace raises where it is used: derivatives around it would leave it out."""

import autograd
import autograd.numpy as anp
import numpy as np
import pytest

import mpiad

pytestmark = pytest.mark.serial

X = np.array([0.5, 1.0, 2.0])
KEPT = {}


def keeping(x):
    KEPT["y"] = anp.sin(x)
    return anp.sum(KEPT["y"])


def outside(evaluate):
    evaluate(keeping)(X)
    return KEPT["y"] * 2.0


# Its gradient is cos x + 2 sin x cos x.
USES = {
    "outside": lambda: outside(mpiad.jit),
    "outside, of a gradient": lambda: outside(lambda fun: mpiad.jit(mpiad.grad(fun))),
    "communicated": lambda: mpiad.mpi_allreduce(outside(mpiad.jit) / 2.0),
    "as numbers": lambda: np.asarray(outside(mpiad.jit)),
    "plain autograd": lambda: autograd.grad(lambda x: mpiad.jit(keeping)(mpiad.stop_gradient(x)) + anp.sum(x * KEPT["y"]))(
        X
    ),
    "another jitted function": lambda: (mpiad.grad(mpiad.jit(keeping))(X), mpiad.jit(lambda x: x + KEPT["y"])(X)),
}
AROUND = {
    "gradient": lambda loss: mpiad.grad(loss)(X),
    "vjp": lambda loss: mpiad.make_vjp(loss)(X)[0](1.0),
    "jvp": lambda loss: mpiad.jvp(loss, X, X),
    "hvp": lambda loss: mpiad.hvp(loss)(X, X),
}


@pytest.mark.parametrize("use", USES)
def test_it_raises_with_the_line_and_what_to_write(use):
    KEPT.clear()
    with pytest.raises(RuntimeError, match=r"test_kept_values.py:\d+ in .* Return the value .*, y, kept = f\(x\)"):
        USES[use]()


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
