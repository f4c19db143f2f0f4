"""The posterior in real time: what is computed before the data, and what when they arrive.

    mpiexec -n 2 python benchmarks/real_time_posterior.py [--cells 32] [--times 100] [--sensors 20]
    mpiexec -n 2 python benchmarks/real_time_posterior.py --cells 64 --times 250 --sensors 100   (10⁶ sources, 9 GB)

A wave on cells × cells cells with absorbing margins, driven by a source in space and time, is observed by sensors; a
harbor's value is forecast. Products are compared with time stepping. The targets are those of the large case.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from mpi4py import MPI
from reaches import report

import mpiad
from mpiad.inverse import Bilaplacian, LinearPosterior, ShiftInvariantMap

T = TypeVar("T")

AIMS = {"map and covariance": 480.0, "exact variances of a time": 60.0, "mean": 1.0, "forecast per time": 0.02}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--cells", type=int, default=32, help="in each direction")
parser.add_argument("--times", type=int, default=100)
parser.add_argument("--sensors", type=int, default=20)
parser.add_argument("--interval", type=int, default=2, help="steps in an interval")


def timed(name: str, call: Callable[[], T]) -> T:
    """Call, and report the time of the slowest rank."""
    MPI.COMM_WORLD.Barrier()
    start = time.perf_counter()
    result = call()
    seconds = MPI.COMM_WORLD.allreduce(time.perf_counter() - start, MPI.MAX)
    if MPI.COMM_WORLD.rank == 0:
        print(f"{name}: {seconds:.3g} s", flush=True)
        report(f"posterior in real time: {name}, s", seconds, at_most=AIMS.get(name))
    return result


def main() -> None:
    options = parser.parse_args()
    n, cells = options.times, options.cells
    domain = mpiad.Domain((cells, cells))
    x, y = domain.coordinates()
    margin = np.minimum(np.minimum(x, cells - 1 - x), np.minimum(y, cells - 1 - y))
    damping = 0.3 * np.clip(1.0 - margin / 6.0, 0.0, 1.0) ** 2
    random = np.random.default_rng(0)
    points = random.uniform(4.0, cells - 5.0, (options.sensors, 2))

    @mpiad.jit
    def step(state, k, m):
        u, before = state
        p = domain.exchange(u, "edge", corners=False)
        around = p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2]
        return (2.0 * u - (1.0 - damping) * before + 0.2 * (around - 4.0 * u) + m) / (1.0 + damping), u

    zero = np.zeros(domain.local_shape)

    def mapped(points: np.ndarray) -> ShiftInvariantMap:
        observe = mpiad.jit(lambda state: domain.interpolate(state[0], points))
        return ShiftInvariantMap(step, observe, (zero, zero), zero, n, interval=options.interval)

    prior = Bilaplacian(domain, cells / 8.0)
    start = time.perf_counter()
    F = timed("map", lambda: mapped(points))
    posterior = timed("covariance of the data and its factor", lambda: LinearPosterior(F, prior, 0.05, correlation=0.9))
    if MPI.COMM_WORLD.rank == 0:
        report("posterior in real time: map and covariance, s", time.perf_counter() - start, at_most=480.0)
    forecast = timed(
        "preparation of the forecast", lambda: posterior.forecast(mapped(np.array([[cells / 2.0, cells / 3.0]])))
    )
    variances = timed("exact variances of a time", lambda: posterior.variance(of=n // 2))
    truth = np.stack([prior.sample(seed) for seed in range(n)])
    for k in range(1, n):
        truth[k] += 0.9 * truth[k - 1]
    d = F(truth) + F.offset + 0.05 * random.standard_normal(F.offset.shape)
    for first in range(n - 5, n):
        seconds = -time.perf_counter()
        forecast(d[:first])
        seconds += time.perf_counter()
    if MPI.COMM_WORLD.rank == 0:
        print(f"forecast per time: {1e3 * seconds:.3g} ms", flush=True)
        report("posterior in real time: forecast per time, s", seconds, at_most=AIMS["forecast per time"])
    mean = timed("mean", lambda: posterior.condition(d).mean)
    state, seen = (zero, zero), []
    for k in range(n * options.interval):
        state = step(state, k, truth[k // options.interval])
        if k % options.interval == options.interval - 1:
            seen.append(domain.interpolate(state[0], points))
    error = np.abs(np.array(seen) - F(truth)).max() / np.abs(seen).max()
    within = domain.mean(np.abs(mean[n // 2] - truth[n // 2]) < 2.0 * np.sqrt(variances))
    if MPI.COMM_WORLD.rank == 0:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(
            f"products against time stepping: {error:.1e}; {100 * within:.0f} % within two standard deviations; "
            f"{peak:.3g} GB on the root"
        )
        report("posterior in real time: products against time stepping", error, at_most=1e-12)


if __name__ == "__main__":
    main()
