"""Fisher's equation by finite differences, a tridiagonal Jacobian: `Rodas5P` compared with SciPy's banded LSODA.

    python benchmarks/ensemble_sparse.py [--unknowns 300 2000] [--counts 1 8 100] [--repeats 5]

Both sides have errors of at most 1e-6, compared with LSODA at rtol=1e-11: LSODA runs at the largest of its tolerances that
reaches them. LSODA solves one trajectory; the table has times per trajectory, and the ratio of the gradient with respect to
all parameters to the forward solve. The first solve, which traces and compiles f, isn't counted. Up to 300 unknowns,
repeated solves with compile="auto" use kernels; the targets are for this way, but arrays are measured, too.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import autograd.numpy as np
from reaches import report
from scipy.integrate import solve_ivp

import mpiad
from mpiad.ensemble import EnsembleProblem, ODEProblem, Rodas5P, remake, solve

END, ERROR = 2.0, 1e-6
MANY = 8  # trajectories from which the target of the solve holds
MOST = 300  # unknowns of a kernel
TOLERANCES = (1e-6, 5e-7, 2e-7, 1e-7, 5e-8, 2e-8)  # of LSODA
REACH = {"forward": 1.0, "gradient": 5.0}


def fisher(u, p, t):
    left, right = np.concatenate([u[:1], u[:-1]]), np.concatenate([u[1:], u[-1:]])
    return p[0] * (u.shape[0] - 1) ** 2 * (left - 2 * u + right) + p[1] * u * (1 - u)


def ends(ensemble: EnsembleProblem, p: np.ndarray, compile: bool) -> np.ndarray:
    """Return the states at the end."""
    return solve(remake(ensemble, p=p), Rodas5P(), rtol=1e-6, atol=1e-8, compile=compile).u_end


def lsoda(u0: np.ndarray, p: np.ndarray, rtol: float) -> np.ndarray:
    """Return the state at the end, by SciPy."""
    bands = {"lband": 1, "uband": 1}
    return solve_ivp(lambda t, u: fisher(u, p, t), (0.0, END), u0, "LSODA", rtol=rtol, atol=1e-2 * rtol, **bands).y[:, -1]


def least(sides: list[Callable[[], object]], repeats: int) -> list[float]:
    """Return the least time of each side; the sides alternate."""
    times = [np.inf] * len(sides)
    for _ in range(repeats):
        for k, side in enumerate(sides):
            begin = time.process_time()
            side()
            times[k] = min(times[k], time.process_time() - begin)
    return times


def measure(d: int, count: int, repeats: int, compile: bool) -> None:
    """Print and report one line."""
    u0 = np.exp(-100 * np.linspace(0, 1, d) ** 2)
    p = np.array([1e-3, 5.0]) * (1 + 0.1 * np.arange(count)[:, None] / count)
    ensemble = EnsembleProblem(ODEProblem(fisher, u0, (0.0, END), p[0]), p=p)
    exact = lsoda(u0, p[0], 1e-11)
    error = np.abs(ends(ensemble, p, compile)[0] - exact).max()
    rtol = next(rtol for rtol in TOLERANCES if np.abs(lsoda(u0, p[0], rtol) - exact).max() <= ERROR)
    gradient = mpiad.grad(lambda p: np.sum(ends(ensemble, p, compile) ** 2))
    gradient(p)
    sides = [lambda: ends(ensemble, p, compile), lambda: gradient(p), lambda: lsoda(u0, p[0], rtol)]
    forward, backward, scipy = least(sides, repeats)
    line = f"Fisher, {d} unknowns, {count} trajectories, by {'a kernel' if compile else 'arrays'}"
    print(
        f"{line}: {1e3 * forward / count:.1f} ms per trajectory (error {error:.0e}), LSODA {1e3 * scipy:.1f} ms "
        f"(rtol {rtol:g}), gradient {backward / forward:.1f} × the solve",
        flush=True,
    )
    aim = compile == (d <= MOST)
    report(
        f"{line}: a trajectory / LSODA",
        forward / count / scipy,
        at_most=REACH["forward"] if aim and count >= MANY else None,
    )
    report(f"{line}: gradient / solve", backward / forward, at_most=REACH["gradient"] if aim else None)


def main() -> None:
    """Print a line for each number of unknowns and of trajectories."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unknowns", type=int, nargs="*", default=[300, 2000])
    parser.add_argument("--counts", type=int, nargs="*", default=[1, 8, 100])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    for d in options.unknowns:
        for count in options.counts:
            for compile in (True, False) if d <= MOST else (False,):
                measure(d, count, options.repeats, compile)


if __name__ == "__main__":
    main()
