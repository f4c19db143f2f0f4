"""Variational inference on all ranks beside the same on one rank, for a model that takes 50 ms.

    mpiexec -n 2 python benchmarks/vi.py [--milliseconds 50] [--draws 16] [--epochs 3] [--picture demo/vi_speed.png]

The model computes for as long as asked (matrix products of NumPy, their number measured once on rank 0), so that
ranks compete for cores as real models do. One rank alone and all ranks together take turns in the same processes,
while those that have nothing to do sleep; the time is the smallest of all repeats. What is to be reached on 2
ranks: 1.8.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import autograd.numpy as np
from mpi4py import MPI
from reaches import report

import mpiad
from mpiad.parallel import Adam
from mpiad.vi import VI, FullRankGaussian

comm = MPI.COMM_WORLD.Dup()
REACH = 1.8  # on two ranks
MATRIX = np.random.default_rng(0).normal(size=(64, 64)) / 8

parser = argparse.ArgumentParser(description="Measure the speed-up of variational inference with the ranks.")
parser.add_argument("--milliseconds", type=float, default=50.0)
parser.add_argument("--draws", type=int, default=16, help="of each epoch")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--repeats", type=int, default=3)
parser.add_argument("--picture", type=Path, help="plot the speed-up into this file")


def work(count: int) -> float:
    x = MATRIX
    for _ in range(count):
        x = np.tanh(x @ MATRIX)
    return float(x[0, 0])


def products_for(milliseconds: float) -> int:
    """Return how many products take so long on rank 0, for all ranks."""
    count = 0
    if comm.rank == 0:
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            work(100)
            best = min(best, time.perf_counter() - start)
        count = round(milliseconds * 1e-3 / best * 100)
    return comm.bcast(count)


def seconds(group: MPI.Comm | None, count: int, options: argparse.Namespace) -> float:
    """Return how long the epochs take on a group, infinity on ranks that aren't in it; all ranks call it."""
    sleep_until_all_are_here()
    taken = float("inf")
    if group is not None:
        inference = VI(
            lambda theta, data: np.sum(theta**2) + 0.0 * work(count), FullRankGaussian(4), ("norm",), Adam(1e-2), 1.0,
            options.draws, comm=group,
        )  # fmt: skip
        inference.run(None, 1, n_samples=1)
        start = time.perf_counter()
        inference.run(None, options.epochs, n_samples=1)
        taken = time.perf_counter() - start
    sleep_until_all_are_here()
    return comm.bcast(taken)


def sleep_until_all_are_here() -> None:
    """Wait without taking a core from those that work."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.0005)


def main() -> None:
    options = parser.parse_args()
    mpiad.mpi_init()  # the first group is rank 0 alone
    count = products_for(options.milliseconds)
    sizes = list(range(1, comm.size + 1))
    groups = [comm.Split(0 if comm.rank < size else MPI.UNDEFINED) for size in sizes]
    groups = [None if group == MPI.COMM_NULL else group for group in groups]
    best = [float("inf")] * len(sizes)
    for _ in range(options.repeats):
        for k, group in enumerate(groups):
            best[k] = min(best[k], seconds(group, count, options))
    if comm.rank:
        return
    print(f"a model of {options.milliseconds:g} ms, {options.draws} draws, {options.epochs} epochs")
    for size, taken in zip(sizes, best):
        print(f"{size} rank(s): {taken * 1e3:9.1f} ms, {best[0] / taken:5.2f} x one rank")
    if comm.size == 2:
        report("variational inference, over one rank", best[0] / best[1], at_least=REACH)
    if options.picture:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        axes = pyplot.subplots(figsize=(5, 4), layout="constrained")[1]
        axes.plot(sizes, [best[0] / taken for taken in best], "o-", label="measured")
        axes.plot(sizes, sizes, "k:", label="ranks")
        axes.set(xlabel="ranks", ylabel="times as fast as one rank")
        axes.legend()
        options.picture.parent.mkdir(parents=True, exist_ok=True)
        axes.figure.savefig(options.picture, dpi=100)


if __name__ == "__main__":
    main()
