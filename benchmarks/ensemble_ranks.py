"""Ensembles of ODEs on all ranks beside the same on one rank: states and a gradient, even and uneven costs.

    mpiexec -n 2 python benchmarks/ensemble_ranks.py [--n 10000 100000] [--repeats 7]

- `lorenz`: the ensemble of `benchmarks/lorenz/problem.py`, whose trajectories cost about the same;
- `uneven`: oscillators u' = (ω v, -ω u) over one unit of time, ω from 1.5 to 150 and sorted, so that the last one takes
  a hundred times as many steps as the first and contiguous shares would leave ranks idle.

One rank alone and all ranks together take turns in the same processes, while those that have nothing to do sleep. The
time is that of the slowest rank, the smallest of all repeats.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable
from importlib.util import find_spec

os.environ.setdefault("OMP_NUM_THREADS", "1")

import autograd.numpy as np
from mpi4py import MPI

import mpiad
from mpiad import ensemble

comm = MPI.COMM_WORLD.Dup()
REACH = {10_000: 1.5, 100_000: 1.8}
TOLERANCES = {"rtol": 1e-6, "atol": 1e-9}


def lorenz(u, p, t):
    x, y, z = u
    return 10.0 * (y - x), x * (p[0] - z) - y, x * y - 8.0 / 3.0 * z


def oscillator(u, p, t):
    return p[0] * u[1], -p[0] * u[0]


PROGRAMS = {
    "lorenz": (lorenz, np.array([1.0, 0.0, 0.0]), lambda n: np.linspace(0.0, 21.0, n)),
    "uneven": (oscillator, np.array([1.0, 0.0]), lambda n: np.geomspace(1.5, 150.0, n)),
}


def ends(f: Callable, u0: np.ndarray, p: np.ndarray, way: ensemble.EnsembleAlgorithm, compiled: bool) -> np.ndarray:
    """Return the states at t = 1, shape (n, d)."""
    one = ensemble.ODEProblem(f, u0, (0.0, 1.0), np.zeros(1))
    many = ensemble.EnsembleProblem(one, p=np.reshape(p, (-1, 1)))
    return ensemble.solve(many, ensemblealg=way, trajectories=len(p), compile=compiled, **TOLERANCES).u_end


def sleep_until_all_are_here() -> None:
    """Wait without taking a core from those that work."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.0005)


def seconds(call: Callable[[], object], takes_part: bool) -> float:
    """Return how long the slowest of the ranks that take part needs."""
    comm.Barrier()
    begin = time.perf_counter()
    if takes_part:
        call()
    passed = time.perf_counter() - begin
    sleep_until_all_are_here()
    return comm.allreduce(passed, op=MPI.MAX)


def measure(alone: Callable[[], object], together: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Return the smallest times of one rank alone and of all together."""
    times = []
    for repeat in range(repeats + 1):
        pair = seconds(alone, comm.rank == 0), seconds(together, True)
        # The first call warms up, and tells the shares what the trajectories cost.
        if repeat:
            times.append(pair)
    return tuple(np.min(times, axis=0))


def cases(name: str, n: int, compiled: bool) -> dict[str, tuple[Callable, Callable]]:
    """Return, by name, what one rank does alone and what all do together."""
    f, u0, parameters = PROGRAMS[name]
    p, here, shared = parameters(n), ensemble.EnsembleVectorized(), ensemble.EnsembleMPI()
    itself = mpiad.grad(lambda p: np.sum(ends(f, u0, p, here, compiled) ** 2), comm=MPI.COMM_SELF)
    all_of_us = mpiad.grad(lambda p: np.sum(ends(f, u0, p, shared, compiled) ** 2), shared=True)
    label = f"{name}{', compiled' if compiled else ''}"
    return {
        f"{label}, states": (lambda: ends(f, u0, p, here, compiled), lambda: ends(f, u0, p, shared, compiled)),
        f"{label}, gradient": (lambda: itself(p), lambda: all_of_us(p)),
    }


def main() -> None:
    """Print a line for each program, size and derivative."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    if comm.rank == 0:
        print(f"{'':28}{'N':>9}{'1 rank, ms':>12}{comm.size:>6} ranks, ms{'faster':>9}{'reach, 2 ranks':>16}", flush=True)
    ways = [False, True] if find_spec("numba") else [False]
    for compiled, name, n in itertools.product(ways, PROGRAMS, options.n):
        for case, (alone, together) in cases(name, n, compiled).items():
            one, all_ranks = measure(alone, together, options.repeats)
            if comm.rank == 0:
                times = f"{one * 1e3:12.1f}{all_ranks * 1e3:16.1f}{one / all_ranks:9.2f}"
                reach = 1.9 if compiled else REACH.get(n, 0)
                print(f"{case:28}{n:9}{times}{reach:16.1f}", flush=True)


main()
