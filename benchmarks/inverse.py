"""Newton's method in a prior's inner product beside L-BFGS: log κ in -∇·(κ∇u) = f from 150 points.

    mpiexec -n 2 python benchmarks/inverse.py [--sizes 16 32 64] [--ways recycling L-BFGS]

For each mesh: outer steps and V-cycles until the objective is within 1e-3 of its minimum, in units of the log-posterior,
and products with the Hessian (steps of conjugate gradients) to a gradient of 1e-6. V-cycles are those of all solves, the
prior's too; a solve to 1e-8 takes about eight. "recycling" is Gauss-Newton with its option `recycle`. Aimed at: steps
within 1 and products within 10 % over meshes and ranks, and a third of L-BFGS's V-cycles from 64² on.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import autograd.numpy as anp
import numpy as np
from reaches import report

import mpiad
from mpiad.inverse import Bilaplacian
from mpiad.linalg import solve_elliptic
from mpiad.linalg.multigrid.level import Level

CLOSE = 1e-3
POINTS = 150
MOST = 2000  # evaluations of L-BFGS


class Cycles:
    """Count V-cycles of the finest level."""

    def __init__(self) -> None:
        self.count, self._inside, cycle = 0, False, Level.cycle

        def counted(level: Level, *args: Any) -> Any:
            if self._inside:
                return cycle(level, *args)
            self.count, self._inside = self.count + 1, True
            try:
                return cycle(level, *args)
            finally:
                self._inside = False

        Level.cycle = counted  # type: ignore[method-assign]


class Problem:
    """The inversion on a mesh of n² cells."""

    def __init__(self, n: int):
        self.domain, h = mpiad.Domain((n, n)), 1.0 / n
        x, y = self.domain.coordinates(spacing=h, origin=h / 2)
        truth = 0.8 * np.sin(2 * np.pi * x) * np.cos(np.pi * y) + 0.5 * (x > 0.5)
        self.h, self.points = h, np.random.default_rng(1).uniform(0.05, 0.95, (POINTS, 2))
        self.prior = Bilaplacian(self.domain, 0.5, 1.0, spacing=h)
        self.owned = self.observed(np.ones(self.domain.local_shape))
        clean = self.observed(self.state(truth))
        self.noise = 0.01 * np.max(mpiad.mpi_allreduce(clean))
        self.data = clean + self.owned * self.noise * np.random.default_rng(5).standard_normal(POINTS)

    def observed(self, u: Any) -> Any:
        """Return the values at the points that this rank owns, zeros at the others."""
        return self.domain.interpolate(u, self.points, self.h, self.h / 2, result="share")

    def state(self, m: Any) -> Any:
        """Return u for log κ = m."""
        source = 10.0 * np.ones(self.domain.local_shape)
        return solve_elliptic(self.domain, anp.exp(m), source, spacing=self.h, centred=True)

    def residuals(self, m: Any) -> Any:
        """Return this rank's misfits, in units of the noise."""
        return (self.observed(self.state(m)) - self.data) / self.noise

    def objective(self, m: Any) -> Any:
        """Return the negative log-posterior."""
        return 0.5 * mpiad.mpi_allreduce(anp.sum(self.residuals(m) ** 2)) + self.prior.cost(m)


def descent(problem: Problem, fun: Any, method: str, options: dict, cycles: Cycles) -> tuple[Any, list[int]]:
    """Minimise; return the result, and the V-cycles so far at each iterate."""
    start, spent = cycles.count, [0]

    def note(_: Any) -> None:
        spent.append(cycles.count - start)

    zero = np.zeros(problem.domain.local_shape)
    return problem.domain.minimize(fun, zero, method=method, options=options, callback=note), spent


def until(history: Any, lowest: float) -> int:
    """Return the first iterate that is close to the minimum; -1 where none is."""
    close = np.flatnonzero(history.loss - lowest <= CLOSE)
    return int(close[0]) if close.size else -1


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--ways", nargs="+", default=["Newton", "Gauss-Newton", "recycling", "L-BFGS"])
    chosen, cycles = parser.parse_args(), Cycles()
    leads = mpiad.mpi_rank() == 0
    if leads:
        print(f"{mpiad.mpi_size()} ranks; until within {CLOSE} of the minimum\n")
        print(f"{'mesh':>6} {'method':>14} {'steps':>6} {'products':>9} {'V-cycles':>9} {'s':>7}")
    for n in chosen.sizes:
        problem, spent = Problem(n), {}
        newton = {"inner_product": problem.prior, "grtol": 1e-6, "gtol": 1e-3}
        gauss = {**newton, "product": "gauss-newton", "regularizer": problem.prior}
        ways = {
            "Newton": (problem.objective, "Newton-CG-sharded", newton),
            "Gauss-Newton": (problem.residuals, "Newton-CG-sharded", gauss),
            "recycling": (problem.residuals, "Newton-CG-sharded", {**gauss, "recycle": POINTS}),
            "L-BFGS": (problem.objective, "L-BFGS-sharded", {"ftol": 0.0, "gtol": 1e-6, "maxfun": MOST}),
        }
        lowest = np.inf
        for name in chosen.ways:
            began = time.perf_counter()
            result, at = descent(problem, *ways[name], cycles)
            lowest, seconds = min(lowest, result.fun), time.perf_counter() - began
            steps = until(result.history, lowest)
            spent[name] = at[steps]
            # Products of the whole solve, as those up to an iterate aren't kept.
            products = result.evaluations["product"]
            if leads:
                print(f"{n:>5}² {name:>14} {steps:>6} {products:>9} {at[steps]:>9} {seconds:>7.1f}", flush=True)
        if leads and n >= 64 and {"recycling", "L-BFGS"} <= set(spent):
            part = spent["recycling"] / spent["L-BFGS"]
            report(f"{n}²: V-cycles of Gauss-Newton, recycling, by L-BFGS's", part, at_most=1 / 3)


if __name__ == "__main__":
    main()
