"""What one hard trajectory costs among many easy ones: together, beside each alone.

    python benchmarks/ensemble_stragglers.py [--repeats 7]

10⁴ Lorenz systems, as in `benchmarks/lorenz/problem.py`, take 28 to 54 steps each; one with ρ = 3500 takes 561. A solver
that keeps all in its working set until the last has arrived pays for 10⁴ trajectories in each of its steps. Arrays are
compared with both solved one after the other, kernels with the easy ones alone.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial

os.environ.setdefault("OMP_NUM_THREADS", "1")

import autograd.numpy as np
from reaches import report

import mpiad
from mpiad import ensemble

REACH = {False: 1.5, True: 1.3}
EASY, HARD = np.linspace(0.0, 21.0, 10_000), np.array([3500.0])


def lorenz(u, p, t):
    x, y, z = u
    return 10.0 * (y - x), x * (p[0] - z) - y, x * y - 8.0 / 3.0 * z


def integrate(rho: np.ndarray, compiled: bool = False) -> ensemble.EnsembleSolution:
    """Return the solutions for each ρ."""
    one = ensemble.ODEProblem(lorenz, np.array([1.0, 0.0, 0.0]), (0.0, 1.0), np.zeros(1))
    many = ensemble.EnsembleProblem(one, p=np.reshape(rho, (-1, 1)))
    return ensemble.solve(many, trajectories=len(rho), rtol=1e-6, atol=1e-9, compile=compiled)


def smallest(call: Callable, parameters: dict[str, np.ndarray], repeats: int) -> dict[str, float]:
    """Return a call's smallest time in seconds for each choice of ρ, taking turns."""
    best = dict.fromkeys(parameters, float("inf"))
    for _ in range(repeats):
        for name, rho in parameters.items():
            begin = time.perf_counter()
            call(rho)
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


def main() -> None:
    """Print a line for states and one for the gradient, by arrays and by kernels."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    both = np.concatenate([EASY, HARD])
    print(f"steps of the hard one: {integrate(HARD).naccept[0]}")
    print(f"{'':20}{'easy, ms':>10}{'hard, ms':>10}{'both, ms':>10}{'ratio':>8}{'reach':>7}")
    for compiled in (False, True):
        states = partial(integrate, compiled=compiled)
        gradient = mpiad.grad(lambda rho, states=states: np.sum(states(rho).u_end ** 2))
        for name, call in (("states", states), ("gradient", gradient)):
            best = smallest(call, {"easy": EASY, "hard": HARD, "both": both}, repeats)
            ratio = best["both"] / (best["easy"] if compiled else best["easy"] + best["hard"])
            times = "".join(f"{1e3 * best[key]:10.1f}" for key in ("easy", "hard", "both"))
            label = f"{name}{', compiled' if compiled else ''}"
            print(f"{label:20}{times}{ratio:8.2f}{REACH[compiled]:7.1f}", flush=True)
            report(f"one hard trajectory among 10⁴, {label}", ratio, at_most=REACH[compiled])


main()
