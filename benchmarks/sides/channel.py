"""The flow that all sides compute. Needs NumPy and mpi4py only: every environment imports it.

A layer of fluid in a channel on a rotating plane, periodic eastwards, with walls in the north and south (nonlinear
shallow water): Sadourny's scheme on staggered cells, the winds u and v on their eastern and northern faces; two-step
Adams-Bashforth; friction in a step of its own. A step has three exchanges of halos: of height and winds; of fluxes,
potential vorticity and kinetic energy; of the new winds. Beyond the walls height and winds are as beside them, all else
is zero. The plane is divided eastwards. Asked for are the state after some steps, and the gradient of Σ (h - depth)² by
the height at the start.

A side is a program `channel_NAME.py NORTH EAST STEPS DTYPE`; it prints one line of JSON.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import numpy as np
from timing import COMM

CELL, GRAVITY, DEPTH = 5e3, 9.81, 100.0
ROTATION, INCREASE = 1e-4, 1.6e-11  # Coriolis parameter at the southern wall, and by metre northwards
STEP = 0.125 * CELL / (GRAVITY * DEPTH) ** 0.5
FRICTION = 2e-3  # in a step: viscosity times its length, over the square of a cell
NOW, BEFORE = 1.6, -0.6  # weights of the rates of this step and the one before


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


def arguments() -> argparse.Namespace:
    """Return those of a side."""
    parser = argparse.ArgumentParser()
    for name in ("north", "east", "steps"):
        parser.add_argument(name, type=int)
    parser.add_argument("dtype", type=np.dtype)
    parser.add_argument("--budget", type=float, default=2.0, help="seconds for each case, about")
    return parser.parse_args()
