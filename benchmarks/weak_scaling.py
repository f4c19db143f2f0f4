"""Weak scaling of a compiled wave: a block on each rank of one domain, beside as large domains of one rank each.

    mpiexec -n 2 python benchmarks/weak_scaling.py [--cells 512 1024] [--steps 48] [--repeats 10]

u'' = c² Δu by slices of an exchanged block, `scan` of a jitted step, forward and with the gradient by c². All ranks compute
at once in both cases, so that they share caches and memory alike; they alternate, and the smallest time of the slowest rank
counts. What is aimed at is 0.9 of the time without communication.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import autograd.numpy as np
from mpi4py import MPI
from reaches import report

import mpiad
from mpiad.timestepping import scan

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--cells", type=int, nargs="+", default=[512, 1024], help="of a block, in each direction")
parser.add_argument("--steps", type=int, default=48)
parser.add_argument("--repeats", type=int, default=10)
comm = MPI.COMM_WORLD.Dup()


def cases(cells: int, ranks: MPI.Intracomm, steps: int) -> dict[str, Callable[[], object]]:
    """Return what is timed on the blocks of a domain of some ranks."""
    domain = mpiad.Domain((cells * ranks.size, cells), comm=ranks)
    x, y = domain.coordinates()
    start = np.exp(-((x - cells / 2) ** 2 + (y - cells / 3) ** 2) / 50)
    start.flags.writeable = False
    square = 0.2 + 0.05 * np.cos(x / 9) * np.sin(y / 7)

    @mpiad.jit
    def step(state, k, square):
        u, before = state
        p = domain.exchange(u)
        around = p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2]
        return 2.0 * u - before + square * (around - 4.0 * u), u

    def energy(square):
        return np.sum(scan(step, (start, start), steps, square)[0] ** 2)

    # The sum of all ranks' terms costs a message more where there are others.
    gradient = mpiad.value_and_grad(energy, objective="sum", comm=ranks)
    return {"forward": lambda: energy(square), "gradient": lambda: gradient(square)}


def seconds(call: Callable[[], object]) -> float:
    comm.Barrier()
    begin = time.perf_counter()
    call()
    return comm.allreduce(time.perf_counter() - begin, MPI.MAX)


def main() -> None:
    options = parser.parse_args()
    for cells in options.cells:
        sides = {"together": cases(cells, comm, options.steps), "apart": cases(cells, MPI.COMM_SELF, options.steps)}
        best: dict[tuple[str, str], float] = {}
        for _ in range(options.repeats):
            for side, found in sides.items():
                for case, call in found.items():
                    best[side, case] = min(best.get((side, case), float("inf")), seconds(call))
        for case in ("forward", "gradient"):
            together, apart = (1e3 * best[side, case] / options.steps for side in ("together", "apart"))
            if comm.rank == 0:
                print(
                    f"{cells}² on each of {comm.size} ranks, {case}: {together:.3f} ms a step, without communication "
                    f"{apart:.3f}: {apart / together:.2f} (reach 0.9)"
                )
                report(f"weak scaling, {cells}² a rank, {case}", apart / together, at_least=0.9)


if __name__ == "__main__":
    main()
