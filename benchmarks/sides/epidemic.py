"""The epidemic whose rates all sides infer: 120 explicit Euler steps of an SIR model, with measurements at every sixth.

Needs NumPy only. Parameters are log β and log γ, with normal priors of width 1 around `START`; the measured fractions of
infected people are normal with a standard deviation of `NOISE`. The posterior is a normal distribution of full rank, fitted
by Adam with `rate`. A side is a program `epidemic_NAME.py EPOCHS DRAWS`; it prints one line of JSON with the seconds of the
whole fit, compilation included and imports not, and the mean and the standard deviation of each parameter.
"""

from __future__ import annotations

import argparse
import json

import numpy as np

STEPS, STEP, EVERY, NOISE = 120, 0.5, 6, 0.01
SUSCEPTIBLE, INFECTED = 0.999, 0.001
START, WIDTH = np.log([0.3, 0.15]), 0.01


def measured() -> np.ndarray:
    """Return the measurements, of an epidemic with β = 0.4 and γ = 0.1."""
    exact = infected(np.array([0.4]), np.array([0.1]))[:, 0]
    return exact + NOISE * np.random.default_rng(0).standard_normal(len(exact))


def infected(beta: np.ndarray, gamma: np.ndarray) -> np.ndarray:
    """Return the fractions of infected people at the times of measurement, for several rates."""
    s, i, found = SUSCEPTIBLE, INFECTED, []
    for k in range(STEPS):
        new, ended = STEP * beta * s * i, STEP * gamma * i
        s, i = s - new, i + new - ended
        if k % EVERY == 0:
            found.append(i)
    return np.stack(found)


def quadrature(size: int = 401, widths: float = 7.0) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of the exact posterior, on a grid around its mode that is refined once."""
    y, center, sd = measured(), np.log([0.4, 0.1]), np.array([0.1, 0.2])
    for _ in range(3):
        axes = [c + np.linspace(-widths, widths, size) * s for c, s in zip(center, sd)]
        grid = np.stack([x.ravel() for x in np.meshgrid(*axes, indexing="ij")])
        misfit = np.sum((infected(*np.exp(grid)) - y[:, None]) ** 2, axis=0) / NOISE**2
        log_density = -0.5 * (misfit + np.sum((grid - START[:, None]) ** 2, axis=0))
        weights = np.exp(log_density - log_density.max())
        weights /= weights.sum()
        center = grid @ weights
        sd = np.sqrt((grid - center[:, None]) ** 2 @ weights)
    return center, sd


def rate(epoch: float, epochs: int, cos=np.cos):
    """Return Adam's learning rate, which decreases to zero."""
    return 0.01 * (1 + cos(np.pi * epoch / epochs)) + 1e-12


def arguments() -> argparse.Namespace:
    """Return those of a side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("epochs", type=int)
    parser.add_argument("draws", type=int)
    return parser.parse_args()


def show(seconds: float, mean: np.ndarray, sd: np.ndarray) -> None:
    """Print a side's line."""
    print(json.dumps({"seconds": seconds, "mean": np.asarray(mean).tolist(), "sd": np.asarray(sd).tolist()}))
