"""Stiff right-hand sides, with derivatives written by hand: f, ∂f/∂u, ∂f/∂t, an initial state, parameters, an end."""

from __future__ import annotations

from typing import NamedTuple

import autograd.numpy as anp
import numpy as np


class System(NamedTuple):
    f: object
    jacobian: object
    slope: object
    u0: np.ndarray
    p: np.ndarray
    end: float

    @property
    def by_hand(self):
        """f, ∂f/∂u and ∂f/∂t as arrays of one trajectory."""
        return (
            lambda u, p, t: np.array(self.f(u, p, t)), lambda u, p, t: np.array(self.jacobian(u, p, t)),
            lambda u, p, t: np.array(self.slope(u, p, t)),
        )  # fmt: skip


def _still(u, p, t):
    return 0 * u


def robertson(u, p, t):
    a, b, c = p[0] * u[0], p[1] * u[1] * u[2], p[2] * u[1] ** 2
    return [b - a, a - b - c, c]


def _of_robertson(u, p, t):
    return [
        [-p[0], p[1] * u[2], p[1] * u[1]],
        [p[0], -p[1] * u[2] - 2 * p[2] * u[1], -p[1] * u[1]],
        [0, 2 * p[2] * u[1], 0],
    ]


def van_der_pol(u, p, t):
    return [u[1], p[0] * ((1 - u[0] ** 2) * u[1]) - u[0]]


def _of_van_der_pol(u, p, t):
    return [[0, 1], [-2 * p[0] * u[0] * u[1] - 1, p[0] * (1 - u[0] ** 2)]]


def forced(u, p, t):
    return [-p[0] * (u[0] - anp.cos(3 * t)) + u[1] ** 2, p[1] * u[0] - u[1] * anp.exp(-t) * u[0]]


def _of_forced(u, p, t):
    return [[-p[0], 2 * u[1]], [p[1] - u[1] * anp.exp(-t), -anp.exp(-t) * u[0]]]


def _slope_of_forced(u, p, t):
    return [-3 * p[0] * anp.sin(3 * t), u[1] * anp.exp(-t) * u[0]]


def hires(u, p, t):
    a, b, c, d, e, f, g, h = u
    return [
        -1.71 * a + 0.43 * b + 8.32 * c + 0.0007, 1.71 * a - 8.75 * b, -10.03 * c + 0.43 * d + 0.035 * e,
        8.32 * b + 1.71 * c - 1.12 * d, -1.745 * e + 0.43 * f + 0.43 * g,
        -p[0] * f * h + 0.69 * d + 1.71 * e - 0.43 * f + 0.69 * g, p[0] * f * h - 1.81 * g, -p[0] * f * h + 1.81 * g,
    ]  # fmt: skip


def _of_hires(u, p, t):
    j = np.zeros((8, 8), np.result_type(u, p))
    j[0, :3], j[1, :2], j[2, 2:5] = [-1.71, 0.43, 8.32], [1.71, -8.75], [-10.03, 0.43, 0.035]
    j[3, 1:4], j[4, 4:7] = [8.32, 1.71, -1.12], [-1.745, 0.43, 0.43]
    j[5, 3:8] = [0.69, 1.71, -0.43 - p[0] * u[7], 0.69, -p[0] * u[5]]
    j[6, 5:8] = [p[0] * u[7], -1.81, p[0] * u[5]]
    j[7] = -j[6]
    return j


# Some of what the diagonal has is less than what stands below it, so rows are exchanged.
_MANY = 11
_TURNS = 40 * np.triu(np.sin(np.arange(float(_MANY**2)).reshape(_MANY, _MANY)), 1)
_TURNS -= _TURNS.T
_RATES = np.linspace(1.0, 8.0, _MANY)


def coupled(u, p, t):
    turned = [u[j] * anp.cos(u[j]) for j in range(_MANY)]
    return [-p[0] * _RATES[i] * u[i] + sum(_TURNS[i, j] * turned[j] for j in range(_MANY)) for i in range(_MANY)]


def _of_coupled(u, p, t):
    return -p[0] * np.diag(_RATES) + _TURNS * (np.cos(u) - u * np.sin(u))


SYSTEMS = {
    "coupled": System(coupled, _of_coupled, _still, np.linspace(0.5, 1.2, _MANY), np.array([30.0]), 0.3),
    "Robertson": System(robertson, _of_robertson, _still, np.array([1.0, 0, 0]), np.array([0.04, 1e4, 3e7]), 1e4),
    "Van der Pol": System(van_der_pol, _of_van_der_pol, _still, np.array([2.0, 0.0]), np.array([1e3]), 1500.0),
    "HIRES": System(hires, _of_hires, _still, np.array([1.0, 0, 0, 0, 0, 0, 0, 0.0057]), np.array([280.0]), 321.8122),
    "forced": System(forced, _of_forced, _slope_of_forced, np.array([0.5, 1.5]), np.array([1e4, 0.7]), 2.0),
}
