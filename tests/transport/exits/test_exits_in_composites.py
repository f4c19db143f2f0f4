"""`sys.exit` on one rank in a function that a composite calls: all ranks raise an exception that names it."""

from __future__ import annotations

import time

import autograd.numpy as np
import pytest

import mpiad
from mpiad import Domain, mpi_allreduce
from mpiad.ensemble import EnsembleMPI, EnsembleProblem, EnsembleSerial, ODEProblem, fit
from mpiad.ensemble import solve as solve_ensemble
from mpiad.inverse import Bilaplacian, laplace_approximation, sample
from mpiad.linalg import DistributedMatrix, Multigrid, eigsh, factorized, newton, solve, solve_elliptic
from mpiad.optimize import least_squares
from mpiad.parallel import SGD, Adam, DistributedOptimizer, value
from mpiad.tasks import sum_over
from mpiad.transport.core.agreement import code_of
from mpiad.vi import VI, MeanFieldGaussian

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.unguarded]

START, WEIGHTS = np.zeros(3), np.arange(1.0, 4.0)
ON_ROOT, ON_LAST = {}, {}  # composites by name: functions of `leave`, which user functions call, on this rank


def on_root(name):
    return lambda fun: ON_ROOT.setdefault(name, fun)


def on_last(name):
    return lambda fun: ON_LAST.setdefault(name, fun)


def quartic(x):
    return np.sum((x - 1.0) ** 4)


# Optimization

for (
    method
) in "L-BFGS-B BFGS CG TNC SLSQP Newton-CG trust-ncg trust-krylov trust-constr L-BFGS-sharded Newton-CG-sharded".split():
    on_last(f"minimize, {method}")(
        lambda leave, m=method: mpiad.minimize(lambda x: (quartic(x), leave())[0], START, method=m, objective="sum")
    )


@on_last("minimize, MMA-sharded")
def _(leave):
    bounds = [(-2.0, 2.0)] * 3
    mpiad.minimize(lambda x: (quartic(x), leave())[0], START, method="MMA-sharded", objective="sum", bounds=bounds)


@on_last("minimize after a communication")
def _(leave):
    mpiad.minimize(lambda x: (mpi_allreduce(quartic(x)), leave())[0], START)


@on_last("minimize, sharded callback")
def _(leave):
    mpiad.minimize(quartic, START, method="L-BFGS-sharded", objective="sum", callback=lambda *_: leave())


@on_last("minimize, preconditioner")
def _(leave):
    options = {"preconditioner": lambda r: (r, leave())[0]}
    mpiad.minimize(quartic, START, method="Newton-CG-sharded", objective="sum", options=options)


@on_root("minimize, callback")
def _(leave):
    mpiad.minimize(quartic, START, objective="mean", callback=lambda *_: leave())


@on_root("minimize, constraint")
def _(leave):
    constraint = {"type": "ineq", "fun": lambda x: (x[0] - 0.5, leave())[0]}
    mpiad.minimize(quartic, START, method="SLSQP", objective="mean", constraints=constraint)


@on_last("mpi_optimize, objective")
def _(leave):
    mpiad.mpi_optimize(lambda x: (quartic(x), leave())[0], lambda x: 4 * (x - 1) ** 3, START, "L-BFGS")


@on_last("mpi_optimize, gradient")
def _(leave):
    mpiad.mpi_optimize(quartic, lambda x: (4 * (x - 1) ** 3, leave())[0], START, "L-BFGS")


@on_last("least_squares")
def _(leave):
    least_squares(lambda x: (x**2 - 1.0, leave())[0], START + 2.0)


for method in ("value_and_gradient", "gradient", "__call__"):
    on_last(f"drive, {method}")(
        lambda leave, m=method: mpiad.drive(
            lambda f: [getattr(f, m)(START + k) for k in range(4)], lambda x: (quartic(x), leave())[0], objective="mean"
        )
    )


@on_last("drive, map")
def _(leave):
    mpiad.drive(lambda f: f.map([START + k for k in range(8)]), lambda x: (quartic(x), leave())[0], objective="mean")


@on_last("drive, groups")
def _(leave):
    fun, points = lambda x, comm: (quartic(x), leave())[0], [START + k for k in range(12)]
    mpiad.drive(lambda f: f.map(points), fun, objective="mean", groups=mpiad.mpi_size())


@on_root("drive, program")
def _(leave):
    mpiad.drive(lambda f: [(f(START + k), leave()) for k in range(4)], quartic, objective="mean")


@on_last("Domain.minimize")
def _(leave):
    domain = Domain(16)
    domain.minimize(lambda u: (domain.sum((u - 1) ** 4), leave())[0], np.zeros(domain.local_shape))


# Linear and nonlinear systems

for method in ("cg", "gmres", "bicgstab"):
    on_last(f"solve, {method}")(lambda leave, m=method: solve(lambda u: (WEIGHTS * u, leave())[0], START + 1.0, method=m))


@on_last("solve with a communication")
def _(leave):
    solve(lambda u: (WEIGHTS * u + 1e-3 * mpi_allreduce(np.sum(u)), leave())[0], START + 1.0, method="gmres")


@on_last("solve, before a communication")
def _(leave):
    solve(lambda u: (leave(), WEIGHTS * u + 1e-3 * mpi_allreduce(np.sum(u)))[1], START + 1.0, method="gmres")


@on_last("solve, preconditioner")
def _(leave):
    solve(lambda u: WEIGHTS * u, START + 1.0, preconditioner=lambda r: (r, leave())[0])


@on_last("solve, callback")
def _(leave):
    solve(lambda u: WEIGHTS * u, START + 1.0, callback=lambda _: leave())


@on_last("solve, derivative")
def _(leave):
    loss = lambda p: np.sum(solve(lambda u, p: (p * WEIGHTS * u, leave())[0], START + 1.0, p))  # noqa: E731
    for _ in range(4):
        mpiad.value_and_grad(loss, objective="sum")(2.0)


@on_last("newton")
def _(leave):
    newton(lambda u: (u**3 + u - 2.0, leave())[0], START)


@on_last("newton, sparse")
def _(leave):
    newton(lambda u: (u**3 + u - 2.0, leave())[0], START, jacobian="sparse", pattern=Domain(3 * mpiad.mpi_size()))


@on_last("factorized")
def _(leave):
    for _ in range(2):
        factorized(lambda u, k: (k * u, leave())[0], START, 2.0, pattern=Domain(3 * mpiad.mpi_size()))(START + 1.0)


@on_last("eigsh")
def _(leave):
    eigsh(lambda v: (WEIGHTS * v, leave())[0], START, k=2)


@on_last("DistributedMatrix.from_operator")
def _(leave):
    DistributedMatrix.from_operator(lambda u: (2.0 * u, leave())[0], Domain(6 * mpiad.mpi_size()))


@on_last("solve_elliptic")
def _(leave):
    domain = Domain((16, 16))
    solve_elliptic(domain, 1.0, np.ones(domain.local_shape), spacing=1 / 16, centred=True, callback=lambda _: leave())


@on_last("Multigrid.solve")
def _(leave):
    domain = Domain((16, 16))
    multigrid = Multigrid(domain, 1.0, spacing=1 / 16, centred=True)
    multigrid.solve(np.ones(domain.local_shape), callback=lambda _: leave())


# Tasks


@on_last("mpi_map")
def _(leave):
    mpiad.mpi_map(lambda item: (time.sleep(0.01), leave()), range(20))


@on_root("mpi_map, items")
def _(leave):
    mpiad.mpi_map(float, (leave() for _ in range(5)))


@on_last("sum_over")
def _(leave):
    sum_over(range(12), lambda item, comm: (1.0, leave())[0], groups=mpiad.mpi_size())


@on_last("sum_over, one group")
def _(leave):
    sum_over(range(12), lambda item, comm: (1.0, leave())[0], groups=1)


@on_last("sum_over, dynamic")
def _(leave):
    fun = lambda item, comm: (1.0, time.sleep(0.01), leave())[0]  # noqa: E731
    sum_over(range(12), fun, groups=mpiad.mpi_size(), schedule="dynamic")


# Ensembles

DECAY = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (0.0, 1.0), [1.0])


class Decay:
    """A callable that isn't compared with those of other ranks."""

    def __init__(self, leave):
        self.leave = leave

    def __call__(self, u, p, t):
        self.leave()
        return [-p[0] * u[0]]


@on_last("ensemble, f")
def _(leave):
    solve_ensemble(
        EnsembleProblem(ODEProblem(Decay(leave), [1.0], (0.0, 1.0), [1.0])), ensemblealg=EnsembleMPI(), trajectories=8
    )


@on_last("ensemble, f, serial")
def _(leave):
    problem = EnsembleProblem(ODEProblem(Decay(leave), [1.0], (0.0, 1.0), [1.0]))
    solve_ensemble(problem, ensemblealg=EnsembleMPI(EnsembleSerial()), trajectories=8)


@on_last("ensemble, prob_func")
def _(leave):
    problem = EnsembleProblem(DECAY, lambda problem, i, repeat: (problem, leave())[0])
    solve_ensemble(problem, ensemblealg=EnsembleMPI(), trajectories=12)


@on_last("ensemble, output_func")
def _(leave):
    problem = EnsembleProblem(DECAY, output_func=lambda sol, i: ((1.0, False), leave())[0])
    solve_ensemble(problem, ensemblealg=EnsembleMPI(), trajectories=12)


@on_last("ensemble, reduction")
def _(leave):
    reduction = lambda u, batch, i: ((sum(batch), False), leave())[0]  # noqa: E731
    problem = EnsembleProblem(DECAY, output_func=lambda sol, i: (1.0, False), reduction=reduction)
    solve_ensemble(problem, ensemblealg=EnsembleMPI(), trajectories=20, batch_size=2)


@on_last("fit")
def _(leave):
    times, rates = np.linspace(0.0, 1.0, 9), np.linspace(0.5, 2.0, 12)[:, None]
    residuals = lambda u, p, data: (u[:, 0] - data, leave())[0]  # noqa: E731
    data = np.exp(-rates * times)
    fit(DECAY, residuals, np.ones((12, 1)), ensemblealg=EnsembleMPI(), data=data, saveat=times, compile=False)


# Variational inference, training, sampling


class Prior:
    """A standard normal distribution."""

    def __init__(self, leave):
        self.leave = leave

    def log_prob(self, theta):
        self.leave()
        return -0.5 * np.sum(theta**2, axis=-1)


class Optimizer:
    """Adam, in a class of the user."""

    def __init__(self, leave):
        self.leave, self.setup = leave, Adam(0.1).setup

    def update(self, *args):
        self.leave()
        return Adam(0.1).update(*args)


def variational(loss=quartic, prior=("norm", 0.0, 1.0), optimizer=None, callback=None, **options):
    inference = VI(lambda theta, data: loss(theta), MeanFieldGaussian(2), prior, optimizer or Adam(0.1), **options)
    inference.run(np.ones(2), n_epochs=6, callback=callback)


for name, options in {"even": {}, "dynamic": {"schedule": "dynamic"}, "score": {"gradient": "score"}}.items():
    on_last(f"VI, {name}")(
        lambda leave, options=options: variational(lambda theta: (quartic(theta), leave())[0], **options)
    )
on_root("VI, prior")(lambda leave: variational(prior=Prior(leave)))
on_root("VI, optimizer")(lambda leave: variational(optimizer=Optimizer(leave)))
on_root("VI, callback")(lambda leave: variational(callback=lambda *_: leave()))


def trained(optimizer, **options):
    w, batch, loss = np.ones(2), np.zeros((3, 2)), lambda w, x: np.mean((w - x) ** 2)
    training = DistributedOptimizer(optimizer)
    state = training.setup(w)
    for _ in range(6):
        state, w, _ = training.step(state, w, loss, batch, **options)


on_last("DistributedOptimizer, update")(lambda leave: trained(Optimizer(leave)))
on_last("DistributedOptimizer, samples")(lambda leave: trained(SGD(0.1), samples=lambda *_: (3, leave())[0]))


@on_last("parallel.value, samples")
def _(leave):
    for _ in range(6):
        value(lambda w, x: np.mean(w - x), samples=lambda *_: (3, leave())[0])(0.5, np.ones(3))


def sampled(leave=lambda: None, quantity=lambda: None, product=lambda: None, method="pcn"):
    domain = Domain(32)
    prior, measured = Bilaplacian(domain, correlation_length=8.0), np.arange(32)[domain.owned] == 16
    misfit = lambda m: (domain.sum(measured * (m - 1.0) ** 2), leave())[0]  # noqa: E731
    posterior = laplace_approximation(lambda v: (2.0 * measured * v, product())[0], measured * 1.0, prior, k=2)
    quantities = lambda m: (domain.sum(m), quantity())[0]  # noqa: E731
    sample(
        misfit, prior, method=method, n_samples=10, posterior=posterior if method == "hpcn" else None, quantities=quantities
    )


on_last("sample, pcn")(sampled)
on_last("sample, mala")(lambda leave: sampled(leave, method="mala"))
on_last("sample, hpcn")(lambda leave: sampled(leave, method="hpcn"))
on_last("sample, quantities")(lambda leave: sampled(quantity=leave))
on_last("laplace_approximation")(lambda leave: sampled(product=leave))


@on_last("sample, chains in groups")
def _(leave):
    def build(comm):
        domain = Domain(32, comm=comm)
        return lambda m: (0.5 * domain.sum(m**2), leave())[0], Bilaplacian(domain, correlation_length=8.0), None

    sample(build, chains=mpiad.mpi_size(), groups=mpiad.mpi_size(), method="pcn", n_samples=10)


# Set-up


class Number:
    """An integer whose conversion leaves the program."""

    def __init__(self, leave):
        self.leave = leave

    def __index__(self):
        for _ in range(3):
            self.leave()
        return 16


on_last("Domain")(lambda leave: Domain((Number(leave), 16)))
on_last("DistributedFFT")(lambda leave: mpiad.fft.DistributedFFT((Number(leave), 16)))


@on_last("GhostExchange")
def _(leave):
    class Numbers:
        def __array__(self, *_args, **_kwargs):
            for _ in range(3):
                leave()
            return np.arange(3)

    rank = mpiad.mpi_rank()
    mpiad.GhostExchange(Numbers(), (3 * rank, 3 * rank + 3))


def named(error):
    """Return whether an exception, or one of its causes, names the exit."""
    while error is not None and "SystemExit" not in str(error):
        error = error.__cause__
    return error is not None


@pytest.mark.each_value
@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize(("name", "composite", "where"), [
    *[(name, fun, "root") for name, fun in ON_ROOT.items()], *[(name, fun, "last") for name, fun in ON_LAST.items()]
], ids=lambda x: x if isinstance(x, str) else "")  # fmt: skip
def test_all_ranks_raise(name, composite, where, code, rank, size):
    calls = 0

    def leave():
        nonlocal calls
        calls += 1
        if rank == (0 if where == "root" else size - 1) and calls == 3:
            raise SystemExit(code)

    with pytest.raises(Exception) as caught:  # noqa: PT011 (and no SystemExit)
        composite(leave)
    assert named(caught.value)
    assert not isinstance(caught.value, mpiad.errors.DeadlockError)
    if not name.startswith(("VI", "DistributedOptimizer", "parallel")):  # whose exit status is 1
        assert code_of(caught.value) == (code or 1)
    mpiad.reset()
    assert mpi_allreduce(1) == size
