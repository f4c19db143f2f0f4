"""The sharded L-BFGS beside SciPy's L-BFGS-B in one process and NuMPI's l_bfgs on the same ranks: evaluations and time.

    mpiexec -n 2 python benchmarks/optimize_peers.py [--variables 1000000] [--json FILE]

The evaluations are those to a gradient of 1e-8 on the functions that the tests know, each cut into pieces, m = 10 for all.
The time is that of 30 iterations on a quadratic of many variables, the function included. NuMPI is left out, and said so,
where it isn't installed (pip install NuMPI).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import autograd
import numpy as np
import scipy.optimize
from mpi4py import MPI
from reaches import report, report_missing
from timing import seconds_of

import mpiad

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from known_problems import PROBLEMS

try:
    from NuMPI.Optimization.LBFGS import l_bfgs
except ImportError:
    l_bfgs = None

WORLD = MPI.COMM_WORLD
OPTIONS = {"gtol": 1e-8, "ftol": 0.0, "maxfun": 20000}
LONG = {"quadratic", "rosenbrock-1000"}


class Counted:
    """A function of pieces that returns the whole value and this rank's part of the gradient, and counts its calls."""

    def __init__(self, fun: Callable[[Any], Any], start: np.ndarray):
        self._both, self.calls = autograd.value_and_grad(fun), 0
        ends = np.linspace(0, len(start), WORLD.size + 1).astype(int)
        self._part = slice(ends[WORLD.rank], ends[WORLD.rank + 1])
        self.start = start[self._part]

    def __call__(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        self.calls += 1
        value, gradient = self._both(np.concatenate(WORLD.allgather(np.ravel(x))))
        return float(value), gradient[self._part].reshape(x.shape)


def of_mpiad(fun: Callable, start: np.ndarray, **options: Any) -> Any:
    return mpiad.minimize(fun, start, jac=True, method="L-BFGS-sharded", options=options)


def of_numpi(fun: Callable, start: np.ndarray, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return l_bfgs(fun, start, jac=True, comm=WORLD, maxcor=10, **options)  # type: ignore[misc]


def evaluations(name: str) -> dict[str, int | None]:
    """Return how many evaluations each takes; None where it didn't come to the gradient."""
    fun, start, _ = PROBLEMS[name]
    counts: dict[str, int | None] = {}
    if WORLD.rank == 0:
        whole = scipy.optimize.minimize(
            lambda x: float(fun(x)), start, jac=autograd.grad(fun), method="L-BFGS-B", options=OPTIONS
        )
        counts["SciPy"] = whole.nfev
    for label, solve, options in (
        ("mpiad", of_mpiad, OPTIONS),
        ("NuMPI", of_numpi, {"gtol": 1e-8, "ftol": 0.0, "maxiter": 20000}),
    ):
        if label == "NuMPI" and l_bfgs is None:
            continue
        counted = Counted(fun, start)
        try:
            ended = bool(solve(counted, counted.start, **options).success)
        except (RuntimeError, ValueError, ArithmeticError):
            ended = False
        counts[label] = counted.calls if ended else None
    return counts


def seconds(solve: Callable, size: int, rounds: int = 3) -> float:
    """Return the smallest time of 30 iterations, the longest of all ranks."""
    scale = np.linspace(1.0, 100.0, size)

    def fun(x: np.ndarray) -> tuple[float, np.ndarray]:
        flat = np.ravel(x)
        change = scale * flat - 1.0
        value = WORLD.allreduce(0.5 * float(flat @ (change - 1.0)))
        return value, change.reshape(x.shape)

    return seconds_of(lambda: solve(fun, np.zeros(size), gtol=1e-300, ftol=0.0, maxiter=30), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--variables", type=int, default=10**6, help="of all ranks together")
    parser.add_argument("--all", action="store_true", help="also the functions that take thousands of evaluations")
    parser.add_argument("--json")
    options = parser.parse_args()
    labels = ["mpiad", "NuMPI"] if l_bfgs else ["mpiad"]
    rows = {name: evaluations(name) for name in PROBLEMS if options.all or name not in LONG}
    size = options.variables // WORLD.size
    times = {"mpiad": seconds(of_mpiad, size)} | ({"NuMPI": seconds(of_numpi, size)} if l_bfgs else {})
    if WORLD.rank:
        return
    for name, counts in rows.items():
        print(f"{name:16}", *(f"{label} {counts[label]!s:>6}" for label in ("SciPy", *labels)), sep="  ")
    for label in labels:
        ratios = [counts[label] / counts["SciPy"] for counts in rows.values() if counts[label] and counts["SciPy"]]
        mean = np.exp(np.mean(np.log(ratios)))
        print(f"{label}: geometric mean of the ratios to SciPy's {mean:.3f}, worst {max(ratios):.3f}")
        report(f"evaluations of {label}'s L-BFGS over SciPy's, geometric mean", mean)
        report(f"30 iterations of {label}'s L-BFGS, {options.variables:,} variables, s", times[label])
        print(f"{label}: 30 iterations at {options.variables} variables {times[label]:.3f} s")
    if l_bfgs is None:
        print("NuMPI isn't installed")
        report_missing("NuMPI's L-BFGS", "peer not installed")
    if options.json:
        Path(options.json).write_text(json.dumps({"evaluations": rows, "seconds": times}))


if __name__ == "__main__":
    main()
