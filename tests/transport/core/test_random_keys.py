"""`rng=` of every public function that draws, as in SPEC 7: which values it takes, and what it does to a Generator."""

import inspect
import pkgutil
from collections.abc import Callable
from importlib import import_module

import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad.ensemble import EnsembleMPI, EnsembleProblem, ODEProblem, fit, remake, solve, steady_state
from mpiad.inverse import Bilaplacian, laplace_approximation, sample
from mpiad.linalg import eigsh
from mpiad.parallel import Adam, DistributedDataContainer
from mpiad.testing import check_adjoint, check_grads
from mpiad.transport import channel
from mpiad.transport.core import random_keys
from mpiad.transport.core.random_keys import shared_key
from mpiad.vi import VI, MeanFieldGaussian

COMM = MPI.COMM_WORLD
DECAY = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (0.0, 1.0), p=[1.0])


def noisy(problem, i, repeat, rng):
    return remake(problem, u0=rng.uniform(1.0, 2.0, 1))


def prior():
    return Bilaplacian(mpiad.Domain(16), correlation_length=4.0)


def inference(rng):
    return VI(lambda theta, data: (theta[0] - 1) ** 2, MeanFieldGaussian(1), ("norm",), Adam(0.1), 1.0, 4, rng=rng)


def fitted(rng):
    times = np.linspace(0.0, 1.0, 4)
    rows = np.exp(-np.outer([0.5, 2.0], times))
    options = {"data": rows, "saveat": times, "starts": 3, "bounds": (0.1, 5.0), "ensemblealg": EnsembleMPI()}
    return fit(DECAY, lambda u, p, data: u[:, 0] - data, np.ones((2, 1)), rng=rng, max_nfev=1, **options).starts.p


def gathered(block):
    return np.concatenate(COMM.allgather(np.ravel(block)))


def posterior(rng=0):
    gaussian = prior()
    weights = gathered(gaussian.mean) * 0 + 0.02 * np.arange(16.0)
    return laplace_approximation(lambda v: weights[gaussian.domain.owned] * v, gaussian.mean, gaussian, 3, tol=0.5, rng=rng)


def ended(rng):
    return solve(EnsembleProblem(DECAY, noisy, rng=rng), ensemblealg=EnsembleMPI(), trajectories=5).u_end


def steady(rng):
    constant = ODEProblem(lambda u, p, t: [0.0 * u[0]], [1.0], (0.0, 1.0))
    return steady_state(EnsembleProblem(constant, noisy, rng=rng), ensemblealg=EnsembleMPI(), trajectories=5).u


def chain(rng):
    return sample(lambda m: mpiad.mpi_allreduce(np.sum(m**2)), prior(), method="pcn", n_samples=4, rng=rng).misfit


# What each public function that draws returns for an `rng`, as an array that is the same on all ranks.
DRAWS: dict[str, Callable] = {
    "Domain.normal": lambda rng: gathered(mpiad.Domain(16).normal(rng)),
    "GaussianPrior.sample": lambda rng: gathered(prior().sample(rng)),
    "Posterior.sample": lambda rng: gathered(posterior().sample(rng)),
    "Posterior.predict": lambda rng: posterior().predict(lambda m: mpiad.mpi_allreduce(np.sum(m)), 3, rng)[0],
    "laplace_approximation": lambda rng: posterior(rng).residuals,
    "sample": chain,
    "eigsh": lambda rng: eigsh(lambda v: (1.0 + COMM.rank + np.arange(9.0)) * v, np.zeros(9), 2, tol=0.1, rng=rng).values,
    "VI.run": lambda rng: inference(rng).run(None, 2, n_samples=3).samples,
    "VI.elbo": lambda rng: np.array(inference(rng).elbo(MeanFieldGaussian(1).initial(np.random.default_rng(0)), None, 5)),
    "DistributedDataContainer": lambda rng: gathered(list(DistributedDataContainer(np.arange(60.0), 60, True, rng))[0]),
    "ensemble.solve": ended,
    "ensemble.steady_state": steady,
    "ensemble.fit": fitted,
}


@pytest.mark.parametrize("name", DRAWS)
def test_what_rng_may_be(name):
    draw = DRAWS[name]
    by_number = draw(5)
    for other in (np.int64(5), np.random.SeedSequence(5), np.random.default_rng(5)):
        np.testing.assert_array_equal(draw(other), by_number)
    assert not np.array_equal(draw(6), by_number)
    assert all(np.array_equal(each, by_number) for each in COMM.allgather(by_number))
    fresh = [draw(None) for _ in range(2)]
    assert not np.array_equal(*fresh)
    assert all(np.array_equal(each, fresh) for each in COMM.allgather(fresh))
    generator = np.random.default_rng(5)
    first, second = draw(generator), draw(generator)
    np.testing.assert_array_equal(first, by_number)
    assert not np.array_equal(second, first)


@pytest.mark.parametrize("name", DRAWS)
def test_a_generator_advances_by_one_key(name):
    generator, expected = np.random.default_rng(5), np.random.default_rng(5)
    DRAWS[name](generator)
    expected.bytes(16)
    assert generator.bit_generator.state == expected.bit_generator.state


def test_checks_take_rng_and_repeat_by_default():
    for rng in (0, None, np.random.SeedSequence(1), np.random.default_rng(1)):
        check_adjoint(mpiad.mpi_allreduce, np.zeros(3), rng=rng)
        check_grads(lambda x: mpiad.mpi_allreduce(np.sum(x**2)), np.ones(2), order=1, rng=rng)
    drawn = []
    for _ in range(2):
        check_adjoint(lambda x: (drawn.append(x), x)[1], np.zeros(3))
    assert any(np.array_equal(drawn[0], x) for x in drawn[len(drawn) // 2 :])


def test_no_public_function_takes_a_seed():
    names = [mpiad.__name__, *(f"mpiad.{each.name}" for each in pkgutil.iter_modules(mpiad.__path__) if each.ispkg)]
    for module in map(import_module, names):
        for name in getattr(module, "__all__", ()):
            public = getattr(module, name)
            members = [getattr(public, key) for key in vars(public)] if inspect.isclass(public) else []
            for function in filter(callable, [public, *members]):
                try:
                    parameters = inspect.signature(function).parameters
                except (TypeError, ValueError):
                    continue
                assert not {"seed", "random_state"} & set(parameters), (module.__name__, name, function)


@pytest.mark.parametrize("rng", [-1, 1.5, "a", object()], ids=lambda rng: type(rng).__name__)
def test_wrong_sources_are_refused_on_all_ranks(rng, rank, size):
    group = channel(None, "test")
    with pytest.raises(
        (TypeError, ValueError), match="f: rng must be a Generator, a SeedSequence, an integer of at least 0"
    ):
        shared_key(rng if rank == size - 1 else 0, group, "f")


@pytest.mark.mpi(min_size=2)
def test_sources_that_differ_are_refused(rank):
    group = channel(None, "test")
    for rngs in ((0, 1), (None, 0), (np.random.default_rng(1), np.random.default_rng(2))):
        with pytest.raises(ValueError, match="f: all ranks must give the same"):
            shared_key(rngs[rank > 0], group, "f")
    assert shared_key(rank, group, "f", compare=False) == random_keys.random_key(rank, "f")


def test_entropy_is_drawn_on_the_root(monkeypatch, rank):
    monkeypatch.setattr(random_keys, "entropy", lambda: 7 + rank)
    assert shared_key(None, channel(None, "test"), "f") == random_keys.random_key(7, "f")
    assert random_keys.random_key(None, "f") == random_keys.random_key(7 + rank, "f")


def test_chains_resume_with_the_key_of_the_checkpoint(tmp_path):
    folder = COMM.bcast(tmp_path, 0)
    gaussian = prior()
    misfit = lambda m: mpiad.mpi_allreduce(np.sum(m**2))  # noqa: E731
    arguments = {"method": "pcn", "warmup": 2, "chains": 2, "checkpoint": folder / "chain.npz"}
    short = sample(misfit, gaussian, n_samples=4, **arguments)
    longer = sample(misfit, gaussian, n_samples=8, **arguments)
    np.testing.assert_array_equal(longer.misfit[:, :4], short.misfit)
    with pytest.raises(ValueError, match='key of rng is "0x.* in the file'):
        sample(misfit, gaussian, n_samples=8, rng=1, **arguments)
