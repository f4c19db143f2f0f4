"""Solutions and gradients are those of the arrays as they were: programs use their arrays again for the next solve."""

from __future__ import annotations

from functools import partial

import autograd.numpy as anp
import numpy as np
import pytest

import mpiad
from mpiad.ensemble import EnsembleMPI, EnsembleProblem, EnsembleSerial, EnsembleVectorized, ODEProblem, solve
from mpiad.ensemble.ranks import ShardedSolution

COUNT = 5
WAYS = pytest.mark.parametrize(
    "way",
    [EnsembleVectorized, EnsembleSerial, EnsembleMPI, partial(EnsembleMPI, gather=False)],
    ids=["vectorized", "serial", "ranks", "shares"],
)


def decay(u, p, t):
    return -p[0] * u


def arrays():
    """Return initial states, parameters, those that all share, in the order in which columns are solved."""
    return np.linspace(1.0, 2.0, COUNT)[:, None], np.linspace(0.5, 1.5, COUNT)[:, None], np.array([0.7]), np.array([0.9])


def ensemble(u0, p, common_u0, common_p):
    return EnsembleProblem(ODEProblem(decay, common_u0, (0.0, 1.0), common_p), u0=u0, p=p)


@WAYS
@pytest.mark.parametrize("which", [(0, 1), (0,), (1,)])
def test_what_is_read_after_they_were_changed(way, which):
    given = [x if i > 1 or i in which else None for i, x in enumerate(arrays())]
    read, late = (solve(ensemble(*given), ensemblealg=way(), dense_output=True, trajectories=COUNT) for _ in range(2))
    expected, between = read.u.copy(), read(0.3)
    for x in given:
        if x is not None:
            x[:] = 7.0
    late.u_end[:] = 5.0
    np.testing.assert_array_equal(late.u, expected)
    np.testing.assert_array_equal(late(0.3), between)


@WAYS
@pytest.mark.parametrize("gradient", ["adjoint", "tangent"])
def test_a_gradient_after_they_were_changed(way, gradient):
    def loss(scale, changes):
        u0, p, *common = arrays()
        own, asked = np.linspace(1.0, 2.0, COUNT)[:, None], {"ensemblealg": way(), "gradient": gradient}
        sol = solve(ensemble(own * scale, None, *common), saveat=[0.25, 0.5, 1.0], **asked)
        other = solve(ensemble(u0, own * scale, *common), **asked)
        third = solve(ensemble(own * scale, p, *common), **asked)
        if changes:
            for x in (u0, p, *common, sol.t):
                x *= 60.0
        value = anp.sum(sol.u**2) + anp.sum(other.u**3) + anp.sum(third.u**3)
        return mpiad.mpi_allreduce(value) if isinstance(sol, ShardedSolution) else value

    found, expected = (mpiad.grad(loss, shared=True)(1.1, changes) for changes in (True, False))
    assert expected != 0
    assert found == expected


@pytest.mark.serial
def test_kernels():
    def loss(scale, changes):
        u0, p, *common = arrays()
        sol = solve(ensemble(np.ones((COUNT, 1)) * scale, p, *common), compile=True, saveat=[0.5, 1.0], gradient="adjoint")
        if changes:
            for x in (u0, p, *common, sol.t):
                x *= 60.0
        return anp.sum(sol.u**3)

    found, expected = (mpiad.grad(loss)(1.1, changes) for changes in (True, False))
    assert expected != 0
    assert found == expected


@pytest.mark.serial
def test_a_single_solution():
    u0, p = np.array([1.0, 2.0]), np.array([0.5])
    sol = solve(ODEProblem(decay, u0, (0.0, 1.0), p), dense_output=True)
    expected = sol(0.5)
    u0[:], p[:] = 9.0, 8.0
    np.testing.assert_array_equal(sol.u[0], [1.0, 2.0])
    np.testing.assert_array_equal(sol(0.5), expected)
