"""A linear inverse problem with kept implicit steps: mpiad, and SciPy with dense matrices.

    python benchmarks/posterior.py [--cells 18 32 64] [--largest 128]

The initial concentration of an advection-diffusion equation on the unit square is unknown, as in hIPPYlib's tutorial
(Petra and Stadler 2011; Villa, Petra and Ghattas 2021): 20 implicit steps in a flow with uniform vorticity, and sensors
that measure the last state with a noise of 1 % of its maximum; here with finite volumes of first order. The prior is a
Matérn prior. mpiad computes the most probable field by Gauss-Newton's method, to 1e-8 of the gradient in the prior's norm,
and the posterior's variance from eigenpairs. By hand, the map from the field to the data is a dense matrix, by one
back-substitution per step for all data together, and the covariance is the inverse of a dense matrix.

The number of products of a minimization to 1e-6 is compared with the number of eigenvalues above 1, for 100 and 10,000 data
(100 sensors that measure once or 100 times), and on finer meshes up to `--largest`; for 25 data, that of a minimization to
1e-8 with the number of data. The sides alternate, and the smallest time of each counts.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import scipy.linalg
import scipy.sparse
from reaches import report
from timing import fastest

import mpiad
from mpiad.inverse import Bilaplacian, laplace_approximation
from mpiad.linalg import factorized

STEPS, STEP, DIFFUSION = 20, 0.1, 1e-2


class Problem:
    """The transport on n² cells, and `sensors`² sensors that measure the last state `times` times."""

    def __init__(self, n: int, sensors: int, times: int = 1):
        self.n, h = n, 1 / n
        self.domain = domain = mpiad.Domain((n, n))
        corners = np.linspace(0, 1, n + 1)
        psi = np.sin(np.pi * corners)[:, None] * np.sin(np.pi * corners) / np.pi  # stream function
        self.v = np.diff(psi, axis=1) / h, -np.diff(psi, axis=0) / h
        self.h = h
        self.solve = factorized(self.implicit, np.zeros((n, n)), pattern=domain)
        places = np.linspace(0.1, 0.9, sensors)
        self.sensors = np.stack(np.meshgrid(places, places, indexing="ij"), axis=-1).reshape(-1, 2)
        centres = (np.arange(n) + 0.5) * h
        truth = np.exp(-40 * ((centres[:, None] - 0.35) ** 2 + (centres - 0.6) ** 2))
        exact = self.measured(truth)
        self.noise = 0.01 * exact.max() / np.sqrt(times)  # of the mean of all times
        self.data = exact + self.noise * np.random.default_rng(1).standard_normal(exact.shape)
        self.prior, self.compiled = Bilaplacian(domain, 0.5, 0.2, spacing=h), mpiad.jit(self.residuals)
        self.count = len(self.data) * times

    def implicit(self, u: Any) -> Any:
        padded, (v, w) = self.domain.exchange(u), self.v
        x = np.maximum(v, 0) * padded[:-1, 1:-1] + np.minimum(v, 0) * padded[1:, 1:-1]
        y = np.maximum(w, 0) * padded[1:-1, :-1] + np.minimum(w, 0) * padded[1:-1, 1:]
        conducts = np.ones(self.n + 1)
        conducts[[0, -1]] = 0.0
        x = x - DIFFUSION / self.h * conducts[:, None] * (padded[1:, 1:-1] - padded[:-1, 1:-1])
        y = y - DIFFUSION / self.h * conducts * (padded[1:-1, 1:] - padded[1:-1, :-1])
        return u + STEP / self.h * (x[1:] - x[:-1] + y[:, 1:] - y[:, :-1])

    def measured(self, m: Any) -> Any:
        for _ in range(STEPS):
            m = self.solve(m)
        return self.domain.interpolate(m, self.sensors, self.h, centred=True, result="share")

    def residuals(self, m: Any) -> Any:
        return (self.measured(m) - self.data) / self.noise

    def with_mpiad(self, pairs: int = 0, grtol: float = 1e-8) -> tuple[Any, Any]:
        """Return the minimization's result, and the posterior with some eigenpairs."""
        options = {"product": "gauss-newton", "regularizer": self.prior, "inner_product": self.prior, "grtol": grtol}
        found = self.domain.minimize(self.compiled, self.prior.mean, method="Newton-CG-sharded", options=options)
        if not pairs:
            return found, None
        kept = mpiad.linearize(self.compiled)(found.x)
        return found, laplace_approximation(lambda v: kept.vjp(kept.jvp(v)), found.x, self.prior, pairs, tol=1e-3)

    def by_hand(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the most probable field and the variance, by dense matrices."""
        factors = scipy.sparse.linalg.splu(self.matrix)
        rows = self.observation.T
        for _ in range(STEPS):
            rows = factors.solve(rows, "T")
        hessian = rows @ rows.T / self.noise**2 + self.precision
        covariance = scipy.linalg.inv(hessian, overwrite_a=True)
        return covariance @ (rows @ self.data / self.noise**2), covariance.diagonal()

    def assemble(self) -> None:
        """Assemble the matrices that a program by hand would assemble itself."""
        size = self.n**2
        units = np.eye(size).reshape(size, self.n, self.n)
        self.matrix = scipy.sparse.csc_array(np.stack([self.implicit(unit).ravel() for unit in units], axis=1))
        place = [self.domain.interpolate(unit, self.sensors, self.h, centred=True, result="share") for unit in units]
        self.observation = np.stack(place, axis=1)
        self.precision = np.stack([self.prior.apply(unit).ravel() for unit in units], axis=1)

    def eigenvalues_above_one(self) -> int:
        """Return the number of eigenvalues of the data's Hessian, in the prior's metric, above 1."""
        point = mpiad.linearize(self.compiled)(self.prior.mean)
        seeds = point.vjp(np.eye(len(self.data)), batch=True)
        rows = np.stack([seed.ravel() for seed in seeds])
        covariances = np.stack([self.prior.solve(seed).ravel() for seed in seeds])
        return int((np.linalg.eigvalsh(rows @ covariances.T) > 1).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, nargs="+", default=(18, 32))
    parser.add_argument("--largest", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print("| cells | data | most probable field, ms | and variance | by hand, ms | products | eigenvalues above 1 |")
    print("|---|---|---|---|---|---|---|")
    for n in options.cells:
        problem = Problem(n, 10)
        problem.assemble()
        above = problem.eigenvalues_above_one()
        (found, posterior), (field, variance) = problem.with_mpiad(above + 10), problem.by_hand()
        assert np.abs(found.x.ravel() - field).max() <= 1e-4 * np.abs(field).max()
        assert np.abs(posterior.variance.ravel() / variance - 1).max() <= 0.05
        calls = [problem.with_mpiad, lambda: problem.with_mpiad(above + 10)[1].variance, problem.by_hand]  # noqa: B023
        times = [1e3 * seconds for seconds in fastest(calls, options.repeats)]
        row = [*(f"{t:.3g}" for t in times), found.nhev, above]
        print(f"| {n}² | {problem.count} | " + " | ".join(map(str, row)) + " |")
        report(f"most probable field of {n}² cells by 100 data, over dense matrices by hand", times[0] / times[2])
        report(f"with the variance, {n}² cells, over dense matrices by hand", times[1] / times[2])
    problem = Problem(18, 5)
    found, _ = problem.with_mpiad()
    print(f"| 18² | {problem.count} | | | | {found.nhev} | |")
    report("products to 1e-8 over data, 18², 25 data", found.nhev / problem.count, at_most=1.2)
    for n, times in ((64, 1), (32, 100), (64, 100), (options.largest, 100)):
        problem = Problem(n, 10, times)
        found, _ = problem.with_mpiad(grtol=1e-6)
        above = problem.eigenvalues_above_one()
        print(f"| {n}² | {problem.count} | | | | {found.nhev} | {above} |")
        report(f"products to 1e-6 over eigenvalues above 1, {n}², {problem.count} data", found.nhev / above, at_most=1.2)


if __name__ == "__main__":
    main()
