"""Whether a run has converged, and whether its family fits the posterior: told by the result, and once in the log."""

import logging
import sys
from functools import partial

import autograd.numpy as anp
import numpy as np
import pytest
import scipy.stats
from mpi4py import MPI
from random_streams import generator

from mpiad import vi
from mpiad.errors import ConvergenceError, WorkerError
from mpiad.parallel import SGD, Adam
from mpiad.vi import FullRankGaussian, MeanFieldGaussian

# All fits have the draws of one key, but for those to which a test gives another `rng`.
VI = partial(vi.VI, rng=0)

COMM = MPI.COMM_WORLD
ROOT = COMM.size - 1
COVARIANCE = np.array([[1.0, 0.97], [0.97, 1.0]])


def correlated(theta, data):
    return anp.dot(theta, anp.dot(np.linalg.inv(COVARIANCE), theta)) / 2


def fitted(family, epochs=200, loss=correlated, **options):
    optimizer = Adam(lambda k: 0.1 * (1 - k / epochs))
    inference = VI(loss, family(2), ("norm", 0.0, 10.0), optimizer, divergence="path", root=ROOT, rng=3)
    return inference.run(None, epochs, **options)


@pytest.mark.one_rank
@pytest.mark.limit(60)
@pytest.mark.parametrize("family, is_suitable", [(MeanFieldGaussian, False), (FullRankGaussian, True)])
def test_k_hat_tells_a_family_without_the_posteriors_correlation(family, is_suitable, caplog):
    calls = []

    def loss(theta, data):
        calls.append(theta)
        return correlated(theta, data)

    with caplog.at_level(logging.WARNING, logger="mpiad"):
        result = fitted(family, 200, loss, importance_weights=True)
    # Ten draws in each epoch, and after the fit each of the samples once.
    assert sum(COMM.allgather(len(calls))) == 200 * 10 + 1000
    assert len(set(COMM.allgather(result.log_weights.tobytes()))) == 1
    posterior = scipy.stats.multivariate_normal(np.zeros(2), np.linalg.inv(np.linalg.inv(COVARIANCE) + np.eye(2) / 100))
    exact = posterior.logpdf(result.samples) - result.log_prob(result.samples)
    np.testing.assert_allclose(np.diff(result.log_weights), np.diff(exact), atol=1e-9)
    logged = [record.getMessage() for record in caplog.records if "k-hat" in record.getMessage()]
    if COMM.rank != ROOT:
        assert logged == []
        return
    arviz = pytest.importorskip("arviz")  # on one rank, since the import takes seconds
    assert result.k_hat == pytest.approx(float(arviz.psislw(exact)[1]), abs=1e-6)
    assert (result.k_hat < 0.7) is is_suitable
    texts = [text for text in result.warnings if "k-hat" in text]
    assert len(texts) == (not is_suitable) and all("FullRankGaussian" in text for text in texts)
    assert logged == [f"VI: {text}" for text in texts]


@pytest.mark.parametrize("w", [1.0, 5.0])
def test_the_mean_of_the_weights_is_the_evidence_of_the_tempered_likelihood(w):
    y = np.array([0.3, -0.4, 1.1])
    inference = VI(
        lambda t, y: anp.sum((y - t[0]) ** 2) / 2, MeanFieldGaussian(1, 0.3, 0.9), ("norm",), SGD(1e-300), w, root=ROOT
    )
    result = inference.run(y, 1, n_samples=1000, importance_weights=True)
    grid = np.linspace(-9, 9, 20001)
    density = np.exp(-np.sum((y[:, None] - grid) ** 2, axis=0) / 2 / w) * scipy.stats.norm.pdf(grid)
    weights = np.exp(result.log_weights)
    assert abs(weights.mean() - density.sum() * (grid[1] - grid[0])) < 4 * weights.std() / np.sqrt(1000)
    assert np.all(weights > 0)


@pytest.mark.one_rank
def test_an_objective_that_still_falls_is_told_and_one_that_has_converged_is_not(caplog):
    far = lambda theta, data: 8 * anp.sum((theta - 3.0) ** 2)  # noqa: E731
    posterior = MeanFieldGaussian(2, sd=0.2)
    with caplog.at_level(logging.WARNING, logger="mpiad"):
        early, done = (
            VI(far, posterior, ("norm", 0.0, 10.0), Adam(rate), divergence="path", root=ROOT).run(None, 100)
            for rate in (0.02, 0.2)
        )
    change, error = early.trend
    assert change < -3 * error and abs(done.trend[0]) < max(0.1, 3 * done.trend[1])
    assert len(early.warnings) == 1 and "hasn't converged" in early.warnings[0] and "run more epochs" in early.warnings[0]
    assert done.warnings == []
    assert early.summary().endswith(early.warnings[0])
    assert caplog.text.count("hasn't converged") == (COMM.rank == ROOT)
    assert len(set(map(str, COMM.allgather((early.trend, early.warnings))))) == 1


def test_dropped_draws_are_counted_in_the_log_with_the_first_failure(caplog):
    def loss(theta, data):
        if theta[0] > 0.5:
            raise ConvergenceError("too large")
        return anp.sum(theta**2)

    with caplog.at_level(logging.WARNING, logger="mpiad"):
        result = VI(loss, MeanFieldGaussian(1), ("norm",), SGD(1e-300), 1.0, 30, root=ROOT).run(None, 3)
    noise = np.array([generator(0, 1, epoch).standard_normal((30, 1)) for epoch in range(3)])
    count = int((noise > 0.5).sum())
    first = min(r for r, part in enumerate(np.array_split(np.arange(30), COMM.size)) if (noise[:, part] > 0.5).any())
    reason = f"first on rank {first}: mpiad.errors.ConvergenceError: too large"
    text = f"{count} draws were dropped, since the model failed, {reason}"
    assert result.warnings == [text]
    assert [record.getMessage() for record in caplog.records] == ([f"VI: {text}"] if COMM.rank == ROOT else [])


@pytest.mark.parametrize("schedule", ["even", "dynamic"])
def test_a_likelihood_that_is_nan_is_named_with_rank_and_draw_on_all_ranks(schedule):
    inference = VI(
        lambda theta, data: anp.sum(theta) * np.nan, MeanFieldGaussian(2), ("norm",), Adam(), root=ROOT, schedule=schedule
    )
    with pytest.raises(
        WorkerError, match=r"NaN or infinity for 10. The first was on rank \d:\nthe loss's value is nan"
    ) as error:
        inference.run(None, 3)
    assert len(set(COMM.allgather(str(error.value)))) == 1
    draws = generator(0, 1, 0).standard_normal((10, 2)).tolist()
    assert any(f"at the draw theta = {draw}" in str(error.value) for draw in draws)
    kink = VI(lambda theta, data: anp.sum(anp.sqrt(0.0 * theta)), MeanFieldGaussian(2), ("norm",), Adam(), root=ROOT)
    with np.errstate(all="ignore"), pytest.raises(WorkerError, match=r"the loss's gradient is \[nan, nan\] at the draw"):
        kink.run(None, 3)


@pytest.mark.parametrize(
    "options, sign",
    [({}, "its gradient is zero at all 10 draws"), ({"gradient": "score"}, "it is 3 at all 10 draws")],
)
def test_a_loss_that_does_not_depend_on_theta_is_refused_on_all_ranks(options, sign):
    inference = VI(lambda theta, data: 3.0, MeanFieldGaussian(2), ("norm",), Adam(), root=ROOT, **options)
    with pytest.raises(ValueError, match=f"VI: the loss doesn't depend on theta: {sign} of epoch 0"):
        inference.run(None, 3)


def test_a_loss_of_few_values_may_be_the_same_at_few_draws():
    inference = VI(
        lambda theta, data: float(theta[0] > 9),
        MeanFieldGaussian(1),
        ("norm",),
        Adam(),
        1.0,
        4,
        gradient="score",
        root=ROOT,
    )
    assert inference.run(None, 2).epochs == 2


class Shaped:
    dim = 2

    def log_prob(self, theta):
        return -anp.sum(theta**2, axis=1, keepdims=True)


@pytest.mark.parametrize(
    "prior, kind, words",
    [
        (("norm", 1e300, 1.0), FloatingPointError, "at the start KL.q‖prior. is inf. Correct prior or initial posterior"),
        (("norm", 0.0, 1e-200), FloatingPointError, "the prior's density is zero at 10 of 10 draws"),
        (("norm", 0.0, 1e-160), FloatingPointError, "the prior's density is zero at 10 of 10 draws"),
        (Shaped(), ValueError, r"log_prob of the prior must return shape \(10,\), but returned \(10, 1\)"),
    ],
)
def test_a_prior_that_is_not_usable_at_the_start_is_named_on_all_ranks(prior, kind, words):
    inference = VI(lambda theta, data: anp.sum(theta**2), FullRankGaussian(2), prior, Adam(), root=ROOT)
    with np.errstate(all="ignore"), pytest.raises(kind, match=words) as error:
        inference.run(None, 3)
    assert "earning rate" not in str(error.value)
    if kind is ValueError:
        with pytest.raises(kind, match=words.replace("10", "1000")):
            inference.elbo(FullRankGaussian(2).initial(np.random.default_rng(0)))


@pytest.mark.serial
def test_a_very_wide_prior_has_a_divergence():
    result = VI(lambda theta, data: anp.sum(theta**2), FullRankGaussian(2), ("norm", 0.0, 1e200), SGD(1e-300)).run(None, 1)
    expected = 2 * (200 * np.log(10) - 0.5)  # E[log q - log p], from draws
    assert result.history["divergence"][0] == pytest.approx(expected, abs=3)


@pytest.mark.parametrize("wrong", [{"w": 0.0}, {"n_samples": 99}, {"importance_weights": 1}])
def test_importance_weights_need_a_posterior_and_draws(wrong):
    options = {"n_samples": 200, "importance_weights": True, **wrong}
    inference = VI(correlated, FullRankGaussian(2), ("norm",), Adam(), options.pop("w", 1.0), root=ROOT)
    with pytest.raises((TypeError, ValueError), match="w above zero and n_samples of 100 or more|must be True or False"):
        inference.run(None, 2, **options)


@pytest.mark.serial
def test_without_arviz_the_fit_is_the_same_and_a_sentence_says_how_to_install_it(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "arviz", None)
    result = fitted(FullRankGaussian, 3, importance_weights=True)
    assert result.k_hat is None and np.isfinite(result.log_weights).all()
    assert [text.partition(";")[2] for text in result.warnings] == [" pip install 'mpiad[arviz]'"]
    with pytest.raises(ImportError, match=r"VIResult.to_arviz needs ArviZ.*pip install 'mpiad\[arviz\]'"):
        result.to_arviz()
    caplog.clear()
    silent = fitted(FullRankGaussian, 3)
    assert silent.k_hat is None and silent.log_weights is None and silent.warnings == [] and not caplog.records
