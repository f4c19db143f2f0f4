"""Ensembles of ODEs beside other solvers: 10³, 10⁴ and 10⁵ Lorenz systems, their states and a gradient, on one core.

    python benchmarks/ensemble.py [--n 1000 10000] [--rounds 2] [--json FILE]

Each library has a program in `benchmarks/lorenz/` (`problem.py` there says what is solved) and runs in a process of its
own, the peers in the environment that `make bench-peers` makes; one that isn't there is left out, and said so. The
programs take turns, the smallest time counts, and all have the same thresholds of malloc. Compilation isn't counted.

mpiad's rows are those of compiled kernels and of its vectorised path; `lanes` is a kernel
written by hand for this problem alone.

- `ms`, and that time over mpiad's and over that of the least that NumPy must do (`benchmarks/lorenz/side_numpy.py`);
- steps: the mean, least and most of a trajectory;
- error: the largest of 200 trajectories against SciPy's DOP853 at 1e-13; that of the gradient relative to its largest
  entry;
- MiB: the peak of memory beyond that of the process with its libraries loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from reaches import report, report_missing

HERE = Path(__file__).resolve().parent
PEERS = HERE.parent / ".venv-peers" / "bin" / "python"
LIMIT = 600
HEAP = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(512 << 20)}
SIDES = {
    "mpiad": (
        "forward", "forward, vectorised", "gradient", "gradient, adjoint", "gradient, vectorised",
        "gradient, vectorised adjoint",
    ),
    "lanes": ("forward", "gradient"),
    "numpy": ("forward",),
    "scipy": ("forward", "gradient"),
    "torchdiffeq": ("forward", "gradient", "gradient, continuous"),
    "torchode": ("forward", "gradient", "gradient, continuous"),
    "diffrax": ("forward", "gradient", "gradient, tangent", "gradient, continuous"),
}  # fmt: skip
# What, over what, and at most how many times, by N.
AIMS = {
    ("states, over a kernel by hand", ("mpiad", "forward"), ("lanes", "forward")): {10_000: 1.5},
    ("tangents, over a kernel by hand", ("mpiad", "gradient"), ("lanes", "gradient")): {10_000: 1.5},
    ("adjoint, over the states", ("mpiad", "gradient, adjoint"), ("mpiad", "forward")): {10_000: 3.0},
}
OWN = ("mpiad", "lanes", "numpy", "scipy")


def installed(side: str) -> bool:
    """Tell whether a side can run."""
    python = Path(sys.executable) if side in OWN else PEERS
    module = {"mpiad": "mpiad.ensemble", "lanes": "numba"}.get(side, side)
    return python.exists() and not subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode


def measure(side: str, case: str, n: int, budget: float) -> dict | None:
    """Run one side's program and return what it measured; None, and its last words, where it fails or takes too long."""
    python = sys.executable if side in OWN else str(PEERS)
    command = [python, str(HERE / "lorenz" / f"side_{side}.py"), case, str(n), "--budget", str(budget)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env={**os.environ, **HEAP})
    except subprocess.TimeoutExpired:
        print(f"{side}, {case}, N = {n:,} took more than {LIMIT} s")
        return None
    if done.returncode:
        print(f"{side}, {case}, N = {n:,} failed: {done.stderr.strip().splitlines()[-1]}")
        return None
    return json.loads(done.stdout.splitlines()[-1])


def smallest(sides: list[str], case: str, n: int, options: argparse.Namespace) -> dict[tuple[str, str], dict]:
    """Measure all sides in turn, several rounds, and keep each one's smallest time."""
    found: dict[tuple[str, str], dict] = {}
    programs = [(side, name) for side in sides for name in SIDES[side] if name.split(",")[0] == case]
    for side, name in programs * options.rounds:
        row = measure(side, name, n, options.budget)
        if row:
            before = found.get((side, name), row)
            found[side, name] = {**row, **{key: min(row[key], before[key]) for key in ("s", "first_s", "peak_mib")}}
    return found


def add_errors(rows: dict[tuple[str, str], dict], exact: dict) -> None:
    """Put the errors of end states and gradient into the rows, in place of the values."""
    for row in rows.values():
        for key in ("end", "gradient"):
            if key in row:
                difference = np.abs(np.array(row.pop(key)) - np.array(exact[key])).max()
                row[f"error_{key}"] = float(difference if key == "end" else difference / np.abs(exact["gradient"]).max())


def show(case: str, n: int, rows: dict[tuple[str, str], dict], least: float | None) -> None:
    """Print the table of one case and size."""
    ours = min((row["s"] for (side, _), row in rows.items() if side == "mpiad"), default=None)
    print(f"\n{case}, N = {n:,}")
    print(f"{'':34}{'ms':>10}{'/ mpiad':>9}{'/ least':>9}{'steps':>18}{'error':>10}{'MiB':>8}")
    for (side, name), row in rows.items():
        ratios = "".join(f"{row['s'] / base:9.2f}" if base else f"{'':9}" for base in (ours, least))
        steps = "{:.1f} ({}-{})".format(*row["steps"]) if "steps" in row else ""
        error = row["error_gradient" if case == "gradient" else "error_end"]
        label = side + name.removeprefix(case)
        print(f"{label:34}{row['s'] * 1e3:10.1f}{ratios}{steps:>18}{error:10.1e}{row['peak_mib']:8.1f}", flush=True)


def tell(n: int, rows: dict[tuple[str, str], dict]) -> None:
    """Report mpiad's kernels beside those by hand, and the others' times over mpiad's."""
    seconds = {key: row["s"] for key, row in rows.items()}
    for (label, ours, base), aims in AIMS.items():
        if ours in seconds and base in seconds:
            report(f"Lorenz, N = {n:,}, {label}", seconds[ours] / seconds[base], at_most=aims.get(n))
    for (side, name), theirs in seconds.items():
        own = [s for (other, case), s in seconds.items() if other == "mpiad" and case.split(",")[0] == name.split(",")[0]]
        if side not in ("mpiad", "lanes") and own:
            report(f"Lorenz, N = {n:,}, {side}: {name}, over mpiad", theirs / min(own))


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--budget", type=float, default=3.0, help="seconds that a program spends on what it times")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--cases", nargs="+", choices=("forward", "gradient"), default=["forward", "gradient"])
    parser.add_argument("--json", type=Path, help="also write all that was measured to this file")
    options = parser.parse_args()
    sides = [side for side in options.sides if installed(side)]
    for side in set(options.sides) - set(sides):
        print(f"{side} isn't installed" + ("" if side in OWN else ": make bench-peers"))
        report_missing(f"Lorenz beside {side}", "numba not installed" if side == "lanes" else "peer not installed")
    all_rows = []
    for n in options.n:
        exact = measure("scipy", "reference", n, 0)
        least, found = None, {}
        for case in options.cases:
            rows = smallest(sides, case, n, options)
            add_errors(rows, exact)
            least = least or rows.get(("numpy", "forward"), {}).get("s")
            show(case, n, rows, least)
            found |= rows
            all_rows += [{"side": side, "case": name, "n": n, **row} for (side, name), row in rows.items()]
        tell(n, found)
    if options.json:
        options.json.write_text(json.dumps(all_rows, indent=1))


main()
