"""Solutions that are known: the error of distributed Poisson and Burgers solves is of second order in the spacing."""

import autograd.numpy as anp
import numpy as np
import pytest

from mpiad.domain import Domain
from mpiad.linalg import newton, solve

pytestmark = pytest.mark.one_rank  # on ranks solutions are compared with dense ones: test_methods, test_newton
PI = np.pi


def orders(errors):
    return np.log2(np.array(errors[:-1]) / errors[1:])


def poisson_error(n, method):
    """Return the error of -∇·(κ∇u) + w·∇u = f on n² points, with κ = 1 + xy and u = sin πx sin 2πy."""
    domain, h = Domain((n, n)), 1 / (n + 1)
    y, x = domain.coordinates(h, h)
    y_halo, x_halo = domain.coordinates(h, h, halo=True)
    kappa = 1 + x_halo * y_halo
    wind = 0.0 if method == "cg" else 3.0
    u = np.sin(PI * x) * np.sin(2 * PI * y)
    by_x, by_y = PI * np.cos(PI * x) * np.sin(2 * PI * y), 2 * PI * np.sin(PI * x) * np.cos(2 * PI * y)
    f = 5 * PI**2 * (1 + x * y) * u - y * by_x - x * by_y + wind * by_x

    def operator(u):
        v = domain.exchange(u)
        down = (kappa[1:, 1:-1] + kappa[:-1, 1:-1]) / 2 * (v[1:, 1:-1] - v[:-1, 1:-1])
        right = (kappa[1:-1, 1:] + kappa[1:-1, :-1]) / 2 * (v[1:-1, 1:] - v[1:-1, :-1])
        diffusion = (down[:-1] - down[1:] + right[:, :-1] - right[:, 1:]) / h**2
        return diffusion + wind * (v[1:-1, 2:] - v[1:-1, :-2]) / (2 * h)

    return h * domain.norm(solve(operator, f, method=method, rtol=1e-10) - u)


@pytest.mark.parametrize("method", ["cg", "gmres", "bicgstab"])
def test_poisson(method):
    found = orders([poisson_error(n, method) for n in (7, 15, 31)])
    np.testing.assert_allclose(found, 2.0, atol=0.1)


def burgers_error(n):
    """Return the error of u u' = ν u'' + f with u = sin πx + x/2, and so 0 and 1/2 at the ends."""
    domain, h, nu = Domain(n), 1 / (n + 1), 0.1
    (x,) = domain.coordinates(h, h)
    u = anp.sin(PI * x) + x / 2
    f = u * (PI * np.cos(PI * x) + 0.5) + nu * PI**2 * np.sin(PI * x)

    def residual(u):
        v = domain.exchange(u, ((0.0, 0.5),))
        return u * (v[2:] - v[:-2]) / (2 * h) - nu * (v[2:] - 2 * u + v[:-2]) / h**2 - f

    return np.sqrt(h) * domain.norm(newton(residual, 0.5 * x, rtol=1e-11) - u)


def test_burgers():
    np.testing.assert_allclose(orders([burgers_error(n) for n in (15, 31, 63)]), 2.0, atol=0.1)
