"""Parts of a solution that are made when they are read."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import autograd.numpy as anp
import numpy as np
import pytest
from ode_systems import lorenz

import mpiad
from mpiad.ensemble import EnsembleProblem, ODEProblem, remake, solve

pytestmark = pytest.mark.serial
RHO = np.linspace(0, 21, 5)[:, None]
LORENZ = EnsembleProblem(ODEProblem(lorenz, [1.0, 0.0, 0.0], (0.0, 1.0)), p=RHO)
SQUARES = EnsembleProblem(ODEProblem(lambda u, p, t: u * u, [1.0], (0.0, 1.5)), u0=np.linspace(-1, 1, 7)[:, None])


def same(a, b):
    for name in ("u", "t", "u_end", "retcode", "t_reached", "naccept", "nreject", "nf"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


def test_copies_and_pickles_have_them():
    read = solve(LORENZ)
    assert read.u.shape == (5, 2, 3) and set(read.retcode) == {"Success"} and read.nf.min() > 0
    for made in (copy.copy, copy.deepcopy, lambda sol: pickle.loads(pickle.dumps(sol)), dataclasses.replace):
        same(made(solve(LORENZ)), read)
    assert dataclasses.replace(solve(LORENZ), u=3).u == 3


@pytest.mark.parametrize("ensemble", [LORENZ, SQUARES], ids=["all", "some fail"])
def test_states_at_the_ends_are_those_that_are_saved_there(ensemble):
    sol, saved = solve(ensemble), solve(ensemble, saveat=list(ensemble.problem.tspan))
    same(sol, saved)
    assert np.isnan(sol.u).any() == (ensemble is SQUARES)


def test_they_are_differentiated_as_those_that_are_saved():
    def loss(u0, **arguments):
        u = solve(remake(SQUARES, u0=u0), rtol=1e-8, **arguments).u
        return anp.sum(anp.where(np.isnan(getattr(u, "_value", u)), 0.0, u) ** 2 * anp.array([1.0, 3.0])[:, None])

    u0 = np.linspace(-1, 1, 7)[:, None]
    found, expected = mpiad.grad(loss)(u0), mpiad.grad(loss)(u0, saveat=[0.0, 1.5])
    assert found.any()
    np.testing.assert_allclose(found, expected, rtol=1e-13)


def test_what_there_is_not():
    sol = solve(LORENZ)
    assert sol.u.shape == (5, 2, 3)
    del sol.u
    with pytest.raises(AttributeError, match="no attribute 'u'"):
        sol.u  # noqa: B018
