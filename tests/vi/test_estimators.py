"""The gradient's estimators against their formulas, priors without density, and posteriors of the user's own."""

from functools import partial

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI
from random_streams import generator

import mpiad
from mpiad import vi
from mpiad.errors import ConvergenceError, WorkerError
from mpiad.parallel import SGD, Adam
from mpiad.vi import MeanFieldGaussian

# All fits have the draws of one key, but for those to which a test gives another `rng`.
VI = partial(vi.VI, rng=0)

COMM = MPI.COMM_WORLD
ROOT = COMM.size - 1


class Moved:
    """A normal density of unit width, with an attribute that means something else than the library's own."""

    dim = 2
    moments = (0, 1)

    def initial(self, rng):
        return [np.array([0.3, -0.2])]

    def draw(self, params, noise):
        return params[0] + noise, -0.5 * anp.sum(noise**2, axis=1) - np.log(2 * np.pi)

    def log_prob(self, params, theta):
        return -0.5 * anp.sum((theta - params[0]) ** 2, axis=1) - np.log(2 * np.pi)


class WideMoved(Moved):
    def moments(self, order):
        raise NotImplementedError


def bowl(theta, data):
    return anp.sum((theta - np.array([1.0, -0.5])) ** 4)


def first_step(posterior, count, **options):
    """Return draws of the first epoch and the gradient that moved the parameters."""
    result = VI(bowl, posterior, ("norm", 0.5, 2.0), SGD(1.0), n_samples_per_epoch=count, root=ROOT, rng=6, **options).run(
        None, 1
    )
    noise = generator(6, 1, 0).standard_normal((count, 2))
    return noise, np.array(posterior.initial(None)[0]) - result.params[0], result


@pytest.mark.parametrize("schedule", ["even", "dynamic"])
@pytest.mark.parametrize("count", [2, 7])
def test_scores_are_weighed_with_the_mean_of_the_other_draws(count, schedule):
    noise, g, _ = first_step(Moved(), count, gradient="score", w=0.0, schedule=schedule)
    values = np.array([bowl(theta, None) for theta in np.array([0.3, -0.2]) + noise])
    exact = [(values[s] - np.delete(values, s).mean()) * noise[s] for s in range(count)]  # d log q / d mean is the noise
    np.testing.assert_allclose(g, np.mean(exact, axis=0), rtol=1e-12)


@pytest.mark.parametrize("kind", [Moved, WideMoved])
def test_a_posterior_of_ones_own_has_its_divergence_from_draws(kind):
    noise, g, result = first_step(kind(), 5, w=0.7)
    theta = np.array([0.3, -0.2]) + noise
    by_model = 4 * (theta - np.array([1.0, -0.5])) ** 3
    np.testing.assert_allclose(g, np.mean(by_model + 0.7 * (theta - 0.5) / 4, axis=0), rtol=1e-12)
    log_q = -0.5 * np.sum(noise**2, axis=1) - np.log(2 * np.pi)
    log_p = np.sum(-0.5 * ((theta - 0.5) / 2) ** 2 - np.log(2 * np.sqrt(2 * np.pi)), axis=1)
    assert result.history["divergence"][0] == pytest.approx(np.mean(log_q - log_p), rel=1e-12)


@pytest.mark.parametrize("divergence, own", [("draws", 0.0), ("path", 1.0)])
def test_the_path_estimator_leaves_out_the_densitys_own_dependence(divergence, own):
    """With the mean held fixed in it, log q changes by minus the noise along the path; else not at all."""
    noise, g, _ = first_step(Moved(), 5, w=0.7, divergence=divergence)
    theta = np.array([0.3, -0.2]) + noise
    by_model = 4 * (theta - np.array([1.0, -0.5])) ** 3
    np.testing.assert_allclose(g, np.mean(by_model + 0.7 * ((theta - 0.5) / 4 - own * noise), axis=0), rtol=1e-12)


@pytest.mark.parametrize("gradient", ["pathwise", "score"])
def test_draws_that_are_dropped_count_in_no_mean(gradient):
    def loss(theta, data):
        if mpiad.stop_gradient(theta)[0] > 0.5:
            raise ConvergenceError("not here")
        return bowl(theta, data)

    result = VI(loss, Moved(), ("norm", 0.5, 2.0), SGD(1.0), 0.7, 9, root=ROOT, rng=6, gradient=gradient).run(None, 1)
    noise = generator(6, 1, 0).standard_normal((9, 2))
    theta = np.array([0.3, -0.2]) + noise
    kept = theta[:, 0] <= 0.5
    theta, noise = theta[kept], noise[kept]
    assert 2 < len(theta) < 8
    if gradient == "pathwise":
        by_model = 4 * (theta - np.array([1.0, -0.5])) ** 3
    else:
        values = np.array([bowl(t, None) for t in theta])
        by_model = [(values[s] - np.delete(values, s).mean()) * noise[s] for s in range(len(theta))]
    expected = np.mean(by_model + 0.7 * (theta - 0.5) / 4, axis=0)
    np.testing.assert_allclose(np.array([0.3, -0.2]) - result.params[0], expected, rtol=1e-12)


def test_without_weight_the_prior_has_no_say():
    """Its density is zero at some draws, which would make NaN of everything."""
    options = {"n_samples_per_epoch": 6, "root": ROOT}
    bounded = VI(bowl, MeanFieldGaussian(2), ("uniform", 0.0, 1.0), Adam(0.1), 0.0, **options).run(None, 9)
    free = VI(bowl, MeanFieldGaussian(2), ("norm",), Adam(0.1), 0.0, **options).run(None, 9)
    assert bounded.history["objective"] == free.history["objective"]
    assert bounded.best_epoch > 0
    assert bounded.params["mean"].tolist() == free.params["mean"].tolist()


@pytest.mark.parametrize("prior", [("uniform", 0.0, 1.0), ("gamma", 2.0)])
def test_draws_outside_of_the_priors_support_say_so_on_all_ranks(prior):
    with pytest.raises(FloatingPointError, match=r"density is zero at \d of 6 draws.*support"):
        VI(bowl, MeanFieldGaussian(2), prior, Adam(0.1), 1.0, 6, root=ROOT).run(None, 9)
    assert VI(bowl, MeanFieldGaussian(2), ("norm",), Adam(0.1), root=ROOT).run(None, 2).epochs == 2


class Odd(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


class Failing(Moved):
    def __init__(self, where, error):
        self.where, self.error, self.calls = where, error, 0

    def initial(self, rng):
        if self.where == "initial":
            raise self.error
        return super().initial(rng)

    def draw(self, params, noise):
        self.calls += 1
        if self.where == "draw" and self.calls == 4:
            raise self.error
        theta, log_q = super().draw(params, noise)
        return (theta[:, 0], log_q) if self.where == "shape" else (theta, log_q)


@pytest.mark.parametrize("schedule", ["even", "dynamic"])
@pytest.mark.parametrize("where", ["initial", "draw", "shape", "callback"])
@pytest.mark.parametrize("error", [KeyError("on the root"), Odd("one", "two")], ids=["KeyError", "Odd"])
def test_what_fails_on_the_root_ends_the_run_on_all_ranks(where, error, schedule):
    def callback(epoch, objective, params):
        if where == "callback":
            raise error

    inference = VI(bowl, Failing(where, error), ("norm",), Adam(0.1), root=ROOT, schedule=schedule)
    kinds = (type(error), RuntimeError) if where != "shape" else (ValueError,)
    with pytest.raises(kinds, match="on the root|one and two|shape") as found:
        inference.run(None, 9, callback=callback)
    if COMM.rank == ROOT and where != "shape":
        assert found.value is error
    assert VI(bowl, Moved(), ("norm",), Adam(0.1), root=ROOT).run(None, 2).epochs == 2


def test_the_model_is_not_run_at_draws_that_are_not_finite():
    seen = []

    def loss(theta, data):
        seen.append(np.isfinite(getattr(theta, "_value", theta)).all())
        return bowl(theta, data)

    with pytest.raises((FloatingPointError, WorkerError)), np.errstate(over="ignore"):
        VI(loss, MeanFieldGaussian(2), ("norm",), SGD(1e200), root=ROOT).run(None, 20)
    assert all(seen)
