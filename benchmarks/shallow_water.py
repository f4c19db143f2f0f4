"""Nonlinear shallow water, compiled: mpiad's `jit` beside its interpreted steps, jitted mpi4jax, and fused loops by hand.

    python benchmarks/shallow_water.py [--ranks 1 2] [--sizes 180x360 900x1800] [--dtypes float64 float32] [--rounds 2]

A flow in a channel (`benchmarks/sides/channel.py`, a file for each side), forward and with the gradient by the height
at the start. Each side is a process of its own, started in turn, round by round; within mpiad's its two ways alternate.
The smallest time of a step counts, that of the slowest rank. J and the norm of the gradient must be those of all sides.

The first call of a round traces and compiles. That of the first round starts without a cache of kernels, those of later
rounds with what it left on disk. mpi4jax is started where `make bench-peers` has installed it, numba's loops where numba
is.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

from reaches import report
from side_programs import folders, run_side

STEPS = {"180x360": 20, "900x1800": 4}
# Over jitted mpi4jax.
FORWARD = {"180x360": 0.7, "900x1800": 0.4}
GRADIENT, OVER_FORWARD, FROM_DISK = 0.2, 4.0, 0.5
CLOSE = {"float64": 1e-9, "float32": 1e-3}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
parser.add_argument("--sizes", nargs="+", default=list(STEPS), help="cells northwards x eastwards")
parser.add_argument("--dtypes", nargs="+", default=list(CLOSE), choices=list(CLOSE))
parser.add_argument("--rounds", type=int, default=2, help="two at least: the second shows what the cache brings")
parser.add_argument("--budget", type=float, default=1.0, help="seconds for each case in each round, about")


def sides() -> dict[str, Path]:
    """Return the sides that are here, and the folder of each one's interpreter."""
    found = folders("mpi4jax", "shallow water beside mpi4jax")
    if find_spec("numba"):
        found["loops"] = found["mpiad"]
    else:
        print("numba isn't installed: no loops by hand")
    return found


def run(side: str, folder: Path, ranks: int, size: str, dtype: str, budget: float, cache: str) -> dict:
    """Run a side and return what it has measured."""
    arguments = *size.split("x"), STEPS.get(size, 10), dtype, "--budget", budget
    return run_side(f"channel_{side}", folder / "python", arguments, ranks, MPIAD_CACHE=cache)


def compare(options: argparse.Namespace, found: dict[str, Path], ranks: int, size: str, dtype: str) -> None:
    """Run all rounds of one case and print its lines."""
    best: dict[str, dict[str, float]] = {side: defaultdict(lambda: float("inf")) for side in found}
    first: dict[str, list[dict[str, float]]] = {side: [] for side in found}
    checks, peaks = {}, {}
    with tempfile.TemporaryDirectory() as cache:
        os.chmod(cache, 0o700)
        for _ in range(max(2, options.rounds)):
            for side, folder in found.items():
                if side == "loops" and ranks > 1:
                    continue
                measured = run(side, folder, ranks, size, dtype, options.budget, cache)
                for case, ms in measured["ms"].items():
                    best[side][case] = min(best[side][case], ms)
                first[side].append(measured["compiling"])
                checks[side] = measured["check"]
                if measured["peaks"]:
                    peaks = measured["peaks"]
    for side, check in checks.items():
        for mine, other in zip(checks["mpiad"], check):
            if not abs(mine - other) <= CLOSE[dtype] * abs(mine):
                raise SystemExit(f"{side} and mpiad differ: J and the gradient's norm are {check} and {checks['mpiad']}")
    name = f"shallow water {size} {dtype}, {ranks} rank{'s' * (ranks > 1)}"
    print(f"\n{name}\n| side | forward, ms per step | value and gradient | ratio |\n|---|---|---|---|")
    rows = [("mpiad, jitted", "mpiad", ", jitted"), ("mpiad, interpreted", "mpiad", ", interpreted")]
    rows += [(side, side, "") for side in found if side != "mpiad"]
    for label, side, way in rows:
        forward, gradient = (best[side].get(case + way) for case in ("forward", "gradient"))
        if forward is not None:
            more = f"{gradient:.3f} | {gradient / forward:.1f}" if gradient else "|"
            print(f"| {label} | {forward:.3f} | {more} |")
    print_compiling(name, first)
    print(f"memory of a gradient, in fields: jitted {peaks['jitted']:.0f}, interpreted {peaks['interpreted']:.0f}")
    report(f"{name}: memory of a gradient, jitted over interpreted", peaks["jitted"] / peaks["interpreted"], at_most=1.0)
    report_all(name, best, size)


def print_compiling(name: str, first: dict[str, list[dict[str, float]]]) -> None:
    """Print what the first call of each side took beyond the others."""
    for case in ("forward", "gradient"):
        taken = [found[f"{case}, jitted"] for found in first["mpiad"]]
        cold, disk = taken[0], min(taken[1:])
        print(f"first call, {case}: mpiad {cold:.2f} s, from the cache {disk:.2f} s", end="")
        peer = min((found[case] for found in first.get("mpi4jax", [])), default=None)
        print("" if peer is None else f"; mpi4jax {peer:.2f} s")
        report(f"{name}: first {case} from the cache, s", disk, at_most=FROM_DISK)
        if peer is not None:
            report(f"{name}: first {case} from cold, over mpi4jax", cold / peer, at_most=1.0)


def report_all(name: str, best: dict[str, dict[str, float]], size: str) -> None:
    """Tell the table of all benchmarks."""
    forward, gradient = best["mpiad"]["forward, jitted"], best["mpiad"]["gradient, jitted"]
    report(f"{name}: gradient over forward, jitted", gradient / forward, at_most=OVER_FORWARD)
    for case, ours in (("forward", forward), ("gradient", gradient)):
        report(f"{name}: {case}, jitted over interpreted", ours / best["mpiad"][f"{case}, interpreted"])
        if "mpi4jax" in best:
            aim = FORWARD.get(size) if case == "forward" else GRADIENT
            report(f"{name}: {case}, over mpi4jax", ours / best["mpi4jax"][case], at_most=aim)
    if best.get("loops"):
        report(f"{name}: forward, over loops by hand", forward / best["loops"]["forward"])


def main() -> None:
    options = parser.parse_args()
    found = sides()
    for ranks in options.ranks:
        for size in options.sizes:
            for dtype in options.dtypes:
                compare(options, found, ranks, size, dtype)


if __name__ == "__main__":
    main()
