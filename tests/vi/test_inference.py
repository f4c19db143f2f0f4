"""Variational inference against the exact posterior of a conjugate model, on any number of ranks."""

import logging
from functools import partial

import autograd.numpy as anp
import numpy as np
import pytest
import scipy.stats
from mpi4py import MPI
from random_streams import generator

import mpiad
from mpiad import vi
from mpiad.errors import CommunicatorError, ConvergenceError, WorkerError
from mpiad.parallel import Adam
from mpiad.vi import AffineCoupling, Flow, FullRankGaussian, LULinear, MeanFieldGaussian, Prior

# All fits have the draws of one key, but for those to which a test gives another `rng`.
VI = partial(vi.VI, rng=0)

COMM = MPI.COMM_WORLD
ROOT = COMM.size - 1


class Conjugate:
    """y = A θ + noise with a normal prior: its posterior and its evidence in closed form."""

    def __init__(self, dim, rows=30, sd=0.5, mean=0.3, spread=1.5):
        rng = np.random.default_rng(3)
        self.a, truth = rng.normal(size=(rows, dim)), rng.normal(size=dim)
        self.y = self.a @ truth + sd * rng.normal(size=rows)
        self.prior, self.sd = ("norm", mean, spread), sd
        precision = self.a.T @ self.a / sd**2 + np.eye(dim) / spread**2
        self.covariance = np.linalg.inv(precision)
        self.mean = self.covariance @ (self.a.T @ self.y / sd**2 + mean / spread**2)
        whole = sd**2 * np.eye(rows) + spread**2 * self.a @ self.a.T
        self.evidence = scipy.stats.multivariate_normal(self.a @ np.full(dim, mean), whole).logpdf(self.y)

    def loss(self, theta, y):
        return 0.5 * anp.sum(((y - self.a @ theta) / self.sd) ** 2) + len(y) * np.log(self.sd * np.sqrt(2 * np.pi))


def falling(rate, epochs):
    return Adam(lambda k: rate / 2 * (1 + np.cos(np.pi * k / epochs)) + 1e-12)


@pytest.mark.serial
@pytest.mark.limit(120)
def test_ten_dimensions_reach_the_exact_posterior_and_evidence():
    model, epochs = Conjugate(10), 400
    posterior = FullRankGaussian(10, sd=0.1)
    inference = VI(model.loss, posterior, model.prior, falling(0.2, epochs), 1.0, 5, divergence="path", rng=2)
    result = inference.run(model.y, epochs)
    mean, covariance = inference.posterior.moments(result.params)
    assert np.all(abs(mean - model.mean) < 0.02 * np.sqrt(np.diag(model.covariance)))
    assert np.linalg.norm(covariance - model.covariance) < 0.02 * np.linalg.norm(model.covariance)
    estimate, error = inference.elbo(result.params, model.y, 200)
    assert estimate == pytest.approx(model.evidence, abs=1e-2)
    assert error < 1e-2


class InPlace:
    """Plain descent that overwrites the parameters, as optimizers of others do."""

    def setup(self, params):
        return {}

    def update(self, state, params, gradient):
        for name in params:
            params[name] -= 0.3 * gradient[name]
        return state, params


def test_the_best_parameters_stay_where_an_optimizer_overwrites_them():
    model, posterior = Conjugate(2), MeanFieldGaussian(2, sd=0.1)
    start = posterior.initial(np.random.default_rng(0))
    given = {name: value.copy() for name, value in start.items()}
    inference = VI(model.loss, posterior, model.prior, InPlace(), 1.0, 4, root=ROOT)
    # The rate is too large: after the first epoch the objective rises.
    result = inference.run(model.y, 2, params=start)
    assert result.history["objective"][1] > result.history["objective"][0] and result.best_epoch == 0
    for name, value in given.items():
        np.testing.assert_array_equal(result.best_params[name], value)
        np.testing.assert_array_equal(start[name], value)


@pytest.mark.thorough
@pytest.mark.parametrize("divergence", ["closed", "draws"])
def test_noisier_estimators_reach_it_roughly(divergence):
    model, epochs = Conjugate(2), 120
    options = {"n_samples_per_epoch": 12, "divergence": divergence, "root": ROOT}
    inference = VI(model.loss, FullRankGaussian(2, sd=0.2), model.prior, falling(0.1, epochs), **options)
    result = inference.run(model.y, epochs)
    mean, covariance = inference.posterior.moments(result.params)
    assert np.all(abs(mean - model.mean) < 0.2 * np.sqrt(np.diag(model.covariance)))
    assert np.linalg.norm(covariance - model.covariance) < 0.25 * np.linalg.norm(model.covariance)


@pytest.mark.serial
def test_score_functions_serve_models_without_a_gradient():
    model, epochs = Conjugate(2), 300

    def loss(theta, y):
        assert type(theta) is np.ndarray  # never traced
        return float(model.loss(theta, y))

    posterior = MeanFieldGaussian(2, sd=0.5)
    result = VI(loss, posterior, model.prior, falling(0.2, epochs), 1.0, 20, gradient="score").run(model.y, epochs)
    # The best mean field has the exact mean, and the precisions' diagonal.
    sd = 1 / np.sqrt(np.diag(np.linalg.inv(model.covariance)))
    assert np.all(abs(result.params["mean"] - model.mean) < 0.3 * sd)
    np.testing.assert_allclose(np.exp(result.params["log_sd"]), sd, rtol=0.25)


@pytest.mark.thorough
@pytest.mark.serial
def test_flows_reach_it_too():
    model, epochs = Conjugate(2), 250
    flow = Flow(2, [AffineCoupling(hidden=8), LULinear(), AffineCoupling(True, 8)], sd=0.3)
    inference = VI(model.loss, flow, model.prior, falling(0.03, epochs), 1.0, 8, divergence="path")
    result = inference.run(model.y, epochs)
    estimate, error = inference.elbo(result.params, model.y, 400)
    assert model.evidence - 0.05 - 3 * error < estimate < model.evidence + 3 * error


def short_run(comm=None, root=0, schedule="even", samples=5):
    model = Conjugate(2)
    inference = VI(
        model.loss,
        FullRankGaussian(2),
        model.prior,
        Adam(0.1),
        0.7,
        samples,
        comm=comm,
        root=root,
        schedule=schedule,
        rng=9,
    )
    return inference.run(model.y, 7, n_samples=6)


@pytest.mark.parametrize("schedule", ["even", "dynamic"])
def test_runs_do_not_depend_on_the_number_of_ranks(schedule):
    result, alone = short_run(None, ROOT, schedule), short_run(MPI.COMM_SELF)
    for column in ("objective", "loss", "divergence"):
        np.testing.assert_allclose(result.history[column], alone.history[column], rtol=1e-13)
    np.testing.assert_allclose(result.samples, alone.samples, rtol=1e-12)
    assert len(set(COMM.allgather(result.samples.tobytes()))) == 1


@pytest.mark.parametrize("count", [5, 20, 2 * COMM.size + 1])
def test_every_draw_is_run_once_in_even_shares(count):
    model, seen = Conjugate(2), []

    def loss(theta, y):
        seen.append(tuple(theta) if type(theta) is np.ndarray else tuple(theta._value))
        return model.loss(theta, y)

    VI(loss, MeanFieldGaussian(2), model.prior, Adam(0.1), 1.0, count, rng=4, root=ROOT).run(model.y, 1)
    shares = COMM.allgather(seen)
    assert [len(share) for share in shares] == [count // COMM.size + (r < count % COMM.size) for r in range(COMM.size)]
    # The draws are the root's, bit for bit, whoever ran them.
    noise = generator(4, 1, 0).standard_normal((count, 2))
    assert [theta for share in shares for theta in share] == [tuple(row) for row in noise]


def test_each_epoch_has_draws_of_its_own():
    seen = []

    def loss(theta, data):
        seen.append(tuple(mpiad.stop_gradient(theta)))
        return anp.sum(theta)

    VI(loss, MeanFieldGaussian(2), ("norm",), Adam(1e-300), 1.0, 1, rng=4, root=ROOT).run(None, 3)
    noise = [generator(4, 1, epoch).standard_normal((1, 2))[0] for epoch in range(3)]
    assert COMM.bcast(seen) == [tuple(row) for row in noise]


def test_the_evidence_is_the_mean_with_its_standard_error():
    model = Conjugate(2)
    inference = VI(model.loss, MeanFieldGaussian(2), model.prior, Adam(0.1), rng=8, root=ROOT)
    params = {"mean": np.array([0.3, -0.1]), "log_sd": np.log([0.2, 0.4])}
    noise = generator(8, 3).standard_normal((7, 2))
    theta = params["mean"] + [0.2, 0.4] * noise
    log_q = scipy.stats.norm(params["mean"], [0.2, 0.4]).logpdf(theta).sum(1)
    log_p = scipy.stats.norm(0.3, 1.5).logpdf(theta).sum(1)
    terms = log_p - log_q - [model.loss(t, model.y) for t in theta]
    exact = terms.mean(), terms.std(ddof=1) / np.sqrt(7)
    assert inference.elbo(params, model.y, 7) == pytest.approx(exact, rel=1e-12)


def test_the_objective_is_the_weighted_sum_and_the_start_the_posteriors():
    model = Conjugate(2)
    result = VI(model.loss, MeanFieldGaussian(2, 0.1, 0.8), model.prior, Adam(0.1), 2.5, 3, rng=1).run(model.y, 1)
    theta = 0.1 + 0.8 * generator(1, 1, 0).standard_normal((3, 2))
    divergence = 2 * (np.log(1.5 / 0.8) + (0.64 + 0.04) / (2 * 2.25) - 0.5)
    assert result.history["divergence"][0] == pytest.approx(divergence, rel=1e-12)
    assert result.history["loss"][0] == pytest.approx(np.mean([model.loss(t, model.y) for t in theta]), rel=1e-12)
    expected = result.history["loss"][0] + 2.5 * divergence
    assert result.history["objective"][0] == pytest.approx(expected, rel=1e-12)


def test_early_stopping_is_decided_once():
    model = Conjugate(2)
    result = VI(model.loss, MeanFieldGaussian(2), model.prior, Adam(1e-9), 1.0, 4, rng=2, root=ROOT).run(model.y, 500, 3)
    every = COMM.allgather((result.epochs, result.best_epoch, result.message))
    assert len(set(every)) == 1
    assert every[0][0] - 1 - every[0][1] == 3
    assert every[0][2] == "no improvement in 3 epochs"
    lowest = int(np.argmin(result.history["objective"]))
    assert lowest == result.best_epoch


def test_a_callback_may_end_the_run():
    model, seen = Conjugate(2), []

    def callback(epoch, objective, params):
        seen.append(epoch)
        if epoch == 2:
            raise StopIteration

    result = VI(model.loss, MeanFieldGaussian(2), model.prior, Adam(0.1), root=ROOT).run(model.y, 50, callback=callback)
    assert result.epochs == 3
    assert result.message == "ended by the callback"
    assert seen == ([0, 1, 2] if COMM.rank == ROOT else [])


@pytest.mark.parametrize("schedule", ["even", "dynamic"])
def test_draws_whose_model_fails_are_dropped_and_counted(schedule):
    model = Conjugate(2)

    def loss(theta, y):
        if theta[0] > 0.7:
            raise ConvergenceError("the model does not like it")
        if theta[1] > 1.0:
            return anp.sum(theta) * np.nan
        return model.loss(theta, y)

    result = VI(loss, MeanFieldGaussian(2), model.prior, Adam(1e-6), 1.0, 40, rng=5, schedule=schedule).run(model.y, 2)
    theta = generator(5, 1, 0).standard_normal((40, 2))
    bad = (theta[:, 0] > 0.7) | (theta[:, 1] > 1.0)
    assert result.history["dropped"][0] == bad.sum() > 5
    exact = np.mean([model.loss(t, model.y) for t in theta[~bad]])
    assert result.history["loss"][0] == pytest.approx(exact, rel=1e-12)


def test_a_model_that_always_fails_ends_the_run_with_its_traceback():
    def loss(theta, data):
        raise RuntimeError("no such model")

    inference = VI(loss, MeanFieldGaussian(2), ("norm",), Adam(), root=ROOT)
    with pytest.raises(WorkerError, match="in epoch 0 the model raised at 10 of 10 draws(.|\n)*no such model"):
        inference.run(None, 3)
    calls = []

    def worse(theta, data):
        calls.append(1)
        raise RuntimeError(f"failure number {len(calls)}")

    with pytest.raises(WorkerError, match="failure number 1\n"):
        VI(worse, MeanFieldGaussian(2), ("norm",), Adam(), root=ROOT).run(None, 3)
    with pytest.raises(WorkerError, match=r"VI: loss must return one real number, but returned .*shape \(2,\)"):
        VI(lambda theta, data: theta, MeanFieldGaussian(2), ("norm",), Adam(), root=ROOT).run(None, 3)
    with pytest.raises(
        WorkerError, match=r"VI.elbo: the model raised at 1000 of 1000 draws. The first was on rank \d:\nTrace"
    ):
        make(loss=lambda theta, data: worse(theta, data)).elbo(MeanFieldGaussian(2).initial(np.random.default_rng(0)))
    with pytest.raises(WorkerError, match="in epoch 0 the model failed for all 10 .* 0, .* NaN or infinity for 10"):
        VI(lambda theta, data: anp.sum(theta) * np.inf, MeanFieldGaussian(2), ("norm",), Adam()).run(None, 3)
    assert VI(lambda theta, data: anp.sum(theta**2), MeanFieldGaussian(2), ("norm",), Adam()).run(None, 1).epochs == 1


@pytest.mark.parametrize("schedule", ["even", "dynamic"])
@pytest.mark.parametrize("error", [MemoryError("no more"), ZeroDivisionError("1 / 0"), KeyError("speed")])
def test_an_exception_at_one_draw_ends_the_run_on_all_ranks(schedule, error):
    """Also beside draws that are dropped."""
    draws = generator(0, 1, 0).standard_normal((12, 1))
    chosen = draws[7, 0]

    def loss(theta, data):
        if mpiad.stop_gradient(theta)[0] == chosen:
            raise error
        return anp.sum(theta) * np.nan

    inference = VI(loss, MeanFieldGaussian(1), ("norm",), Adam(), 1.0, 12, root=ROOT, schedule=schedule)
    with pytest.raises(WorkerError, match=rf"the model raised at 1 of 12 draws(.|\n)*{type(error).__name__}: ") as raised:
        inference.run(None, 3)
    assert len(set(COMM.allgather(str(raised.value)))) == 1
    assert mpiad.mpi_allreduce(1) == COMM.size


class OwnPrior:
    """A prior whose log density is computed by a function."""

    dim = 1

    def __init__(self, log_prob):
        self.log_prob = log_prob


@pytest.mark.parametrize(
    ("log_prob", "words"),
    [
        (lambda theta: anp.sum(theta * np.nan, axis=1), "prior's log density is NaN or infinite at 10 of 10 draws"),
        (lambda theta: anp.sum(anp.sqrt(theta * 0.0), axis=1), "derivative of the log density of the prior"),
    ],
)
def test_a_prior_that_is_not_finite_is_named_not_the_learning_rate(log_prob, words):
    inference = VI(lambda theta, data: anp.sum(theta**2), MeanFieldGaussian(1), OwnPrior(log_prob), Adam(), root=ROOT)
    with np.errstate(all="ignore"), pytest.raises(FloatingPointError, match=words) as error:
        inference.run(None, 3)
    assert "earning rate" not in str(error.value)


@pytest.mark.parametrize(
    ("prior", "words"),
    [
        (
            ("norm", 0.0, np.nan),
            r"prior of parameter 0 must have valid arguments of scipy.stats.norm, but got \[0.0, nan\]",
        ),
        (("norm", 0.0, -1.0), r"valid arguments of scipy.stats.norm, but got \[0.0, -1.0\]"),
        ([("expon",), ("gamma", np.inf)], "prior of parameter 1 .* scipy.stats.gamma"),
        (scipy.stats.multivariate_normal([np.nan, 0.0]), "mean and covariance of the prior must be finite"),
    ],
)
def test_priors_with_arguments_out_of_range_are_refused(prior, words):
    with pytest.raises(ValueError, match=words):
        Prior(prior, 2)


def test_steps_that_are_too_long_say_so_on_all_ranks():
    model = Conjugate(2)
    inference = VI(model.loss, MeanFieldGaussian(2), model.prior, Adam(1e300), root=ROOT)
    with pytest.raises((FloatingPointError, WorkerError), match="finite|failed"):
        inference.run(model.y, 20)


def test_few_draws_for_many_ranks_are_allowed_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING, logger="mpiad"):
        assert short_run(samples=1).epochs == 7
    said = f"with 1 draws per epoch, {COMM.size - 1} of {COMM.size} ranks have none" in caplog.text
    assert said is (COMM.rank == 0 and COMM.size > 1)
    assert ("have none" in caplog.text) is said


@pytest.mark.serial
@pytest.mark.parametrize(
    "given",
    [
        scipy.stats.norm(0.4, 2.0), ("norm", 0.4, 2.0), [("norm", 0.4, 2.0), scipy.stats.norm(-1, 0.5)],
        scipy.stats.multivariate_normal([0.3, -0.2], [[2.0, 0.5], [0.5, 1.0]]), ("gamma", 3.0), scipy.stats.t(4, 1, 2),
        [("uniform", -2, 9), ("lognorm", 0.7)], ("cauchy", 0.0, 0.01),
    ],
)  # fmt: skip
def test_priors_are_scipys_with_their_derivative(given):
    prior = Prior(given, 2)
    theta = np.array([[0.5, 1.3], [1.7, 0.4]])
    if hasattr(given, "cov"):
        expected = given.logpdf(theta)
    else:
        pair = given if isinstance(given, list) else [given, given]
        frozen = [getattr(scipy.stats, g[0])(*g[1:]) if isinstance(g, tuple) else g for g in pair]
        expected = frozen[0].logpdf(theta[:, 0]) + frozen[1].logpdf(theta[:, 1])
    np.testing.assert_allclose(prior.log_prob(theta), expected, rtol=1e-12)
    from autograd import grad

    slope = grad(lambda x: anp.sum(prior.log_prob(x)))(theta)
    for k in range(2):
        step = np.eye(2)[k] * 1e-5
        change = (prior.log_prob(theta + step) - prior.log_prob(theta - step)) / 2e-5
        np.testing.assert_allclose(slope[:, k], change, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("known", [True, False], ids=["with its dimension", "without"])
def test_a_prior_of_the_users_own_is_that_of_its_density(known):
    class Wide:
        def log_prob(self, theta):
            return anp.sum(-0.5 * ((theta - 0.3) / 1.5) ** 2 - 0.5 * anp.log(2 * anp.pi) - anp.log(1.5), axis=1)

    if known:
        Wide.dim = 2
    model = Conjugate(2)
    for posterior in (MeanFieldGaussian(2), FullRankGaussian(2)):
        inferences = [
            VI(model.loss, posterior, prior, Adam(0.1), 0.7, 6, rng=3, root=ROOT, divergence="path")
            for prior in (Wide(), ("norm", 0.3, 1.5))
        ]
        own, scipys = (inference.run(model.y, 4) for inference in inferences)
        np.testing.assert_allclose(own.history["objective"], scipys.history["objective"], rtol=1e-12)
        np.testing.assert_allclose(own.params["mean"], scipys.params["mean"], rtol=1e-10)
        own, scipys = (inference.elbo(own.params, model.y, 20) for inference in inferences)
        np.testing.assert_allclose(own, scipys, rtol=1e-10)


@pytest.mark.serial
def test_a_prior_may_have_an_entry_for_each_parameter():
    theta = np.array([[0.5, 1.3], [1.7, 0.4]])
    for given in (scipy.stats.norm([0, 1], scale=[1, 2]), scipy.stats.gamma([2.0, 3.0])):
        np.testing.assert_allclose(Prior(given, 2).log_prob(theta), given.logpdf(theta).sum(1), rtol=1e-13)


@pytest.mark.serial
def test_independent_normal_priors_of_points_at_infinity():
    theta = np.array([[np.inf, 1.3], [1.7, -np.inf]])
    np.testing.assert_array_equal(Prior([("norm", 0, 1), ("norm", 1, 2)], 2).log_prob(theta), [-np.inf, -np.inf])


@pytest.mark.serial
@pytest.mark.parametrize("x", [1e-12, 1e-6, 1e-3])
def test_slopes_of_priors_are_right_near_the_end_of_their_support(x):
    from autograd import grad

    prior = Prior(("gamma", 3.0), 1)
    slope = grad(lambda x: prior.log_prob(np.ones((1, 1)) * x)[0])(x)
    assert slope == pytest.approx(2 / x - 1, rel=1e-6)


def make(**changes):
    given = {"loss": lambda t, d: anp.sum(t), "posterior": MeanFieldGaussian(2), "prior": ("norm",), "optimizer": Adam()}
    return VI(**{**given, **changes})


@pytest.mark.parametrize(
    "changes, kind, text",
    [
        ({"loss": 3}, TypeError, "loss must be a function, but got int 3"),
        ({"posterior": "normal"}, TypeError, "posterior must have initial, draw, log_prob"),
        ({"optimizer": "adam"}, TypeError, "optimizer must have setup, update"),
        ({"optimizer": Adam}, TypeError, r"optimizer must be an object, but got a class: write Adam\(...\)"),
        ({"posterior": MeanFieldGaussian}, TypeError, "posterior must be an object, but got a class: write MeanField"),
        ({"prior": 5}, TypeError, "int 5"),
        ({"prior": ("normaal",)}, ValueError, "no continuous distribution 'normaal'"),
        ({"prior": [("norm",)] * 3}, ValueError, "dimension 2, but the prior has 3"),
        ({"prior": scipy.stats.multivariate_normal(np.zeros(3))}, ValueError, "dimension 2, but the prior has 3"),
        ({"prior": scipy.stats.norm([0, 1, 2])}, ValueError, "dimension 2, but the prior has 3"),
        ({"prior": Prior(("norm",), 3)}, ValueError, "dimension 2, but the prior has 3"),
        ({"w": -1}, ValueError, "-1"),
        ({"n_samples_per_epoch": 0}, ValueError, "n_samples_per_epoch.*0"),
        ({"rng": "a"}, TypeError, "VI: rng must be a Generator, a SeedSequence, an integer of at least 0, or None"),
        ({"rng": -1}, ValueError, "VI: rng must be .* an integer of at least 0, or None, but got -1"),
        ({"gradient": "exact"}, ValueError, "'pathwise', 'score', but got 'exact'"),
        ({"divergence": "closed", "prior": ("gamma", 2.0)}, ValueError, "needs a Gaussian posterior and a normal prior"),
        ({"divergence": "closed", "prior": ("norm", 0, 1e-170)}, ValueError, "normal prior with finite inverse covariance"),
    ],
)
def test_what_cannot_be_used_is_refused(changes, kind, text):
    with pytest.raises(kind, match=text):
        make(**changes)


@pytest.mark.parametrize("wrong", [{"n_epochs": 0}, {"n_epochs": 2.5}, {"max_epochs_without_improvement": 0}])
def test_arguments_of_run_are_checked_on_all_ranks(wrong):
    given = wrong if COMM.rank == ROOT else {"n_epochs": 1}
    with pytest.raises(ValueError, match="must be an integer above zero"):
        make().run(None, **given)


def test_empty_data_are_refused_on_all_ranks():
    data = np.ones(0 if COMM.rank == ROOT else 3)
    with pytest.raises(ValueError, match=f"data is empty .ndarray of length 0. on rank {ROOT}"):
        make().run(data, 1)


@pytest.mark.serial
def test_results_tell_and_draw(tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    result = short_run()
    assert result.quantile([0.1, 0.9]).shape == (2, 2)
    np.testing.assert_allclose(result.mean(), result.samples.mean(0))
    lines = result.summary(["slope", "offset"]).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["slope", "offset"]
    assert "7 epochs" in lines[-1]
    assert result.draw(5).shape == (5, 2)
    assert result.log_prob(result.draw(5)).shape == (5,)
    figure = result.plot_corner(["slope", "offset"], truth=[0.0, 1.0], prior=np.linspace([0.0, 7.0], [3.0, 9.0], 50))
    assert figure.axes[0].patches[0].get_x() == pytest.approx(0.0, abs=1e-12) and len(figure.axes[3].patches) == 80
    figure.savefig(tmp_path / "corner.png")
    axes = result.plot_predictive(lambda t: t[0] * np.arange(4.0), np.arange(4.0), np.zeros(4))
    axes.figure.savefig(tmp_path / "predictive.png")
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("corner.png", "predictive.png"))


@pytest.mark.parametrize("wrong", [0, 2.5, "10"])
def test_elbo_of_a_wrong_number_of_draws_raises_on_all_ranks(wrong, rank):
    model = Conjugate(2)
    inference = VI(model.loss, MeanFieldGaussian(2), model.prior, Adam(0.1), root=ROOT)
    params = MeanFieldGaussian(2).initial(np.random.default_rng(0))
    with pytest.raises((TypeError, ValueError), match="n_samples"):
        inference.elbo(params, model.y, wrong if rank == ROOT else 4)
    if COMM.size > 1:
        with pytest.raises(ValueError, match="n_samples=5"):
            inference.elbo(params, model.y, 5 if rank == ROOT else 4)


@pytest.mark.serial
def test_the_start_is_independent_of_the_first_noise():
    class Told(MeanFieldGaussian):
        def initial(self, rng):
            started.append(rng.standard_normal(4))
            return super().initial(rng)

        def draw(self, params, noise):
            drawn.append(np.ravel(mpiad.stop_gradient(noise))[:4])
            return super().draw(params, noise)

    started, drawn, model = [], [], Conjugate(2)
    VI(model.loss, Told(2), model.prior, Adam(0.1), rng=5).run(model.y, 2, n_samples=4)
    assert len(started) == 1 and len(drawn) > 1
    assert not any(np.array_equal(started[0], noise) for noise in drawn)


def test_an_object_among_variational_parameters_is_refused_on_all_ranks():
    inference = VI(lambda theta, data: anp.sum(theta**2), MeanFieldGaussian(1), ("norm", 0.0, 1.0), Adam(0.1), root=ROOT)
    start = {**MeanFieldGaussian(1).initial(np.random.default_rng(0)), "layer": Adam()}
    with pytest.raises(TypeError, match=r"VI.run: params\['layer'\] is Adam"):
        inference.run(None, 2, params=start if COMM.rank == ROOT else None)


DATA = np.array([1.0, 2.0, 3.0])


def normal_loss(comm):
    """Return a loss that adds up its terms over ranks; with one rank its posterior is normal, mean 6/4, variance 1/4."""
    return lambda theta, data: mpiad.mpi_allreduce(anp.sum((theta[0] - DATA) ** 2) / 2, comm=comm)


@pytest.mark.skipif(COMM.size == 1, reason="one rank may communicate with itself")
@pytest.mark.parametrize("schedule", ["even", "dynamic"])
@pytest.mark.parametrize("draws", [8, 9])
def test_a_loss_that_communicates_raises_on_all_ranks(draws, schedule):
    """It gave a wrong posterior, or hung if ranks had different numbers of draws."""
    kept = {"n_samples_per_epoch": draws, "schedule": schedule, "root": ROOT}
    for loss in (normal_loss(None), lambda theta, data: normal_loss(None)(theta, data) if theta[0] > 0 else theta[0] ** 2):
        inference = VI(loss, MeanFieldGaussian(1), ("norm", 0.0, 1.0), Adam(0.1), **kept)
        with pytest.raises(WorkerError, match="is evaluated by one rank .*communicate on MPI.COMM_SELF"):
            inference.run(None, 3)
    assert mpiad.mpi_allreduce(1.0) == COMM.size


def test_a_loss_may_communicate_on_a_communicator_of_one_rank():
    inference = VI(
        normal_loss(MPI.COMM_SELF), MeanFieldGaussian(1), ("norm", 0.0, 1.0), falling(0.2, 150), divergence="path"
    )
    mean, covariance = inference.posterior.moments(inference.run(None, 150).params)
    np.testing.assert_allclose([mean[0], covariance[0, 0]], [1.5, 0.25], rtol=0.02)


@pytest.mark.skipif(COMM.size == 1, reason="one rank may communicate with itself")
def test_a_callback_that_communicates_raises_on_all_ranks():
    inference = VI(normal_loss(MPI.COMM_SELF), MeanFieldGaussian(1), ("norm", 0.0, 1.0), Adam(0.1), root=ROOT)
    with pytest.raises(CommunicatorError, match="an update of VI is evaluated by one rank"):
        inference.run(None, 3, callback=lambda *found: mpiad.mpi_allreduce(1.0))
