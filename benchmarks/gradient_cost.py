"""The cost of a gradient: its time and memory relative to the forward run, and the time of its first call.

    python benchmarks/gradient_cost.py
    mpiexec -n 2 python benchmarks/gradient_cost.py

Each row is one program: a short loss with one reduction (interpreted, and its whole gradient compiled), a wave on
512² cells (interpreted, compiled, and compiled with checkpoints), a Poisson problem on 512² cells with multigrid, and
10⁴ Lorenz systems (arrays, compiled kernel). The forward run and the gradient alternate, and the smallest time of
each counts, that of the slowest rank. The first call of the gradient, after a forward run, is timed with an empty
cache of kernels and, in a second process, with the kernels on disk. Memory is the growth of the resident memory's
peak in the latter, in units of the program's variable. `benchmarks/shallow_water.py` and `benchmarks/wave.py` measure
compiled programs and checkpoints in more detail.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

from wave import Wave

import autograd.numpy as np
import numpy
from linalg import Clock, problem
from mpi4py import MPI
from reaches import report

import mpiad
from mpiad import ensemble
from mpiad.timestepping import CheckpointSchedule

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--repeats", type=int, default=7)
parser.add_argument("--only", nargs="+", help="words; programs whose name contains one of them")
parser.add_argument("--first-call", help="print the time of the first gradient of this program, and end")

CELLS, STEPS, SYSTEMS = 512, 64, 10_000
RHO = numpy.linspace(0.0, 21.0, SYSTEMS).reshape(-1, 1)


class Program(NamedTuple):
    """A loss and the value of its variable."""

    loss: Callable
    variable: numpy.ndarray
    calls: int = 1  # the number of calls that are timed together
    compiled: bool = False  # whether the loss and the whole gradient are compiled

    def sides(self) -> dict[str, Callable[[], object]]:
        gradient = mpiad.value_and_grad(self.loss)
        forward = self.loss
        if self.compiled:
            forward, gradient = mpiad.jit(forward), mpiad.jit(gradient)
        return {"forward": lambda: forward(self.variable), "gradient": lambda: gradient(self.variable)}


def short_loss() -> Program:
    return Program(lambda x: mpiad.mpi_allreduce(np.sum(np.sin(x) * x)), numpy.linspace(0.0, 1.0, 1000), 200)


def wave(compiled: bool, checkpoints: CheckpointSchedule | None = None) -> Program:
    """Return the energy of a wave as a function of the squared speed in each cell."""
    program = Wave(CELLS, STEPS)
    step = mpiad.jit(program.slices) if compiled else program.slices
    return Program(program.energy(step, checkpoints), program.square)


def lorenz(compiled: bool) -> Program:
    """Return the sum of squares of the final states as a function of the ρ of each trajectory."""

    def f(u, p, t):
        x, y, z = u
        return 10.0 * (y - x), x * (p[0] - z) - y, x * y - 8 / 3 * z

    one = ensemble.ODEProblem(f, numpy.array([1.0, 0.0, 0.0]), (0.0, 1.0), numpy.zeros(1))

    def loss(rho):
        many = ensemble.EnsembleProblem(one, p=rho)
        solution = ensemble.solve(many, trajectories=SYSTEMS, rtol=1e-6, atol=1e-9, compile=compiled)
        return np.sum(solution.u_end**2)

    return Program(loss, RHO)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "sum of sin(x) x, 1,000 numbers": short_loss,
    "the same, compiled": lambda: short_loss()._replace(compiled=True),
    "wave, interpreted": lambda: wave(False),
    "wave, compiled step": lambda: wave(True),
    "wave, compiled step, 8 checkpoints": lambda: wave(True, CheckpointSchedule(8, recorded=8)),
    "Poisson, multigrid": lambda: Program(*problem(CELLS, False, False, Clock())),
    "Lorenz, arrays": lambda: lorenz(False),
    "Lorenz, compiled kernel": lambda: lorenz(True),
}
ONE_RANK_ONLY = ("Lorenz",)  # `EnsembleMPI` is measured by ensemble_ranks.py


def timed(fun: Callable[[], object], calls: int) -> float:
    """Return the time of one call on the slowest rank."""
    MPI.COMM_WORLD.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        fun()
    return MPI.COMM_WORLD.allreduce((time.perf_counter() - start) / calls, MPI.MAX)


def resident() -> int:
    """Return the peak of this process's resident memory, in bytes."""
    with open("/proc/self/status") as status:  # `ru_maxrss` would begin with that of the process that started this one
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def first_calls(name: str) -> tuple[float, float, float]:
    """Return the times of the first gradient without and with the kernels on disk, and its memory in the second case."""
    with tempfile.TemporaryDirectory() as cache:
        os.chmod(cache, 0o700)
        command = [sys.executable, __file__, "--first-call", name]
        environment = {**os.environ, "MPIAD_CACHE": cache}
        runs = [subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True) for _ in range(2)]
    (cold, _), (disk, memory) = (json.loads(done.stdout) for done in runs)
    return cold, disk, memory


def main() -> None:
    options = parser.parse_args()
    if options.first_call:
        program = PROGRAMS[options.first_call]()
        sides = program.sides()
        sides["forward"]()
        before = resident()
        seconds = timed(sides["gradient"], 1)
        print(json.dumps((seconds, (resident() - before) / program.variable.nbytes)))
        return
    ranks = mpiad.mpi_size()
    if mpiad.mpi_rank() == 0:
        print(f"{ranks} rank{'s' * (ranks > 1)}, {CELLS}² cells, {STEPS} steps of the wave, {SYSTEMS} Lorenz systems")
        print("| program | forward, ms | gradient / forward | first gradient, s | from disk, s | memory |")
        print("|---|---|---|---|---|---|", flush=True)
    for name, make in PROGRAMS.items():
        if ranks > 1 and name.startswith(ONE_RANK_ONLY):
            continue
        if options.only and not any(word in name for word in options.only):
            continue
        program = make()
        sides = program.sides()
        best = dict.fromkeys(sides, math.inf)
        for _ in range(options.repeats):
            for side, fun in sides.items():
                best[side] = min(best[side], timed(fun, program.calls))
        ratio = best["gradient"] / best["forward"]
        if mpiad.mpi_rank() == 0:
            more = "{:.2f} | {:.2f} | {:.0f}".format(*first_calls(name)) if ranks == 1 else " |  | "
            print(f"| {name} | {1e3 * best['forward']:.4g} | {ratio:.2f} | {more} |", flush=True)
            report(f"gradient over forward, {name}, ranks: {ranks}", ratio)


if __name__ == "__main__":
    main()
