"""`newton` at a fixed point that a loop has found: the derivatives are right, and the loop isn't recorded."""

import autograd.numpy as anp
import numpy as np
import pytest
from autograd.tracer import isbox

import mpiad
from mpiad.domain import Domain
from mpiad.extend import custom_operator, defjvp, defvjp
from mpiad.linalg import newton
from mpiad.timestepping import scan

N, STRENGTH = 6, 3.0


def reference(strength):
    """Return Σ u⁴ and its derivative, for -u" = strength exp(-u) between 0 and 0, by Newton's dense method."""
    laplacian = (N + 1) ** 2 * (2 * np.eye(N) - np.eye(N, k=1) - np.eye(N, k=-1))
    u = np.zeros(N)
    for _ in range(20):
        jacobian = laplacian + strength * np.diag(np.exp(-u))
        u = u - np.linalg.solve(jacobian, laplacian @ u - strength * np.exp(-u))
    return np.sum(u**4), 4 * u**3 @ np.linalg.solve(jacobian, np.exp(-u))


class FixedPoint:
    """The same by Jacobi's method on all ranks."""

    def __init__(self):
        self.domain, self.recorded, self.plain = Domain(N), 0, 0
        self.start = custom_operator(self.iterated)
        defvjp(self.start, lambda ans, strength: lambda g: anp.zeros_like(strength))
        defjvp(self.start, lambda g, ans, strength: anp.zeros_like(ans))

    def step(self, u, strength):
        padded = self.domain.exchange(u)
        if isbox(padded):
            self.recorded += 1
        else:
            self.plain += 1
        return (padded[:-2] + padded[2:] + strength * anp.exp(-u) / (N + 1) ** 2) / 2

    def iterated(self, strength):
        u, change = np.zeros(self.domain.local_shape), 1.0
        while change > 1e-8:
            u, before = self.step(u, strength), u
            change = float(mpiad.stop_gradient(self.domain.max(np.abs(mpiad.stop_gradient(u - before)))))
        return u

    def loss(self, strength, start=None):
        start = self.start(strength) if start is None else start
        return self.domain.sum(newton(lambda u, s: self.step(u, s) - u, start, strength) ** 4)


@pytest.fixture
def case():
    return FixedPoint()


def test_a_loop_before_the_differentiated_function(case):
    start = case.iterated(STRENGTH)
    assert case.plain > 100
    found = mpiad.value_and_grad(lambda strength: case.loss(strength, start), shared=True)(STRENGTH)
    np.testing.assert_allclose(found, reference(STRENGTH), rtol=1e-8)
    assert case.recorded < 20


@pytest.mark.parametrize("form", ["interpreted", "inside", "outside"])
def test_a_loop_as_an_operator_with_zero_derivatives(case, form):
    """In an objective, whose parameters change; `inside`, `outside`: of what `jit` compiles."""
    inside = mpiad.jit if form == "inside" else lambda fun: fun
    loss = mpiad.jit(case.loss) if form == "outside" else case.loss
    h = 1e-5
    second = (reference(STRENGTH + h)[1] - reference(STRENGTH - h)[1]) / (2 * h)
    for strength in (STRENGTH, 1.1 * STRENGTH, STRENGTH):
        found = inside(mpiad.value_and_grad(loss, shared=True))(strength)
        np.testing.assert_allclose(found, reference(strength), rtol=1e-8)
        np.testing.assert_allclose(mpiad.jvp(inside(loss), strength, 1.0), reference(strength), rtol=1e-8)
    np.testing.assert_allclose(mpiad.hvp(inside(loss), shared=True)(STRENGTH, 1.0), second, rtol=1e-6)
    assert case.plain > 500


def test_nothing_of_the_operator_is_recorded(case):
    for derivative in (
        mpiad.grad(case.loss),
        lambda x: mpiad.jvp(case.loss, x, 1.0),
        lambda x: mpiad.hvp(case.loss)(x, 1.0),
    ):
        case.recorded = case.plain = 0
        derivative(STRENGTH)
        assert case.plain > 100 > 40 > case.recorded


def test_a_number_of_steps_as_an_operator(case):
    """Of a `scan` in an objective: against the same with a constant number of steps."""

    def steps_until_small(strength):
        u, steps = np.zeros(case.domain.local_shape), 0
        while float(mpiad.stop_gradient(case.domain.max(u))) < 0.25:
            u, steps = case.step(u, strength), steps + 1
        return steps

    counted = custom_operator(steps_until_small)
    defvjp(counted, lambda ans, strength: lambda g: anp.zeros_like(strength))
    defjvp(counted, lambda g, ans, strength: anp.zeros_like(ans))

    def loss(strength, steps=None):
        steps = int(mpiad.stop_gradient(counted(strength))) if steps is None else steps
        u = np.zeros(case.domain.local_shape)
        return case.domain.sum(scan(lambda u, k, s: case.step(u, s), u, steps, strength) ** 2)

    steps = steps_until_small(STRENGTH)
    assert steps > 10
    fixed = lambda strength: loss(strength, steps)  # noqa: E731
    assert mpiad.grad(loss, shared=True)(STRENGTH) == mpiad.grad(fixed, shared=True)(STRENGTH) != 0
    assert mpiad.jvp(loss, STRENGTH, 1.0) == mpiad.jvp(fixed, STRENGTH, 1.0)
    assert mpiad.hvp(loss)(STRENGTH, 1.0) == mpiad.hvp(fixed)(STRENGTH, 1.0)
    case.recorded = 0
    mpiad.grad(loss)(STRENGTH)
    assert case.recorded <= steps


def test_a_loop_within_is_recorded(case):
    """Since the other ranks' operands of a communication may be variables: what the page warns of."""
    mpiad.grad(lambda strength: case.loss(strength, mpiad.stop_gradient(case.iterated(mpiad.stop_gradient(strength)))))(
        STRENGTH
    )
    assert case.recorded > 100
