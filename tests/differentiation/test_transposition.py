"""Tangents of functions that autograd has only adjoints for, against closed forms and central differences."""

import autograd.numpy as anp
import autograd.scipy.special as special
import numpy as np
import pytest

import mpiad
from mpiad.testing import check_grads

pytestmark = pytest.mark.serial
X, V = np.array([0.3, 1.2, 0.7, 2.0]), np.array([1.0, -0.4, 0.2, 0.9])


def spd(x):
    """Return a positive definite matrix made of x."""
    return anp.outer(x, x) + 4.0 * anp.eye(4)


FUNCTIONS = {
    "fft": lambda x: anp.real(anp.fft.fft(x)) + anp.imag(anp.fft.fft(x**2)),
    "rfft": lambda x: anp.abs(anp.fft.rfft(x**2)) ** 2,
    "inv": lambda x: anp.linalg.inv(spd(x)),
    "solve": lambda x: anp.linalg.solve(spd(x), x**2),
    "det": lambda x: anp.linalg.det(spd(x)),
    "cholesky": lambda x: anp.linalg.cholesky(spd(x)),
    "erf": lambda x: special.erf(x),
    "gammaln": lambda x: special.gammaln(x),
    "hypot": lambda x: anp.hypot(x, x[::-1]),
    "astype": lambda x: x.astype(np.float64) ** 2,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_tangents_are_central_differences(name):
    f, h = FUNCTIONS[name], 1e-5
    value, tangent = mpiad.jvp(f, X, V)
    np.testing.assert_array_equal(value, f(X))
    np.testing.assert_allclose(tangent, (f(X + h * V) - f(X - h * V)) / (2 * h), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_over_reverse(name):
    rates = check_grads(lambda x: anp.sum(anp.sin(FUNCTIONS[name](x))), X, order=2, modes=("fwd",), step=0.02)
    assert min(rates.values()) > 1.8


def test_complex_tangents_follow_the_derivative():
    z = np.array([1.0 + 2.0j, 0.5 - 1.0j, 2.0j, 1.0])
    w = np.array([0.3 - 1.0j, 1.0j, 2.0, -1.0 + 0.5j])
    np.testing.assert_allclose(mpiad.jvp(anp.fft.fft, z, w)[1], np.fft.fft(w), rtol=1e-13)
