"""Newton's method in a prior's inner product beside L-BFGS: log κ in -∇·(κ∇u) = f from 150 points.

    mpiexec -n 2 python benchmarks/inverse.py [--sizes 16 32 64] [--ways Gauss-Newton L-BFGS]

For each mesh: outer steps and V-cycles until the objective is within 1e-3 of its minimum, in units of the log-posterior,
and products with the Hessian (steps of conjugate gradients) to a gradient of 1e-6. V-cycles are those of all solves, the
prior's too; a solve to 1e-8 takes about eight. The target is two thirds of L-BFGS's V-cycles from 64² on. If L-BFGS isn't
close after `--most` evaluations, its steps are -1, and its V-cycles all of these.

`--tutorial` takes the problem of hIPPYlib's tutorial on Poisson's equation (3_SubsurfaceBayesian, with 64² squares of
finite elements and 50 points), with its prior, but for the truth, which is drawn from that prior by `--truth`. What it
prints is 12 steps and 89 products, "as hIPPYlib" what its algorithm takes here: five Gauss-Newton steps, and Newton's then.
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
from mpiad.inverse import Bilaplacian, GaussianPrior
from mpiad.linalg import Multigrid, solve, solve_elliptic
from mpiad.linalg.multigrid.hierarchy import Level

CLOSE = 1e-3
POINTS = 150


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

    enough = 1e-3  # of the gradient

    def __init__(self, n: int):
        self.domain, h = mpiad.Domain((n, n)), 1.0 / n
        x, y = self.domain.coordinates(spacing=h, origin=h / 2)
        truth = 0.8 * np.sin(2 * np.pi * x) * np.cos(np.pi * y) + 0.5 * (x > 0.5)
        self.h, self.points = h, np.random.default_rng(1).uniform(0.05, 0.95, (POINTS, 2))
        self.prior = Bilaplacian(self.domain, 0.5, 1.0, spacing=h)
        self.measure(truth, np.random.default_rng(5))

    def measure(self, truth: Any, draw: np.random.Generator) -> None:
        """Observe the truth at the points, with noise of 1 %."""
        owned, clean = self.observed(np.ones(self.domain.local_shape)), self.observed(self.state(truth))
        self.noise = 0.01 * np.max(mpiad.mpi_allreduce(clean))
        self.data = clean + owned * self.noise * draw.standard_normal(len(self.points))

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


class Rotated(GaussianPrior):
    """hIPPYlib's prior: R = h² A², A = δ - γ ∇·(Θ∇), with Robin's condition on the sides.

    Θ has the eigenvalues 2 along the diagonal of the domain and 1/2 across: 5/4 on its own diagonal and 3/4 beside it. The
    latter couples each cell with those beyond its corners, with different signs.
    """

    gamma, delta = 0.1, 0.5

    def __init__(self, domain: mpiad.Domain, h: float):
        self.domain, self.mean, ones = domain, np.zeros(domain.local_shape), np.ones(domain.local_shape)
        self._h, weight = h, self.gamma / h**2
        faces = dict.fromkeys(((-1, 0), (1, 0), (0, -1), (0, 1)), 5 / 4 * weight)
        self._couplings = {**faces, **{(s, t): s * t * 3 / 8 * weight for s in (-1, 1) for t in (-1, 1)}}
        inside = domain.exchange(ones)
        self._known = {step: self._beside(inside, step) for step in self._couplings}
        sides = 4.0 - sum(self._known[step] for step in faces)
        self._diagonal = self.delta + sides * np.sqrt(self.gamma * self.delta) / 1.42 / h
        self._levels = Multigrid(domain, 5 / 4 * self.gamma, self.delta, spacing=h, boundary="neumann", centred=True)

    def _beside(self, padded: Any, step: tuple[int, int]) -> Any:
        (a, b), (s, t) = self.domain.local_shape, step
        return padded[1 + s : 1 + s + a, 1 + t : 1 + t + b]

    def _product(self, u: Any) -> Any:
        padded, total = self.domain.exchange(u), self._diagonal * u
        for step, weight in self._couplings.items():
            total = total + weight * self._known[step] * (u - self._beside(padded, step))
        return total

    def _inverse(self, b: Any) -> Any:
        return solve(self._product, b, preconditioner=self._levels, rtol=1e-10)

    def apply(self, v: Any) -> Any:
        """Return R v."""
        return self._h**2 * self._product(self._product(v))

    def solve(self, g: Any) -> Any:
        """Return R⁻¹ g."""
        return self._inverse(self._inverse(g)) / self._h**2

    def precondition(self, r: Any) -> Any:
        """Return R⁻¹ r: V-cycles of an operator without the rotation would be too far from it."""
        return self.solve(r)

    def sqrt(self, xi: Any) -> Any:
        """Return A⁻¹ ξ / h."""
        return self._inverse(xi) / self._h


class Tutorial(Problem):
    """hIPPYlib's: u from 0 below to 1 above, nothing through the other sides, points in the lower half."""

    enough = 0.0
    truth = 1

    def __init__(self, n: int):
        self.domain, self.h = mpiad.Domain((n, n)), 1.0 / n
        y, _ = self.domain.coordinates(self.h, centred=True)
        self.above = 2.0 / self.h**2 * (y > 1.0 - self.h) * np.ones(self.domain.local_shape)
        draw = np.random.default_rng(1)
        self.points = np.stack([draw.uniform(0.1, 0.5, 50), draw.uniform(0.1, 0.9, 50)], -1)
        self.prior = Rotated(self.domain, self.h)
        self.measure(self.prior.sample(self.truth), draw)

    def state(self, m: Any) -> Any:
        """Return u for log κ = m."""
        kappa, sides = anp.exp(m), ("dirichlet", "neumann")
        return solve_elliptic(self.domain, kappa, kappa * self.above, spacing=self.h, centred=True, boundary=sides)


def descent(problem: Problem, fun: Any, method: str, options: dict, cycles: Cycles) -> tuple[Any, list[int]]:
    """Minimise; return the result, and the V-cycles so far at each iterate."""
    start, spent = cycles.count, [0]

    def note(_: Any) -> None:
        spent.append(cycles.count - start)

    zero = np.zeros(problem.domain.local_shape)
    return problem.domain.minimize(fun, zero, method=method, options=options, callback=note), spent


def published(problem: Problem, newton: dict, gauss: dict) -> tuple[int, int]:
    """Take hIPPYlib's way, five Gauss-Newton steps and Newton's then; return steps and products."""
    domain, zero = problem.domain, np.zeros(problem.domain.local_shape)
    first = mpiad.grad(problem.objective)(zero)
    enough = 1e-6 * np.sqrt(domain.dot(first, problem.prior.solve(first)))
    begun = domain.minimize(problem.residuals, zero, method="Newton-CG-sharded", options={**gauss, "maxiter": 5})
    options = {**newton, "grtol": 0.0, "gtol": enough}
    ended = domain.minimize(problem.objective, begun.x, method="Newton-CG-sharded", options=options)
    return begun.nit + ended.nit, begun.nhev + ended.nhev


def until(history: Any, lowest: float) -> int:
    """Return the first iterate that is close to the minimum; -1 where none is."""
    close = np.flatnonzero(history.loss - lowest <= CLOSE)
    return int(close[0]) if close.size else -1


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--ways", nargs="+", default=["Newton", "Gauss-Newton", "L-BFGS"])
    parser.add_argument("--most", type=int, default=2000, help="evaluations of L-BFGS")
    parser.add_argument("--tutorial", action="store_true", help="hIPPYlib's problem; give --sizes 64")
    parser.add_argument("--truth", type=int, default=1, help="seed of the truth in hIPPYlib's problem")
    chosen, cycles = parser.parse_args(), Cycles()
    Tutorial.truth = chosen.truth
    leads = mpiad.mpi_rank() == 0
    if leads:
        print(f"{mpiad.mpi_size()} ranks; until within {CLOSE} of the minimum\n")
        print(f"{'mesh':>6} {'method':>14} {'steps':>6} {'products':>9} {'V-cycles':>9} {'s':>7}")
    for n in chosen.sizes:
        problem, spent = (Tutorial if chosen.tutorial else Problem)(n), {}
        newton = {"inner_product": problem.prior, "grtol": 1e-6, "gtol": problem.enough}
        gauss = {**newton, "product": "gauss-newton", "regularizer": problem.prior}
        ways = {
            "Newton": (problem.objective, "Newton-CG-sharded", newton),
            "Gauss-Newton": (problem.residuals, "Newton-CG-sharded", gauss),
            "L-BFGS": (problem.objective, "L-BFGS-sharded", {"ftol": 0.0, "gtol": 1e-6, "maxfun": chosen.most}),
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
        if chosen.tutorial:
            steps, products = published(problem, newton, gauss)
            if leads:
                print(f"{n:>5}² {'as hIPPYlib':>14} {steps:>6} {products:>9}")
                report("steps by hIPPYlib's 12", steps / 12, at_most=1.0)
                report("products by hIPPYlib's 89", products / 89, at_most=1.0)
        if leads and n >= 64 and {"Gauss-Newton", "L-BFGS"} <= set(spent):
            report(f"{n}²: V-cycles of Gauss-Newton by L-BFGS's", spent["Gauss-Newton"] / spent["L-BFGS"], at_most=2 / 3)


if __name__ == "__main__":
    main()
