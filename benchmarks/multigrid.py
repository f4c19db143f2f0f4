"""Multigrid for -∇·(κ∇u) = b: iterations, times beside PyAMG's, messages, and what a gradient costs.

    mpiexec -n 2 python benchmarks/multigrid.py [--size 1024] [--rounds 3]

Iterations of conjugate gradients to a residual of 1e-8 of the recurrence, for constant κ and for κ that jumps by 10⁴ where
no coarse grid can follow. On one rank, set-up and solve are compared with PyAMG's Ruge-Stüben multigrid (in this
environment, or in that of `make bench-peers`), each medium of both in turn, the smallest time of several rounds.
Aimed at: 10 iterations for constant κ and 25 with jumps, on any grid; 0.6 times PyAMG's time, and 1.0 times.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from mpi4py import MPI
from reaches import report, report_missing
from timing import seconds_of

import mpiad
from mpiad.domain import halo
from mpiad.linalg import Multigrid, solve_elliptic
from mpiad.linalg.multigrid import hierarchy

HERE = Path(__file__).resolve().parent
WORLD = MPI.COMM_WORLD
JUMP = 1e4
MOST_ITERATIONS = {False: 10, True: 25}  # for constant κ, and with jumps
OVER_PYAMG = {False: 0.6, True: 1.0}


def say(text: str = "") -> None:
    """Print on one rank."""
    if WORLD.rank == 0:
        print(text, flush=True)


def media(shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Return κ by name."""
    rng = np.random.default_rng(5)
    x, y, *_ = np.meshgrid(*[(np.arange(n) + 0.5) / n for n in shape], indexing="ij", sparse=True)
    whole = np.ones(shape)
    found = {
        "constant": whole,
        "disc": np.where((x - 0.47) ** 2 + (y - 0.53) ** 2 < 0.09, JUMP, whole),
        "layers": np.where(np.floor(7.3 * x) % 2 == 0, JUMP, whole),
        "cross": np.where((abs(x - 0.43) < 0.07) | (abs(y - 0.57) < 0.07), JUMP, whole),
    }
    for count in (8, 32):
        cells = np.ix_(*[np.arange(n) * count // n for n in shape])
        found[f"{count} blocks"] = np.where(rng.random((count,) * len(shape)) < 0.5, 1.0, JUMP)[cells]
        found[f"{count} blocks, log-uniform"] = (JUMP ** rng.random((count,) * len(shape)))[cells]
    return found


def iterations(domain: mpiad.Domain, kappa: np.ndarray, b: np.ndarray) -> int:
    """Return the number of iterations of one solve."""
    levels = Multigrid(domain, kappa[domain.owned])
    levels.solve(b[domain.owned])
    return len(levels.history) - 1


def count_iterations() -> None:
    """Print the table of iterations."""
    grids = [(64,) * 2, (256,) * 2, (1024,) * 2, (64,) * 3]
    say("iterations to 1e-8" + "".join(f"{'x'.join(map(str, grid)):>12}" for grid in grids))
    found = {}
    for grid in grids:
        domain, b = mpiad.Domain(grid), np.random.default_rng(6).random(grid)
        found[grid] = {name: iterations(domain, kappa, b) for name, kappa in media(grid).items()}
    for name in found[grids[0]]:
        say(f"  {name:<24}" + "".join(f"{found[grid][name]:>12}" for grid in grids))
    if WORLD.rank == 0:
        for jumps, label in ((False, "constant κ"), (True, "κ with jumps")):
            most = max(counts[name] for counts in found.values() for name in counts if (name != "constant") == jumps)
            report(f"iterations of multigrid at most, {label}, ranks: {WORLD.size}", most, at_most=MOST_ITERATIONS[jumps])
    say()


def peer() -> str | None:
    """Return an interpreter that has PyAMG."""
    for python in (sys.executable, str(HERE.parent / ".venv-peers" / "bin" / "python")):
        if Path(python).exists() and not subprocess.run([python, "-c", "import pyamg"], capture_output=True).returncode:
            return python
    return None


def pyamg_times(name: str, kappa: np.ndarray, b: np.ndarray, python: str, rounds: int) -> tuple[float, int]:
    """Return PyAMG's time and iterations for one medium."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "media.npz"
        fields: dict[str, Any] = {"b": b, name: kappa}
        np.savez(file, **fields)
        command = [python, str(HERE / "peers" / "pyamg_elliptic.py"), str(file), "--rounds", str(rounds)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    return tuple(json.loads(done.stdout)[name])


def times(domain: mpiad.Domain, kappa: np.ndarray, b: np.ndarray, rounds: int) -> tuple[float, float]:
    """Return the time of the set-up and that of the solve."""
    mine, right = kappa[domain.owned].copy(), b[domain.owned].copy()
    levels = Multigrid(domain, mine)
    return seconds_of(lambda: Multigrid(domain, mine), rounds), seconds_of(lambda: levels.solve(right), rounds)


def compare_times(size: int, rounds: int) -> None:
    """Print times of set-up and solve, beside PyAMG's where it is installed and this is one rank."""
    python = peer() if WORLD.size == 1 else None
    domain, b = mpiad.Domain((size, size)), np.random.default_rng(6).random((size, size))
    say(f"{size} x {size}, seconds     set-up     solve  set-up + solve" + ("     PyAMG   ratio" if python else ""))
    for name, kappa in media(domain.shape).items():
        setup, solve = times(domain, kappa, b, rounds)
        line = f"  {name:<22}{setup:>9.3f}{solve:>10.3f}{setup + solve:>16.3f}"
        if python:
            theirs, count = pyamg_times(name, kappa, b, python, rounds)
            ratio = (setup + solve) / theirs
            report(f"multigrid over PyAMG, {size}², {name}", ratio, at_most=OVER_PYAMG[name != "constant"])
            line += f"{theirs:>10.3f}{ratio:>8.2f}   (its iterations: {count})"
        say(line)
    if not python and WORLD.size == 1:
        report_missing("multigrid over PyAMG", "peer not installed")
    say("" if python or WORLD.size > 1 else "  PyAMG isn't installed: `make bench-peers` installs it.\n")


def count_messages(size: int) -> None:
    """Print what the busiest rank sends in a cycle."""
    sent: list[int] = []

    def counting(x: np.ndarray, *rest: Any, **options: Any) -> Any:
        sent.append(x.nbytes)
        return mpiad.mpi_send(x, *rest, **options)

    halo.mpi_send = hierarchy.mpi_send = counting
    domain = mpiad.Domain((size, size))
    for name, kappa in media(domain.shape).items():
        if name in ("constant", "8 blocks"):
            levels = Multigrid(domain, kappa[domain.owned])
            sent.clear()
            levels(np.ones(domain.local_shape))
            count, volume = WORLD.allreduce(len(sent), MPI.MAX), WORLD.allreduce(sum(sent), MPI.MAX)
            say(f"a cycle on {size} x {size}, {name}: at most {count} messages and {volume / 1e3:.0f} kB from one rank")
    halo.mpi_send = hierarchy.mpi_send = mpiad.mpi_send


def cost_of_gradient(size: int, rounds: int) -> None:
    """Print the time of a loss with its gradient by κ over that of the loss."""
    domain = mpiad.Domain((size, size))
    kappa, b = media(domain.shape)["disc"][domain.owned], np.random.default_rng(6).random(domain.shape)[domain.owned]

    def loss(kappa: np.ndarray) -> float:
        return domain.norm(solve_elliptic(domain, kappa, b)) ** 2

    alone, both = seconds_of(lambda: loss(kappa), rounds), seconds_of(lambda: mpiad.value_and_grad(loss)(kappa), rounds)
    if WORLD.rank == 0:
        report(f"loss and gradient by κ over the loss, {size}², ranks: {WORLD.size}", both / alone)
    say(f"loss {alone:.3f} s, with its gradient {both:.3f} s: {both / alone:.2f} times on {size} x {size}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    say(f"ranks: {WORLD.size}")
    count_iterations()
    compare_times(arguments.size, arguments.rounds)
    count_messages(arguments.size)
    cost_of_gradient(arguments.size // 2, arguments.rounds)
