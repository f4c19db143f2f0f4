"""The heat equation that all sides compute, divided by rows. Needs NumPy and mpi4py only: every environment imports it.

An explicit step of n × n cells with constant diffusion and zero beyond the edges; each step sends a row to each neighbor.
Asked for are Σ tanh(u)² after some steps, and its gradient with respect to the initial values.

A side is a program `heat_NAME.py CELLS STEPS`; it prints one line of JSON.
"""

from __future__ import annotations

import argparse

import numpy as np
from mpi4py import MPI
from timing import COMM

DIFFUSION = 0.2
BEFORE = COMM.rank - 1 if COMM.rank else MPI.PROC_NULL
AFTER = COMM.rank + 1 if COMM.rank < COMM.size - 1 else MPI.PROC_NULL


def start(cells: int) -> np.ndarray:
    """Return this rank's rows of the initial values."""
    low, high = (cells * (COMM.rank + k) // COMM.size for k in (0, 1))
    return np.random.default_rng(0).random((cells, cells))[low:high]


def arguments() -> argparse.Namespace:
    """Return those of a side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cells", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("--budget", type=float, default=1.0, help="seconds for each case, about")
    return parser.parse_args()
