"""The benchmark posterior of Aristoff and Bangerth (arXiv 2102.07263), to 2 % of a posterior standard deviation.

    mpiexec -n 2 python benchmarks/aristoff_bangerth.py [--samples 10000] [--nuts 400] [--informed 10000]

The problem is that of `examples/membrane_posterior.py`: 64 coefficients θ, whose posterior was computed by 2·10¹¹
samples of a random walk (30 years of processor time). Four chains of each sampler, divided among the ranks, in log θ
with mpiad's gradient:

- Hamiltonian Monte Carlo of the example, with a mass matrix adapted in the warm-up;
- NumPyro's NUTS, through `mpiad.drive` and `mpiad.interop.to_jax`, if NumPyro is installed (`make recipes` installs it);
- h-MALA of `mpiad.inverse.sample`, relative to the Laplace approximation, on a domain of 8 x 8 cells, for information: the
  posterior is so far from a Gaussian that this method needs about 100 times as many gradients.

For each sampler: the time, the smallest bulk effective sample size and the largest R-hat (ArviZ) of all coefficients,
and the largest Monte-Carlo standard error of a posterior mean of θ, in posterior standard deviations; and the
differences of its means of log θ from those of the first sampler, in their joint standard errors, of which one in 300
exceeds 3 by chance.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from reaches import report, report_missing

import mpiad
from mpiad.inverse import GaussianPrior, Samples, laplace_approximation, sample
from mpiad.tasks import RankGroups

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from membrane_posterior import CHAINS, SQUARES, STD, Membrane, gathered, hamiltonian_chains  # noqa: E402


class Independent(GaussianPrior):
    """Independent log coefficients with the standard deviation of the benchmark."""

    def __init__(self, domain: mpiad.Domain):
        self.domain, self.mean = domain, np.zeros(domain.local_shape)
        self.variance = np.full(domain.local_shape, STD**2)

    def apply(self, v: Any) -> Any:
        return v / STD**2

    def solve(self, g: Any) -> Any:
        return STD**2 * g

    def precondition(self, r: Any) -> Any:
        return self.solve(r)

    def sqrt(self, xi: Any) -> Any:
        return STD * xi


def nuts_chains(membrane: Membrane, samples: int, warmup: int, seed: int) -> Any:
    """Return chains of log θ by NumPyro's NUTS, of shape (chains, samples, 64), on the root."""
    import jax
    from numpyro.infer import MCMC, NUTS

    from mpiad.interop import to_jax

    jax.config.update("jax_enable_x64", True)

    def program(f: Any) -> list[tuple[int, np.ndarray]]:
        cost, found = to_jax(f), []
        kernel = NUTS(potential_fn=cost, dense_mass=True, max_tree_depth=(6, 8))
        for chain in range(mpiad.mpi_rank(), CHAINS, mpiad.mpi_size()):
            sampler = MCMC(kernel, num_warmup=warmup, num_samples=samples, progress_bar=False)
            start = 0.1 * np.random.default_rng([seed, chain]).standard_normal(SQUARES**2)
            sampler.run(jax.random.key(seed * CHAINS + chain), init_params=start)
            found.append((chain, np.asarray(sampler.get_samples())))
        return found

    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = mpiad.drive(program, lambda x: membrane.cost(x.reshape(SQUARES, SQUARES)), comm=MPI.COMM_SELF)
    return gathered(found)


def informed_chains(membrane: Membrane, samples: int, seed: int) -> np.ndarray:
    """Return chains of log θ by h-MALA, of shape (chains, samples, 64)."""
    groups = RankGroups(mpiad.mpi_size())
    prior = Independent(mpiad.Domain((SQUARES, SQUARES), comm=groups.comm))
    options = {"product": "gauss-newton", "regularizer": prior, "inner_product": prior, "grtol": 1e-6}
    with np.errstate(all="ignore"):
        found = prior.domain.minimize(membrane.residuals, prior.mean, method="Newton-CG-sharded", options=options)
        kept = mpiad.linearize(membrane.residuals)(found.x)
        posterior = laplace_approximation(lambda v: kept.vjp(kept.jvp(v)), found.x, prior, SQUARES**2)
        result = sample(
            lambda comm: (membrane.misfit, prior, posterior, np.ravel), method="hmala", n_samples=samples, chains=CHAINS,
            groups=groups, rng=seed,
        )  # fmt: skip
    return result.quantities


class Summary:
    """What the chains of a sampler say, and how well."""

    def __init__(self, name: str, chains: np.ndarray, seconds: float):
        import arviz

        logarithms, values = Samples(chains).to_arviz(), Samples(np.exp(chains)).to_arviz()

        def of(fun: Any, data: Any, method: str) -> np.ndarray:
            return fun(data, method=method).quantities.values

        self.name, self.seconds = name, seconds
        self.sizes, self.rhat = of(arviz.ess, logarithms, "bulk"), of(arviz.rhat, logarithms, "rank")
        self.error = of(arviz.mcse, values, "mean") / np.exp(chains).std((0, 1))
        self.theta, self.mean = np.exp(chains).mean((0, 1)), chains.mean((0, 1))
        self.mean_error = of(arviz.mcse, logarithms, "mean")

    def row(self, first: Summary) -> str:
        numbers = f"{self.seconds:.0f} | {self.sizes.min():.0f} | {np.median(self.sizes):.0f} | {self.rhat.max():.4f}"
        away = np.abs(self.mean - first.mean) / np.hypot(self.mean_error, first.mean_error)
        differences = "" if first is self else f"{away.max():.1f}, {np.sqrt(np.mean(away**2)):.2f}"
        return f"| {self.name} | {numbers} | {self.error.max():.1%} | {differences} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000, help="samples per chain of Hamiltonian Monte Carlo")
    parser.add_argument("--warmup", type=int, default=2000, help="of Hamiltonian Monte Carlo; of NUTS a quarter")
    parser.add_argument("--nuts", type=int, default=400, help="samples per chain of NUTS")
    parser.add_argument("--informed", type=int, default=10_000, help="samples per chain of h-MALA")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    membrane, root = Membrane(), mpiad.mpi_rank() == 0
    errors = membrane.errors()
    runs = {"HMC": lambda: hamiltonian_chains(membrane, options.samples, options.warmup, options.seed)[0]}
    if options.nuts and importlib.util.find_spec("numpyro") is not None:
        runs["NUTS (NumPyro)"] = lambda: nuts_chains(membrane, options.nuts, options.warmup // 4, options.seed)
    if options.informed:
        runs["h-MALA"] = lambda: informed_chains(membrane, options.informed, options.seed)
    if root:
        print("published vectors: log likelihood to {:.0e}, log prior to {:.0e}".format(*errors), flush=True)
        report("Aristoff-Bangerth: relative error of published log densities", max(errors), at_most=1e-9)
        print("| sampler | s | effective samples | median | R-hat | error of mean | difference: most, rms |")
        print("|---|---|---|---|---|---|---|", flush=True)
    summaries: list[Summary] = []
    for name, run in runs.items():
        MPI.COMM_WORLD.Barrier()
        began = time.perf_counter()
        chains = run()
        MPI.COMM_WORLD.Barrier()
        if root:
            summaries.append(Summary(name, chains, time.perf_counter() - began))
            print(summaries[-1].row(summaries[0]), flush=True)
    if not root:
        return
    first, *others = summaries
    label = f"Aristoff-Bangerth, {CHAINS * options.samples} samples of HMC"
    whole = options.samples >= 10_000  # shorter runs are for information
    report(f"{label}: seconds", first.seconds, at_most=600)
    report(f"{label}: smallest effective sample size", first.sizes.min(), at_least=2500 if whole else None)
    report(f"{label}: largest R-hat", first.rhat.max(), at_most=1.01 if whole else None)
    report(f"{label}: error of a mean in standard deviations", first.error.max(), at_most=0.02 if whole else None)
    for other in others:
        away = np.abs(other.mean - first.mean) / np.hypot(other.mean_error, first.mean_error)
        report(f"{label}: difference from {other.name} in standard errors", away.max(), at_most=4.0)
    if "NUTS (NumPyro)" not in runs:
        report_missing(f"{label}: difference from NUTS", "peer not installed")
    print("posterior means of θ, one row per y, and their Monte-Carlo standard errors in standard deviations:")
    for theta, error in zip(first.theta.reshape(SQUARES, SQUARES), first.error.reshape(SQUARES, SQUARES)):
        print(" ".join(f"{value:8.4g}" for value in theta), "  ", " ".join(f"{value:6.2%}" for value in error))


if __name__ == "__main__":
    main()
