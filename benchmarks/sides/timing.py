"""How all sides of a comparison are timed. Needs NumPy and mpi4py only: every environment imports it."""

from __future__ import annotations

import argparse
import json
import os
import time
import tracemalloc
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

from mpi4py import MPI

if not MPI.Is_initialized():  # a library that is imported earlier may have left it to others
    MPI.Init()
COMM = MPI.COMM_WORLD
LEAST, MOST = 3, 40


def seconds(call: Callable[[], object], told: bool = False) -> float:
    """Return what a call takes on the slowest rank; `told`: what it says itself, by its result."""
    COMM.Barrier()
    begin = time.perf_counter()
    result = call()
    return COMM.allreduce(result if told else time.perf_counter() - begin, MPI.MAX)


def total(x: float) -> float:
    """Return a sum over the ranks."""
    return COMM.allreduce(float(x), MPI.SUM)


def peak(call: Callable[[], object]) -> float:
    """Return the most bytes that a call has in new arrays, on the rank that has most."""
    tracemalloc.start()
    call()
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return COMM.allreduce(taken, MPI.MAX)


def measure(
    side: str,
    options: argparse.Namespace,
    cases: dict[str, Callable[[], object]],
    check: Callable,
    peaks: Callable = dict,
    told: bool = False,
) -> None:
    """Time cases in turn, and print a line.

    Parameters
    ----------
    side : str
    options : Namespace
        From `arguments`.
    cases : dict of callables
        Each returns when its results are in memory.
    check : callable
        Returns J and the gradient's norm, as far as the side has them.
    peaks : callable
        Returns the memory that cases take.
    told : bool
        Whether a case returns the seconds that count.
    """
    first = {name: seconds(call) for name, call in cases.items()}
    again = {name: seconds(call, told) for name, call in cases.items()}
    best, spent, calls = dict(again), 0.0, 0
    while calls < LEAST or (spent < options.budget * len(cases) and calls < MOST):
        for name, call in cases.items():
            took = seconds(call, told)
            best[name], spent = min(best[name], took), spent + took
        calls += 1
    found, taken = check(), peaks()
    if COMM.rank == 0:
        ms = {name: 1e3 * took / options.steps for name, took in best.items()}
        compiling = {name: first[name] - best[name] for name in cases}
        print(json.dumps({"side": side, "ms": ms, "compiling": compiling, "check": found, "peaks": taken}), flush=True)
