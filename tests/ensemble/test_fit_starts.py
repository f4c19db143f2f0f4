"""`fit(starts=)`: fits from several starting points, beside SciPy's from the same ones; those that fail; over ranks."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest
from scipy.optimize import least_squares

from mpiad.ensemble import (
    EnsembleMPI,
    EnsembleProblem,
    EnsembleSerial,
    Event,
    ODEProblem,
    Rodas5P,
    Vern7,
    fit,
    remake,
    solve,
)

LOG10 = np.log(10.0)


def infection(u, x, t):
    """Target cells, cells that are infected and produce virus later, virus, immune cells; twelve rates in log scale.

    Virus makes target cells divide, so that both grow beyond all bounds in finite time for many of the rates.
    """
    target, exposed, producing, virus, immune = u
    k = [anp.exp(LOG10 * x[i]) for i in range(12)]
    infected = k[0] * target * virus
    return [
        k[1] - k[2] * target + k[8] * target * virus - infected,
        infected - k[3] * exposed,
        k[3] * exposed - k[4] * producing - k[5] * producing * immune,
        k[6] * producing - k[7] * virus,
        k[9] * producing / (k[10] + producing) * immune + k[11] - 0.1 * immune,
    ]


TRUTH = np.array([-3.0, 1.0, -2.0, 0.5, 0.0, -1.0, 1.5, 0.7, -4.0, 0.0, 1.0, -1.0])
LOWER, UPPER = TRUTH - 2, TRUTH + 2
LOWER[[5, 7, 8, 9]], UPPER[[5, 7, 8, 9]] = [-5.0, -2.0, -5.5, -3.0], [0.0, 1.5, 1.5, 0.5]
TIMES = np.linspace(0.5, 12.0, 24)
PATIENT = ODEProblem(infection, [100.0, 0.0, 0.0, 1.0, 0.1], (0.0, 12.0), TRUTH)
SOLVES = {"saveat": TIMES, "rtol": 1e-6, "atol": 1e-8, "max_steps": 100, "compile": True}
OBSERVED = (0, 2, 3, 4)


def logarithms(u):
    """Return the decimal logarithms of the observed components, shape (24, 4, …)."""
    return anp.stack([anp.log(u[:, k] + 1e-3) / LOG10 for k in OBSERVED], axis=1)


def deviations(u, x, data):
    return (logarithms(u) - data) / 0.1


@pytest.fixture(scope="module")
def measured():
    exact = solve(PATIENT, Rodas5P(), saveat=TIMES, rtol=1e-9, atol=1e-10).u
    return logarithms(exact) + 0.1 * np.random.default_rng(0).standard_normal((24, 4))


def by_scipy(measured, start):
    """Return cost and status of SciPy's fit; failed solves are residuals that aren't finite."""

    def residuals(x):
        u = solve(remake(PATIENT, p=x), Rodas5P(), **SOLVES).u
        return deviations(u, x, measured).ravel()

    try:
        found = least_squares(residuals, start, bounds=(LOWER, UPPER), max_nfev=300, x_scale="jac")
    except ValueError:  # at the start
        return np.inf, -1
    return found.cost, found.status


@pytest.mark.serial
@pytest.mark.thorough
@pytest.mark.limit(300)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_as_many_succeed_as_by_scipy(measured):
    starts = np.random.default_rng(2).uniform(LOWER, UPPER, (12, 12))
    options = {"bounds": (LOWER, UPPER), **SOLVES}
    found = fit(PATIENT, deviations, starts, Rodas5P(), data=np.repeat(measured[None], 12, 0), **options)
    failed = found.retcode == "InitialFailure"
    assert 4 <= failed.sum() <= 8
    cost, status = zip(*[by_scipy(measured, start) for start in starts])
    assert found.success.sum() >= 0.9 * np.count_nonzero(np.array(status) > 0)
    assert np.nanmin(found.cost) <= min(cost) * (1 + 1e-6)
    # With `starts`, those that fail are drawn again.
    several = fit(PATIENT, deviations, starts[:1], Rodas5P(), data=measured[None], starts=4, **options)
    assert (several.starts.retcode == "Success").sum() >= 3
    assert several.cost == several.starts.cost[:, 0] <= min(cost) * (1 + 1e-6)


# u = cos(p t): a misfit with many minima.
WAVE = ODEProblem(lambda u, p, t: [p[0] * u[1], -p[0] * u[0]], [1.0, 0.0], (0.0, 4.0))
RATES = np.array([[3.0], [7.0], [5.0]])
WAVE_TIMES = np.array([[0.7, 1.6, 2.9, 4.0], [0.5, 1.0, 2.0, 4.0], [0.3, 1.1, 2.5, 3.5]])
WAVES = {
    "alg": Vern7(), "data": np.cos(RATES * WAVE_TIMES), "saveat": WAVE_TIMES, "bounds": (0.5, 8.0), "rtol": 1e-8,
    "atol": 1e-10, "max_nfev": 30, "compile": True, "rng": 0,
}  # fmt: skip


def first(u, p, data):
    return u[:, 0] - data


@pytest.mark.parametrize("mpi", [False, True])
def test_the_lowest_minimum_of_each_trajectory(mpi, rank, size):
    start = np.ones((3, 1))
    alone = fit(WAVE, first, start, **WAVES)
    assert (alone.cost > 0.1).any()
    found = fit(WAVE, first, start, ensemblealg=EnsembleMPI() if mpi else EnsembleSerial(), starts=12, **WAVES)
    np.testing.assert_allclose(found.p, RATES, rtol=1e-6)
    assert found.indices.tolist() == [0, 1, 2] and found.starts.p.shape == (3, 12, 1)
    cost = np.nan_to_num(found.starts.cost, nan=np.inf)
    assert (np.diff(cost, axis=1) >= 0).all() and len(np.unique(cost[0].round(6))) > 2
    np.testing.assert_array_equal(found.cost, found.starts.cost[:, 0])
    serial = fit(WAVE, first, start, ensemblealg=EnsembleSerial(), starts=12, **WAVES)
    for name in ("p", "cost", "retcode", "nfev"):
        np.testing.assert_array_equal(getattr(found.starts, name), getattr(serial.starts, name))
    if mpi:
        share = fit(WAVE, first, start, ensemblealg=EnsembleMPI(gather=False), starts=12, **WAVES)
        np.testing.assert_array_equal(share.p, found.p[share.indices])
        np.testing.assert_array_equal(share.starts.cost, found.starts.cost[share.indices])
    other = fit(WAVE, first, start, starts=12, **WAVES | {"rng": 1})
    assert not np.array_equal(other.starts.cost, found.starts.cost)
    np.testing.assert_allclose(other.p, RATES, rtol=1e-6)


def test_trajectories_that_differ():
    """From a prob_func or from rows; each starting point belongs to its trajectory."""
    u0 = np.array([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]])
    options = WAVES | {"data": u0[:, :1] * WAVES["data"]}
    drawn = EnsembleProblem(WAVE, lambda one, i, repeat: remake(one, u0=u0[i - 1]))
    for ensemble in (EnsembleProblem(WAVE, u0=u0), drawn):
        found = fit(ensemble, first, np.ones((3, 1)), ensemblealg=EnsembleMPI(), starts=12, batch_size=7, **options)
        np.testing.assert_allclose(found.p, RATES, rtol=1e-6)


def test_starts_at_which_the_model_fails_are_drawn_again():
    """The solution 1 / (1 - p t) of u' = p u² ends at t = 1 / p."""
    grows = ODEProblem(lambda u, p, t: [p[0] * u[0] ** 2], [1.0], (0.0, 1.0))
    options = {"data": np.array([[2.0]]), "saveat": [1.0], "bounds": (0.0, 4.0), "rtol": 1e-8, "compile": True}
    assert fit(grows, first, np.array([[3.0]]), **options).retcode == "InitialFailure"
    found = fit(grows, first, [[3.0]], ensemblealg=EnsembleMPI(), starts=6, **options)
    assert (found.starts.retcode == "Success").all() and (found.starts.nfev > 1).all()
    np.testing.assert_allclose(found.starts.p, 0.5, rtol=1e-6)
    # Nowhere within these bounds there is a solution.
    hopeless = fit(grows, first, [[3.0]], starts=2, **options | {"bounds": (2.0, 4.0)})
    assert (hopeless.starts.retcode == "InitialFailure").all() and np.isnan(hopeless.starts.cost).all()
    assert (hopeless.starts.nfev == 21).all()


def test_waterfall():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    found = fit(WAVE, first, np.ones((3, 1)), starts=6, **WAVES)
    axes = found.starts.plot(trajectory=1)
    assert sum(len(line.get_xdata()) for line in axes.lines) == 6
    pyplot.close(axes.figure)
    assert repr(found.starts) == "FitStarts(3 trajectories, 6 starts each, 18 Success)"


BAD = {
    "infinite": ({"bounds": (0.5, np.inf)}, "starts=4 draws .* variable 0 of trajectory 1 has the bounds 0.5 and inf"),
    "none": ({"starts": 0}, "starts must be an integer above zero, but got 0"),
    "seed": ({"rng": -1}, "fit: rng must be"),
}


@pytest.mark.parametrize(("changes", "text"), BAD.values(), ids=BAD)
def test_bad_arguments(changes, text, rank):
    with pytest.raises(ValueError, match=text):
        fit(WAVE, first, np.ones((3, 1)), ensemblealg=EnsembleMPI(), **WAVES | {"starts": 4} | changes)


@pytest.mark.parametrize("batch_size", [None, 4])
def test_the_trajectory_of_a_bad_schedule(batch_size, rank):
    # The second of two trajectories, of which one to five fits run on a rank and in a batch.
    doses = Event(times=lambda p: [p[0] * 0 + p[1]], affect=lambda u, p, t: [u[0] + 1.0])
    decay = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (0.0, 1.0), np.ones(2))
    ensemble = EnsembleProblem(decay, p=np.array([[1.0, 0.2], [1.0, 7.0]]))
    with pytest.raises(ValueError, match=r"the times of events of trajectory 2, \[7.\], lie outside of its data"):
        fit(ensemble, first, np.ones((2, 1)), ensemblealg=EnsembleMPI(), data=np.ones((2, 2)), saveat=[0.5, 1.0], starts=4,
            bounds=(0.5, 2.0), events=doses, batch_size=batch_size,
            prob_generator=lambda one, x: remake(one, p=[x[0], one.p[1]]))  # fmt: skip


def test_different_starts_of_ranks(rank, size):
    if size > 1:
        with pytest.raises(ValueError, match="all ranks must give the same arguments"):
            fit(WAVE, first, np.ones((3, 1)), ensemblealg=EnsembleMPI(), starts=4 + rank, **WAVES)
