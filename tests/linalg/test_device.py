"""Linear and nonlinear systems on devices: what they give on the host, and a few numbers copied in each iteration."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest
from device_double import DeviceArray, on_device, on_host, transfers

import mpiad
from mpiad import Domain
from mpiad.linalg import compiled_iteration, newton, solve

_RANK, _SIZE = mpiad.mpi_rank(), mpiad.mpi_size()
_N = 13


def _problem(put, dtype=float, convection=0.0, lead=()):
    """A chain of cells over all ranks: a diffusion, with a convection where it isn't to be symmetric."""
    domain = Domain((_N * _SIZE,), halo=1)
    rng = np.random.default_rng(_RANK)
    kappa, b = 1 + rng.random(domain.local_shape), rng.normal(size=(*lead, *domain.local_shape))

    def matvec(u, kappa):
        around = domain.exchange(u)
        left, right = around[..., :-2], around[..., 2:]
        return (2.0 + kappa) * u - (1.0 + convection) * left - (1.0 - convection) * right

    return matvec, put(b.astype(dtype)), put(kappa.astype(np.zeros(0, dtype).real.dtype))


def _loss(put, method, **settings):
    matvec, b, kappa = _problem(put, settings.pop("dtype", float), 0.0 if method == "cg" else 0.3, settings.pop("lead", ()))

    def loss(b, kappa):
        u = solve(matvec, b, kappa, method=method, rtol=1e-11, **settings)
        return anp.sum(anp.abs(u) ** 2)

    return loss, b, kappa


@pytest.mark.parametrize("method", ["cg", "gmres", "bicgstab"])
@pytest.mark.parametrize("settings", [{}, {"lead": (3,), "batch": 1}, {"dtype": complex}, {"restart": 4}])
def test_solutions_and_derivatives_are_those_of_the_host(method, settings):
    loss, *host = _loss(np.asarray, method, **settings)
    value, gradient = mpiad.value_and_grad(loss, (0, 1), objective="sum")(*host)
    loss, *there = _loss(on_device, method, **settings)
    found, of_device = mpiad.value_and_grad(loss, (0, 1), objective="sum")(*there)
    np.testing.assert_allclose(found, value, rtol=1e-8)
    for mine, known in zip(of_device, gradient):
        assert type(mine) is DeviceArray and mine.dtype == known.dtype
        np.testing.assert_allclose(on_host(mine), known, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("method", ["cg", "gmres", "bicgstab"])
def test_tangents_preconditioners_and_starts(method):
    def moved(put, along):
        matvec, b, kappa = _problem(put, convection=0.0 if method == "cg" else 0.3)
        diagonal = 2.0 + kappa
        x0 = b / diagonal

        def solution(kappa):
            return solve(
                matvec, b, kappa, method=method, rtol=1e-11, x0=x0, preconditioner=lambda r, kappa: r / (2.0 + kappa)
            )

        return mpiad.jvp(solution, kappa, put(along))

    along = np.cos(np.arange(1.0 * _N))
    for found, known in zip(moved(on_device, along), moved(np.asarray, along)):
        np.testing.assert_allclose(on_host(found), known, rtol=1e-7, atol=1e-10)


def test_single_precision_and_sizes_beyond_its_squares():
    matvec, b, kappa = _problem(on_device, np.float32)
    for size in (1.0, 1e-25, 1e25):
        u = solve(matvec, b * np.float32(size), kappa, rtol=1e-5)
        assert u.dtype == np.float32
        gap = on_host(matvec(u, kappa)).astype(float) - on_host(b).astype(float) * size
        assert np.linalg.norm(gap) <= 1e-4 * np.linalg.norm(on_host(b).astype(float) * size) + 1e-7 * size


@pytest.mark.serial
def test_an_iteration_copies_a_few_numbers(monkeypatch):
    monkeypatch.setattr(compiled_iteration, "_FIRST_RUNS", 10**9)  # interpreted, also beside kernels for the stand-in
    rng = np.random.default_rng(0)
    matrix = on_device(np.diag(1 + 10 * rng.random(40)))
    b, norms = on_device(rng.normal(size=40)), []
    transfers.reset()
    solve(lambda u, a: a @ u, b, matrix, rtol=1e-10, callback=norms.append)
    assert len(norms) > 10
    assert transfers.h2d == 0 and transfers.d2h <= 2 * len(norms) + 6
    assert transfers.d2h_bytes <= 24 * transfers.d2h


def test_roots():
    def root(put, kappa):
        domain = Domain((_N * _SIZE,), halo=1)

        def residual(u, kappa):
            around = domain.exchange(u)
            return 2.5 * u - around[:-2] - around[2:] + kappa * u**3 - 1.0

        return anp.sum(newton(residual, put(np.zeros(_N)), kappa, rtol=1e-12, method="gmres") ** 2)

    kappa = 0.5 + np.random.default_rng(_RANK).random(_N)
    known = mpiad.value_and_grad(lambda k: root(np.asarray, k), objective="sum")(kappa)
    found = mpiad.value_and_grad(lambda k: root(on_device, k), objective="sum")(on_device(kappa))
    np.testing.assert_allclose(found[0], known[0], rtol=1e-9)
    np.testing.assert_allclose(on_host(found[1]), known[1], rtol=1e-6)


def test_arrays_in_two_places_are_refused_by_name():
    matvec, b, kappa = _problem(on_device)
    with pytest.raises(TypeError, match="matvec must return an array on the device of b, but returned ndarray"):
        solve(lambda u: on_host(u), b)
    with pytest.raises(TypeError, match="return an array on the host, as b is, but returned .* on device 0"):
        solve(lambda u: on_device(u), on_host(b))
    with pytest.raises(TypeError, match="x0 and b must be on one device"):
        solve(matvec, b, kappa, x0=on_host(b))
