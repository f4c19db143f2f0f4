"""Two ways to one gradient, and what a trajectory's gradient doesn't depend on."""

from __future__ import annotations

import gc
import logging
import weakref
from functools import cache

import autograd.numpy as anp
import numpy as np
import pytest
from ode_systems import lorenz

import mpiad
from mpiad.ensemble import (
    EnsembleProblem,
    EnsembleSerial,
    EnsembleThreads,
    EnsembleVectorized,
    ODEProblem,
    remake,
    run,
    solve,
)
from mpiad.ensemble.field_jacobian import field_program

pytestmark = pytest.mark.serial

COARSE = {"rtol": 1e-4, "atol": 1e-7, "compile": False}
RHO = np.linspace(0, 21, 600)[:, None]
U0 = np.random.default_rng(0).uniform(0.5, 1.5, (600, 3))
WAYS = pytest.mark.parametrize("way", ["tangent", "adjoint"])


def loss(u0, p, f=lorenz, backend=None, saveat=0.2, **more):
    ensemble = EnsembleProblem(ODEProblem(f, u0[0], (0.0, 1.0)), u0=u0, p=p)
    sol = solve(ensemble, ensemblealg=backend or EnsembleVectorized(), saveat=saveat, **COARSE, **more)
    return anp.sum(anp.sin(sol.u)) + anp.sum(sol.u_end**2)


def complex_field(u, p, t):
    return [1j * p[0] * u[0] * anp.abs(u[1]), -p[1] * u[1] + 0.1 * u[0] ** 2]


def test_both_ways_agree():
    cases = [(lorenz, U0[:20], RHO[:20]), (complex_field, U0[:5, :2] * (1 + 1j), U0[5:10, :2])]
    for f, u0, p in cases:

        def real_loss(u0, p, f=f, **more):
            return anp.real(loss(u0, p, f, **more))

        for argnum in (0, 1, (0, 1)):
            one, other = (np.hstack(mpiad.grad(
                lambda x, y, way=way: real_loss(x, y, gradient=way), argnum if isinstance(argnum, tuple) else (argnum,)
            )(u0, p)) for way in ("tangent", "adjoint"))  # fmt: skip
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12 * np.abs(other).max())


@pytest.mark.parametrize("shared", [True, False])
def test_f_with_many_parameters_has_a_program_but_a_network_has_none(shared, monkeypatch):
    """With the exact gradients of exp(-p), and a network's matrix, whose numbers outnumber the operations of arrays."""
    found = []

    def recorded(batch):
        found.append(field_program(batch))
        return found[-1]

    monkeypatch.setattr(run, "field_program", recorded)
    rng = np.random.default_rng(1)
    p, u0 = rng.uniform(0.5, 1.0, (60,) if shared else (4, 60)), rng.uniform(0.5, 1.5, (4, 60))

    def squares(p, f, u0):
        problem = EnsembleProblem(ODEProblem(f, u0[0], (0.0, 1.0), p if shared else p[0]), u0=u0, p=None if shared else p)
        sol = solve(problem, rtol=1e-10, atol=1e-12, compile=False, gradient="adjoint")
        return anp.sum(sol.u_end**2)

    exact = -2 * u0**2 * np.exp(-2 * p)
    by_program = mpiad.grad(squares)(p, lambda u, p, t: [-rate * x for rate, x in zip(p, u)], u0)
    np.testing.assert_allclose(by_program, exact.sum(0) if shared else exact, rtol=1e-8)
    assert found and all(program is not None for program in found)
    found.clear()
    # One product with all numbers of p.
    mpiad.grad(squares)(p, lambda u, p, t: -anp.reshape(p, (60, -1)) * u, u0)
    assert found and all(program is None for program in found)


def test_shared_parameters_both_ways():
    def shared(p, way):
        ensemble = EnsembleProblem(ODEProblem(lorenz, U0[0], (0.0, 1.0), p), u0=U0[:9])
        return anp.sum(solve(ensemble, gradient=way, **COARSE).u_end ** 2)

    one, other = (mpiad.grad(shared)(np.array([5.0]), way) for way in ("tangent", "adjoint"))
    np.testing.assert_allclose(one, other, rtol=1e-12)


@WAYS
def test_shared_parameters_in_several_blocks(way, monkeypatch):
    def shared(p, rows=slice(0, 9)):
        ensemble = EnsembleProblem(ODEProblem(lorenz, U0[0], (0.0, 1.0), p), u0=U0[rows])
        return anp.sum(solve(ensemble, gradient=way, **COARSE).u_end ** 2)

    p = np.array([5.0])
    expected = sum(mpiad.grad(lambda p, k=k: shared(p, slice(k, k + 1)))(p) for k in range(9))
    monkeypatch.setattr("mpiad.ensemble.run._LEAST_COLUMNS", 1)
    monkeypatch.setattr("mpiad.ensemble.run._BLOCK", 9)
    np.testing.assert_allclose(mpiad.grad(shared)(p), expected, rtol=1e-12)


@pytest.fixture
def counted(monkeypatch):
    """Count the sweeps of both kinds."""
    from mpiad.ensemble import differentiable, directions

    calls = []
    for name, user in (("pull_run", differentiable), ("push_run", directions)):
        fun = getattr(user, name)
        monkeypatch.setattr(user, name, lambda *a, fun=fun, name=name: (calls.append(name), fun(*a))[1])
    return calls


def test_arrays_use_the_adjoint_unless_tangents_are_requested(counted):
    mpiad.grad(loss, 1)(U0[:4], RHO[:4])
    mpiad.grad(loss, 0)(U0[:4], RHO[:4])
    mpiad.grad(loss, (0, 1))(U0[:4], RHO[:4])
    mpiad.grad(lambda p: loss(U0[:4], p, gradient="adjoint"))(RHO[:4])
    mpiad.grad(lambda u0: loss(u0, RHO[:4], gradient="tangent"))(U0[:4])
    assert counted == ["pull_run", "pull_run", "pull_run", "pull_run", "push_run"]
    with pytest.raises(ValueError, match="gradient must be"):
        loss(U0[:2], RHO[:2], gradient="forward")
    with pytest.raises(ValueError, match="With None, the default, solve chooses"):
        loss(U0[:2], RHO[:2], gradient="auto")


@pytest.mark.few(1)
@WAYS
def test_the_record_is_freed_with_the_gradient(way, monkeypatch):
    from mpiad.ensemble.run import Run

    made = []
    first = Run.__init__
    monkeypatch.setattr(Run, "__init__", lambda self, *args: (first(self, *args), made.append(weakref.ref(self)))[0])
    gc.collect()
    gc.disable()
    try:
        mpiad.grad(lambda p: loss(U0[:9], p, gradient=way))(RHO[:9])
        mpiad.hvp(lambda p: loss(U0[:9], p, gradient=way))(RHO[:9], RHO[:9])
        assert len(made) == 2 and all(run() is None for run in made)
    finally:
        gc.enable()


@pytest.mark.few(1)
@WAYS
def test_a_gradient_is_independent_of_its_company(way):
    both = mpiad.grad(lambda u0, p: loss(u0, p, gradient=way), (0, 1))
    whole = both(U0, RHO)
    for rows in (slice(0, 1), slice(7, 8), slice(3, 5), slice(100, 260), slice(599, 600)):
        for part, all_of_them in zip(both(U0[rows], RHO[rows]), whole):
            assert part.tobytes() == all_of_them[rows].tobytes()


@pytest.mark.few(1)
@WAYS
@pytest.mark.parametrize("backend", [pytest.param(EnsembleSerial(), marks=pytest.mark.thorough), EnsembleThreads(2)])
def test_a_gradient_is_independent_of_the_backend(way, backend):
    for rows in (slice(0, 3), slice(100, 117)):
        one, other = (
            mpiad.grad(lambda p, b=b, rows=rows: loss(U0[rows], p, backend=b, gradient=way))(RHO[rows])
            for b in (backend, EnsembleVectorized())
        )
        assert one.tobytes() == other.tobytes()


@cache
def gradient_in_one_block(way):
    return mpiad.grad(lambda p: loss(U0, p, gradient=way))(RHO)


@WAYS
@pytest.mark.parametrize("blocks", [1, pytest.param(100, marks=pytest.mark.thorough), 10**9])
def test_a_gradient_is_independent_of_blocks(way, blocks, monkeypatch):
    expected = gradient_in_one_block(way)
    monkeypatch.setattr("mpiad.ensemble.run._LEAST_COLUMNS", 1)
    monkeypatch.setattr("mpiad.ensemble.run._BLOCK", 3 * blocks)
    rows = slice(0, 12) if blocks == 1 else slice(0, 600)
    found = mpiad.grad(lambda p: loss(U0[rows], p, gradient=way))(RHO[rows])
    assert found.tobytes() == expected[rows].tobytes()


def explosive(u, p, t):
    return [u[0] ** 2 * p[0], u[1] * p[0]]


@WAYS
def test_failed_trajectories_drop_out(way, caplog):
    caplog.set_level(logging.ERROR, "mpiad")
    u0 = np.array([[0.5, 1.0], [1.0, 2.0], [-1.0, 3.0], [30.0, 1.0], [0.2, 0.1]])

    def total(theta, rows):
        ensemble = EnsembleProblem(ODEProblem(explosive, u0[0], (0.0, 1.5), theta), u0=theta * u0[rows])
        sol = solve(ensemble, saveat=[0.01, 0.7, 1.5], gradient=way, **COARSE)
        # The cotangents of failed trajectories are NaN here.
        return anp.sum(sol.u**2) + anp.sum(anp.sqrt(anp.where(sol.survivors[:, None], 1.0, -1.0)) * sol.u_end)

    good = [0, 2, 4]
    with np.errstate(all="ignore"):
        found = mpiad.grad(lambda theta: total(theta, slice(None)))(np.ones(1))
    assert found.tobytes() == mpiad.grad(lambda theta: total(theta, good))(np.ones(1)).tobytes()


def test_nothing_to_do():
    still = mpiad.grad(lambda u0: anp.sum(solve(ODEProblem(lorenz, u0, (1.0, 1.0), [1.0])).u ** 2))(np.ones(3))
    np.testing.assert_array_equal(still, 4)

    def none(u0):
        return 1.0 + anp.sum(solve(EnsembleProblem(ODEProblem(lorenz, u0, (0.0, 1.0), [1.0])), trajectories=0).u)

    np.testing.assert_array_equal(mpiad.grad(none)(np.ones(3)), 0)


def test_batches_outputs_and_statistics_are_traced():
    ensemble = EnsembleProblem(ODEProblem(lorenz, U0[0], (0.0, 1.0)), u0=U0[:7])

    def by(p, fun, **more):
        changed = remake(ensemble, p=p, **more)
        return fun(solve(changed, saveat=0.25, batch_size=3, **COARSE))

    def expected(p, fun):
        return fun(solve(remake(ensemble, p=p), saveat=0.25, **COARSE).u)

    pairs = [
        (lambda sol: anp.sum(sol.u**3), lambda u: anp.sum(u**3), {}),
        (lambda sol: anp.sum(sol.mean() ** 2), lambda u: anp.sum(anp.mean(u, axis=0) ** 2), {}),
        (lambda sol: anp.sum(sol.std()[1:] ** 3), lambda u: anp.sum(anp.std(u[:, 1:], axis=0) ** 3), {}),
        (lambda sol: sum(sol.u), lambda u: anp.sum(u[:, -1, 0] ** 2), {"output_func": lambda s, i: (s.u[-1, 0] ** 2, 0)}),
    ]
    for fun, plain, more in pairs:
        one = mpiad.grad(lambda p, fun=fun, more=more: by(p, fun, **more))(RHO[300:307])
        other = mpiad.grad(lambda p, plain=plain: expected(p, plain))(RHO[300:307])
        np.testing.assert_allclose(one, other, rtol=1e-12)
