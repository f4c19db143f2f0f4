"""What a step costs as blocks become small: the heat equation beside mpi4jax and beside NumPy with mpi4py.

    python benchmarks/strong_scaling.py [--ranks 1 2] [--cells 20 64 256 1024] [--rounds 2]

Each side (`benchmarks/sides/heat_NAME.py`) is a process of its own, started in turn, round by round; the smallest time of a
step counts, that of the slowest rank. mpiad also runs the same block without messages. J and the norm of the gradient must
be those of all sides. mpi4jax is started where `make bench-peers` has installed it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from reaches import report, report_missing

HERE = Path(__file__).resolve().parent
PEERS = HERE.parent / ".venv-peers" / "bin"
CLOSE, LIMIT = 1e-9, 300
CASES = ("forward", "gradient")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
parser.add_argument("--cells", type=int, nargs="+", default=[20, 64, 256, 1024], help="in each direction")
parser.add_argument("--rounds", type=int, default=2)
parser.add_argument("--budget", type=float, default=0.5, help="seconds for each case in each round, about")


def sides() -> dict[str, Path]:
    """Return the folder of the interpreter of each side that is here."""
    peer = [str(PEERS / "python"), "-c", "import mpi4jax"]
    if (PEERS / "python").exists() and subprocess.run(peer, capture_output=True).returncode == 0:
        return {"mpiad": Path(sys.executable).parent, "mpi4jax": PEERS}
    print("mpi4jax isn't installed: make bench-peers")
    report_missing("steps beside mpi4jax", "peer not installed")
    return {"mpiad": Path(sys.executable).parent}


def run(side: str, folder: Path, ranks: int, cells: int, budget: float) -> dict:
    """Run a side and return what it has measured."""
    launcher = folder / "mpiexec"
    command = [str(launcher) if launcher.exists() else "mpiexec", "-n", str(ranks), str(folder / "python")]
    command += [str(HERE / "sides" / f"heat_{side}.py"), str(cells), str(max(20, 2000 // cells)), "--budget", str(budget)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=dict(os.environ))
    if done.returncode:
        raise SystemExit(f"{side} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def compare(ranks: int, cells: int, options: argparse.Namespace, folders: dict[str, Path]) -> None:
    """Run all rounds of one case, and print its row of the table."""
    best: dict[str, float] = {}
    checks = {}
    for _ in range(options.rounds):
        for side, folder in folders.items():
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
    for case in CASES if "mpi4jax" in folders else ():
        theirs = best[f"{case}, mpi4jax"]
        row.append(f"{theirs:.1f}")
        report(f"step of {cells}², {ranks} ranks: {case}, over mpi4jax", best[f"{case}, mpiad"] / theirs)
    print(f"| {' | '.join(row)} |", flush=True)


def main() -> None:
    options, folders = parser.parse_args(), sides()
    names = ["cells", "ranks", "forward", "without messages", "gradient", "without messages", "NumPy and mpi4py, forward"]
    names += [f"mpi4jax, {case}" for case in CASES if "mpi4jax" in folders]
    print(f"Microseconds per step:\n| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for cells in options.cells:
        for ranks in options.ranks:
            compare(ranks, cells, options, folders)


if __name__ == "__main__":
    main()
