"""Chains of fields on finer meshes: acceptance, jumps and autocorrelation times of a quantity of interest.

    python benchmarks/sampling.py [--cells 16 64 256] [--samples 1000] [--long 10000] [--methods hpcn hmala hhmc dr]

The field m is the logarithm of a conductivity on the unit square, with a Matérn prior. 25 values of u are measured, where
-∇·(exp(m)∇u) = 1 and u = 0 on the sides; the quantity is the logarithm of the mean of u. On finer meshes the posterior
converges, and the behavior of chains must not depend on the mesh. The random numbers belong to the cosine modes of the
noise, and are the same on all meshes. So chains on two meshes differ by the discretization and not by chance, until they
decide differently on a proposal. (With independent numbers the difference of two acceptance rates has a standard error of
several percent for 1,000 steps.)

The table shows, for each mesh and fixed step sizes, the acceptance rates and the expected squared jump of the quantity over
the same steps; and for longer chains on the first two meshes the integrated autocorrelation time of the quantity (by
Geyer's initial sequence), with the standard error from ten batches.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import autograd.numpy as anp
import numpy as np
import scipy.fft
from reaches import report

import mpiad
from mpiad.extend import custom_operator, defadjoint
from mpiad.inverse import GaussianPrior, Posterior, Samples, laplace_approximation, sample
from mpiad.linalg import solve_elliptic

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from poisson_posterior import effective_size  # noqa: E402

RANGE, STD, NOISE = 1.0, 0.5, 0.05  # the noise is relative to the largest of the measured values
STEPS = {"hpcn": 0.5, "hmala": 0.7, "hhmc": 0.5, "dr": (0.6, 0.5, 0.6)}


class CosinePrior(GaussianPrior):
    """The Matérn field A⁻¹W with A = 1 - Δ/κ² and no flux through the sides, by cosine transforms instead of solves."""

    def __init__(self, domain: mpiad.Domain, h: float):
        self.domain, self.mean = domain, np.zeros(domain.local_shape)
        kappa = np.sqrt(8.0) / RANGE
        waves = [(2.0 * np.sin(0.5 * np.pi * np.arange(n) / n) / h) ** 2 for n in domain.shape]
        # The variance of A⁻¹W is κ²/(4π) far from the sides.
        self._symbol = (1.0 + (waves[0][:, None] + waves[1]) / kappa**2) * (kappa * h / np.sqrt(4.0 * np.pi) / STD)
        self.variance = np.full(domain.local_shape, STD**2)
        # Number i of the noise belongs to the same mode on all meshes: modes are sorted by the larger wave number.
        first, second = np.indices(domain.shape).reshape(2, -1)
        self._order = np.lexsort((first, second, np.maximum(first, second)))
        self.apply = custom_operator(lambda v: self._times(v, 2))  # differentiable
        defadjoint(self.apply, self.apply)

    def _times(self, v: np.ndarray, power: int) -> Any:
        spectrum: Any = scipy.fft.dctn(v, axes=(-2, -1), norm="ortho")
        return scipy.fft.idctn(self._symbol**power * spectrum, axes=(-2, -1), norm="ortho")

    def solve(self, g: np.ndarray) -> np.ndarray:
        """Return R⁻¹ g."""
        return self._times(g, -2)

    def precondition(self, r: np.ndarray) -> np.ndarray:
        """Return R⁻¹ r."""
        return self.solve(r)

    def sqrt(self, xi: np.ndarray) -> np.ndarray:
        """Return the field whose cosine modes are ξ, times the square root of R⁻¹."""
        modes = np.empty(xi.size)
        modes[self._order] = xi.ravel()
        field: Any = scipy.fft.idctn(modes.reshape(xi.shape) / self._symbol, norm="ortho")
        return field


class Problem:
    """25 measurements of u on n² cells."""

    def __init__(self, n: int):
        self.h = 1.0 / n
        self.domain = mpiad.Domain((n, n))
        self.prior = CosinePrior(self.domain, self.h)
        self.means: dict[int, float] = {}  # of u, for each field
        x = (np.arange(n) + 0.5) * self.h
        hats = np.maximum(0.0, 1.0 - np.abs(x - np.arange(1, 6)[:, None] / 6.0) / self.h)  # linear interpolation
        self.weights = np.einsum("ai,bj->abij", hats, hats).reshape(25, n, n)
        truth = STD * (np.sin(3.0 * x[:, None] + 1.0) * np.cos(4.0 * x) + x - 0.5)
        exact = self.measured(truth)
        self.noise = NOISE * exact.max()
        self.data = exact + self.noise * np.random.default_rng(1).standard_normal(25)

    def measured(self, m: Any) -> Any:
        one = np.ones(self.domain.local_shape)
        u = solve_elliptic(self.domain, anp.exp(m), one, spacing=self.h, centred=True, rtol=1e-8)
        self.means[hash(mpiad.stop_gradient(m).tobytes())] = np.mean(mpiad.stop_gradient(u))
        return self.domain.gram(self.weights, u[None])[:, 0]

    def log_mean(self, m: Any) -> Any:
        """Return the quantity of interest of a field whose misfit was evaluated."""
        return np.log(self.means[hash(m.tobytes())])

    def residuals(self, m: Any) -> Any:
        return (self.measured(m) - self.data) / self.noise

    def misfit(self, m: Any) -> Any:
        return 0.5 * anp.sum(self.residuals(m) ** 2)

    def posterior(self) -> Posterior:
        options = {"product": "gauss-newton", "regularizer": self.prior, "inner_product": self.prior, "grtol": 1e-6}
        found = self.domain.minimize(self.residuals, self.prior.mean, method="Newton-CG-sharded", options=options)
        kept = mpiad.linearize(self.residuals)(found.x)
        return laplace_approximation(lambda v: kept.vjp(kept.jvp(v)), found.x, self.prior, 25)


def chain(problem: Problem, posterior: Posterior, method: str, count: int) -> Samples:
    return sample(
        problem.misfit, problem.prior, method=method, n_samples=count, warmup=0, posterior=posterior, rng=2,
        step_size=STEPS[method], start=posterior.mean, quantities=problem.log_mean,
    )  # fmt: skip


def figures(result: Samples, method: str) -> np.ndarray:
    """Return the rates of acceptance and the expected squared jump."""
    rates = np.atleast_1d(result.acceptance)
    if method == "dr":  # the two stages together, and the rest of the field
        rates = np.array([rates[0] + (1.0 - rates[0]) * rates[1], rates[2]])
    return np.append(rates, np.mean(np.diff(result.quantities) ** 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, nargs="+", default=(16, 64, 256))
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--long", type=int, default=10_000)
    parser.add_argument("--methods", nargs="+", default=tuple(STEPS), choices=tuple(STEPS))
    options = parser.parse_args()
    problems = [(n, problem, problem.posterior()) for n, problem in ((n, Problem(n)) for n in options.cells)]
    print("| method | cells | acceptance | squared jump | autocorrelation time | misfits, gradients | ms per step |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for method in options.methods:
        coarsest, times = None, []
        for k, (n, problem, posterior) in enumerate(problems):
            result, shown = chain(problem, posterior, method, options.samples), ""
            found = figures(result, method)
            if k < 2 and options.long:
                parts = np.array_split(chain(problem, posterior, method, options.long).quantities, 10)
                batches = [len(part) / effective_size(part) for part in parts]
                times.append((np.mean(batches), np.std(batches, ddof=1) / np.sqrt(len(batches))))
                shown = f"{times[-1][0]:.1f} ± {times[-1][1]:.1f}"
            accepted = ", ".join(f"{rate:.3f}" for rate in found[:-1])
            costs = ", ".join(f"{result.solves[name] / options.samples:.2f}" for name in ("misfit", "gradient"))
            speed = f"{1e3 * result.seconds / options.samples:.1f}"
            print(f"| {method} | {n}² | {accepted} | {found[-1]:.3g} | {shown} | {costs} | {speed} |", flush=True)
            if coarsest is None:
                coarsest = found
                continue
            change = np.max(np.abs(found / coarsest - 1.0))
            report(f"{method}, {n}²: change of acceptance and squared jump from {options.cells[0]}²", change, at_most=0.05)
        if len(times) == 2:
            (first, error), (second, other) = times
            apart = abs(first - second) / np.hypot(error, other)
            report(f"{method}: autocorrelation times on two meshes, apart in standard errors", apart, at_most=3.0)


if __name__ == "__main__":
    main()
