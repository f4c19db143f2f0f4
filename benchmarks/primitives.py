"""What the primitives cost beyond autograd and bare MPI: value and gradient, on 2 ranks.

    mpiexec -n 2 python benchmarks/primitives.py [--json FILE] [--alone]

Two programs, for 1, 10³, 10⁵ and 10⁶ doubles:

    allreduce   J = Σ allreduce(x²)² / 2        objective "root"
    ring        J = Σ over ranks of Σ shift(x)² / 2   objective "sum"

mpiad is timed beside (a) autograd on the same loss without communication, (b) the two bare mpi4py calls with
preallocated buffers and (c) the adjoint written by hand in NumPy, in the same process, the sides alternated so that
noise hits all of them. A time is that of the slowest rank; the smallest over the repeats is shown. The last lines tell
what 1,000 gradients of 10⁶ doubles leave behind in memory, with the garbage collector off.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one BLAS thread per rank, for all sides

import autograd
import autograd.numpy as anp
import numpy as np
from mpi4py import MPI
from reaches import report

import mpiad

REPEATS = {1: 4000, 1_000: 3000, 100_000: 500, 1_000_000: 120}
REACH = {"allreduce": {1: 1.15, 1_000: 1.15, 100_000: 1.10, 1_000_000: 1.10},
         "ring": {1: 1.25, 1_000: 1.25, 100_000: 1.10, 1_000_000: 1.10}}  # fmt: skip
JITTED = 15.0  # µs, one double
comm = MPI.COMM_WORLD.Dup()
rank, size = comm.rank, comm.size
right, left = (rank + 1) % size, (rank - 1) % size


def allreduce_sides(x: np.ndarray) -> dict[str, Callable]:
    """Return the sides of the allreduce program."""
    local = autograd.value_and_grad(lambda x: anp.sum((x**2) ** 2) / 2)
    ours = mpiad.value_and_grad(lambda x: anp.sum(mpiad.mpi_allreduce(x**2) ** 2) / 2)
    fast = mpiad.jit(ours)
    total, back = np.empty_like(x), np.empty_like(x)

    def bare() -> None:
        comm.Allreduce(x, total)
        comm.Allreduce(total, back)

    def by_hand() -> tuple[float, np.ndarray]:
        comm.Allreduce(x * x, total)
        # Only the root's loss counts, so only its cotangent is not zero.
        cotangent = total if rank == 0 else np.zeros_like(x)
        back = np.empty_like(x)
        comm.Allreduce(2.0 * cotangent, back)
        return comm.bcast(float(total @ total) / 2), back * x

    calls = {"mpiad": lambda: ours(x), "jitted": lambda: fast(x), "autograd": lambda: local(x)}
    return {**calls, "bare": bare, "by hand": by_hand}


def ring_sides(x: np.ndarray) -> dict[str, Callable]:
    """Return the sides of the ring program."""
    local = autograd.value_and_grad(lambda x: anp.sum(x**2) / 2)
    ours = mpiad.value_and_grad(lambda x: anp.sum(mpiad.mpi_exchange(x, right, left) ** 2) / 2, objective="sum")
    fast = mpiad.jit(ours)
    there, back = np.empty_like(x), np.empty_like(x)

    def bare() -> None:
        comm.Sendrecv(x, right, 0, there, left, 0)
        comm.Sendrecv(there, left, 1, back, right, 1)

    def by_hand() -> tuple[float, np.ndarray]:
        comm.Sendrecv(x, right, 0, there, left, 0)
        back = np.empty_like(x)
        comm.Sendrecv(there, left, 1, back, right, 1)
        return comm.allreduce(float(there @ there) / 2), back

    calls = {"mpiad": lambda: ours(x), "jitted": lambda: fast(x), "autograd": lambda: local(x)}
    return {**calls, "bare": bare, "by hand": by_hand}


def check(sides: dict[str, Callable], case: str, n: int) -> None:
    """Compare mpiad's answer with the one by hand before anything is timed."""
    expected, by_hand = sides["by hand"]()
    for side in ("mpiad", "jitted", "jitted"):  # the second call is compiled
        value, gradient = sides[side]()
        if not (np.isclose(value, expected, rtol=1e-12) and np.allclose(gradient, by_hand, rtol=1e-12)):
            raise SystemExit(f"{case} at {n}: {side} and the adjoint by hand differ on rank {rank}")


def times(sides: dict[str, Callable], repeats: int) -> dict[str, float]:
    """Return each side's smallest time in µs, that of the slowest rank."""
    best = dict.fromkeys(sides, float("inf"))
    for repeat in range(repeats + 3):
        for name, side in sides.items():
            comm.Barrier()
            start = time.perf_counter()
            side()
            passed = comm.allreduce(time.perf_counter() - start, op=MPI.MAX)
            if repeat >= 3:
                best[name] = min(best[name], passed * 1e6)
    return best


def resident_bytes() -> int:
    """Return what this process holds in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(gradients: int, n: int) -> int:
    """Return by how much memory grows over many gradients, with the garbage collector off."""
    step = mpiad.value_and_grad(
        lambda x: anp.sum(mpiad.mpi_exchange(mpiad.mpi_allreduce(x**2), right, left) ** 2), objective="sum"
    )
    x = np.random.default_rng(rank).standard_normal(n)
    gc.disable()
    for _ in range(20):
        step(x)
    before = resident_bytes()
    for _ in range(gradients):
        step(x)
    grown = resident_bytes() - before
    gc.enable()
    return comm.allreduce(grown, op=MPI.MAX)


def main() -> None:
    """Run the cases and print a line for each on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", help="also write the times to this file")
    parser.add_argument("--alone", action="store_true", help="mpiad's side only, as its peers are timed; no memory test")
    options = parser.parse_args()
    rows = []
    header = f"{'':10}{'doubles':>9}{'mpiad µs':>11}{'jitted':>10}{'(a) autograd':>14}{'(b) bare':>10}{'(c) by hand':>13}"
    if rank == 0 and not options.alone:
        print(header + f"{'mpiad/(a+b)':>13}{'reach':>7}{'mpiad/(c)':>11}", flush=True)
    for case, make in (("allreduce", allreduce_sides), ("ring", ring_sides)):
        for n, repeats in REPEATS.items():
            sides = make(np.random.default_rng(rank).standard_normal(n))
            check(sides, case, n)
            if options.alone:
                rows.append({"case": case, "n": n, **times({"mpiad": sides["mpiad"]}, repeats)})
                continue
            best = times(sides, repeats)
            ratio = best["mpiad"] / (best["autograd"] + best["bare"])
            rows.append({"case": case, "n": n, "ratio": ratio, **best})
            if rank == 0:
                widths = {"mpiad": 11, "jitted": 10, "autograd": 14, "bare": 10, "by hand": 13}
                shown = "".join(f"{best[side]:{width}.1f}" for side, width in widths.items())
                over = best["mpiad"] / best["by hand"]
                print(f"{case:10}{n:9}{shown}{ratio:13.3f}{REACH[case][n]:7.2f}{over:11.2f}", flush=True)
                report(f"{case}, {n:,} doubles, over autograd + bare MPI", ratio, at_most=REACH[case][n])
                if n == 1:
                    report(f"{case}, one double, jitted, µs", best["jitted"], at_most=JITTED)
    if not options.alone:
        grown = growth(1000, 1_000_000)
        if rank == 0:
            print(f"memory held after 1,000 gradients of 10^6 doubles, no garbage collector: {grown / 2**20:+.2f} MiB")
            report("memory held after 1,000 gradients of 10⁶ doubles, MiB", grown / 2**20)
    if rank == 0 and options.json:
        Path(options.json).write_text(json.dumps(rows))


main()
