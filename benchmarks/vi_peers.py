"""Variational inference of an epidemic beside NumPyro: the whole fit, compilation included, on one rank.

    python benchmarks/vi_peers.py [--epochs 1500] [--draws 12] [--rounds 2] [--python .venv-peers/bin/python]

Each side (`benchmarks/sides/epidemic_NAME.py`) is a process of its own, started in turn, round by round; the smallest time
counts. mpiad's kernels are compiled again in each process. The posteriors are compared with the exact one by quadrature on
a grid. NumPyro is started where `make bench-peers` has installed it, or by the interpreter that `--python` names.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from reaches import report, report_missing
from side_programs import PEERS, run_side

sys.path.insert(0, str(Path(__file__).resolve().parent / "sides"))
from epidemic import quadrature

REACH, CLOSE = 0.8, 0.02


def run(side: str, python: str, options: argparse.Namespace) -> dict:
    """Run a side and return what it has measured."""
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as empty:
        arguments = options.epochs, options.draws
        return run_side(f"epidemic_{side}", Path(python), arguments, OMP_NUM_THREADS=threads, MPIAD_CACHE=empty)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=1500)
    parser.add_argument("--draws", type=int, default=12, help="of each epoch")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--python", default=str(PEERS / "python"), help="NumPyro's interpreter")
    options = parser.parse_args()
    sides = {"mpiad": sys.executable, "numpyro": options.python}
    try:
        subprocess.run([options.python, "-c", "import numpyro"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        print("NumPyro isn't installed: make bench-peers")
        report_missing("variational inference beside NumPyro", "peer not installed")
        del sides["numpyro"]
    mean, sd = quadrature()
    best: dict[str, float] = {}
    for _ in range(options.rounds):
        for side, python in sides.items():
            found = run(side, python, options)
            best[side] = min(best.get(side, np.inf), found["seconds"])
            shift, ratio = abs(np.array(found["mean"]) - mean) / sd, np.array(found["sd"]) / sd
            print(
                f"{side}: {found['seconds']:.2f} s, means {shift.round(3)} standard deviations from the exact ones, "
                f"standard deviations {ratio.round(3)} times the exact ones"
            )
            if side == "mpiad":
                error = max(*shift, *abs(ratio - 1))
                report("variational inference of an epidemic, error over the standard deviation", error, at_most=CLOSE)
    if "numpyro" in best:
        ratio = best["mpiad"] / best["numpyro"]
        print(f"{options.epochs} epochs of {options.draws} draws: {ratio:.2f} of NumPyro's time (reach {REACH})")
        report("variational inference of an epidemic, compiled anew, over NumPyro", ratio, at_most=REACH)


if __name__ == "__main__":
    main()
