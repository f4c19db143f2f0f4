"""The flow that both sides compute: Navier-Stokes in a periodic cube, from a disturbed Taylor-Green vortex.

Needs NumPy only. The products u × ω are computed on POINTS³ points, and their modes above MODES are dropped along each axis
(the rule of 2/3). The steps are those of Cox and Matthews' exponential method of fourth order (ETDRK4), with coefficients
by contour integrals. Asked for are the energy after some steps, and its gradient with respect to the initial velocity,
which is compared without its part with a divergence: initial velocities have none, and methods may extend the equations to
others in different ways.

A side is a program `vortex_NAME.py STEPS`; it prints one line of JSON.
"""

from __future__ import annotations

import argparse

import numpy as np

POINTS, MODES, VISCOSITY, STEP = 48, 15, 0.01, 0.02


def start() -> np.ndarray:
    """Return the initial velocity (3, POINTS, POINTS, POINTS)."""
    x, y, z = 2 * np.pi * np.indices((POINTS,) * 3) / POINTS
    u, v = np.sin(x) * np.cos(y) * np.cos(z), -np.cos(x) * np.sin(y) * np.cos(z)
    return np.stack([u + 0.1 * np.cos(2 * y + z), v, 0.1 * np.sin(x - 3 * y)])


def check(energy: float, gradient: np.ndarray) -> tuple[float, float]:
    """Return the energy, and the norm of the gradient (3, POINTS, POINTS, POINTS) without its part with a divergence."""
    k = np.stack(np.meshgrid(*[np.fft.fftfreq(POINTS, 1 / POINTS)] * 3, indexing="ij"))
    modes = np.fft.fftn(gradient, axes=(1, 2, 3), norm="ortho")
    potential = (k * modes).sum(axis=0) / np.maximum((k**2).sum(axis=0), 1)
    return float(energy), float(np.linalg.norm(modes - k * potential))


def arguments() -> argparse.Namespace:
    """Return those of a side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--budget", type=float, default=2.0, help="seconds for each case, about")
    return parser.parse_args()
