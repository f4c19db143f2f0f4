"""Several tangents at once, compared with one forward-mode derivative per direction."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest

import mpiad
from mpiad.differentiation.forward import Bundle

pytestmark = pytest.mark.serial

X = np.random.default_rng(0).uniform(0.5, 1.5, (3, 4))
ROW = np.arange(1.0, 5.0)


def program(u):
    x, y, z = u
    a = 2 * x - y * 3.0 + (1 - z) / 2.0
    b = ROW * x + x * ROW[:, None] - ROW / y + -z * a
    c = anp.sin(u[1:] + 1j * u[0]) * u[-1] + np.float64(2.0) * u[:, ::2][0, 0]
    return anp.sum(b * a) + anp.sum(anp.real(c)) + anp.sum(u[0] * u[0]) - anp.sum(x / u[np.array([0, 1])]) + 5 / x[0]


def test_several_tangents():
    along = [np.cos(X), None, np.ones_like(X)]
    with Bundle() as bundle:
        x = bundle.variable(X, along)
        values, tangents = zip(*[bundle.parts(value) for value in (program(x), x[1], 7.0)])
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
        _, tangents = bundle.parts(one * other + anp.exp(one))
    assert tangents is not None
    np.testing.assert_allclose(tangents[0], X * y + X * np.exp(X))
    np.testing.assert_allclose(tangents[1], X * y)
