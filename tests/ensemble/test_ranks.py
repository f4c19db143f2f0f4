"""EnsembleMPI: the same numbers on any number of ranks, gathered, in shares, or reduced."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from ode_systems import decay, lorenz

from mpiad.ensemble import (
    EnsembleMPI,
    EnsembleProblem,
    EnsembleSerial,
    EnsembleThreads,
    EnsembleVectorized,
    Event,
    ODEProblem,
    remake,
    solve,
)
from mpiad.errors import IntegrationError

RHO = np.linspace(0, 21, 37)[:, None]
LORENZ = EnsembleProblem(ODEProblem(lorenz, [1.0, 0.0, 0.0], (0.0, 1.0)), p=RHO)
BASE = ODEProblem(decay, [1.0], (0.0, 1.0), 1.0)
SQUARES = EnsembleProblem(ODEProblem(lambda u, p, t: u * u, [1.0], (0.0, 1.5)), u0=np.linspace(-1, 1, 23)[:, None])


def same(a, b):
    for name in ("u_end", "u", "t", "t_reached", "naccept", "nreject", "nf", "retcode"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    assert a.events == b.events


@pytest.mark.parametrize("inner", [EnsembleVectorized(), EnsembleSerial(), EnsembleThreads(2)], ids=repr)
def test_gathered_is_what_one_process_has(inner):
    for changes in ({"saveat": 0.25}, {"save_everystep": True}, {"saveat": np.linspace(0, 0.9, 74).reshape(37, 2)}):
        same(solve(LORENZ, ensemblealg=EnsembleMPI(inner), **changes), solve(LORENZ, **changes))


def test_shares(rank, size):
    whole = solve(LORENZ, saveat=0.25)
    sol = solve(LORENZ, ensemblealg=EnsembleMPI(gather=False), saveat=0.25)
    np.testing.assert_array_equal(sol.indices, np.arange(37 * rank // size, 37 * (rank + 1) // size))
    np.testing.assert_array_equal(sol.u, whole.u[sol.indices])
    np.testing.assert_array_equal(sol.naccept, whole.naccept[sol.indices])
    np.testing.assert_allclose(sol.mean(), whole.mean(), rtol=1e-13)
    np.testing.assert_allclose(sol.std(), whole.std(), rtol=1e-12)
    np.testing.assert_array_equal(sol.quantile([0.1, 0.5]), whole.quantile([0.1, 0.5]))
    assert sol.summary() == whole.summary()


def test_balanced_by_the_last_solve(rank, size):
    # The first third takes a hundred times the steps of the others.
    speed = np.where(np.arange(60) < 20, 100.0, 1.0)[:, None]
    ensemble = EnsembleProblem(ODEProblem(lambda u, p, t: [p[0] * u[1], -p[0] * u[0]], [0.0, 1.0], (0.0, 3.0)), p=speed)
    mpi = EnsembleMPI(gather=False)
    first = solve(ensemble, ensemblealg=mpi)
    again = solve(ensemble, ensemblealg=mpi)
    assert len(first.indices) == 60 * (rank + 1) // size - 60 * rank // size
    tries = first.facts.naccept + first.facts.nreject + 2
    mine = tries[again.indices].sum()
    assert mine <= tries.sum() / size + tries.max()
    np.testing.assert_array_equal(again.u, solve(ensemble).u[again.indices])
    other = solve(remake(ensemble, p=speed[:7]), ensemblealg=mpi)
    assert len(other.facts.nf) == 7


@pytest.mark.parametrize("count", [0, 1, 2])
def test_fewer_trajectories_than_ranks(count):
    arrays = remake(LORENZ, p=RHO[:count])
    same(solve(arrays, ensemblealg=EnsembleMPI(), saveat=[0.5, 1.0]), solve(arrays, saveat=[0.5, 1.0]))
    made = EnsembleProblem(BASE, prob_func=lambda prob, i, repeat: remake(prob, u0=np.array([1j * i])))
    if count:
        same(solve(made, ensemblealg=EnsembleMPI(), trajectories=count), solve(made, trajectories=count))
    shares = solve(arrays, ensemblealg=EnsembleMPI(gather=False))
    assert shares.u.shape == (len(shares.indices), 2, 3)


def test_generators_do_not_depend_on_ranks():
    ensemble = EnsembleProblem(BASE, lambda prob, i, repeat, rng: remake(prob, u0=rng.standard_normal(1)), seed=5)
    same(solve(ensemble, ensemblealg=EnsembleMPI(), trajectories=11, batch_size=2), solve(ensemble, trajectories=11))


def test_outputs_and_reductions():
    ensemble = EnsembleProblem(
        BASE, lambda prob, i, _: remake(prob, u0=np.array([1.0 * i])), lambda sol, i: ({"i": i, "u": sol.u[0]}, False)
    )
    sol = solve(ensemble, ensemblealg=EnsembleMPI(), trajectories=9)
    assert [one["i"] for one in sol.u] == list(range(1, 10))
    np.testing.assert_array_equal([one["u"] for one in sol.u], np.arange(1.0, 10)[:, None])
    total = remake(
        ensemble, output_func=lambda sol, i: (sol.u[0], False), reduction=lambda u, batch, I: (u + sum(batch), False),
        u_init=np.zeros(1),
    )  # fmt: skip
    for backend in (EnsembleVectorized(), EnsembleMPI()):
        assert solve(total, ensemblealg=backend, trajectories=9, batch_size=2).u == [45.0]


def test_failures_are_told_once(rank, caplog):
    expected = solve(SQUARES)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="mpiad"):
        same(solve(SQUARES, ensemblealg=EnsembleMPI()), expected)
        solve(SQUARES, ensemblealg=EnsembleMPI(gather=False))
    assert len(caplog.records) == (2 if rank == 0 else 0)
    with pytest.raises(IntegrationError, match="of 23 trajectories failed"):
        solve(SQUARES, ensemblealg=EnsembleMPI(), throw=True)


def test_events_are_numbered_over_all_ranks():
    events = Event(lambda u, p, t: u[0] - 0.5)
    ensemble = EnsembleProblem(remake(BASE, tspan=(0.0, 2.0)), u0=np.linspace(0.6, 5, 13)[:, None])
    same(solve(ensemble, ensemblealg=EnsembleMPI(), events=events), solve(ensemble, events=events))


def test_mistakes_are_raised_on_all_ranks(rank, size):
    last = size - 1
    with pytest.raises(ValueError, match="rtol must be above zero"):
        solve(LORENZ, ensemblealg=EnsembleMPI(), rtol=-1.0 if rank == last else 1e-3)

    def prob_func(prob, i, repeat):
        return None if i == 20 else prob

    with pytest.raises(TypeError, match="returned NoneType for trajectory 20"):
        solve(EnsembleProblem(BASE, prob_func), ensemblealg=EnsembleMPI(), trajectories=20)
    if size > 1:
        with pytest.raises(ValueError, match="all ranks must give the same arguments"):
            solve(EnsembleProblem(BASE, lambda b, i, r: b), ensemblealg=EnsembleMPI(), trajectories=3 + (rank == last))
    same(solve(LORENZ, ensemblealg=EnsembleMPI()), solve(LORENZ))


def test_inner_must_be_a_way_to_run():
    for inner in (EnsembleMPI(), 3, EnsembleSerial):
        with pytest.raises(TypeError, match="inner must be"):
            EnsembleMPI(inner)
