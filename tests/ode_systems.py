"""Right-hand sides in the form f(u, p, t), each written for one trajectory and served with columns."""

from __future__ import annotations

import numpy as np


def lorenz(u, p, t):
    x, y, z = u[0], u[1], u[2]  # arrays on devices aren't taken apart
    return [10.0 * (y - x), x * (p[0] - z) - y, x * y - 8 / 3 * z]


def lotka_volterra(u, p, t):
    return [p[0] * u[0] - p[1] * u[0] * u[1], p[2] * u[0] * u[1] - p[3] * u[1]]


def forced_pendulum(u, p, t):
    return [u[1], -p[0] * np.sin(u[0]) - p[1] * u[1] + 0.3 * np.cos(t)]


def decay(u, p, t):
    return -p * u


def van_der_pol(u, p, t):
    return [u[1], p[0] * (1 - u[0] ** 2) * u[1] - u[0]]
