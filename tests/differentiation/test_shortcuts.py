"""Operators that take a short way, and several tangents at once: the same numbers as by the usual way."""

from __future__ import annotations

import autograd
import autograd.numpy as anp
import numpy as np
import pytest

import mpiad
from mpiad.differentiation.forward import Bundle
from mpiad.differentiation.shortcuts import ShortcutBox, bundle_box, shortened

pytestmark = pytest.mark.serial

X = np.random.default_rng(0).uniform(0.5, 1.5, (3, 4))
ROW = np.arange(1.0, 5.0)


def program(u):
    x, y, z = u
    a = 2 * x - y * 3.0 + (1 - z) / 2.0
    b = ROW * x + x * ROW[:, None] - ROW / y + -z * a
    c = anp.sin(u[1:] + 1j * u[0]) * u[-1] + np.float64(2.0) * u[:, ::2][0, 0]
    return anp.sum(b * a) + anp.sum(anp.real(c)) + anp.sum(u[0] * u[0]) - anp.sum(x / u[np.array([0, 1])]) + 5 / x[0]


@pytest.mark.interpreted
def test_gradients_are_those_of_the_usual_way():
    seen = []

    def short(u):
        seen.append(type(shortened(u)))
        return program(shortened(u))

    assert mpiad.grad(short)(X).tobytes() == mpiad.grad(program)(X).tobytes()
    np.testing.assert_allclose(mpiad.grad(short)(X), autograd.grad(program)(X), rtol=1e-13)
    assert ShortcutBox in seen


def test_higher_orders():
    v = np.cos(X)
    one, other = (mpiad.hvp(lambda u, f=f: program(f(u)))(X, v) for f in (shortened, lambda u: u))
    np.testing.assert_allclose(one, other, rtol=1e-12)
    one, other = (mpiad.jvp(lambda u, f=f: program(f(u)), X, v)[1] for f in (shortened, lambda u: u))
    np.testing.assert_allclose(one, other, rtol=1e-13)


@pytest.mark.interpreted
def test_a_lasting_value_is_a_constant():
    kept = []

    def keep(u):
        kept.append(shortened(u))
        return anp.sum(u)

    mpiad.grad(keep)(X)
    found = mpiad.grad(lambda x: anp.sum(shortened(x) * kept[0]) + anp.sum(kept[0] - shortened(x)))(X)
    np.testing.assert_allclose(found, X - 1)


def test_several_tangents():
    along = [np.cos(X), None, np.ones_like(X)]
    with Bundle() as bundle:
        x = bundle.variable(X, along)
        values, tangents = zip(*[bundle.parts(value) for value in (program(shortened(x)), x[1], 7.0)])
    assert values[2] == 7.0 and tangents[2] is None
    for j, direction in enumerate(along):
        for i, fun in enumerate((program, lambda u: u[1])):
            if direction is None:
                assert tangents[i][j] is None
            else:
                value, expected = mpiad.jvp(fun, X, direction)
                np.testing.assert_array_equal(values[i], value)
                np.testing.assert_allclose(tangents[i][j], expected, rtol=1e-13)


def test_several_tangents_of_two_variables():
    y = X + 1
    with Bundle() as bundle:
        one, other = bundle.variable(X, [X, None]), bundle.variable(y, [None, y])
        _, tangents = bundle.parts(shortened(one) * shortened(other) + anp.exp(one))
    np.testing.assert_allclose(tangents[0], X * y + X * np.exp(X))
    np.testing.assert_allclose(tangents[1], X * y)


def test_all_tangents_in_one_array():
    """Operators of arrays whose tangents form one array, also with operands of other shapes."""
    along, y = np.stack([np.cos(X), np.ones_like(X)]), X[0] + 2.0

    def f(x):
        first, second = x[0], x[1]
        return (
            first * second / (2.0 + first)
            - (first - y) * 3.0
            + y * second
            - (-second) / y
            + (y - first)
            + first * y[:, None]
            + x[:, :1][0]
        )

    with Bundle() as bundle:
        tape = bundle.variable(X, list(along))._node.tape
        value, tangents = bundle.parts(f(bundle_box(X, along, tape, tape.number)))
    assert tangents is not None
    for tangent, direction in zip(tangents, along):
        expected = mpiad.jvp(f, X, direction)
        np.testing.assert_allclose(value, expected[0])
        np.testing.assert_allclose(tangent, expected[1], rtol=1e-13)


def test_inner_trace():
    """A value with faster operators can be the variable of an inner trace."""
    square = mpiad.grad(lambda x: anp.sum(shortened(x) * mpiad.grad(lambda y: anp.sum(y**3))(shortened(x))))
    np.testing.assert_allclose(square(X), 9 * X**2, rtol=1e-13)
