"""The Lorenz ensemble that all sides solve, and how a side is timed. Needs NumPy only: every environment imports it.

    u' = (σ (y - x), x (ρ_i - z) - y, x y - β z),   σ = 10, β = 8/3, ρ_i = linspace(0, 21, N)
    u(0) = (1, 0, 0), t from 0 to 1, rtol 1e-6, atol 1e-9, double precision

Asked for are the states at t = 1, shape (N, 3), and the gradient of Σ_i |u_i(1)|² with respect to ρ, shape (N,). For
ρ < 24 all trajectories end in a fixed point, so that errors don't grow without bound.

A side is a program `side_NAME.py CASE N`. One process measures one case of one size, so that its peak of memory is that
case's own; it prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable

# One core for all sides: not all libraries can be told otherwise how many threads they may start.
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

SIGMA, BETA = 10.0, 8.0 / 3.0
START, T0, T1 = (1.0, 0.0, 0.0), 0.0, 1.0
RTOL, ATOL = 1e-6, 1e-9
SAMPLED = 200  # trajectories whose error is looked at
LEAST, MOST = 3, 30  # calls that are timed, within the budget of seconds

Answer = dict[str, np.ndarray]


def parameters(n: int) -> np.ndarray:
    """Return ρ, shape (n,)."""
    return np.linspace(0.0, 21.0, n)


def sample(n: int, most: int = SAMPLED) -> np.ndarray:
    """Return the numbers of some trajectories, evenly spread and with both ends."""
    return np.unique(np.linspace(0, n - 1, min(n, most)).astype(int))


def peak_bytes() -> int:
    """Return the most memory that this process has held."""
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else held * 1024


def timed(call: Callable[[], Answer], budget: float) -> tuple[float, float, Answer]:
    """Return the seconds of the first call, the smallest of the following ones, and the last answer."""
    begin = time.perf_counter()
    answer = call()
    first, best, spent, calls = time.perf_counter() - begin, float("inf"), 0.0, 0
    while budget and (calls < LEAST or (spent < budget and calls < MOST)):
        begin = time.perf_counter()
        answer = call()
        seconds = time.perf_counter() - begin
        best, spent, calls = min(best, seconds), spent + seconds, calls + 1
    return first, min(best, first), answer


def main(cases: dict[str, Callable[[int], Callable[[], Answer]]]) -> None:
    """Measure the case that the command line names, and print one line of JSON.

    Parameters
    ----------
    cases : dict
        By name, a function of N that returns what is timed. That returns `end`, shape (N, 3), `gradient`, shape (N,),
        or both, and where they are known `steps`, shape (N,), those taken by each trajectory; `scale`, if it computed
        a part of the ensemble only: by how much its time is to be multiplied, and `members`, which these were.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=cases)
    parser.add_argument("n", type=int)
    parser.add_argument("--budget", type=float, default=4.0, help="seconds of calls that are timed; 0: one call")
    options = parser.parse_args()
    before = peak_bytes()
    first, best, answer = timed(cases[options.case](options.n), options.budget)
    scale = float(answer.get("scale", 1.0))
    shown = {"first_s": first * scale, "s": best * scale, "peak_mib": (peak_bytes() - before) / 2**20}
    if "steps" in answer:
        steps = np.asarray(answer["steps"])
        shown["steps"] = [float(steps.mean()), int(steps.min()), int(steps.max())]
    members = answer.get("members", np.arange(options.n))
    chosen = np.searchsorted(members, sample(options.n))
    for name in ("end", "gradient"):
        if name in answer:
            shown[name] = np.asarray(answer[name], float)[chosen].tolist()
    print(json.dumps(shown))
