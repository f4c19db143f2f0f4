"""Ensembles of ODEs on all ranks, and on two threads, beside the same on one: states and a gradient, even and uneven costs.

    mpiexec -n 2 python benchmarks/ensemble_ranks.py [--n 10000 100000] [--compiled-n 10000 100000 1000000] [--repeats 7]

- `lorenz`: the ensemble of `benchmarks/lorenz/problem.py`, whose trajectories cost about the same;
- `uneven`: oscillators u' = (ω v, -ω u) over one unit of time, ω from 1.5 to 150 and sorted, so that the last one takes
  a hundred times as many steps as the first and contiguous shares would leave ranks idle;
- `ends`, `saved`, `doses`: the same as `lorenz`, by kernels, with final states, eight saved times, and two doses as well;
- `visits`: few trajectories of a stiff model, with two doses and eight saved times each, as in a fit.

All ranks have all states in the end, or each its share (`gather=False`). Kernels also run on two threads of one rank.
"Apart" is what this machine allows for at most: each rank solves its share as if it were alone, says nothing to the
others, and gets nothing from them.

All ways take turns in the same processes, while those that have nothing to do sleep. The time is that of the slowest
rank, the smallest of all repeats, and beside it how many times as fast as one rank alone that is. With `--cpu` it is the
time of the processor: where others use the machine too, but waiting counts as work there,
and what threads do is added up.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import autograd.numpy as np
from autograd.tracer import getval
from mpi4py import MPI
from reaches import report

import mpiad
from mpiad import ensemble

comm = MPI.COMM_WORLD.Dup()
REACH = {10_000: 1.5, 100_000: 1.8}
COMPILED = 1.9
TOLERANCES = {"rtol": 1e-6, "atol": 1e-9}
ON_ALL = ("ranks", "ranks, shares", "apart")


def lorenz(u, p, t):
    x, y, z = u
    return 10.0 * (y - x), x * (p[0] - z) - y, x * y - 8.0 / 3.0 * z


def oscillator(u, p, t):
    return p[0] * u[1], -p[0] * u[0]


def reactions(u, p, t):
    decay, return_ = 0.04 * p[0] * u[0], 1e4 * u[1] * u[2]
    return return_ - decay, decay - return_ - 3e7 * u[1] ** 2, 3e7 * u[1] ** 2


def visits(p: np.ndarray) -> dict[str, object]:
    """Return the options of a solve with two doses, and eight saved times per trajectory."""
    doses = ensemble.Event(times=lambda p: [0.2, 0.6], affect=lambda u, p, t: [u[0] + 0.1, u[1], u[2]])
    rows = np.sort(np.random.default_rng(0).uniform(0.0, 1.0, (len(p), 8)), axis=1)
    return {"alg": ensemble.Rodas5P(), "saveat": rows, "events": doses}


def eight_times(p: np.ndarray) -> dict[str, object]:
    """Return the options of a solve with saved times that all trajectories share."""
    return {"saveat": np.linspace(0.125, 1.0, 8)}


def two_doses(p: np.ndarray) -> dict[str, object]:
    """Return the options of a solve with saved times and doses that all trajectories share."""
    doses = ensemble.Event(times=lambda p: [0.2, 0.6], affect=lambda u, p, t: [u[0] + 0.1, u[1], u[2]])
    return eight_times(p) | {"events": doses}


class Program(NamedTuple):
    """An ensemble for any number of trajectories."""

    f: Callable
    u0: np.ndarray
    parameters: Callable[[int], np.ndarray]
    options: Callable[[np.ndarray], dict[str, object]] = lambda p: {}
    sizes: tuple[int, ...] = ()  # numbers of trajectories by kernels, instead of those of the command line


LORENZ = Program(lorenz, np.array([1.0, 0.0, 0.0]), lambda n: np.linspace(0.0, 21.0, n))
PROGRAMS = {
    "lorenz": LORENZ,
    "uneven": Program(oscillator, np.array([1.0, 0.0]), lambda n: np.geomspace(1.5, 150.0, n)),
    "visits": Program(reactions, np.array([1.0, 0.0, 0.0]), lambda n: np.linspace(0.5, 2.0, n), visits, (123, 1000)),
    "ends": LORENZ._replace(sizes=(12, 10_000)),
    "saved": LORENZ._replace(options=eight_times, sizes=(12, 10_000)),
    "doses": LORENZ._replace(options=two_doses, sizes=(12, 10_000)),
}


def speedup_to_reach(one: float) -> float | None:
    """Return how many times as fast two ranks should be if one takes this long; None between 2 and 5 ms."""
    return one / (1.1 * one + 1e-4) if one < 2e-3 else 1 / 0.6 if one > 5e-3 else None


def solved(program: Program, p: np.ndarray, way: ensemble.EnsembleAlgorithm, compiled: bool) -> np.ndarray:
    """Return the states at t = 1, shape (n, d), or those at the saved times."""
    one = ensemble.ODEProblem(program.f, program.u0, (0.0, 1.0), np.zeros(1))
    many = ensemble.EnsembleProblem(one, p=np.reshape(p, (-1, 1)))
    options = TOLERANCES | program.options(getval(p))
    sol = ensemble.solve(many, ensemblealg=way, trajectories=len(p), compile=compiled, **options)
    return sol.u if "saveat" in options else sol.u_end


def sleep_until_all_are_here() -> None:
    """Wait without taking a core from those that work."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.0005)


def seconds(call: Callable[[], object], takes_part: bool, clock: Callable[[], float], calls: int) -> float:
    """Return how long the slowest of the ranks that take part needs; of several short calls the shortest counts."""
    comm.Barrier()
    least = np.inf if takes_part else 0.0
    for _ in range(calls if takes_part else 0):
        begin = clock()
        call()
        least = min(least, clock() - begin)
    sleep_until_all_are_here()
    return comm.allreduce(least, op=MPI.MAX)


def measure(
    ways: dict[str, Callable[[], object]], repeats: int, clock: Callable[[], float], calls: int
) -> dict[str, float]:
    """Return the smallest time of each way."""
    times = []
    for repeat in range(repeats + 1):
        row = [seconds(call, way in ON_ALL or comm.rank == 0, clock, calls) for way, call in ways.items()]
        # The first call warms up, and tells the shares what the trajectories cost.
        if repeat:
            times.append(row)
    return dict(zip(ways, np.min(times, axis=0)))


def cases(name: str, n: int, compiled: bool) -> dict[str, dict[str, Callable]]:
    """Return, by name, the ways to compute the same; those in `ON_ALL` take all ranks."""
    program = PROGRAMS[name]
    p = program.parameters(n)
    ways = {
        "one": ensemble.EnsembleVectorized(),
        "ranks": ensemble.EnsembleMPI(),
        "ranks, shares": ensemble.EnsembleMPI(gather=False),
        "apart": ensemble.EnsembleVectorized(),
    }
    if compiled:
        ways["threads"] = ensemble.EnsembleThreads(2)

    # Solved once, so that the shares are known into which all costs fall evenly.
    solved(program, p, ways["ranks"], compiled)
    bounds = ways["ranks"].bounds(n, comm.size)
    own = {way: p[bounds[comm.rank] : bounds[comm.rank + 1]] if way == "apart" else p for way in ways}

    def gradient(way: str) -> Callable:
        loss = lambda p: np.sum(solved(program, p, ways[way], compiled) ** 2)  # noqa: E731
        if "ranks" not in way:
            return mpiad.grad(loss, comm=MPI.COMM_SELF)
        return mpiad.grad(loss, shared=True, objective="sum" if "shares" in way else "root")

    label = f"{name}{', compiled' if compiled else ''}"
    gradients = {way: partial(gradient(way), own[way]) for way in ways}
    return {
        f"{label}, states": {way: partial(solved, program, own[way], backend, compiled) for way, backend in ways.items()},
        f"{label}, gradient": gradients,
    }


def main() -> None:
    """Print a line for each program, size and derivative."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, nargs="*", default=[10_000, 100_000])
    parser.add_argument("--compiled-n", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    clock = time.process_time if options.cpu else time.perf_counter
    if comm.rank == 0:
        heads = "".join(f"{head:>18}" for head in (f"{comm.size} ranks", "in shares", f"{comm.size} apart", "2 threads"))
        print(f"{'':28}{'N':>9}{'one, ms':>10}{heads}{'to reach':>10}", flush=True)
    sizes = [(False, n) for n in options.n] + [(True, n) for n in options.compiled_n]
    own = {name: [(True, n) for n in program.sizes] or sizes for name, program in PROGRAMS.items()}
    runs = [(name, *size) for name in options.programs for size in own[name]]
    for name, compiled, n in runs:
        for case, ways in cases(name, n, compiled).items():
            found = measure(ways, options.repeats, clock, 20 if n < 1000 else 1)
            if comm.rank == 0:
                one = found.pop("one")
                reach = speedup_to_reach(one) if PROGRAMS[name].sizes else COMPILED if compiled else REACH.get(n)
                times = "".join(f"{t * 1e3:10.3f}{one / t:6.2f} x" for t in found.values())
                times += "" if compiled else f"{'':18}"
                for way in ("ranks", "ranks, shares"):
                    label = f"{case}, N = {n:,}, {way}, over one (apart: {one / found['apart']:.2f})"
                    report(label, one / found[way], at_least=reach)
                print(f"{case:28}{n:9}{one * 1e3:10.3f}{times}{reach or 0:10.2f}", flush=True)


main()
