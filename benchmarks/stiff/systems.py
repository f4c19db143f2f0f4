"""The stiff systems that all sides solve. Needs NumPy only: every environment imports it.

Robertson's kinetics, an Oregonator, HIRES, POLLU (20 species of smog) and a Brusselator on a line of 20 cells, each with
parameters spread by a factor of 10. Asked for are the states at the end, and the gradient of Σ_i |u_i|² by all parameters.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

# One core for all sides, before a library starts its threads.
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

FEW = 4  # trajectories whose errors are looked at


class System(NamedTuple):
    """A right-hand side, where it starts, when it ends, parameters that are spread, and how many trajectories."""

    f: Callable
    u0: np.ndarray
    end: float
    p: np.ndarray
    count: int = 10_000


def robertson(u, p, t):
    a, b, c = p[0] * u[0], p[1] * u[1] * u[2], p[2] * u[1] ** 2
    return [b - a, a - b - c, c]


def oregonator(u, p, t):
    return [p[0] * (u[1] + u[0] * (1 - 8.375e-6 * u[0] - u[1])), (u[2] - (1 + u[0]) * u[1]) / p[0], p[1] * (u[0] - u[2])]


def hires(u, p, t):
    a, b, c, d, e, f, g, h = (u[i] for i in range(8))
    r = p[0] * f * h
    return [
        -1.71 * a + 0.43 * b + 8.32 * c + 0.0007, 1.71 * a - 8.75 * b, -10.03 * c + 0.43 * d + 0.035 * e,
        8.32 * b + 1.71 * c - 1.12 * d, -1.745 * e + 0.43 * f + 0.43 * g,
        -r + 0.69 * d + 1.71 * e - 0.43 * f + 0.69 * g, r - 1.81 * g, -r + 1.81 * g,
    ]  # fmt: skip


RATES = (
    0.35, 26.6, 1.23e4, 8.6e-4, 8.2e-4, 1.5e4, 1.3e-4, 2.4e4, 1.65e4, 9e3, 0.022, 1.2e4, 1.88, 1.63e4, 4.8e6, 3.5e-4,
    0.0175, 1e8, 4.44e11, 1240.0, 2.1, 5.78, 0.0474, 1780.0, 3.12,
)  # fmt: skip


def pollu(y, p, t):
    k, q = RATES, p[0]
    r = [
        k[0] * q * y[0], k[1] * y[1] * y[3], k[2] * y[4] * y[1], k[3] * q * y[6], k[4] * q * y[6], k[5] * y[6] * y[5],
        k[6] * q * y[8], k[7] * y[8] * y[5], k[8] * y[10] * y[1], k[9] * y[10] * y[0], k[10] * y[12], k[11] * y[9] * y[1],
        k[12] * y[13], k[13] * y[0] * y[5], k[14] * y[2], k[15] * q * y[3], k[16] * q * y[3], k[17] * y[15], k[18] * y[15],
        k[19] * y[16] * y[5], k[20] * y[18], k[21] * y[18], k[22] * y[0] * y[3], k[23] * y[18] * y[0], k[24] * y[19],
    ]  # fmt: skip
    return [
        r[1] + r[2] + r[8] + r[10] + r[11] + r[21] + r[24] - r[0] - r[9] - r[13] - r[22] - r[23],
        r[0] + r[20] - r[1] - r[2] - r[8] - r[11], r[0] + r[16] + r[18] + r[21] - r[14],
        r[14] - r[1] - r[15] - r[16] - r[22], 2 * r[3] + r[5] + r[6] + r[12] + r[19] - r[2],
        r[2] + 2 * r[17] - r[5] - r[7] - r[13] - r[19], r[12] - r[3] - r[4] - r[5], r[3] + r[4] + r[5] + r[6],
        -r[6] - r[7], r[6] + r[8] - r[11], r[7] + r[10] - r[8] - r[9], r[8], r[9] - r[10], r[11] - r[12], r[13],
        r[15] - r[17] - r[18], -r[19], r[19], r[22] + r[24] - r[20] - r[21] - r[23], r[23] - r[24],
    ]  # fmt: skip


def brusselator(u, p, t):
    cells, rates = 20, []
    spread = p[0] * (cells + 1) ** 2
    for i in range(cells):
        x, y = u[2 * i], u[2 * i + 1]
        beside = [(u[2 * j], u[2 * j + 1]) if 0 <= j < cells else (1.0, 3.0) for j in (i - 1, i + 1)]
        (left, below), (right, above) = beside
        rates.append(1 + x * x * y - 4 * x + spread * (left - 2 * x + right))
        rates.append(3 * x - x * x * y + spread * (below - 2 * y + above))
    return rates


PLACES = np.arange(1, 21) / 21
SMOG = np.zeros(20)
SMOG[[1, 3, 6, 7, 8, 16]] = 0.2, 0.04, 0.1, 0.3, 0.01, 0.007
SYSTEMS = {
    "robertson": System(robertson, np.array([1.0, 0.0, 0.0]), 1e4, np.array([0.04, 1e4, 3e7])),
    "oregonator": System(oregonator, np.array([1.0, 2.0, 3.0]), 30.0, np.array([77.27, 0.161])),
    "hires": System(hires, np.array([1.0, 0, 0, 0, 0, 0, 0, 0.0057]), 321.8122, np.array([280.0])),
    "pollu": System(pollu, SMOG, 60.0, np.array([1.0]), 1000),
    "brusselator": System(
        brusselator,
        np.stack([1 + np.sin(2 * np.pi * PLACES), 3 + 0 * PLACES], axis=1).ravel(),
        10.0,
        np.array([0.02]),
        1000,
    ),
}


def parameters(name: str, count: int) -> np.ndarray:
    """Return the parameters of some trajectories, shape (count, m); the first ones are the same for any count."""
    p = SYSTEMS[name].p
    return p * 10 ** np.random.default_rng(0).uniform(-0.5, 0.5, (count, len(p)))


def atol(rtol: float) -> float:
    """Return the absolute tolerance that goes with a relative one, for all sides."""
    return 1e-4 * rtol
