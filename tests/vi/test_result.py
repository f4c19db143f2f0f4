"""What a result says of its draws and of its two posteriors, number by number; and what its plots say they show."""

import dataclasses

import numpy as np
import pytest
import scipy.stats

from mpiad.vi import MeanFieldGaussian, VIResult

pytestmark = pytest.mark.serial

FOUND = {"mean": np.array([1.0, 2.0]), "log_sd": np.log([0.5, 0.1])}
BEST = {"mean": np.array([-1.0, 0.5]), "log_sd": np.log([2.0, 3.0])}
HISTORY = {"objective": [5.0, 3.0, 4.0], "dropped": [1, 0, 2]}
SAMPLES = np.array([[1.0, 10.0], [2.0, 20.0], [4.0, 0.0], [5.0, 50.0]])


@pytest.fixture
def result():
    return VIResult(MeanFieldGaussian(2), FOUND, BEST, HISTORY, 3, 1, "all 3 epochs were completed", SAMPLES)


def test_draws_and_densities_are_of_the_posterior_reported_and_of_the_best_on_request(result):
    noise = np.random.default_rng(7).standard_normal((6, 2))
    for options, mean, sd in (({}, FOUND["mean"], [0.5, 0.1]), ({"best": True}, BEST["mean"], [2.0, 3.0])):
        np.testing.assert_allclose(result.draw(6, rng=7, **options), mean + sd * noise, rtol=1e-14)
        expected = scipy.stats.norm(mean, sd).logpdf(SAMPLES).sum(axis=1)
        np.testing.assert_allclose(result.log_prob(SAMPLES, **options), expected, rtol=1e-13)


def test_moments_are_those_of_the_samples(result):
    np.testing.assert_allclose(result.mean(), [3.0, 20.0])
    np.testing.assert_allclose(result.sd(), np.sqrt([(4 + 1 + 1 + 4) / 3, (100 + 0 + 400 + 900) / 3]))
    np.testing.assert_allclose(result.quantile(0.5), [3.0, 15.0])


def test_the_summary_tells_them_and_of_which_posterior_they_are(result):
    lines = result.summary(["a", "b"]).splitlines()
    assert lines[1].split() == ["a", "3", "1.826", "1.15", "3", "4.85"]
    assert lines[2].split()[:3] == ["b", "20", "21.6"]
    assert lines[3] == "posterior averaged over the last epochs; mean objective 4 in the last 1 epoch"
    assert lines[4] == "3 epochs, 3 draws dropped; all 3 epochs were completed"
    longer = {**HISTORY, "objective": [9.0] * 11 + [1.0, 2.0]}
    last = dataclasses.replace(result, average=False, history=longer, epochs=13)
    assert last.summary().splitlines()[3] == "posterior after the last epoch; mean objective 1.5 in the last 2 epochs"


@pytest.mark.parametrize("noise, kind", [(None, "posterior of the parameters"), (30.0, "parameters and noise")])
def test_bands_say_what_they_are_of(result, noise, kind):
    pytest.importorskip("matplotlib").use("Agg")
    times = np.arange(200.0)
    axes = result.plot_predictive(lambda theta: theta[0] + 0 * times, times, times, noise=noise)
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert [label[:4] for label in labels[:2]] == ["90 %", "50 %"] and all(kind in label for label in labels[:2])
    outer = axes.collections[0].get_paths()[0].vertices[:, 1]
    # Without noise the samples' own quantiles; with it about the ends of four normal numbers at each time.
    assert np.ptp(outer) == pytest.approx(3.7) if noise is None else 60 < np.ptp(outer) < 250


def test_the_trend_is_the_slope_of_a_line_through_the_last_fifth_with_its_error(result):
    objectives = np.random.default_rng(2).standard_normal(100) - 0.03 * np.arange(100)
    objectives[:80] = 1e6
    longer = dataclasses.replace(result, history={**HISTORY, "objective": list(objectives)}, epochs=100)
    line = scipy.stats.linregress(np.arange(20), objectives[80:])
    np.testing.assert_allclose(longer.trend, (20 * line.slope, 20 * line.stderr), rtol=1e-9)
    assert result.trend is None and result.warnings == []
    objectives[90] = np.inf
    assert dataclasses.replace(longer, history={"objective": list(objectives)}).trend is None


@pytest.mark.parametrize("w, step, words", [(1.0, -0.01, "more epochs"), (1.0, 0.01, "lower the"), (9.0, 0.01, None)])
def test_a_change_counts_in_units_of_the_divergence(result, w, step, words):
    objectives = list(step * np.arange(200.0) + 1e-4 * np.random.default_rng(3).standard_normal(200))
    found = dataclasses.replace(result, history={**HISTORY, "objective": objectives}, epochs=200, w=w).warnings
    assert found == [] if words is None else len(found) == 1 and words in found[0] and f"{40 * step:+.3g}" in found[0]


def test_arviz_gets_the_samples_and_the_weights(result):
    arviz = pytest.importorskip("arviz")
    data = result.to_arviz()
    assert data.posterior["theta"].dims[:2] == ("chain", "draw") and not hasattr(data, "sample_stats")
    np.testing.assert_array_equal(data.posterior["theta"].values, SAMPLES[None])
    weighted = dataclasses.replace(result, log_weights=np.arange(4.0))
    named = weighted.to_arviz(["a", "b"])
    np.testing.assert_array_equal(named.posterior["b"].values, SAMPLES[None, :, 1])
    np.testing.assert_array_equal(named.sample_stats["log_weight"].values, [np.arange(4.0)])
    np.testing.assert_allclose(arviz.summary(named, kind="stats", round_to="none")["mean"], [3.0, 20.0])
    for wrong in (["a"], ["a", "a"], ["a", "a", "b"]):
        with pytest.raises(ValueError, match="names must be 2 different names, but got"):
            result.to_arviz(wrong)
