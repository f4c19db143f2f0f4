"""EnsembleMPI: the same numbers on any number of ranks, gathered, in shares, or reduced."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
from contextlib import nullcontext
from types import SimpleNamespace

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from ode_systems import decay, lorenz

import mpiad
from mpiad.ensemble import (
    RK45,
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
from mpiad.ensemble.compiled import trace
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


@pytest.mark.usefixtures("solved_by")
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
    tries = first.outcomes.naccept + first.outcomes.nreject + 2
    mine = tries[again.indices].sum()
    assert mine <= tries.sum() / size + tries.max()
    np.testing.assert_array_equal(again.u, solve(ensemble).u[again.indices])
    other = solve(remake(ensemble, p=speed[:7]), ensemblealg=mpi)
    assert len(other.outcomes.nf) == 7


@pytest.mark.parametrize(
    "tries, size, bounds",
    [
        ([5, 5], 2, [0, 1, 2]),
        ([5] * 6, 3, [0, 2, 4, 6]),
        ([998, 1, 1, 1], 2, [0, 1, 4]),
        ([45] * 3 + [5] * 9, 3, [0, 1, 3, 12]),
        ([1, 1, 1, 998], 4, [0, 3, 3, 3, 4]),
    ],
)
def test_shares_end_next_to_what_is_due(tries, size, bounds):
    mpi = EnsembleMPI()
    mpi.remember(np.array(tries), 4)
    found = mpi.bounds(len(tries), size)
    np.testing.assert_array_equal(found[[0, -1]], [0, len(tries)])
    cost = np.add.reduceat(np.append(np.array(tries) + 2.0, 0), found[:-1]) * (np.diff(found) > 0)
    best = np.add.reduceat(np.append(np.array(tries) + 2.0, 0), bounds[:-1]) * (np.diff(bounds) > 0)
    assert cost.max() == best.max()


@pytest.mark.parametrize("stride", [1, 10])
def test_a_share_with_the_longest_trajectory_has_fewer_of_them(stride):
    # A turn of the working set costs what some 300 columns of four components do, however wide it is.
    tries = (np.linspace(1, 99, 10_000) ** 2 / 10)[::stride]
    count = len(tries)
    mpi = EnsembleMPI()
    mpi.remember(tries, 4)
    cut = mpi.bounds(count, 2)[1]

    def slowest(cut):
        return max(part.sum() + 300 * part.max() for part in (tries[:cut], tries[cut:]))

    assert slowest(cut) <= 1.02 * min(map(slowest, range(1, count, max(1, count // 500))))
    assert cut > np.searchsorted(np.cumsum(tries), tries.sum() / 2)


@pytest.mark.parametrize("compiled", [False, True])
def test_shares_of_many_trajectories_are_equal_to_a_few_thousandths(compiled):
    tries = np.random.default_rng(3).integers(5, 50, 300_001)
    mpi = EnsembleMPI()
    mpi.remember(tries, 4, compiled)
    found = mpi.bounds(len(tries), 3)
    assert found[0] == 0 and found[-1] == len(tries)
    costs = np.add.reduceat(tries + 2.0, found[:-1])
    assert costs.max() <= 1.003 * costs.mean()


@pytest.mark.parametrize("count", [0, 1, 2])
def test_fewer_trajectories_than_ranks(count):
    arrays = remake(LORENZ, p=RHO[:count])
    same(solve(arrays, ensemblealg=EnsembleMPI(), saveat=[0.5, 1.0]), solve(arrays, saveat=[0.5, 1.0]))
    made = EnsembleProblem(BASE, prob_func=lambda prob, i, repeat: remake(prob, u0=np.array([1j * i])))
    if count:
        same(solve(made, ensemblealg=EnsembleMPI(), trajectories=count), solve(made, trajectories=count))
    shares = solve(arrays, ensemblealg=EnsembleMPI(gather=False))
    assert shares.u.shape == (len(shares.indices), 2, 3)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_derivatives_of_fewer_trajectories_than_ranks(count):
    p, v = RHO[:count] + 5.0, np.ones((count, 1))

    def loss(p, way):
        return anp.sum(solve(remake(LORENZ, p=p), ensemblealg=way, trajectories=count, saveat=[0.5, 1.0]).u ** 2)

    def derivatives(way):
        value, gradient = mpiad.value_and_grad(loss, shared=True)(p, way)
        return value, gradient, mpiad.jvp(lambda p: loss(p, way), p, v)[1], mpiad.hvp(loss, shared=True)(p, way, v)

    for ours, alone in zip(derivatives(EnsembleMPI()), derivatives(EnsembleVectorized())):
        np.testing.assert_allclose(ours, alone, rtol=1e-12)


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("kind", ["interval", "rows", "every"])
def test_shares_with_ranks_that_have_none(count, kind):
    arguments = {
        "interval": {"saveat": 0.25}, "rows": {"saveat": np.linspace(0, 0.9, 2 * count).reshape(count, 2)},
        "every": {"save_everystep": True},
    }[kind]  # fmt: skip
    ensemble = EnsembleProblem(BASE, p=np.arange(1.0, count + 1) ** 3)
    whole = solve(ensemble, **arguments)
    same(solve(ensemble, ensemblealg=EnsembleMPI(), **arguments), whole)
    share = solve(ensemble, ensemblealg=EnsembleMPI(gather=False), **arguments)
    # A rank without trajectories knows neither how wide the others' arrays are nor their times.
    assert share.u.shape[1:] == (whole.u.shape if count else share.u.shape)[1:]
    np.testing.assert_array_equal(share.t, whole.t if whole.t.ndim == 1 else whole.t[share.indices])
    if count:
        np.testing.assert_allclose(share.mean(), whole.mean(), rtol=1e-13)
        np.testing.assert_array_equal(share.quantile(0.5), whole.quantile(0.5))
    assert share.summary() == whole.summary()


@pytest.mark.also_on(2)
@pytest.mark.parametrize("other", [[1.0, 2.0], np.ones(1, np.float32), np.array([1j])], ids=["shape", "float32", "complex"])
def test_states_of_another_kind_are_refused_wherever_they_are(other, size):
    ensemble = EnsembleProblem(BASE, lambda prob, i, repeat: remake(prob, u0=[1.0] if i <= 4 else other))
    with pytest.raises(ValueError, match="one shape and dtype, but batches have"):
        solve(ensemble, trajectories=8, batch_size=4)
    if size == 2:
        for gather in (True, False):
            with pytest.raises(ValueError, match="one shape and dtype, but ranks have"):
                solve(ensemble, ensemblealg=EnsembleMPI(gather=gather), trajectories=8)


def test_generators_do_not_depend_on_ranks():
    ensemble = EnsembleProblem(BASE, lambda prob, i, repeat, rng: remake(prob, u0=rng.standard_normal(1)), rng=5)
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


def test_ranks_without_trajectories_add_nothing_to_a_reduction():
    largest = EnsembleProblem(
        BASE, lambda prob, i, _: remake(prob, u0=np.array([1.0 * i])), lambda sol, i: (float(sol.u[0, 0]), False),
        lambda u, batch, I: (max(batch), False),
    )  # fmt: skip
    assert solve(largest, ensemblealg=EnsembleMPI(), trajectories=2).u == 2.0


def test_failures_are_told_once(rank, caplog):
    expected = solve(SQUARES)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="mpiad"):
        same(solve(SQUARES, ensemblealg=EnsembleMPI()), expected)
        solve(SQUARES, ensemblealg=EnsembleMPI(gather=False))
    assert len(caplog.records) == (2 if rank == 0 else 0)
    with pytest.raises(IntegrationError, match="of 23 trajectories failed"):
        solve(SQUARES, ensemblealg=EnsembleMPI(), throw=True)


@pytest.mark.parametrize("gather", [True, False])
def test_an_entry_that_is_not_finite_is_named_on_all_ranks(gather):
    u0 = np.ones((9, 1))
    u0[[7, 8]] = np.nan  # on the last rank, if there are several
    ensemble, backend = EnsembleProblem(BASE, u0=u0), EnsembleMPI(gather=gather)
    with pytest.raises(IntegrationError, match=r"2 of 9 .* after 0 steps. For trajectory 8, u0\[0\] is nan."):
        solve(ensemble, ensemblealg=backend, throw=True)


@pytest.mark.usefixtures("solved_by")
def test_events_are_numbered_over_all_ranks():
    events = Event(lambda u, p, t: u[0] - 0.5)
    ensemble = EnsembleProblem(remake(BASE, tspan=(0.0, 2.0)), u0=np.linspace(0.6, 5, 13)[:, None])
    same(solve(ensemble, ensemblealg=EnsembleMPI(), events=events), solve(ensemble, events=events))


def test_mistakes_are_raised_on_all_ranks(rank, size):
    last = size - 1
    with pytest.raises(ValueError, match="rtol must be zero or more"):
        solve(LORENZ, ensemblealg=EnsembleMPI(), rtol=-1.0 if rank == last else 1e-3)

    def prob_func(prob, i, repeat):
        return None if i == 20 else prob

    with pytest.raises(TypeError, match="returned NoneType for trajectory 20"):
        solve(EnsembleProblem(BASE, prob_func), ensemblealg=EnsembleMPI(), trajectories=20)
    if size > 1:
        with pytest.raises(ValueError, match="all ranks must give the same arguments"):
            solve(EnsembleProblem(BASE, lambda b, i, r: b), ensemblealg=EnsembleMPI(), trajectories=3 + (rank == last))
        # Times that differ would be put together as if they were each trajectory's own.
        with pytest.raises(ValueError, match="all ranks must give the same arguments"):
            solve(LORENZ, ensemblealg=EnsembleMPI(), saveat=0.1 if rank == last else 0.2)
    same(solve(LORENZ, ensemblealg=EnsembleMPI()), solve(LORENZ))


def made(theta, **functions):
    def prob_func(prob, i, repeat):
        return remake(prob, u0=anp.array([theta[0] * i / 7, 0.0, 0.0]), p=anp.array([theta[1] * i]))

    return EnsembleProblem(ODEProblem(lorenz, [1.0, 0.0, 0.0], (0.0, 1.0), [1.0]), prob_func, **functions)


def squares(theta, backend=EnsembleVectorized(), **arguments):  # noqa: B008
    return anp.sum(solve(made(theta), RK45(), backend, trajectories=7, saveat=0.25, **arguments).u ** 2)


def outputs(theta, backend, reduction=None, u_init=None):
    ensemble = made(theta, output_func=lambda sol, i: (anp.sum(sol.u**2), False), reduction=reduction, u_init=u_init)
    sol = solve(ensemble, RK45(), backend, trajectories=7, saveat=0.25, batch_size=2)
    return sum(sol.u) if reduction is None else sol.u


@pytest.mark.parametrize(
    "loss, objective",
    [
        (lambda x: squares(x, EnsembleMPI()), "root"),
        (lambda x: squares(x, EnsembleMPI()), "mean"),
        (lambda x: squares(x, EnsembleMPI(), batch_size=2), "root"),
        (lambda x: squares(x, EnsembleMPI(gather=False)), "sum"),
        (lambda x: outputs(x, EnsembleMPI()), "root"),
        (lambda x: outputs(x, EnsembleMPI(), lambda u, batch, I: (u + sum(batch), False), 0.0), "root"),
    ],
    ids=["gathered", "gathered, mean", "batches", "shares", "outputs", "reduction"],
)
def test_gradients_are_those_of_one_process(loss, objective):
    theta = np.array([1.0, 2.5])
    J, gradient = mpiad.value_and_grad(loss, objective=objective, shared=True)(theta)
    expected_J, expected = autograd.value_and_grad(squares)(theta)
    np.testing.assert_allclose(J, expected_J, rtol=1e-13)
    np.testing.assert_allclose(gradient, expected, rtol=1e-11)


@pytest.mark.one_rank  # on ranks it is one process's: test_rank_gradient.test_second_derivatives
def test_second_order_over_ranks():
    theta, v = np.array([1.0, 2.5]), np.array([0.3, -1.0])
    # The derivative is that of the steps taken, which are the same at both ends of a difference, at any error.
    held = {"dt": 0.05, "dtmax": 0.05, "rtol": 10.0, "atol": 10.0}
    product = mpiad.hvp(lambda x: squares(x, EnsembleMPI(), **held), shared=True)(theta, v)
    gradients = [autograd.grad(lambda x: squares(x, **held))(theta + step * v) for step in (1e-4, -1e-4)]
    np.testing.assert_allclose(product, (gradients[0] - gradients[1]) / 2e-4, rtol=1e-6)


def test_mean_over_shares_is_differentiated():
    theta = np.array([1.0, 2.5])

    def loss(theta, backend):
        sol = solve(made(theta), RK45(), backend, trajectories=7, saveat=0.25)
        return anp.sum(sol.mean()[-1] if isinstance(backend, EnsembleMPI) else anp.mean(sol.u[:, -1], axis=0))

    gradient = mpiad.grad(lambda x: loss(x, EnsembleMPI(gather=False)), shared=True)(theta)
    np.testing.assert_allclose(gradient, autograd.grad(loss)(theta, EnsembleVectorized()), rtol=1e-11)


@pytest.mark.parametrize("gather", [True, False])
def test_spread_is_differentiated_where_there_is_none_or_nobody_came(gather):
    # At t = 0 all are equal. Those that start at 0.4 and 0.5 are ended before t = 2, the last is not.
    growth = ODEProblem(lambda u, p, t: p * u, np.array([0.5 + 0j]), (0.0, 2.0))
    ends = Event(lambda u, p, t: anp.real(u[0]) - 1.0)
    rates = np.array([1.0, 0.8, 0.1, 0.2])

    def loss(p):
        ensemble = EnsembleProblem(growth, lambda prob, i, repeat: remake(prob, p=p[i - 1] * (1 + 0.5j)))
        sol = solve(ensemble, RK45(), EnsembleMPI(gather=gather), trajectories=4, saveat=0.5, events=ends, rtol=1e-9)
        return anp.sum(anp.where(np.isnan(autograd.tracer.getval(s := sol.std())), 0.0, s))

    def exact(p):
        t = np.linspace(0, 2, 5)
        total = 0.0
        for time in t[1:]:
            u = 0.5 * anp.exp((1 + 0.5j) * p * time)
            past = 0.5 * np.exp((1 + 0.5j) * rates[:, None] * np.linspace(0, time, 1000))
            kept = np.flatnonzero((past.real < 1).all(axis=1))
            mean = anp.mean(u[kept])
            total = total + anp.sqrt(anp.mean(anp.abs(u[kept] - mean) ** 2))
        return total

    value, gradient = mpiad.value_and_grad(loss, shared=True)(rates)
    np.testing.assert_allclose(value, exact(rates), rtol=1e-6)
    np.testing.assert_allclose(gradient, autograd.grad(exact)(rates), rtol=1e-6)


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("q", [0.3, [0.0, 0.25, 0.9, 1.0]])
def test_quantiles_are_differentiated_among_those_that_came(gather, q):
    # The fastest is ended by its event before t = 2, so the last times have six states and not seven.
    decay = ODEProblem(lambda u, p, t: p * u, np.array([0.5]), (0.0, 2.0))
    ends = Event(lambda u, p, t: u[0] - 1.0)
    rates = np.array([0.1, -0.7, 0.8, 0.05, -0.31, 0.2, -0.02])
    times = np.linspace(0, 2, 5)

    def loss(p):
        many = EnsembleProblem(decay, p=anp.reshape(p, (-1, 1)))
        backend = EnsembleMPI(gather=gather)
        sol = solve(many, RK45(), backend, trajectories=7, saveat=0.5, events=ends, rtol=1e-9, atol=1e-12)
        return anp.sum(sol.quantile(q)[..., 0] ** 2 * (1 + times))

    def exact(p):
        u = 0.5 * np.exp(p[:, None] * times)
        return np.sum(np.nanquantile(np.where(u < 1, u, np.nan), q, axis=0) ** 2 * (1 + times))

    step = 1e-6
    differences = [(exact(rates + step * e) - exact(rates - step * e)) / (2 * step) for e in np.eye(7)]
    value, gradient = mpiad.value_and_grad(loss, shared=True)(rates)
    np.testing.assert_allclose(value, exact(rates), rtol=1e-7)
    np.testing.assert_allclose(gradient, differences, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("gather", [True, False])
def test_no_quantiles_of_the_trajectories_of_all_ranks(gather):
    sol = solve(EnsembleProblem(BASE), ensemblealg=EnsembleMPI(gather=gather), trajectories=4, saveat=[0.0, 0.5])
    assert sol.quantile([]).shape == (0, 2, sol.u.shape[-1])


def test_there_are_no_statistics_of_outputs():
    made = EnsembleProblem(BASE, output_func=lambda sol, i: (sol.u_end, False))
    for way in (EnsembleVectorized(), EnsembleMPI(), EnsembleMPI(gather=False)):
        sol = solve(made, ensemblealg=way, trajectories=4)
        for statistic in (sol.mean, sol.std, lambda sol=sol: sol.quantile(0.5)):
            with pytest.raises(TypeError, match="u is the result of output_func or reduction, of type list"):
                statistic()


def test_inner_must_be_a_way_to_run():
    for inner in (EnsembleMPI(), 3, EnsembleSerial):
        with pytest.raises(TypeError, match="inner must be"):
            EnsembleMPI(inner)


@pytest.mark.parametrize("watch", [nullcontext, mpiad.debug.checked])
def test_one_progress_bar_counts_the_trajectories_of_rank_0(watch, rank, size, capsys):
    count = 10 * size
    arrays = remake(LORENZ, p=np.linspace(1.0, 20.0, count)[:, None])
    with watch():
        solve(arrays, ensemblealg=EnsembleMPI(), progress=True)
    shown = capsys.readouterr().err
    assert "trajectories: 100%" in shown and "| 10/10 [" in shown if rank == 0 else not shown


def test_progress_ends_where_a_share_fails(rank, size):
    def member(prob, i, repeat):
        if i == 3 * size:
            raise RuntimeError("no such member")
        return remake(prob, p=np.array([float(i)]))

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such member"):
            solve(EnsembleProblem(BASE, member), ensemblealg=EnsembleMPI(), trajectories=3 * size, progress=True)


@pytest.mark.limit(120)
def test_functions_of_imported_modules_are_traced_once(monkeypatch, caplog):
    """An event is created for each solve, and reads a function through an object that holds a module."""
    module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec("doses_of_a_model", None))
    exec("def times(p):\n    return [0.25, 0.5]", module.__dict__)
    model, traces = SimpleNamespace(module=module), []
    traced = trace._traced
    monkeypatch.setattr(trace, "_traced", lambda *args: traces.append(1) or traced(*args))
    ensemble = EnsembleProblem(BASE, p=np.linspace(0.5, 1.0, 6))

    def solved():
        dose = Event(times=lambda p: model.module.times(p), affect=lambda u, p, t: [u[0] + 1.0])
        rows = np.linspace(0.1, 0.9, 12).reshape(6, 2)
        return solve(ensemble, ensemblealg=EnsembleMPI(), saveat=rows, events=dose, compile=True)

    first = solved()
    count = len(traces)
    assert count
    same(first, solved())
    assert len(traces) == count

    # What may change in each solve can't be compared; the log names it.
    model.counter = iter(range(100))
    with caplog.at_level(logging.INFO, "mpiad"):
        for _ in range(2):
            dose = Event(times=lambda p: [0.25, 0.5 + 0 * next(model.counter)], affect=lambda u, p, t: [u[0] + 1.0])
            solve(ensemble, ensemblealg=EnsembleMPI(), events=dose, compile=True)
    assert len(traces) > count
    assert caplog.text.count("traced again in each solve") == 1 and "model.counter" in caplog.text


def test_arguments_of_all_ranks_are_texts_only_in_messages(rank, size):
    class Times(list):
        def __str__(self):
            raise AssertionError("a text for nothing")

        __repr__ = __format__ = __str__

    times = [0.25, 0.5]
    same(solve(LORENZ, ensemblealg=EnsembleMPI(), saveat=Times(times)), solve(LORENZ, saveat=times))
    if size > 1:
        with pytest.raises(ValueError, match=r"rank 0 gave saveat=\[0.25, 0.5\].* and rank 1 gave saveat=\[0.25, 0.625\]"):
            solve(LORENZ, ensemblealg=EnsembleMPI(), saveat=[0.25, 0.5 + 0.125 * (rank == 1)])
