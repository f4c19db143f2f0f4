"""Stiff ensembles beside diffrax and SciPy: the least time to an error, forward and with the gradient, on one core.

    python benchmarks/ensemble_stiff.py [--systems robertson pollu ...] [--count N] [--peer-count 200] [--no-peers]

`benchmarks/stiff/systems.py` says what is solved. Each side runs at tolerances of a list, which gives errors and times, and
the least time among runs whose error is small enough counts. Errors are those of a few trajectories, relative to the
largest of each component, against `Rodas5P` at rtol=1e-12; that all sides converge to it shows that it is right. diffrax
solves fewer trajectories and SciPy those few only; their times are scaled up. diffrax runs where `make bench-peers` has
installed it, the better of Kvaerno3 and Kvaerno5 counts. Compilation isn't counted on any side, and times are of the
process, so that other programs hardly count. At last one trajectory that needs many steps among easy ones: what they pay
for it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from reaches import report, report_missing
from stiff.systems import FEW, SYSTEMS, System, atol, parameters  # before NumPy: it chooses the core

import autograd.numpy as np  # isort: skip
from scipy.integrate import solve_ivp

import mpiad
from mpiad.ensemble import EnsembleProblem, ODEProblem, Rodas5P, solve

HERE = Path(__file__).resolve().parent
PEERS = HERE.parent / ".venv-peers" / "bin" / "python"
LIMIT = 900
TOLERANCES = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
FINEST = {"Kvaerno5": 0.0, "Kvaerno3": 1e-5}  # at finer tolerances order 3 takes longer
ERRORS = (1e-4, 1e-6)
REACH = {"forward": 10.0, "gradient": 20.0}  # times as fast as diffrax
HARD = 1.3  # times what the easy ones take alone


class Point(NamedTuple):
    """What a side took at one tolerance: seconds for all trajectories, and how far off it was."""

    seconds: float
    error: float
    label: str


def best(fun: Callable, repeats: int) -> tuple[float, object]:
    """Return the least time of several calls, and what the last one returned."""
    times, made = [], fun()
    for _ in range(repeats):
        begin = time.process_time()
        made = fun()
        times.append(time.process_time() - begin)
    return min(times), made


def distance(found: np.ndarray, exact: np.ndarray) -> float:
    """Return the largest error of the first trajectories, relative to the largest of each component."""
    return float(np.max(np.abs(found[: len(exact)] - exact) / np.abs(exact).max(axis=0)))


def ends(name: str, p: np.ndarray, rtol: float) -> np.ndarray:
    """Return the states at the end, by kernels."""
    system = SYSTEMS[name]
    ensemble = EnsembleProblem(ODEProblem(system.f, system.u0, (0.0, system.end), system.p), p=p)
    return solve(ensemble, Rodas5P(), rtol=rtol, atol=atol(rtol), max_steps=100_000, compile=True).u_end


def gradient(name: str, p: np.ndarray, rtol: float) -> np.ndarray:
    """Return the gradient of Σ|u|² by all parameters."""
    return mpiad.grad(lambda p: np.sum(ends(name, p, rtol) ** 2))(p)


def by_mpiad(name: str, case: str, p: np.ndarray, exact: np.ndarray, options: argparse.Namespace) -> Iterator[Point]:
    """Yield a point for each tolerance."""
    for rtol in options.rtol:
        seconds, found = best(partial({"forward": ends, "gradient": gradient}[case], name, p, rtol), options.repeats)
        yield Point(seconds, distance(found, exact), f"{rtol:g}")


def by_diffrax(name: str, case: str, p: np.ndarray, exact: np.ndarray, options: argparse.Namespace) -> Iterator[Point]:
    """Yield a point for each method and tolerance."""
    count = min(options.peer_count, len(p))
    for method, finest in FINEST.items():
        tolerances = [rtol for rtol in options.rtol if rtol >= finest]
        program = [str(PEERS), str(HERE / "stiff" / "side_diffrax.py"), name, case, method, str(count), "--rtol"]
        done = subprocess.run([*program, *map(str, tolerances)], capture_output=True, text=True, timeout=LIMIT)
        if done.returncode:
            raise SystemExit(f"diffrax ended with {done.returncode}:\n{done.stderr[-2000:]}")
        for row in map(json.loads, done.stdout.splitlines()):
            seconds, error = row["s"] * len(p) / count, distance(np.array(row["found"]), exact)
            yield Point(seconds, error, f"{method}, {row['rtol']:g}")


def radau(system: System, p: np.ndarray, rtol: float) -> np.ndarray:
    """Return the states at the end, by SciPy with its own differences for the Jacobian."""
    found = []
    for row in p:
        rate = partial(lambda t, u, row: system.f(u, row, t), row=row)
        found.append(solve_ivp(rate, (0.0, system.end), system.u0, "Radau", rtol=rtol, atol=atol(rtol)).y[:, -1])
    return np.array(found)


def by_scipy(name: str, p: np.ndarray, exact: np.ndarray, options: argparse.Namespace) -> Iterator[Point]:
    """Yield a point for each tolerance."""
    for rtol in options.rtol:
        begin = time.process_time()
        found = radau(SYSTEMS[name], p[: len(exact)], rtol)
        error = distance(found, exact)
        yield Point((time.process_time() - begin) * len(p) / len(exact), error, f"{rtol:g}")
        if error <= min(ERRORS):
            return


def least(points: list[Point], error: float) -> Point | None:
    """Return the fastest of the points whose error is small enough."""
    return min((point for point in points if point.error <= error), default=None)


def show(name: str, case: str, sides: dict[str, list[Point]]) -> None:
    """Print the least time of each side to each error, and report those of the peers over mpiad's."""
    for error in ERRORS:
        found = {side: least(points, error) for side, points in sides.items()}
        ours = found["mpiad"]
        cells = [f"{side} {point.seconds:.3g} s ({point.label})" if point else f"{side} —" for side, point in found.items()]
        print(f"{name}, {case}, error ≤ {error:g}: " + ", ".join(cells), flush=True)
        for side, point in found.items():
            if side != "mpiad" and ours and point:
                reach = REACH[case] if side == "diffrax" else None
                line = f"{name}: {case} to {error:g}, {side} / mpiad"
                report(line, point.seconds / ours.seconds, at_least=reach)


def measure(name: str, options: argparse.Namespace) -> None:
    """Print what one system takes."""
    system = SYSTEMS[name]
    p = parameters(name, options.count or system.count)
    few = p[: min(FEW, len(p))]
    exact = {"forward": ends(name, few, 1e-12), "gradient": gradient(name, few, 1e-12)}
    print(f"\n{name}: {len(p)} trajectories")
    for case in REACH:
        sides = {"mpiad": list(by_mpiad(name, case, p, exact[case], options))}
        if options.peers:
            sides["diffrax"] = list(by_diffrax(name, case, p, exact[case], options))
        if case == "forward":
            sides["Radau"] = list(by_scipy(name, p, exact[case], options))
        if options.points:
            for side, points in sides.items():
                for point in points:
                    print(f"  {side} {point.label}: {point.seconds:.4g} s, error {point.error:.1e}")
        show(name, case, sides)


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


def installed() -> bool:
    """Tell whether diffrax is there."""
    return PEERS.exists() and not subprocess.run([PEERS, "-c", "import diffrax"], capture_output=True).returncode


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, help="trajectories; 10,000 by default, of POLLU and the Brusselator 1,000")
    parser.add_argument("--peer-count", type=int, default=200, help="trajectories that diffrax solves")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--rtol", type=float, nargs="*", default=TOLERANCES)
    parser.add_argument("--points", action="store_true", help="also print each tolerance's time and error")
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    options = parser.parse_args()
    if options.peers and not installed():
        options.peers = False
        print("diffrax isn't installed: make bench-peers")
        report_missing("stiff ensembles beside diffrax", "peer not installed")
    for name in options.systems:
        measure(name, options)
    one_hard(options.count or 10_000, options.repeats)


if __name__ == "__main__":
    main()
