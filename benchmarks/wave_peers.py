"""The wave equation by slices, compiled, beside Devito: forward, and with the gradient by the squared speed.

    python benchmarks/wave_peers.py [--cells 512x512 128x128x128] [--rounds 2]

Each side (`benchmarks/sides/acoustics_NAME.py`) is a process of its own on one rank, started in turn, round by round; the
smallest time of a step counts. Of Devito's it is that of its loops alone, of mpiad's all that a call takes. J and the norm
of the gradient must be those of both. Devito is started where `make bench-peers` has installed it.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

from reaches import report
from side_programs import folders, run_side

STEPS = {"512x512": 100, "128x128x128": 25}
CLOSE = 1e-9
# mpiad's case, Devito's, and what is aimed at as their ratio.
COMPARED = (
    ("forward, jitted", "forward", 0.8),
    ("gradient, jitted", "gradient", 1.0),
    ("gradient from √n checkpoints, jitted", "gradient", 2.2),
)

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--cells", nargs="+", default=list(STEPS))
parser.add_argument("--rounds", type=int, default=2)
parser.add_argument("--budget", type=float, default=1.0, help="seconds for each case in each round, about")


def run(side: str, folder: Path, cells: str, budget: float) -> dict:
    """Run a side and return what it has measured."""
    return run_side(f"acoustics_{side}", folder / "python", (cells, STEPS.get(cells, 20), "--budget", budget))


def compare(found: dict[str, Path], cells: str, options: argparse.Namespace) -> None:
    """Run all rounds on one grid and print its lines."""
    best: dict[str, dict[str, float]] = {side: defaultdict(lambda: float("inf")) for side in found}
    checks = {}
    for _ in range(options.rounds):
        for side, folder in found.items():
            measured = run(side, folder, cells, options.budget)
            for case, ms in measured["ms"].items():
                best[side][case] = min(best[side][case], ms)
            checks[side] = measured["check"]
    for side, check in checks.items():
        if not all(abs(mine - other) <= CLOSE * abs(mine) for mine, other in zip(checks["mpiad"], check)):
            raise SystemExit(f"{side} and mpiad differ: J and the gradient's norm are {check} and {checks['mpiad']}")
    print(f"\nwave {cells} float64, 1 rank\n| side | case | ms per step |\n|---|---|---|")
    for side, cases in best.items():
        for case, ms in cases.items():
            print(f"| {side} | {case} | {ms:.3f} |")
    for case, theirs, aim in COMPARED:
        if "devito" in best:
            ratio = best["mpiad"][case] / best["devito"][theirs]
            print(f"{case}: {ratio:.2f} of Devito's (reach {aim})")
            report(f"wave {cells}: {case}, over Devito", ratio, at_most=aim)


def main() -> None:
    options = parser.parse_args()
    found = folders("devito", "wave beside Devito")
    for cells in options.cells:
        compare(found, cells, options)


if __name__ == "__main__":
    main()
