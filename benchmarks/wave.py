"""The reverse pass of a wave equation beside its plain forward run: stored, and from a few checkpoints.

    python benchmarks/wave.py [--cells 512] [--steps 25] [--repeats 5]
    mpiexec -n 2 python benchmarks/wave.py

u'' = c² Δu, five points, on cells² with the derivative of Σ u² by c² in each cell. Two programs: with the user's
slices of an exchanged block, and with `Domain.laplacian`. Each is timed plain (no derivative),
recorded (its forward run on the tape), its reverse pass from that record, and its reverse pass from √n checkpoints
of n steps: one every √n steps, between which the steps are run again, recorded together; and with one step recorded
at a time, which takes less memory. The former also with states in single precision and in 16 bits an entry: aimed
at are 1.1 times the time and 1e-4 of the gradient. The step with slices is timed compiled, too (`mpiad.jit`).

All in one process, the sides in turn so that noise hits all of them; the smallest time of each counts, divided by
that of the plain run with slices. Times are the processor's, of the rank that took most: the wall clock counts
others who use the machine, too. The first schedule of checkpoints that a process makes is compiled, in the first
turn, and so is the step.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from mpi4py import MPI
from reaches import report

import mpiad
from mpiad.timestepping import CheckpointSchedule, scan

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--cells", type=int, default=512)
parser.add_argument("--steps", type=int, default=25)
parser.add_argument("--repeats", type=int, default=5)

REACH = {
    ("slices", "recorded forward"): 4.0,
    ("slices", "reverse, stored"): 3.0,
    ("slices", "reverse, √n checkpoints"): 5.5,
    ("laplacian", "reverse, √n checkpoints"): 4.0,
    ("slices, jitted", "plain"): 0.2,
    ("slices, jitted", "recorded forward and reverse"): 0.8,
}
PARTS, SMALLER = ("forward", "reverse"), ("√n float32", "√n compressed")
comm = MPI.COMM_WORLD.Dup()


class Wave:
    """A pulse on a square grid, and its steps."""

    def __init__(self, cells: int, steps: int):
        self.domain, self.steps = mpiad.Domain((cells, cells)), steps
        self.laplacian = self.domain.laplacian()
        x, y = self.domain.coordinates()
        self.start = np.exp(-((x - cells / 2) ** 2 + (y - cells / 3) ** 2) / 50)
        self.square = 0.2 + 0.05 * np.cos(x / 9) * np.sin(y / 7)

    def slices(self, state: tuple, k: int, square: np.ndarray) -> tuple:
        """Return the next step's field and this one's, as a user writes it."""
        u, before = state
        p = self.domain.exchange(u)
        around = p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2]
        return 2.0 * u - before + square * (around - 4.0 * u), u

    def operator(self, state: tuple, k: int, square: np.ndarray) -> tuple:
        """Return the same by the library's operator."""
        u, before = state
        return 2.0 * u - before + square * self.laplacian(u), u

    def energy(self, step: Callable, checkpoints: CheckpointSchedule | int | None = None) -> Callable:
        """Return the objective as a function of c²."""

        def objective(square: np.ndarray) -> float:
            last, _ = scan(step, (self.start, self.start), self.steps, square, checkpoints=checkpoints)
            return self.domain.sum(last**2)

        return objective

    def plain(self, step: Callable) -> None:
        """Run the steps alone."""
        state = (self.start, self.start)
        for k in range(self.steps):
            state = step(state, k, self.square)


def timed(fun: Callable) -> tuple[float, object]:
    comm.Barrier()
    start = time.process_time()
    result = fun()
    return comm.allreduce(time.process_time() - start, MPI.MAX), result


def measure(wave: Wave, step: Callable) -> dict[str, float]:
    """Return the times of one turn."""
    plain, _ = timed(lambda: wave.plain(step))
    recorded, (pull, _) = timed(lambda: mpiad.make_vjp(wave.energy(step))(wave.square))
    reverse, stored = timed(lambda: pull(1.0))
    del pull
    found = {"plain": plain, "recorded forward": recorded, "reverse, stored": reverse}
    root = math.isqrt(wave.steps)
    ways = {
        "√n": CheckpointSchedule(root, recorded=root),
        "√n float32": CheckpointSchedule(root, recorded=root, dtype="float32"),
        "√n compressed": CheckpointSchedule(root, recorded=root, compress=True),
        "√n stepwise": CheckpointSchedule(root),
    }
    for name, count in ways.items():
        kept, (pull, _) = timed(lambda: mpiad.make_vjp(wave.energy(step, count))(wave.square))  # noqa: B023
        again, computed = timed(lambda: pull(1.0))  # noqa: B023
        error = np.linalg.norm(computed - stored) / np.linalg.norm(stored)
        assert error <= (1e-4 if count.compress or count.dtype else 1e-9), f"{name}: {error:.1e} of the gradient"
        found |= {f"forward, {name} checkpoints": kept, f"reverse, {name} checkpoints": again}
    return found


def main() -> None:
    options = parser.parse_args()
    wave = Wave(options.cells, options.steps)
    programs = {"slices": wave.slices, "laplacian": wave.operator, "slices, jitted": mpiad.jit(wave.slices)}
    best: dict[str, dict[str, float]] = {}
    for _ in range(options.repeats):
        for name, step in programs.items():
            found = measure(wave, step)
            found["recorded forward and reverse"] = found["recorded forward"] + found["reverse, stored"]
            known = best.setdefault(name, found)
            best[name] = {key: min(known[key], value) for key, value in found.items()}
    if comm.rank:
        return
    plain = best["slices"]["plain"]
    kept = math.isqrt(options.steps)
    print(f"wave equation, {options.cells}², {options.steps} steps, {kept} checkpoints, {comm.size} ranks")
    print("| program | part | ms per step | / plain with slices | reach |\n|---|---|---|---|---|")
    for name, times in best.items():
        both = {way: sum(times[f"{part}, {way} checkpoints"] for part in PARTS) for way in ("√n", *SMALLER)}
        for way in SMALLER:
            report(f"wave, {name}: gradient, {way}, over double precision", both[way] / both["√n"], at_most=1.1)
        for part, seconds in times.items():
            reach = REACH.get((name, part), "")
            if reach:
                report(f"wave, {name}: {part}, over plain", seconds / plain, at_most=reach)
            print(f"| {name} | {part} | {1e3 * seconds / options.steps:.2f} | {seconds / plain:.2f} | {reach} |")


if __name__ == "__main__":
    main()
