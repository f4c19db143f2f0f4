"""Heat and waves on divided grids: order of convergence, dense references, Taylor rates, what is conserved."""

import autograd.numpy as anp
import numpy as np
import pytest
import scipy.sparse as sparse
from scipy.sparse.linalg import splu

import mpiad
import mpiad.linalg
from mpiad.domain import Domain
from mpiad.testing import check_grads
from mpiad.timestepping import scan


def crank_nicolson(laplacian, u, step, source=0.0):
    """Return the temperature after a step, by an implicit solve."""
    right = u + step / 2 * laplacian(u) + step * source
    return mpiad.linalg.solve(lambda v: v - step / 2 * laplacian(v), right, rtol=1e-12)


def heat_error(cells):
    """Return the error at the end for the manufactured u = e^{-3t} sin πx sin 2πy (1 + xy), zero on all sides."""
    domain, h = Domain((cells, cells)), 1 / (cells + 1)
    x, y = domain.coordinates(h, h)
    laplacian = domain.laplacian(h)
    pi = np.pi
    a, b = np.sin(pi * x), np.sin(2 * pi * y)
    da, db = pi * np.cos(pi * x), 2 * pi * np.cos(2 * pi * y)
    field = a * b * (1 + x * y)
    # Δ(fg) = fΔg + 2∇f·∇g + gΔf with f = sin sin and g = 1 + xy, whose Laplacian is zero.
    curved = -5 * pi**2 * field + 2 * (da * b * y + a * db * x)
    steps = (cells + 1) // 2
    step, u = 0.2 / steps, field
    for k in range(steps):
        middle = np.exp(-3 * (k + 0.5) * step)
        u = crank_nicolson(laplacian, u, step, middle * (-3 * field - curved))
    return domain.norm(u - np.exp(-0.6) * field) * h


@pytest.mark.one_rank  # on ranks the states are compared with a serial program's
def test_heat_converges_with_order_two():
    errors = [heat_error(cells) for cells in (5, 11, 23)]
    orders = np.log2(np.array(errors[:-1]) / errors[1:])
    assert np.all(np.abs(orders - 2) < 0.1), (errors, orders)


def line(n):
    return sparse.diags([np.ones(n - 1), -2 * np.ones(n), np.ones(n - 1)], [-1, 0, 1])


def test_heat_gradient_is_that_of_a_serial_sparse_program(rank_rng):
    shape, steps, step = (6, 7), 5, 0.3
    domain = Domain(shape)
    laplacian = domain.laplacian()
    start, data = (rank_rng(100 + k).standard_normal(shape) for k in range(2))

    def loss(u):
        for _ in range(steps):
            u = crank_nicolson(laplacian, u, step)
        return domain.sum(anp.sin(u) * data[domain.owned])

    matrix = sparse.kron(line(6), sparse.eye(7)) + sparse.kron(sparse.eye(6), line(7))
    implicit = splu(sparse.csc_matrix(sparse.eye(42) - step / 2 * matrix))
    explicit = sparse.csr_matrix(sparse.eye(42) + step / 2 * matrix)

    def serial(u):
        for _ in range(steps):
            u = implicit.solve(explicit @ u)
        return np.sin(u) @ data.ravel()

    flat, width = start.ravel(), 1e-6
    differences = np.array([serial(flat + width * e) - serial(flat - width * e) for e in np.eye(42)]) / (2 * width)
    u = flat
    for _ in range(steps):
        u = implicit.solve(explicit @ u)
    adjoint = np.cos(u) * data.ravel()
    for _ in range(steps):
        adjoint = explicit.T @ implicit.solve(adjoint, trans="T")
    value, gradient = mpiad.value_and_grad(loss)(start[domain.owned])
    np.testing.assert_allclose(value, serial(flat), 1e-9)
    np.testing.assert_allclose(gradient, adjoint.reshape(shape)[domain.owned], 1e-7, 1e-9)
    np.testing.assert_allclose(gradient, differences.reshape(shape)[domain.owned], 1e-5, 1e-7)


def leapfrog(laplacian):
    def step(state, k, square):
        u, before = state
        return 2 * u - before + square * laplacian(u), u

    return step


def test_wave_gradient_is_that_of_a_serial_sparse_program(rank_rng):
    # By the squared speed in each cell, through `scan` with three checkpoints.
    shape, steps = (6, 7), 12
    domain = Domain(shape)
    start, data = (rank_rng(100 + k).standard_normal(shape) for k in range(2))
    square = 0.2 + 0.1 * rank_rng(102).random(shape)
    step = leapfrog(domain.laplacian())

    def loss(c):
        u = start[domain.owned]
        last, _ = scan(step, (u, u), steps, c, checkpoints=3)
        return domain.dot(last**2, data[domain.owned])

    matrix = sparse.csr_matrix(sparse.kron(line(6), sparse.eye(7)) + sparse.kron(sparse.eye(6), line(7)))

    def serial(c):
        u = before = start.ravel()
        for _ in range(steps):
            u, before = 2 * u - before + c * (matrix @ u), u
        return u**2 @ data.ravel()

    flat, width = square.ravel(), 1e-6
    differences = np.array([serial(flat + width * e) - serial(flat - width * e) for e in np.eye(42)]) / (2 * width)
    value, gradient = mpiad.value_and_grad(loss)(square[domain.owned])
    np.testing.assert_allclose(value, serial(flat), 1e-10)
    np.testing.assert_allclose(gradient, differences.reshape(shape)[domain.owned], 1e-6, 1e-7 * np.abs(differences).max())


@pytest.mark.one_rank  # on ranks the gradients are compared with serial programs'
def test_taylor_rates(rng):
    domain = Domain((7, 9), periodic=(False, True))
    laplacian = domain.laplacian(boundary="edge")
    u, square = rng.standard_normal(domain.local_shape), 0.2 + 0.1 * rng.random(domain.local_shape)

    def heat(v):
        return domain.norm(crank_nicolson(laplacian, v, 0.4)) ** 3

    def wave(z):
        last, _ = scan(leapfrog(laplacian), (z["u"], z["u"]), 4, z["c"], checkpoints=2)
        return domain.sum(last**4)

    check_grads(heat, u)
    check_grads(wave, {"u": u, "c": square})


@pytest.mark.not_on(4)
def test_closed_sides_keep_the_heat(rng):
    domain = Domain((8, 11), periodic=(False, True))
    laplacian = domain.laplacian(boundary="edge")
    u = rng.random(domain.local_shape)
    heat = domain.sum(u)
    for _ in range(6):
        u = crank_nicolson(laplacian, u, 0.7)
    np.testing.assert_allclose(domain.sum(u), heat, 1e-10)
    assert domain.max(u) - domain.min(u) < 0.5


def test_waves_keep_their_energy(rng):
    # Leapfrog's own energy, |u' - u|² weighted by 1/c² less ⟨u', Δu⟩, changes by rounding only.
    domain = Domain((8, 11), periodic=(False, True))
    laplacian = domain.laplacian(order=4, boundary="zero")
    square = 0.1 + 0.1 * rng.random(domain.local_shape)
    step = leapfrog(laplacian)
    u = before = rng.standard_normal(domain.local_shape)

    def energy(u, before):
        return domain.sum((u - before) ** 2 / square) - domain.dot(u, laplacian(before))

    found = []
    for k in range(40):
        u, before = step((u, before), k, square)
        found.append(energy(u, before))
    np.testing.assert_allclose(found, found[0], 1e-11)
