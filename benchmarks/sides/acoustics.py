"""The wave that all sides compute: u'' = c² Δu in the plane or in space, a difference of second order in each direction.

Needs NumPy only. Beyond the sides u is zero. A step is u_next = 2 u - u_before + s (Σ neighbours - 2 d u), where s is the
square of c times the step over the cell. Asked for are the field after some steps, and the gradient of Σ u² by s.

A side is a program `acoustics_NAME.py CELLS STEPS`, CELLS as in 512x512; it prints one line of JSON.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import numpy as np


class Fields(NamedTuple):
    """A pulse, at rest, and the squares of speed."""

    start: np.ndarray
    square: np.ndarray


def fields(cells: tuple[int, ...]) -> Fields:
    """Return the fields on a grid."""
    axes = np.meshgrid(*[np.arange(n, dtype=float) for n in cells], indexing="ij", sparse=True)
    distance = sum((x - n / (2 + k)) ** 2 for k, (x, n) in enumerate(zip(axes, cells)))
    ripple = np.cos(axes[0] / 9) * np.sin(axes[-1] / 7)
    return Fields(np.exp(-distance / 50), np.ascontiguousarray(np.broadcast_to(0.2 + 0.05 * ripple, cells)))


def arguments() -> argparse.Namespace:
    """Return those of a side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cells", type=lambda text: tuple(map(int, text.split("x"))))
    parser.add_argument("steps", type=int)
    parser.add_argument("--budget", type=float, default=2.0, help="seconds for each case, about")
    return parser.parse_args()
