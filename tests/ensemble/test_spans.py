"""`EnsembleProblem(tspan=rows)`, a tspan per trajectory: compared with single problems and exact derivatives."""

from __future__ import annotations

import autograd.numpy as np
import numpy as onp
import pytest
from ode_systems import lorenz

import mpiad
from mpiad.ensemble import EnsembleMPI, EnsembleProblem, Event, ODEProblem, fit, remake, solve, steady_state

# Ahead, back, of no length, and from another start.
SPANS = onp.array([[0.0, 1.0], [1.0, 0.25], [0.5, 0.5], [-1.0, 2.0]])
LORENZ = ODEProblem(lorenz, [1.0, 0.0, 0.0], (0.0, 5.0), [2.0])
DECAY = ODEProblem(lambda u, p, t: [-p[0] * u[0] * (1 + t)], [2.0], (0.0, 7.0), [0.7])
TIGHT = {"rtol": 1e-10, "atol": 1e-12}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("options", [{}, {"saveat": 0.25}, {"save_everystep": True}], ids=str)
def test_are_those_of_single_problems(options, compiled):
    for algorithm in ({}, {"ensemblealg": EnsembleMPI()}):
        sol = solve(EnsembleProblem(LORENZ, tspan=SPANS), compile=compiled, **options, **algorithm)
        for one, span in zip(sol, SPANS):
            alone = solve(remake(LORENZ, tspan=tuple(span)), compile=compiled, **options)
            stop = len(alone.t)
            onp.testing.assert_array_equal(one.t[:stop], alone.t)
            onp.testing.assert_array_equal(one.u[:stop], alone.u)
            assert onp.isnan(one.u[stop:]).all() and one.t_reached == span[1]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mpi", [False, True])
def test_derivatives_with_respect_to_both_ends(compiled, mpi):
    def ends(spans):
        options = {"ensemblealg": EnsembleMPI()} if mpi else {}
        return solve(EnsembleProblem(DECAY, tspan=spans), compile=compiled, **TIGHT, **options).u_end[:, 0]

    weights = onp.arange(1.0, 5.0)
    bars = mpiad.grad(lambda spans: np.sum(weights * ends(spans)), shared=True, objective="root")(SPANS)
    start, end = SPANS.T
    exact = 2 * onp.exp(-0.7 * (end + end**2 / 2 - start - start**2 / 2))
    onp.testing.assert_allclose(ends(SPANS), exact, rtol=1e-9)
    slopes = 0.7 * (1 + SPANS) * [1, -1] * (weights * exact)[:, None]
    onp.testing.assert_allclose(bars, slopes, rtol=1e-8, atol=1e-8)


def test_with_other_rows_and_events():
    p, doses = onp.array([[0.5], [1.0], [2.0], [3.0]]), Event(times=[0.5], affect=lambda u, p, t: [u[0] + 1.0])
    u0 = onp.arange(1.0, 5.0)[:, None]
    problem = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (0.0, 1.0), [1.0])
    sol = solve(EnsembleProblem(problem, u0=u0, p=p, tspan=SPANS), events=doses, saveat=SPANS[:, 1:], **TIGHT)
    start, end, (rate,), (first,) = *SPANS.T, p.T, u0.T
    dosed = (onp.minimum(start, end) <= 0.5) & (onp.maximum(start, end) >= 0.5)
    exact = first * onp.exp(-rate * (end - start)) + dosed * onp.exp(-rate * (end - 0.5))
    onp.testing.assert_allclose(sol.u_end[:, 0], exact, rtol=1e-8)
    onp.testing.assert_array_equal(sol.u[:, 0], sol.u_end)


def test_in_fits_and_steady_states():
    rates = onp.array([0.5, 1.0, 2.0])
    spans = onp.array([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]])
    problem = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (0.0, 1.0), [1.0])
    times = spans[:, 1:] * [0.5, 1.0]
    data = onp.exp(-rates[:, None] * times)
    fitted = fit(
        EnsembleProblem(problem, tspan=spans),
        lambda u, p, data: u[:, 0] - data,
        onp.ones((3, 1)),
        data=data,
        saveat=times,
        ftol=1e-14,
        xtol=1e-14,
        gtol=1e-14,
        **TIGHT,
    )
    onp.testing.assert_allclose(fitted.p[:, 0], rates, rtol=1e-7)
    forced = ODEProblem(lambda u, p, t: [t - u[0]], [1.0], (0.0, 1.0), [1.0])
    onp.testing.assert_allclose(steady_state(EnsembleProblem(forced, tspan=spans)).u[:, 0], spans[:, 1], rtol=1e-10)


BAD = {
    "rows": (SPANS[:3], ValueError, "tspan= of the ensemble has 3 rows, but there are 4 trajectories"),
    "width": (onp.zeros((4, 3)), ValueError, r"must have shape \(N, 2\), .* but has shape \(4, 3\)"),
    "pair": (onp.array([0.0, 1.0]), ValueError, "tspan= of the ensemble has 2 rows|must have shape"),
    "complex": (SPANS + 0j, ValueError, r"must have shape \(N, 2\), .* dtype complex128"),
    "nan": (onp.where(SPANS == 2.0, onp.nan, SPANS), ValueError, r"finite, but is \(-1.0, nan\) for trajectory 4"),
    "list": ([(0.0, 1.0)] * 4, ValueError, "one row per trajectory.*np.array"),
}


@pytest.mark.parametrize(("spans", "kind", "text"), BAD.values(), ids=BAD)
def test_bad_rows_are_refused_on_all_ranks(spans, kind, text, rank):
    for options in ({}, {"ensemblealg": EnsembleMPI()}):
        with pytest.raises(kind, match=text):
            solve(EnsembleProblem(LORENZ, tspan=spans), trajectories=4, **options)
    here = spans if rank == 0 else SPANS
    with pytest.raises(kind, match=text):
        solve(EnsembleProblem(LORENZ, tspan=here), trajectories=4, ensemblealg=EnsembleMPI())


def test_not_with_a_prob_func():
    with pytest.raises(ValueError, match="give either prob_func, or arrays u0, p and tspan, not both.* tspan"):
        EnsembleProblem(LORENZ, lambda problem, i, repeat: problem, tspan=SPANS)


def test_other_rows_on_another_rank(rank, size):
    if size > 1:
        with pytest.raises(ValueError, match="other tspan than rank 0"):
            solve(EnsembleProblem(LORENZ, tspan=SPANS + (rank == 1)), ensemblealg=EnsembleMPI())
