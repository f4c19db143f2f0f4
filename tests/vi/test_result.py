"""What a result says of its draws and of its two posteriors, number by number."""

import numpy as np
import pytest
import scipy.stats

from mpiad.vi import MeanFieldGaussian, VIResult

pytestmark = pytest.mark.serial

LAST = {"mean": np.array([1.0, 2.0]), "log_sd": np.log([0.5, 0.1])}
BEST = {"mean": np.array([-1.0, 0.5]), "log_sd": np.log([2.0, 3.0])}
HISTORY = {"objective": [5.0, 3.0, 4.0], "dropped": [1, 0, 2]}
SAMPLES = np.array([[1.0, 10.0], [2.0, 20.0], [4.0, 0.0], [5.0, 50.0]])


@pytest.fixture
def result():
    return VIResult(MeanFieldGaussian(2), LAST, BEST, HISTORY, 3, 1, "all 3 epochs were made", SAMPLES)


def test_draws_are_of_the_best_posterior_or_of_the_last(result):
    noise = np.random.default_rng(7).standard_normal((6, 2))
    np.testing.assert_allclose(result.draw(6, seed=7), BEST["mean"] + [2.0, 3.0] * noise, rtol=1e-14)
    np.testing.assert_allclose(result.draw(6, seed=7, best=False), LAST["mean"] + [0.5, 0.1] * noise, rtol=1e-14)


def test_densities_are_the_best_posteriors(result):
    expected = scipy.stats.norm(BEST["mean"], [2.0, 3.0]).logpdf(SAMPLES).sum(axis=1)
    np.testing.assert_allclose(result.log_prob(SAMPLES), expected, rtol=1e-13)


def test_moments_are_those_of_the_samples(result):
    np.testing.assert_allclose(result.mean(), [3.0, 20.0])
    np.testing.assert_allclose(result.sd(), np.sqrt([(4 + 1 + 1 + 4) / 3, (100 + 0 + 400 + 900) / 3]))
    np.testing.assert_allclose(result.quantile(0.5), [3.0, 15.0])


def test_the_summary_tells_them_and_the_best_epoch(result):
    lines = result.summary(["a", "b"]).splitlines()
    assert lines[1].split() == ["a", "3", "1.826", "1.15", "3", "4.85"]
    assert lines[2].split()[:3] == ["b", "20", "21.6"]
    assert lines[3] == "3 epochs, objective 3 at epoch 1, 3 draws dropped; all 3 epochs were made"
