"""Tests of the choice of residuals: what a derivative's forward program stores for its backward program."""

import autograd.numpy as anp
import numpy as np
import pytest
from autograd.extend import defjvp, defvjp, primitive
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

import mpiad
from mpiad.programs import operation
from mpiad.programs.residuals import side_of_source
from mpiad.timestepping import scan

pytestmark = pytest.mark.serial


@pytest.mark.parametrize("seed", range(20))
def test_minimum_cut(seed):
    rng = np.random.default_rng(seed)
    for _ in range(20):
        count, number = rng.integers(2, 30), rng.integers(1, 150)
        starts, ends = rng.integers(0, count, (2, number))
        capacities = rng.integers(1, 20, number)
        side = side_of_source(count, [(int(a), int(b), float(c)) for a, b, c in zip(starts, ends, capacities)])
        assert 0 in side
        assert 1 not in side
        cut = sum(c for a, b, c in zip(starts, ends, capacities) if a in side and b not in side)
        graph = csr_array((capacities.astype(np.int32), (starts, ends)), (count, count))
        assert cut == maximum_flow(graph, 0, 1).flow_value


def lattice_boltzmann(np):
    """A step of a one-dimensional lattice-Boltzmann method with three velocities."""

    def step(f, k):
        f = [f[0], np.roll(f[1], 1), np.roll(f[2], -1)]
        density = f[0] + f[1] + f[2]
        speed = (f[1] - f[2]) / density
        weights = zip(f, (4 / 6, 1 / 6, 1 / 6), (0, 1, -1))
        squares = speed * speed
        even = [w * density * (1 + 3 * e * speed + 4.5 * e * e * squares - 1.5 * squares) for _, w, e in weights]
        return np.stack([g + 0.6 * (h - g) for g, h in zip(f, even)])

    return step, 3


def half_steps(np):
    """A step that reads neighbors of a value which itself costs less than storing it."""

    def step(u, k):
        half = 0.5 * u[0] + 0.1 * u[1]
        flux = (half - np.roll(half, 1)) * (half + 0.2 * np.roll(half, -1)) ** 2
        return np.stack([u[0] - 0.1 * flux, u[1] + 0.05 * half * flux])

    return step, 2


def masked(np):
    """A step with a mask, which has no derivative, and with functions that cost more than storing their results."""

    def step(u, k):
        a, b = np.where(u[0] > u[1], u[0] * u[1], u[1] ** 3), np.exp(u[0]) * np.tanh(u[1])
        return np.stack([u[0] + 0.1 * a * b, u[1] - 0.1 * a * a])

    return step, 2


# Density and speed; the value of the half step; the state, and the product of functions that cost more than storing it.
@pytest.mark.parametrize(
    ("make", "most", "count"), [(lattice_boltzmann, 2, 1), (half_steps, 1, 1), (masked, 3, 1), (half_steps, 1, 20)]
)
def test_what_is_cheap_is_computed_again(make, most, count, monkeypatch):
    (plain, rows), (traced, _) = make(np), make(anp)
    rng = np.random.default_rng(3)
    x, v, w = 1 + 0.2 * rng.random((rows, 40)), rng.normal(size=(rows, 40)), rng.normal(size=(rows, 40))
    stored, original = [], operation.linearized

    def linearized(program, *args):
        forward, backward = original(program, *args)
        stored.append(len(forward.outputs) - len(program.outputs))
        return forward, backward

    monkeypatch.setattr(operation, "linearized", linearized)
    jitted = mpiad.jit(traced, strict=True)
    product = mpiad.hvp(lambda x: anp.sum(scan(jitted, x, count) ** 3))(x, v)

    def along(t):  # the derivative of the loss along w at x + t v, by a complex step
        u = x + t * v + 1e-30j * w
        for k in range(count):
            u = plain(u, k)
        return np.sum(u**3).imag / 1e-30

    h = 1e-3
    differences = [(c * (along(k * h) - along(-k * h))) for k, c in ((1, 45), (2, -9), (3, 1))]
    np.testing.assert_allclose(np.sum(w * product), sum(differences) / (60 * h), rtol=1e-9)
    assert stored
    assert max(stored) <= most * count


@primitive
def reversed_gradient(x):
    return x


defvjp(reversed_gradient, lambda ans, x: lambda g: -g)
defjvp(reversed_gradient, lambda g, ans, x: -g)


def test_functions_that_return_their_arguments():
    """Such a function has the value of its argument, but another derivative."""

    def fun(x):
        y = 2.0 * x + 1.0
        z = reversed_gradient(y)
        return anp.sum(z * z * y + anp.sin(z) * z)

    x, v = np.linspace(0.1, 1.0, 5), np.linspace(1.0, -2.0, 5)
    y = 2.0 * x + 1.0
    # With dz = -dy and y = z in value, the derivatives are those of z²y + z sin z with respect to z and y.
    by_zz, by_zy = 2 * y + 2 * np.cos(y) - y * np.sin(y), 2 * y
    product = 4.0 * (by_zz - 2 * by_zy) * v
    np.testing.assert_allclose(mpiad.hvp(fun)(x, v), product, rtol=1e-13)
    np.testing.assert_allclose(mpiad.hvp(mpiad.jit(fun, strict=True))(x, v), product, rtol=1e-13)
