"""Many small fits: Lotka and Volterra's equations to 200 data sets, beside SciPy's least_squares in `mpi_map`.

    mpiexec -n 2 python benchmarks/ensemble_fits.py [--fits 200] [--scipy-fits 40] [--repeats 5]
    python benchmarks/ensemble_fits.py --pooled

Each fit seeks four parameters from two species at 20 times, and starts up to a factor of 1.5 away from the truth. `fit`
solves all fits of a rank together, with their derivatives. SciPy takes one fit after the other: least_squares with
differences over solve_ivp's RK45 at the same tolerances, handed to the ranks by `mpi_map`; it does fewer, and its time is
scaled up. Data are solutions at a tighter tolerance, so the truth is where each fit has to end. The first call compiles,
or loads what an earlier process has compiled, and isn't counted.

With --pooled one fit has the data of all subjects: five rate constants of a drug in two compartments, in log scale, from
its concentrations in 12 subjects at 8 times, by `mpiad.optimize.least_squares`, and by SciPy's with differences over
solve_ivp. Also the cost of forward mode, of these concentrations and of some other solves by kernels: one direction (`jvp`)
and further ones (`linearize(...).jvp(batch=True)`) over the value; and the Jacobian.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from functools import partial

os.environ.setdefault("OMP_NUM_THREADS", "1")

import autograd.numpy as np
from mpi4py import MPI
from reaches import report
from scipy.integrate import solve_ivp
from scipy.optimize import least_squares
from timing import fastest

import mpiad
import mpiad.optimize
from mpiad.ensemble import RK45, EnsembleMPI, EnsembleProblem, Event, ODEProblem, Rodas5P, fit, remake, solve

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


SUBJECTS = 12
SAMPLES = np.linspace(0.0, 24.0, 9)[1:]
ONE_DIRECTION, FURTHER, POOLED = 2.2, 0.5, 0.06


def drug(u, p, t):
    absorbed, out, back = p[0] * u[0], p[3] * u[1], p[4] * u[2]
    return [-absorbed, absorbed - p[1] / p[2] * u[1] - out + back, out - back]


DRUG = ODEProblem(drug, np.zeros(3), (0.0, 24.0), np.array([1.2, 3.0, 25.0, 0.4, 0.3]))


def lorenz(u, p, t):
    return [p[0] * (u[1] - u[0]), u[0] * (p[1] - u[2]) - u[1], u[0] * u[1] - p[2] * u[2]]


def robertson(u, p, t):
    first, second, third = p[0] * u[0], p[1] * u[1] ** 2, p[2] * u[1] * u[2]
    return [third - first, first - third - second, second]


CHAOS = ODEProblem(lorenz, np.ones(3), (0.0, 2.0), np.array([10.0, 28.0, 8 / 3]))
STIFF = ODEProblem(robertson, np.array([1.0, 0.0, 0.0]), (0.0, 1e4), np.array([0.04, 3e7, 1e4]))
DOSE = Event(times=[0.5, 1.0], affect=lambda u, p, t: [u[0] + 1.0, u[1], u[2]])
SOLVES = {
    "Lorenz": (CHAOS, RK45(), {}),
    "Lorenz, 20 saved times": (CHAOS, RK45(), {"saveat": np.linspace(0.1, 2.0, 20)}),
    "Lorenz, all steps saved": (CHAOS, RK45(), {"save_everystep": True}),
    "Lorenz, two doses": (CHAOS, RK45(), {"saveat": np.linspace(0.1, 2.0, 20), "events": DOSE}),
    "Lorenz, located events": (CHAOS, RK45(), {"saveat": [1.0], "events": Event(lambda u, p, t: u[0] - 5.0)}),
    "Robertson": (STIFF, Rodas5P(), {"rtol": 1e-6, "atol": 1e-9}),
}


def states(problem, alg, options, p):
    return solve(EnsembleProblem(problem, p=p), alg, compile=True, **options).u


def forward_mode(repeats: int) -> None:
    """Print the cost of one direction, and of each further one, over the value."""
    print("| solve | trajectories | value, ms | one direction | each further one |\n|---|---|---|---|---|")
    for (name, (problem, alg, options)), count in itertools.product(SOLVES.items(), (12, 1000)):
        rng = np.random.default_rng(1)
        p = problem.p * rng.uniform(0.95, 1.05, (count, 3))
        several = rng.normal(size=(9, *p.shape))
        run = partial(states, problem, alg, options)
        linear = mpiad.linearize(run)(p)
        calls = [
            partial(run, p),
            partial(mpiad.jvp, run, p, several[0]),
            partial(linear.jvp, several[:1], batch=True),
            partial(linear.jvp, several, batch=True),
        ]
        value, one, first, nine = fastest(calls, repeats)
        print(f"| {name} | {count} | {1e3 * value:.2f} | {one / value:.2f} | {(nine - first) / 8 / value:.2f} |")
        report(f"{name}, {count} trajectories, one direction over the value", one / value, at_most=ONE_DIRECTION)
        line = f"{name}, {count} trajectories, each further direction over the value"
        report(line, (nine - first) / 8 / value, at_most=FURTHER)


def pooled(repeats: int) -> None:
    """Print the times of one fit to the data of all subjects."""
    rng = np.random.default_rng(0)
    u0 = np.zeros((SUBJECTS, 3))
    u0[:, 0] = rng.uniform(50.0, 150.0, SUBJECTS)
    data = None

    def residuals(q):
        sol = solve(EnsembleProblem(remake(DRUG, p=np.exp(q)), u0=u0), saveat=SAMPLES, **TOLERANCES)
        return sol.u[:, :, 1] if data is None else sol.u[:, :, 1] / data - 1.0

    def by_scipy(q):
        runs = [
            solve_ivp(lambda t, u: drug(u, np.exp(q), t), DRUG.tspan, row, t_eval=SAMPLES, **TOLERANCES).y[1] for row in u0
        ]
        return np.ravel(np.array(runs) / data - 1.0)

    truth = np.log(DRUG.p)
    data = residuals(truth) * (1 + 0.05 * rng.normal(size=(SUBJECTS, len(SAMPLES))))
    start = truth + rng.uniform(-0.5, 0.5, len(truth))
    began = time.perf_counter()
    found = mpiad.optimize.least_squares(residuals, start)
    first = time.perf_counter() - began
    ours, jacobian = fastest(
        [lambda: mpiad.optimize.least_squares(residuals, start), lambda: mpiad.jacobian(residuals)(truth)], repeats
    )
    began = time.perf_counter()
    theirs = least_squares(by_scipy, start)
    scipys = time.perf_counter() - began
    print(
        f"pooled fit: first {first:.2f} s, then {ours:.3f} s, {found.nfev} values and {found.njev} Jacobians, each of ",
        end="",
    )
    print(f"{1e3 * jacobian:.1f} ms; SciPy {scipys:.1f} s; costs {found.cost:.8f} and {theirs.cost:.8f}")
    report("pooled fit of 12 subjects, s", ours, at_most=POOLED)
    report("pooled fit of 12 subjects, SciPy over mpiad", scipys / ours)


def main() -> None:
    """Print both times, and how many of the fits ended at the truth."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fits", type=int, default=200)
    parser.add_argument("--scipy-fits", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pooled", action="store_true")
    options = parser.parse_args()
    if options.pooled:
        pooled(4 * options.repeats)
        forward_mode(4 * options.repeats)
        return
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
