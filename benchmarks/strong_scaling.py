"""What a step costs as blocks become small: the heat equation beside mpi4jax and beside NumPy with mpi4py.

    python benchmarks/strong_scaling.py [--ranks 1 2] [--cells 20 64 256 1024] [--rounds 2]

Each side (`benchmarks/sides/heat_NAME.py`) is a process of its own, started in turn, round by round; the smallest time of a
step counts, that of the slowest rank. mpiad also runs the same block without messages. J and the norm of the gradient must
be those of all sides. mpi4jax is started where `make bench-peers` has installed it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from reaches import report
from side_programs import folders, run_side

CLOSE = 1e-9
CASES = ("forward", "gradient")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
parser.add_argument("--cells", type=int, nargs="+", default=[20, 64, 256, 1024], help="in each direction")
parser.add_argument("--rounds", type=int, default=2)
parser.add_argument("--budget", type=float, default=0.5, help="seconds for each case in each round, about")


def run(side: str, folder: Path, ranks: int, cells: int, budget: float) -> dict:
    """Run a side and return what it has measured."""
    return run_side(f"heat_{side}", folder / "python", (cells, max(20, 2000 // cells), "--budget", budget), ranks)


def compare(ranks: int, cells: int, options: argparse.Namespace, sides: dict[str, Path]) -> None:
    """Run all rounds of one case, and print its row of the table."""
    best: dict[str, float] = {}
    checks = {}
    for _ in range(options.rounds):
        for side, folder in sides.items():
            measured = run(side, folder, ranks, cells, options.budget)
            for case, ms in measured["ms"].items():
                name = f"{case}, {side}"
                best[name] = min(best.get(name, float("inf")), 1e3 * ms)
            checks[side] = measured["check"]
    for side, check in checks.items():
        if not all(abs(mine - other) <= CLOSE * abs(mine) for mine, other in zip(checks["mpiad"], check)):
            raise SystemExit(f"{side} and mpiad differ: J and the gradient's norm are {check} and {checks['mpiad']}")
    plain, row = best["NumPy and mpi4py, mpiad"], [f"{cells}² | {ranks}"]
    for case in CASES:
        ours, alone = best[f"{case}, mpiad"], best[f"{case} without messages, mpiad"]
        row.append(f"{ours:.1f} | {alone:.1f}")
        report(f"step of {cells}², {ranks} ranks: {case}, over NumPy's and mpi4py's forward step", ours / plain)
    row.append(f"{plain:.1f}")
    for case in CASES if "mpi4jax" in sides else ():
        theirs = best[f"{case}, mpi4jax"]
        row.append(f"{theirs:.1f}")
        report(f"step of {cells}², {ranks} ranks: {case}, over mpi4jax", best[f"{case}, mpiad"] / theirs)
    print(f"| {' | '.join(row)} |", flush=True)


def main() -> None:
    options, sides = parser.parse_args(), folders("mpi4jax", "steps beside mpi4jax")
    names = ["cells", "ranks", "forward", "without messages", "gradient", "without messages", "NumPy and mpi4py, forward"]
    names += [f"mpi4jax, {case}" for case in CASES if "mpi4jax" in sides]
    print(f"Microseconds per step:\n| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for cells in options.cells:
        for ranks in options.ranks:
            compare(ranks, cells, options, sides)


if __name__ == "__main__":
    main()
