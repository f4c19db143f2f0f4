"""Many small fits: Lotka and Volterra's equations to 200 data sets, beside SciPy's least_squares in `mpi_map`.

    mpiexec -n 2 python benchmarks/ensemble_fits.py [--fits 200] [--scipy-fits 40] [--repeats 5]

Each fit seeks four parameters from two species at 20 times, and starts up to a factor of 1.5 away from the truth. `fit`
solves all fits of a rank together, with their derivatives. SciPy takes one fit after the other: least_squares with
differences over solve_ivp's RK45 at the same tolerances, handed to the ranks by `mpi_map`; it does fewer, and its time is
scaled up. Data are solutions at a tighter tolerance, so the truth is where each fit has to end. The first call compiles,
or loads what an earlier process has compiled, and isn't counted.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import autograd.numpy as np
from mpi4py import MPI
from reaches import report
from scipy.integrate import solve_ivp
from scipy.optimize import least_squares

import mpiad
from mpiad.ensemble import RK45, EnsembleMPI, EnsembleProblem, ODEProblem, fit, solve

comm = MPI.COMM_WORLD.Dup()
TIMES = np.linspace(0.0, 5.0, 20)
TOLERANCES = {"rtol": 1e-8, "atol": 1e-8}
REACH = 2.0


def growth(u, p, t):
    return [p[0] * u[0] - p[1] * u[0] * u[1], p[3] * u[0] * u[1] - p[2] * u[1]]


PROBLEM = ODEProblem(growth, [1.0, 1.0], (0.0, 5.0))


def by_scipy(task: tuple) -> np.ndarray:
    """Return the parameters that one fit ends at."""
    start, counts = task

    def residuals(p: np.ndarray) -> np.ndarray:
        found = solve_ivp(lambda t, u: growth(u, p, t), (0.0, 5.0), [1.0, 1.0], t_eval=TIMES, **TOLERANCES)
        # It stops where steps become too small; least_squares then shortens its own.
        return (found.y.T - counts).ravel() if found.success else np.full(counts.size, np.nan)

    return least_squares(residuals, start).x


def main() -> None:
    """Print both times, and how many of the fits ended at the truth."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fits", type=int, default=200)
    parser.add_argument("--scipy-fits", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    truth = np.array([1.5, 1.0, 3.0, 1.0]) * rng.uniform(0.8, 1.25, (options.fits, 4))
    start = truth * rng.uniform(1 / 1.5, 1.5, truth.shape)
    counts = solve(EnsembleProblem(PROBLEM, p=truth), saveat=TIMES, rtol=1e-10, atol=1e-10).u
    mpi, times = EnsembleMPI(), []
    for _ in range(options.repeats + 1):
        comm.Barrier()
        begin = time.perf_counter()
        found = fit(PROBLEM, lambda u, p, data: u - data, start, RK45(), mpi, data=counts, saveat=TIMES, **TOLERANCES)
        times.append(comm.allreduce(time.perf_counter() - begin, op=MPI.MAX))
    ours = min(times[1:])

    chosen = range(min(options.scipy_fits, options.fits))
    comm.Barrier()
    begin = time.perf_counter()
    ends = mpiad.mpi_map(by_scipy, [(start[i], counts[i]) for i in chosen])
    scipys = (time.perf_counter() - begin) * options.fits / len(chosen)
    if comm.rank == 0:
        good = np.abs(found.p / truth - 1).max(axis=1) < 1e-6
        theirs = np.abs(np.array(ends) / truth[: len(chosen)] - 1).max(axis=1) < 1e-6
        label = f"{options.fits} fits of 4 parameters, {comm.size} ranks"
        print(f"{label}: first {times[0]:.2f} s, then {ours:.3f} s; {good.sum()} end at the truth to 1e-6, ", end="")
        print(f"{found.nfev.sum() / options.fits:.1f} solves each")
        print(f"least_squares in mpi_map: {scipys:.1f} s for as many; {theirs.sum()} of {len(chosen)} end there")
        report(f"{label}, s", ours, at_most=REACH)
        report(f"{label}, that don't end at the truth to 1e-6", options.fits - good.sum(), at_most=0)
        report(f"{label}, least_squares in mpi_map over fit", scipys / ours)


main()
