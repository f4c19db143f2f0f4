"""Which posterior a run reports: the average over its last epochs, which chance moves less than any single epoch."""

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI
from random_streams import generator

from mpiad.parallel import Adam
from mpiad.vi import VI, MeanFieldGaussian
from mpiad.vi.inference import averaged

COMM = MPI.COMM_WORLD
ROOT = COMM.size - 1


Y = np.random.default_rng(8).normal([0.8, -0.5], 0.5, (30, 2))
# With a prior N(0.3, 1.5²): the product of 31 normal densities in each of the two dimensions.
EXACT_SD = (30 / 0.5**2 + 1 / 1.5**2) ** -0.5
EXACT_MEAN = (Y.sum(0) / 0.5**2 + 0.3 / 1.5**2) * EXACT_SD**2


def loss(theta, y):
    """Return the negative log likelihood of normal numbers around θ, but for a constant."""
    return 0.5 * anp.sum(((y - theta) / 0.5) ** 2)


def fitted(seed=0, epochs=200, **options):
    inference = VI(loss, MeanFieldGaussian(2, 0.3, 0.3), ("norm", 0.3, 1.5), Adam(0.05), 1.0, 4, rng=seed, root=ROOT)
    return inference.run(Y, epochs, **options)


def gap(params):
    """Return the ratios of the standard deviations to the exact ones, and the divergence from the exact posterior."""
    ratio, move = np.exp(params["log_sd"]) / EXACT_SD, (params["mean"] - EXACT_MEAN) / EXACT_SD
    return ratio, 0.5 * np.sum(ratio**2 + move**2 - 1 - 2 * np.log(ratio))


@pytest.mark.thorough
@pytest.mark.serial
def test_the_posterior_reported_is_near_the_exact_one_whatever_the_draws():
    found = [fitted(seed, n_samples=1000) for seed in range(5)]
    ratios, divergences = zip(*(gap(result.params) for result in found))
    np.testing.assert_allclose(ratios, 1, atol=0.12)
    assert np.mean(divergences) < 0.02
    np.testing.assert_allclose([result.sd() / EXACT_SD for result in found], 1, atol=0.15)
    # The epochs of the lowest objective are far away: their draws were lucky.
    lucky, lucky_divergences = zip(*(gap(result.best_params) for result in found))
    assert np.max(lucky) > 1.3 and np.mean(lucky_divergences) > 10 * np.mean(divergences)


def test_samples_draws_and_densities_are_of_the_average_of_the_epochs():
    seen = []
    result = fitted(3, 12, n_samples=4, callback=lambda epoch, objective, params: seen.append(params))
    seen = COMM.bcast(seen, ROOT)
    # Epoch j weighs as j (j + 1) … (j + 7).
    weights = np.array([np.prod(np.arange(j, j + 8.0)) for j in range(1, 13)])
    for name, value in result.params.items():
        np.testing.assert_allclose(value, np.average([p[name] for p in seen], axis=0, weights=weights), rtol=1e-12)
    noise = generator(3, 2).standard_normal((4, 2))
    np.testing.assert_allclose(result.samples, result.params["mean"] + np.exp(result.params["log_sd"]) * noise, rtol=1e-13)
    last = fitted(3, 12, average=False)
    assert all(last.params[name].tobytes() == seen[-1][name].tobytes() for name in last.params)
    assert (result.average, last.average) == (True, False)


def test_a_run_that_ends_early_reports_what_a_run_of_so_many_epochs_does():
    def ending(epoch, objective, params):
        if epoch == 6:
            raise StopIteration

    early, short = fitted(4, 50, callback=ending), fitted(4, 7)
    assert early.epochs == 7
    np.testing.assert_array_equal(early.samples, short.samples)


@pytest.mark.serial
def test_the_average_weighs_as_the_last_fifth_and_keeps_kinds_and_places_of_numbers():
    average, size = None, 1000
    flat = {"ages": np.zeros((), np.float32), "order": np.array([2, 0, 1]), "scalars": (0.0, [1j])}
    weights = np.zeros(size)
    for k in range(size):
        one_hot = np.zeros(size)
        one_hot[k] = 1
        flat["ages"][()], flat["scalars"] = size - 1 - k, (float(k), [1j * k])
        average = averaged(average, {**flat, "one hot": one_hot}, k + 1)
        one_hot[:] = np.nan  # as an optimizer that overwrites
    weights, found = average["one hot"], average
    assert weights.sum() == pytest.approx(1, rel=1e-12)
    assert weights @ np.arange(size)[::-1] == pytest.approx(size / 10, rel=0.01)  # the mean age of the last fifth
    assert 1 / np.sum(weights**2) == pytest.approx(size / 5, rel=0.06)
    assert weights[: size // 2].sum() < 0.003
    assert found["ages"].dtype == np.float32 and float(found["ages"]) == pytest.approx(size / 10, rel=0.01)
    assert found["order"].tolist() == [2, 0, 1]
    assert found["scalars"][0] == pytest.approx(size - 1 - size / 10, rel=0.01)
    assert found["scalars"][1][0] == pytest.approx(1j * found["scalars"][0], rel=1e-12)


@pytest.mark.parametrize("wrong, kind", [(0.25, TypeError), (False, ValueError)])
def test_ranks_must_agree_on_what_is_reported(wrong, kind):
    if wrong is False and COMM.size == 1:
        return
    given = wrong if COMM.rank == ROOT else True
    with pytest.raises(kind, match="average must be True or False, but got 0.25" if kind is TypeError else "average=False"):
        fitted(epochs=2, average=given)
    assert VI(loss, MeanFieldGaussian(2), ("norm",), Adam(0.1), root=ROOT).run(Y, 1).epochs == 1
