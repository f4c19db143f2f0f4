"""The flow that all sides compute, and how they are timed. Needs NumPy and mpi4py only: every environment imports it.

A layer of fluid in a channel on a rotating plane, periodic eastwards, with walls in the north and south (nonlinear
shallow water): Sadourny's scheme on staggered cells, the winds u and v on their eastern and northern faces; two-step
Adams-Bashforth; friction in a step of its own. A step has three exchanges of halos: of height and winds; of fluxes,
potential vorticity and kinetic energy; of the new winds. Beyond the walls height and winds are as beside them, all else
is zero. The plane is divided eastwards. Asked for are the state after some steps, and the gradient of Σ (h - depth)² by
the height at the start.

A side is a program `side_NAME.py NORTH EAST STEPS DTYPE`; it prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import tracemalloc
from collections.abc import Callable
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from mpi4py import MPI

CELL, GRAVITY, DEPTH = 5e3, 9.81, 100.0
ROTATION, INCREASE = 1e-4, 1.6e-11  # Coriolis parameter at the southern wall, and by metre northwards
STEP = 0.125 * CELL / (GRAVITY * DEPTH) ** 0.5
FRICTION = 2e-3  # in a step: viscosity times its length, over the square of a cell
NOW, BEFORE = 1.6, -0.6  # weights of the rates of this step and the one before
COMM = MPI.COMM_WORLD
LEAST, MOST = 3, 40


class Start(NamedTuple):
    """The fields of this rank's block; `open` is 0 on the northern wall, `coriolis` is of each row."""

    h: np.ndarray
    u: np.ndarray
    v: np.ndarray
    coriolis: np.ndarray
    open: np.ndarray


def start(north: int, east: int, dtype: np.dtype) -> Start:
    """Return a jet in balance, with waves on it."""
    first, last = (east * (COMM.rank + k) // COMM.size for k in (0, 1))
    y, x = np.arange(north)[:, None] / north, np.arange(first, last)[None] / east
    coriolis = ROTATION + INCREASE * CELL * north * y
    jet = 8.0 / np.cosh((y - 0.5) / 0.08) ** 2
    slope = np.cumsum(-CELL * jet * coriolis / GRAVITY, axis=0)
    waves = 0.3 * np.cos(10 * np.pi * x) * np.sin(6 * np.pi * y)
    wall = np.where(np.arange(north)[:, None] == north - 1, 0.0, 1.0)
    fields = (DEPTH + slope - slope.mean() + waves, jet + 0 * x, 0 * (y + x), coriolis + 0 * x, wall)
    return Start(*[np.ascontiguousarray(field, dtype) for field in fields])


def weights(steps: int, dtype: np.dtype) -> np.ndarray:
    """Return those of the rates now and before, for each step: the first has none before."""
    return np.array([(1.0, 0.0)] + [(NOW, BEFORE)] * (steps - 1), dtype)


def seconds(call: Callable[[], object]) -> float:
    """Return what a call takes on the slowest rank."""
    COMM.Barrier()
    begin = time.perf_counter()
    call()
    return COMM.allreduce(time.perf_counter() - begin, MPI.MAX)


def total(x: float) -> float:
    """Return a sum over the ranks."""
    return COMM.allreduce(float(x), MPI.SUM)


def arguments() -> argparse.Namespace:
    """Return those of a side."""
    parser = argparse.ArgumentParser()
    for name in ("north", "east", "steps"):
        parser.add_argument(name, type=int)
    parser.add_argument("dtype", type=np.dtype)
    parser.add_argument("--budget", type=float, default=2.0, help="seconds for each case, about")
    return parser.parse_args()


def peak(call: Callable[[], object]) -> float:
    """Return the most bytes that a call has in new arrays, on the rank that has most."""
    tracemalloc.start()
    call()
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return COMM.allreduce(taken, MPI.MAX)


def measure(
    side: str, options: argparse.Namespace, cases: dict[str, Callable[[], object]], check: Callable, peaks: Callable = dict
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
    """
    first = {name: seconds(call) for name, call in cases.items()}
    again = {name: seconds(call) for name, call in cases.items()}
    best, spent, calls = dict(again), 0.0, 0
    while calls < LEAST or (spent < options.budget * len(cases) and calls < MOST):
        for name, call in cases.items():
            took = seconds(call)
            best[name], spent = min(best[name], took), spent + took
        calls += 1
    found, taken = check(), peaks()
    if COMM.rank == 0:
        ms = {name: 1e3 * took / options.steps for name, took in best.items()}
        compiling = {name: first[name] - best[name] for name in cases}
        print(json.dumps({"side": side, "ms": ms, "compiling": compiling, "check": found, "peaks": taken}), flush=True)
