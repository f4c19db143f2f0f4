"""Events that act, beside plain solves: Lotka and Volterra's equations with harvests, closed forms of a ball and of doses.

    mpiexec -n 1 python benchmarks/ensemble_events.py [--trajectories 10000] [--repeats 5]

Harvests at 1, 5 or 29 given times, and where the predators become many: how long solves and their gradients take over
those without events, by kernels and by columns, and by columns a tenth as many. A solution that jumps takes other
steps; the ratio by steps is told as well. Times are of the process, so other programs hardly count. The accuracy is that
of values and all derivatives against closed forms.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import autograd.numpy as np
from reaches import report

import mpiad
from mpiad.ensemble import EnsembleProblem, Event, ODEProblem, Vern7, solve

REACH, DIGITS = 1.3, 1e-10


def growth(u, p, t):
    return [p[0] * u[0] - p[1] * u[0] * u[1], p[3] * u[0] * u[1] - p[2] * u[1]]


def harvested(u, p, t):
    return [u[0], 0.9 * u[1]]


GROWTH = ODEProblem(growth, [1.0, 1.0], (0.0, 30.0))
EVENTS = {
    "1 harvest": Event(times=[15.0], affect=harvested),
    "5 harvests": Event(times=np.linspace(5.0, 25.0, 5).tolist(), affect=harvested),
    "29 harvests": Event(times=np.arange(1.0, 30.0).tolist(), affect=harvested),
    "harvests above a threshold": Event(lambda u, p, t: u[1] - 4.0, direction=1, affect=harvested),
}


def least(repeats: int, *runs: Callable[[], Any]) -> list[float]:
    """Return the least time of each, taken in turns."""
    times = [[] for _ in runs]
    for _ in range(repeats + 1):
        for run, found in zip(runs, times):
            begin = time.process_time()
            run()
            found.append(time.process_time() - begin)
    return [min(found[1:]) for found in times]


def speed(count: int, repeats: int, compiled: bool) -> None:
    """Print what solves with events take over plain ones."""
    p = np.array([1.5, 1.0, 3.0, 1.0]) * (1 + 0.2 * np.random.default_rng(0).random((count, 4)))
    way = f"{count} trajectories by {'kernels' if compiled else 'columns'}"

    def solved(events, p=p):
        return solve(
            EnsembleProblem(GROWTH, p=p), events=events, rtol=1e-6, atol=1e-8, compile=compiled, gradient="adjoint"
        )

    def gradient(events):
        return mpiad.grad(lambda p: np.sum(solved(events, p).u_end ** 2))(p)

    tries = {name: (sol.naccept + sol.nreject).mean() for name in ("", *EVENTS) for sol in [solved(EVENTS.get(name, ()))]}
    for name, event in EVENTS.items():
        plain, ours = least(repeats, lambda: solved(()), lambda: solved(event))  # noqa: B023
        back, ours_back = least(max(1, repeats // 2), lambda: gradient(()), lambda: gradient(event))  # noqa: B023
        steps = tries[name] / tries[""]
        print(
            f"{way}, {name}: {ours / plain:.2f} of a plain solve ({ours / plain / steps:.2f} by steps), "
            f"gradient {ours_back / back:.2f} ({ours_back / back / steps:.2f})"
        )
        report(f"{way}, {name}, over a plain solve", ours / plain, at_most=REACH)


def furthest(found: Callable, expected: Callable, p: np.ndarray) -> float:
    """Return by how much values and derivatives differ from a closed form's, relative to the largest."""
    value, slopes = mpiad.value_and_grad(lambda p: np.sum(np.sin(found(p))))(p)
    exact, slopes_there = mpiad.value_and_grad(lambda p: np.sum(np.sin(expected(p))))(p)
    return max(abs(value / exact - 1), np.abs(slopes - slopes_there).max() / np.abs(slopes_there).max())


def accuracy() -> None:
    """Print how far a ball's third flight, and doses in a body, are from closed forms."""
    fall = ODEProblem(lambda u, p, t: [u[1], -p[0]], [2.0, 0.0], (0.0, 2.5))
    bounce = Event(lambda u, p, t: u[0], affect=lambda u, p, t: [u[0], -p[1] * u[1]])
    balls = np.array([[9.81, 0.7], [9.81, 0.75], [6.5, 0.6]])

    def height(p):
        return solve(EnsembleProblem(fall, p=p), events=bounce, rtol=1e-9, atol=1e-12).u_end[:, 0]

    def exact_height(p):
        g, r = p.T
        left = 2.5 - np.sqrt(4.0 / g) * (1 + 2 * r + 2 * r**2)
        return r**3 * np.sqrt(4.0 * g) * left - g * left**2 / 2

    body = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [0.0], (0.0, 24.0))
    tablet = Event(times=lambda p: [p[2], p[2] + 8, p[2] + 16], affect=lambda u, p, t: [u[0] + p[1]])
    bodies = np.array([[0.2, 1.0, 0.5], [0.35, 0.8, 0.25], [0.1, 0.5, 0.75]])

    def left_over(p):
        return solve(EnsembleProblem(body, p=p), Vern7(), events=tablet, rtol=1e-12, atol=1e-14).u_end[:, 0]

    def exactly_left_over(p):
        return sum(p[:, 1] * np.exp(-p[:, 0] * (24.0 - p[:, 2] - 8 * i)) for i in range(3))

    for name, pair, p in (("a ball", (height, exact_height), balls), ("doses", (left_over, exactly_left_over), bodies)):
        report(f"{name}: values and derivatives from the closed form, relative", furthest(*pair, p), at_most=DIGITS)


def main() -> None:
    """Print times and accuracy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trajectories", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    accuracy()
    speed(options.trajectories, options.repeats, True)
    speed(options.trajectories, max(1, options.repeats // 2), False)
    speed(max(2, options.trajectories // 10), options.repeats, False)


main()
