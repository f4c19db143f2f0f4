"""Stiff ensembles: solves and gradients by kernels, beside SciPy's Radau at an error that is no smaller.

    python benchmarks/ensemble_stiff.py [--count 2000] [--repeats 3] [--systems robertson pollu ...]

Each system has parameters spread by a factor of 10. Errors are those of the final states of a few trajectories against
Radau at rtol=1e-12, relative to the largest of each component. SciPy solves the same few, with its own differences for the
Jacobian, at the loosest tolerance of a list at which its error is no larger than that of `Rodas5P`; its time is scaled up.
The first call compiles, or loads what an earlier process has compiled, and isn't counted. At last one trajectory that needs
many steps among easy ones: what they pay for it.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import autograd.numpy as np
from reaches import report
from scipy.integrate import solve_ivp

import mpiad
from mpiad.ensemble import EnsembleProblem, ODEProblem, Rodas5P, remake, solve

FEW, LOOSER = 3, (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
HARD = 1.3  # times what the easy ones take alone
FASTER = 10.0  # than SciPy


class System(NamedTuple):
    """A right-hand side, where it starts, when it ends, and parameters that are spread."""

    f: Callable
    u0: np.ndarray
    end: float
    p: np.ndarray


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
    "pollu": System(pollu, SMOG, 60.0, np.array([1.0])),
    "brusselator": System(
        brusselator, np.stack([1 + np.sin(2 * np.pi * PLACES), 3 + 0 * PLACES], axis=1).ravel(), 10.0, np.array([0.02])
    ),
}


def best(fun: Callable, repeats: int) -> tuple[float, object]:
    """Return the least time of several calls, and what the last one returned."""
    times, made = [], fun()
    for _ in range(repeats):
        begin = time.perf_counter()
        made = fun()
        times.append(time.perf_counter() - begin)
    return min(times), made


def by_scipy(system: System, p: np.ndarray, rtol: float) -> tuple[float, np.ndarray]:
    """Return the time that Radau takes for some trajectories, and where they end."""
    ends, begin = [], time.perf_counter()
    for row in p:
        rate = partial(lambda t, u, row: system.f(u, row, t), row=row)
        found = solve_ivp(rate, (0.0, system.end), system.u0, "Radau", rtol=rtol, atol=1e-4 * rtol)
        ends.append(found.y[:, -1])
    return time.perf_counter() - begin, np.array(ends)


def measure(name: str, count: int, repeats: int) -> None:
    """Print what one system takes."""
    system, rng = SYSTEMS[name], np.random.default_rng(0)
    p = system.p * 10 ** rng.uniform(-0.5, 0.5, (count, len(system.p)))
    ensemble = EnsembleProblem(ODEProblem(system.f, system.u0, (0.0, system.end), system.p), p=p)
    options = {"rtol": 1e-5, "atol": 1e-9, "compile": True}
    forward, sol = best(lambda: solve(ensemble, Rodas5P(), **options), repeats)
    backward, _ = best(
        lambda: mpiad.grad(lambda p: np.sum(solve(remake(ensemble, p=p), Rodas5P(), **options).u_end ** 2))(p), repeats
    )
    few, exact = range(min(FEW, count)), by_scipy(system, p[:FEW], 1e-12)[1]
    error = lambda ends: np.max(np.abs(ends - exact) / np.abs(exact).max(axis=0))  # noqa: E731
    ours = error(sol.u_end[few])
    for rtol in LOOSER:
        theirs, ends = by_scipy(system, p[:FEW], rtol)
        if error(ends) <= ours:
            break
    theirs *= count / len(few)
    print(
        f"{name}: {count} trajectories, {sol.naccept.mean():.0f} steps, error {ours:.1e}; solved in {forward:.3g} s, with "
        f"their gradient in {backward:.3g} s; Radau at rtol={rtol:g} {theirs:.3g} s"
    )
    report(f"{name}: Radau of SciPy / Rodas5P", theirs / forward, at_least=FASTER)
    report(f"{name}: gradient / solve", backward / forward)


def one_hard(count: int, repeats: int) -> None:
    """Print what one hard trajectory among easy ones costs."""

    def turning(u, p, t):
        return [p[0] * u[1], -p[0] * u[0]]

    p = np.ones((count, 1))
    problem = ODEProblem(turning, [1.0, 0.0], (0.0, 10.0))
    options = {"rtol": 1e-5, "atol": 1e-9, "compile": True}
    easy, sol = best(lambda: solve(EnsembleProblem(problem, p=p), Rodas5P(), **options), repeats)
    p[count // 2] = 50.0
    hard, other = best(lambda: solve(EnsembleProblem(problem, p=p), Rodas5P(), **options), repeats)
    steps = f"one of {count} with {other.naccept.max()} steps instead of {sol.naccept.max()}"
    print(f"{steps}: {hard:.3g} s instead of {easy:.3g} s")
    report("one hard among easy ones / easy ones", hard / easy, at_most=HARD)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--systems", nargs="*", default=list(SYSTEMS))
    options = parser.parse_args()
    for name in options.systems:
        measure(name, options.count, options.repeats)
    one_hard(options.count, options.repeats)


if __name__ == "__main__":
    main()
