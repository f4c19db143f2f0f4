"""Chains of fields on finer meshes: acceptance, jumps and autocorrelation times of a quantity of interest.

    python benchmarks/sampling.py [--cells 16 64 256] [--samples 2500] [--long 20000] [--methods hpcn hmala dr]

The field m has a Matérn prior on the unit square, and nine weighted averages of exp(m) are measured with noise. On finer
meshes the posterior converges, and the behavior of chains must not depend on the mesh. The table shows, for each mesh and
fixed step sizes, the acceptance rates and the expected squared jump of nine averages of m; and on the first two meshes the
integrated autocorrelation time of the sum of these averages (by Geyer's initial sequence), with the standard error from
ten batches.
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
from mpiad.inverse import GaussianPrior, Posterior, laplace_approximation, sample

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from poisson_posterior import effective_size  # noqa: E402

RANGE, STD, NOISE = 0.5, 0.2, 0.05
STEPS = {"pcn": 0.27, "mala": 0.3, "hpcn": 0.6, "hmala": 0.9, "dr": (0.7, 0.5, 0.9)}


class CosinePrior(GaussianPrior):
    """The Matérn field A⁻¹W with A = 1 - Δ/κ² and no flux through the sides, by cosine transforms instead of solves."""

    def __init__(self, domain: mpiad.Domain, h: float):
        self.domain, self.mean = domain, np.zeros(domain.local_shape)
        kappa = np.sqrt(8.0) / RANGE
        waves = [(2.0 * np.sin(0.5 * np.pi * np.arange(n) / n) / h) ** 2 for n in domain.shape]
        # The variance of A⁻¹W is κ²/(4π) far from the sides.
        self._symbol = (1.0 + (waves[0][:, None] + waves[1]) / kappa**2) * (kappa * h / np.sqrt(4.0 * np.pi) / STD)
        self.variance = np.full(domain.local_shape, STD**2)
        self.apply = custom_operator(lambda v: self._times(v, 2))  # differentiable
        defadjoint(self.apply, self.apply)

    def _times(self, v: np.ndarray, power: int) -> np.ndarray:
        axes = (-2, -1)
        spectrum: Any = scipy.fft.dctn(v, axes=axes, norm="ortho")
        return scipy.fft.idctn(self._symbol**power * spectrum, axes=axes, norm="ortho")  # pyright: ignore[reportReturnType]

    def solve(self, g: np.ndarray) -> np.ndarray:
        """Return R⁻¹ g."""
        return self._times(g, -2)

    def precondition(self, r: np.ndarray) -> np.ndarray:
        """Return R⁻¹ r."""
        return self.solve(r)

    def sqrt(self, xi: np.ndarray) -> np.ndarray:
        """Return the symmetric square root of R⁻¹, times ξ."""
        return self._times(xi, -1)


class Problem:
    """Nine averages of exp(m) on n² cells."""

    def __init__(self, n: int):
        h = 1.0 / n
        self.domain = mpiad.Domain((n, n))
        self.prior = CosinePrior(self.domain, h)
        x = (np.arange(n) + 0.5) * h
        bumps = np.exp(-((x - np.array([0.2, 0.5, 0.8])[:, None]) ** 2) / (2.0 * 0.12**2))
        bumps /= bumps.sum(axis=1, keepdims=True)
        self.weights = np.einsum("ai,bj->abij", bumps, bumps).reshape(9, n, n)
        truth = STD * (np.sin(3.0 * x[:, None] + 1.0) * np.cos(4.0 * x) + x)
        self.data = self.measured(truth) + NOISE * np.random.default_rng(1).standard_normal(9)

    def averages(self, m: Any) -> Any:
        return self.domain.gram(self.weights, m[None])[:, 0]

    def measured(self, m: Any) -> Any:
        return self.averages(anp.exp(m))

    def residuals(self, m: Any) -> Any:
        return (self.measured(m) - self.data) / NOISE

    def misfit(self, m: Any) -> Any:
        return 0.5 * anp.sum(self.residuals(m) ** 2)

    def posterior(self) -> Posterior:
        options = {"product": "gauss-newton", "regularizer": self.prior, "inner_product": self.prior, "grtol": 1e-8}
        found = self.domain.minimize(self.residuals, self.prior.mean, method="Newton-CG-sharded", options=options)
        kept = mpiad.linearize(self.residuals)(found.x)
        return laplace_approximation(lambda v: kept.vjp(kept.jvp(v)), found.x, self.prior, 12)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, nargs="+", default=(16, 64, 256))
    parser.add_argument("--samples", type=int, default=2500)
    parser.add_argument("--long", type=int, default=20000)
    parser.add_argument("--methods", nargs="+", default=("hpcn", "hmala", "dr"))
    options = parser.parse_args()
    problems = [(n, problem, problem.posterior()) for n, problem in ((n, Problem(n)) for n in options.cells)]
    print("| method | cells | acceptance | squared jump | autocorrelation time | misfits, gradients | ms per step |")
    print("|---|---|---|---|---|---|---|")
    for method in options.methods:
        coarsest, times = None, []
        for k, (n, problem, posterior) in enumerate(problems):
            count = options.long if k < 2 else options.samples
            result = sample(
                problem.misfit, problem.prior, method=method, n_samples=count, warmup=200, posterior=posterior, seed=2,
                step_size=STEPS[method], start=posterior.mean, quantities=problem.averages,
            )  # fmt: skip
            jump = np.mean(np.sum(np.diff(result.quantities, axis=0) ** 2, axis=1))
            rates = np.atleast_1d(result.acceptance)
            if method == "dr":  # the two stages together, and the rest of the field
                rates = np.array([rates[0] + (1.0 - rates[0]) * rates[1], rates[2]])
            figures = np.append(rates, jump)
            sums = np.array_split(result.quantities.sum(axis=1), 10)
            batches = [len(part) / effective_size(part) for part in sums]
            times.append((np.mean(batches), np.std(batches, ddof=1) / np.sqrt(len(batches))))
            accepted = ", ".join(f"{rate:.3f}" for rate in rates)
            shown = f"{times[-1][0]:.1f} ± {times[-1][1]:.1f}" if k < 2 else ""
            costs = ", ".join(f"{result.solves[name] / count:.2f}" for name in ("misfit", "gradient"))
            print(f"| {method} | {n}² | {accepted} | {jump:.4f} | {shown} | {costs} | {1e3 * result.seconds / count:.2f} |")
            if coarsest is None:
                coarsest = figures
            else:
                change = np.max(np.abs(figures / coarsest - 1.0))
                report(
                    f"{method}, {n}²: change of acceptance and squared jump from {options.cells[0]}²", change, at_most=0.05
                )
        if len(times) > 1:
            (first, error), (second, other) = times[:2]
            apart = abs(first - second) / np.hypot(error, other)
            report(f"{method}: autocorrelation times on two meshes, apart in standard errors", apart, at_most=3.0)


if __name__ == "__main__":
    main()
