"""Chains of fields: known posteriors, any number of ranks, groups, checkpoints, errors and warnings."""

import math
import os
import signal
import warnings
from functools import partial

import autograd.numpy as anp
import numpy as np
import pytest
from dense_prior import DensePrior
from mpi4py import MPI

import mpiad
from mpiad import inverse
from mpiad.errors import ConvergenceError, WorkerError
from mpiad.inverse import Bilaplacian, Posterior, Samples, laplace_approximation
from mpiad.optimize import CheckpointFile
from mpiad.transport.exits import signals

# All chains have the numbers of one key, but for those to which a test gives another `rng`.
sample = partial(inverse.sample, rng=0)

SHAPE, H, CELLS = (5, 3), 0.2, 15
METHODS = ["pcn", "mala", "hpcn", "hmala", "hhmc", "dr"]


class Problem:
    """Five observations y of a small field, with the misfit ½ |y + c y³ - d|²/σ²; linear if c is 0."""

    def __init__(self, cubic=0.0, comm=None, observed=5):
        self.domain = mpiad.Domain(SHAPE, comm=comm)
        self.prior = Bilaplacian(self.domain, 0.5, 1.3, mean=0.2, spacing=H, rtol=1e-12)
        random = np.random.default_rng(3)
        self.operator = random.standard_normal((observed, CELLS)) / np.sqrt(CELLS)
        self.data, self.cubic = random.standard_normal(observed), cubic
        self.rows = np.ascontiguousarray(self.operator.reshape(observed, *SHAPE)[(slice(None), *self.domain.owned)])
        self.posterior = laplace_approximation(
            lambda v: self.transposed(self.observed(v)), self.prior.mean, self.prior, observed
        )
        # The mean of the linear problem: mean₀ - C_post ∇Φ(mean₀).
        gradient = self.transposed(self.observed(self.prior.mean) - self.data)
        self.posterior.mean = self.prior.mean - self.posterior.apply(gradient)

    def transposed(self, y):
        return np.tensordot(y, self.rows, 1) / 0.4**2

    def observed(self, m):
        return self.domain.gram(self.rows, m[None])[:, 0]

    def misfit(self, m):
        y = self.observed(m)
        return 0.5 * anp.sum((y + self.cubic * y**3 - self.data) ** 2) / 0.4**2

    def sample(self, method, n_samples, **options):
        return sample(self.misfit, self.prior, method=method, n_samples=n_samples, posterior=self.posterior, **options)


@pytest.fixture
def folder(tmp_path):
    """A folder that all ranks know."""
    return MPI.COMM_WORLD.bcast(tmp_path)


@pytest.fixture(scope="module")
def linear():
    return Problem()


def effective_size(series):
    """Return the effective number of samples by Geyer's initial positive sequence."""
    away = series - series.mean()
    n = len(away)
    spectrum = np.abs(np.fft.rfft(away, 2 * n)) ** 2
    correlation = np.fft.irfft(spectrum)[:n] / np.arange(n, 0, -1)
    pairs = correlation[: n // 2 * 2].reshape(-1, 2).sum(axis=1) / correlation[0]
    end = int(np.argmax(pairs < 0.0)) if np.any(pairs < 0.0) else len(pairs)
    return n / max(2.0 * pairs[:end].sum() - 1.0, 1.0)


@pytest.mark.one_rank
@pytest.mark.parametrize("method", METHODS)
def test_conjugate_posterior(method):
    """Mean and covariance of the field, within three standard errors."""
    random = np.random.default_rng(7)
    factor, operator, data = random.standard_normal((4, 4)), random.standard_normal((2, 4)), random.standard_normal(2)
    prior = DensePrior(factor @ factor.T / 4 + 0.3 * np.eye(4), random.standard_normal(4))
    dense = np.linalg.inv(operator.T @ operator + prior.precision)
    mean = prior.mean + dense @ operator.T @ (data - operator @ prior.mean)
    posterior = laplace_approximation(lambda v: operator.T @ (operator @ v), mean, prior, 3)
    count = {"pcn": 1500, "mala": 1200}.get(method, 400)
    result = sample(
        lambda m: 0.5 * anp.sum((anp.dot(operator, m) - data) ** 2), prior, method=method, n_samples=count, rng=1,
        posterior=posterior, quantities=lambda m: m,
    )  # fmt: skip
    away = result.quantities - mean
    for k in range(4):
        for other in [None, *range(k, 4)]:
            series = away[:, k] if other is None else away[:, k] * away[:, other] - dense[k, other]
            size = effective_size(series)
            assert size > 60 and abs(series.mean()) < 3.0 * series.std() / np.sqrt(size)
    np.testing.assert_allclose(result.mean, result.quantities.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(result.variance, result.quantities.var(axis=0, ddof=1), rtol=1e-10)
    assert result.misfit.shape == (count,) and result.solves["failed"] == 0 and np.max(result.acceptance) > 0.2
    if method in ("hpcn", "hmala", "hhmc"):  # the approximation is exact, and every proposal is accepted
        assert result.acceptance == 1.0 and result.step_size == 1.0
    values = 2 * count if method == "dr" else count  # a Hamiltonian path of a quarter turn has one step
    evaluations = (values, values if method in ("mala", "hmala", "hhmc") else 0)
    assert (result.solves["misfit"], result.solves["gradient"]) == evaluations


SIZES = {"pcn": 0.3, "mala": 0.15, "hpcn": 0.5, "hmala": 0.5, "hhmc": 0.5, "dr": (0.5, 0.5, 0.5)}


@pytest.mark.limit(300)
@pytest.mark.parametrize("method", METHODS)
def test_chains_do_not_depend_on_ranks(method, request):
    """A chain on all ranks, and the same chain on each rank alone; the step sizes are small enough for stable proposals."""
    # Paths of several steps amplify rounding.
    steps = 1000 if request.config.getoption("--thorough") and method != "hhmc" else 15
    divided, alone = Problem(0.1), Problem(0.1, MPI.COMM_SELF)
    options = {"warmup": 5, "step_size": SIZES[method], "rng": 2}
    results = [each.sample(method, steps, **options, quantities=each.observed) for each in (divided, alone)]
    np.testing.assert_allclose(results[0].quantities, results[1].quantities, atol=1e-8)
    np.testing.assert_allclose(results[0].mean, results[1].mean[divided.domain.owned], atol=1e-8)
    np.testing.assert_allclose(results[0].variance, results[1].variance[divided.domain.owned], atol=1e-8)
    assert np.array_equal(results[0].acceptance, results[1].acceptance)


def test_chains_on_groups(linear, size):
    """Three chains, on as many groups as there are ranks, equal those that all ranks run one after the other."""

    def build(comm):
        found = Problem(comm=comm)
        return found.misfit, found.prior, found.posterior, found.observed

    one_by_one = linear.sample("hmala", 8, warmup=4, chains=3, quantities=linear.observed)
    grouped = sample(build, method="hmala", n_samples=8, warmup=4, chains=3, groups=size)
    assert grouped.quantities.shape == (3, 8, 5) and grouped.acceptance.shape == (3,)
    np.testing.assert_allclose(grouped.quantities, one_by_one.quantities, atol=1e-8)
    np.testing.assert_allclose(grouped.mean[linear.domain.owned], one_by_one.mean, atol=1e-8)
    np.testing.assert_allclose(grouped.variance[linear.domain.owned], one_by_one.variance, atol=1e-8)
    assert grouped.solves["misfit"].tolist() == one_by_one.solves["misfit"].tolist() == [8, 8, 8]
    few = sample(build, method="pcn", n_samples=2, chains=1, groups=size)  # fewer chains than groups
    np.testing.assert_allclose(few.misfit, linear.sample("pcn", 2, chains=1).misfit, atol=1e-8)
    with pytest.raises(TypeError, match=r"with groups, build\(comm\) returns prior and posterior"):
        sample(build, linear.prior, method="pcn", n_samples=2, groups=size)
    with pytest.raises(WorkerError, match="build must return an mpiad.inverse.GaussianPrior, but got NoneType"):
        sample(lambda comm: (linear.misfit, None, None), method="pcn", n_samples=2, groups=size)
    for count, given in ((4, linear.observed), (1, None)):
        with pytest.raises(WorkerError, match=f"build must return misfit, prior, .* but returned {count} parts"):
            sample(lambda comm, n=count: build(comm)[:n], method="pcn", n_samples=2, groups=size, quantities=given)
    pooled = one_by_one.quantities.reshape(24, 5)
    np.testing.assert_allclose(linear.observed(one_by_one.mean), pooled.mean(axis=0), atol=1e-10)


@pytest.mark.parametrize("method", ["pcn", "dr", "mala"])
def test_resumed_bit_for_bit(method, folder):
    problem = Problem(0.3)
    options = {
        "rng": np.int64(3),
        "warmup": 6,
        "quantities": {"y": problem.observed, "misfit": lambda m: problem.observed(m)[0]},
    }
    whole = problem.sample(method, 20, **options)
    saved = {"checkpoint": CheckpointFile(folder / "chain.npz", every=4), **options}
    calls = 0

    def killed(m):
        nonlocal calls
        calls += 1
        if calls == 20:
            raise InterruptedError("killed")
        return problem.misfit(m)

    with pytest.raises(WorkerError, match="killed"):
        sample(killed, problem.prior, method=method, n_samples=20, posterior=problem.posterior, **saved)
    shorter = problem.sample(method, 15, **saved)
    resumed = problem.sample(method, 20, **saved)
    for name in ("y", "misfit"):
        assert np.array_equal(resumed.quantities[name], whole.quantities[name])
        assert np.array_equal(shorter.quantities[name], whole.quantities[name][:15])
    for name in ("misfit", "mean", "variance", "acceptance", "step_size"):
        assert np.array_equal(getattr(resumed, name), getattr(whole, name)), name
    assert resumed.solves == whole.solves
    for change, text in (
        ({"rng": 4}, r'key of rng is "0x.*" in the file, but "0x.*" in this call'),
        ({"warmup": 5}, r"warmup is 6 in the file, but 5 in this call\. Use"),
        ({"step_size": [0.1] * np.size(whole.step_size)}, "step_size is null in the file"),
        ({"start": problem.prior.mean + 1}, "misfit at the start is"),
        ({"quantities": problem.observed}, "quantities is"),
    ):
        with pytest.raises(ValueError, match=f"belongs to another problem: {text}"):
            problem.sample(method, 20, **{**saved, **change})
    wider = Bilaplacian(problem.domain, 0.6, 1.3, mean=0.2, spacing=H, rtol=1e-12)
    other = Posterior(problem.posterior.mean, wider, problem.posterior)
    with pytest.raises(ValueError, match=r"belongs to another problem: .*prior \(checksum\) is"):
        sample(problem.misfit, wider, method=method, n_samples=20, posterior=other, **saved)
    with pytest.raises(ValueError, match="belongs to another problem: misfit at the start"):
        sample(
            lambda m: 2.0 * problem.misfit(m),
            problem.prior,
            method=method,
            n_samples=20,
            posterior=problem.posterior,
            **saved,
        )
    with pytest.raises(ValueError, match="has 26 steps, but this call has 11"):
        problem.sample(method, 5, **saved)
    for path in folder.glob("*.rows") if mpiad.mpi_rank() == 0 else ():
        path.write_bytes(path.read_bytes()[:-8] + bytes(8))
    with pytest.raises(ValueError, match=r"rows is damaged: its checksum is wrong"):
        problem.sample(method, 20, **saved)
    for path in folder.glob("*.rows") if mpiad.mpi_rank() == 0 else ():
        path.unlink()
    with pytest.raises(ValueError, match=r"rows is damaged: its checksum is wrong"):
        problem.sample(method, 20, **saved)


@pytest.mark.parametrize("number, groups", [(signal.SIGTERM, None), (signal.SIGUSR2, None), (signal.SIGTERM, 1)])
def test_stopped_by_a_signal_of_one_rank(linear, folder, size, number, groups):
    """All ranks end at the next step with a checkpoint, from which the chains continue as if nothing had happened."""
    calls, interrupts = 0, True

    def misfit(m):
        nonlocal calls
        calls += 1
        if interrupts and calls == 12 and mpiad.mpi_rank() == size - 1:
            os.kill(os.getpid(), number)
        return linear.misfit(m)

    def run(**saved):
        chosen = {"method": "hpcn", "n_samples": 20, "warmup": 4, "chains": 2, **saved}
        if groups is None:
            return sample(misfit, linear.prior, posterior=linear.posterior, **chosen)
        return sample(lambda comm: (misfit, linear.prior, linear.posterior), groups=groups, **chosen)

    checkpoint = CheckpointFile(folder / "chain.npz", every=1000, signals=(signal.SIGUSR2,))
    try:
        with pytest.raises(SystemExit) as ended:
            run(checkpoint=checkpoint)
    finally:
        signals._requested = None
    # The first call is at the start, so the twelfth is in step 11; the second chain hasn't begun.
    assert ended.value.code == 128 + number and calls == 12
    (rows,) = folder.glob(f"*.rank{mpiad.mpi_rank()}of*.rows")
    assert rows.stat().st_size == 8 * (11 - 4)
    interrupts = False
    assert np.array_equal(run(checkpoint=checkpoint).misfit, run().misfit)


def test_checkpoints_of_several_chains_by_a_name_without_a_suffix(linear, folder):
    options = {"warmup": 2, "chains": 2, "checkpoint": folder / "state"}
    found = linear.sample("hpcn", 6, **options)
    assert np.array_equal(linear.sample("hpcn", 6, **options).misfit, found.misfit)


def test_fields_are_saved(linear, folder):
    result = linear.sample("hpcn", 6, warmup=0, fields=folder, thin=2, quantities=lambda m: linear.domain.sum(m))
    names = sorted(path.name for path in folder.glob("*.npy"))
    assert names == ["chain0_000002.npy", "chain0_000004.npy", "chain0_000006.npy"]
    for k, name in enumerate(names):
        field = np.load(folder / name)
        assert field.shape == SHAPE and abs(field.sum() - result.quantities[2 * k + 1]) < 1e-10


def test_a_solver_that_fails_rejects_the_proposal(linear, size):
    """On one rank, on all ranks, and a value that is NaN; at other fields the chain goes on."""
    calls = 0

    def misfit(m):
        nonlocal calls
        calls += 1
        value = linear.misfit(m)
        if calls == 7 and mpiad.mpi_rank() == size - 1 or calls == 9:
            raise ConvergenceError("too many iterations")
        return np.nan if calls == 11 else value

    with pytest.warns(RuntimeWarning, match="rejected 3 proposals at which a solver"):
        result = sample(misfit, linear.prior, method="hpcn", n_samples=20, warmup=0, posterior=linear.posterior)
    # The first call is at the start, so call k is that of sample k - 2.
    assert [k for k in range(1, 20) if result.misfit[k] == result.misfit[k - 1]] == [5, 7, 9]
    assert result.solves["failed"] == 3 and result.acceptance == 17 / 20


@pytest.mark.parametrize("method", ["mala", "dr"])
def test_gradient_that_is_not_finite(linear, method):
    def misfit(m):
        value = linear.misfit(m)
        return value + 0.0 * anp.sqrt(value - mpiad.stop_gradient(value))  # its derivative is NaN

    with pytest.raises(ValueError, match="gradient isn't finite, at the start of chain 0"):
        sample(misfit, linear.prior, method=method, n_samples=3, posterior=linear.posterior)


def test_quantities_may_change_their_argument(linear):
    def quantity(m):
        m -= 100.0
        return 0.0

    found = linear.sample("hpcn", 5, quantities=quantity)
    assert np.array_equal(found.misfit, linear.sample("hpcn", 5).misfit)


def test_form_of_quantities(linear, folder):
    """A dict gives a dict, also with the name that ArviZ gets for other quantities, and after a resumption."""
    for given in (linear.observed, {"quantities": linear.observed}):
        for n_samples in (3, 6):
            options = {"quantities": given, "warmup": 2, "checkpoint": folder / type(given).__name__}
            found = linear.sample("hpcn", n_samples, **options).quantities
        assert isinstance(found, dict) == isinstance(given, dict)
        assert np.shape(found["quantities"] if isinstance(found, dict) else found) == (6, 5)


def test_quantities_of_another_shape(linear):
    calls = 0

    def quantities(m):
        nonlocal calls
        calls += 1
        return np.zeros(calls)

    with pytest.raises(WorkerError, match=r"quantities had the shapes \[\(1,\)\] before, but now have \[\(2,\)\]"):
        linear.sample("hpcn", 9, quantities=quantities)


def test_no_acceptance_is_warned_of(linear):
    with pytest.warns(RuntimeWarning, match=r"accepted none of 30 proposals of stage 1 .* step size 1\. Use a longer"):
        sample(
            lambda m: 1e6 * linear.misfit(m), linear.prior, method="pcn", n_samples=30, step_size=1.0,
            start=linear.posterior.mean,
        )  # fmt: skip


WRONG = [
    ({"method": "nuts"}, ValueError, "method must be one of 'pcn', .*, but got 'nuts'"),
    ({"n_samples": 0}, ValueError, "n_samples must be an integer of at least 1, but got 0"),
    ({"rng": -1}, ValueError, "rng must be .* an integer of at least 0, or None, but got -1"),
    ({"warmup": 2.5}, ValueError, "warmup must be an integer"),
    ({"thin": 0}, ValueError, "thin must be"),
    ({"step_size": 1.5}, ValueError, r"step_size must be 1 number\(s\) above 0 and at most 1"),
    ({"method": "dr", "step_size": 0.5}, ValueError, r"step_size must be 3 number\(s\)"),
    ({"objective": "max"}, ValueError, "objective must be one of"),
    ({"chains": 0}, ValueError, "chains must be an integer of at least 1, but got 0"),
    ({"fields": "/no/such/folder"}, ValueError, "folder fields='/no/such/folder' doesn't exist"),
    ({"checkpoint": "/no/such/folder/c.npz"}, ValueError, "folder of checkpoint"),
    ({"quantities": 3}, TypeError, "quantities must be callable, but got int 3"),
    ({"start": np.zeros(3)}, ValueError, "start must be this rank's block of shape"),
    ({"posterior": None}, ValueError, "method 'hpcn' needs a Laplace approximation"),
    ({"posterior": 1}, TypeError, "posterior must be an mpiad.inverse.Posterior, but got int"),
]


@pytest.mark.parametrize("change, kind, text", WRONG)
def test_wrong_arguments(linear, change, kind, text):
    arguments = {"method": "hpcn", "n_samples": 4, "posterior": linear.posterior, **change}
    with pytest.raises(kind, match=text):
        sample(linear.misfit, linear.prior, **arguments)


def test_wrong_problems(linear):
    other = Bilaplacian(linear.domain, 0.5, 1.0, spacing=H)
    with pytest.raises(ValueError, match="posterior belongs to another prior"):
        sample(linear.misfit, other, method="hpcn", n_samples=2, posterior=linear.posterior)
    with pytest.raises(ValueError, match="the misfit is inf, or its gradient isn't finite, at the start"):
        sample(lambda m: np.inf, linear.prior, method="pcn", n_samples=2)
    with pytest.raises(TypeError, match="prior must be an mpiad.inverse.GaussianPrior, but got Domain"):
        sample(linear.misfit, linear.domain, method="pcn", n_samples=2)
    with pytest.raises(TypeError, match="must return one real number"):
        sample(linear.observed, linear.prior, method="pcn", n_samples=2)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_disagree(linear):
    with pytest.raises(ValueError, match="all ranks must give the same arguments"):
        linear.sample("hpcn", 2, rng=mpiad.mpi_rank())
    with pytest.raises(ValueError, match="n_samples must be an integer"):
        linear.sample("hpcn", 2 if mpiad.mpi_rank() else None)

    is_root = mpiad.mpi_rank() == 0
    for options in (
        {"start": linear.prior.mean if is_root else None},
        {"quantities": linear.observed if is_root else None},
    ):
        with pytest.raises(ValueError, match="all ranks must give the same arguments, but rank 0 gave start="):
            linear.sample("hpcn", 2, chains=2, **options)

    def quantity(m):
        return linear.observed(m)[0] / (mpiad.mpi_rank() != 1 or math.sqrt(-1))

    with pytest.raises(WorkerError, match="rank 1 raised ValueError: math domain error"):
        linear.sample("hpcn", 2, quantities=quantity)


def test_objectives(linear, size):
    """Each rank's share of the misfit, and a misfit on the root only, give the same chain."""
    expected = linear.sample("hmala", 5, warmup=0).misfit
    shares = {"sum": lambda m: linear.misfit(m) / size, "mean": linear.misfit,
              "root": lambda m: linear.misfit(m) if mpiad.mpi_rank() == 0 else 0.0 * linear.misfit(m)}  # fmt: skip
    for objective, share in shares.items():
        found = sample(share, linear.prior, method="hmala", n_samples=5, warmup=0, posterior=linear.posterior,
                       objective=objective)  # fmt: skip
        np.testing.assert_allclose(found.misfit, expected, rtol=1e-9)


@pytest.mark.one_rank
def test_progress_and_diagnostics(linear, capfd):
    result = linear.sample("hpcn", 20, warmup=0, chains=2, progress=True, quantities=linear.observed)
    assert ("effective samples/min" in capfd.readouterr().err) == (mpiad.mpi_rank() == 0)
    data = result.to_arviz()
    assert data.posterior["quantities"].shape == (2, 20, 5) and data.sample_stats["misfit"].shape == (2, 20)
    single = linear.sample("hpcn", 10, quantities={"first": lambda m: linear.observed(m)[0]})
    assert single.to_arviz().posterior["first"].shape == (1, 10)
    assert Samples({"theta": np.zeros((3, 7, 2))}).to_arviz().posterior["theta"].shape == (3, 7, 2)


def test_draws_of_a_program_on_the_root(size):
    """Two parameters, sampled on the root by Langevin proposals: the same type of result, and the moments of a Gaussian."""
    precision, mean = np.array([[2.0, 0.6], [0.6, 1.0]]), np.array([0.5, -1.0])

    def chain(f, random, step, count):
        x, (value, gradient), found = mean, f.value_and_gradient(mean), []
        for _ in range(count):
            new = x - step * gradient + np.sqrt(2.0 * step) * random.standard_normal(2)
            new_value, new_gradient = f.value_and_gradient(new)
            there, back = new - x + step * gradient, x - new + step * new_gradient
            if np.log(random.random()) < value - new_value + (there @ there - back @ back) / (4.0 * step):
                x, value, gradient = new, new_value, new_gradient
            found.append(x)
        return found

    def program(f):
        return Samples({"theta": np.array([chain(f, np.random.default_rng(seed), 0.6, 500) for seed in range(2)])})

    result = mpiad.drive(program, lambda x: 0.5 * anp.dot(x - mean, anp.dot(precision, x - mean)) / size, objective="sum")
    if result is not None:
        draws = result.quantities["theta"]
        assert draws.shape == (2, 500, 2)
        for series in (*np.moveaxis(draws - mean, 2, 0), np.prod(draws - mean, axis=2) - np.linalg.inv(precision)[0, 1]):
            effective = sum(map(effective_size, series))
            assert effective > 100 and abs(series.mean()) < 3.0 * series.std() / np.sqrt(effective)


def test_several_chains_start_at_samples(linear):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = linear.sample("hpcn", 1, warmup=0, chains=2, step_size=1e-9)
        given = linear.sample("hpcn", 1, warmup=0, step_size=1e-9, start=linear.prior.mean)
    assert abs(first.misfit[0, 0] - first.misfit[1, 0]) > 1e-3
    np.testing.assert_allclose(given.misfit[0], linear.misfit(linear.prior.mean), rtol=1e-6)
    assert isinstance(linear.posterior, Posterior)
