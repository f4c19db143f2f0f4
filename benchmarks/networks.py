"""Training steps of small networks beside PyTorch and JAX, one thread each: value and gradient, interpreted and compiled.

    python benchmarks/networks.py [--python ENVIRONMENT/bin/python] [--cases "block, einsum" ...] [--rounds 3]

- `block`: a transformer's block, by `einsum` and by `@`;
- `convolution`: two layers of 3 x 3 filters, as products with the neighborhoods of pixels (PyTorch: its own convolution);
- `perceptron`: layers of 512 units;
- `projection`: an array of shape (64, 64, 256) times a matrix, beside the same flattened by hand, with the memory of both.

Each side (`benchmarks/sides/networks.py`) is a process of its own, started in turn, round by round; the smallest time
counts. Values and gradients must be the same. A peer is left out where the interpreter doesn't have it.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

from reaches import report, report_missing

HERE = Path(__file__).resolve().parent
CASES = ("block, einsum", "block, matmul", "convolution", "perceptron")
BESIDE = {"float64": 1.1, "float32": 1.5}  # times PyTorch's step
LIMIT = 120

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--python", default=str(HERE.parent / ".venv-peers" / "bin" / "python"), help="the peers' interpreter")
parser.add_argument("--cases", nargs="*", default=CASES, help="none: the projection only")
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--budget", type=float, default=1.0, help="seconds for each side in each round, about")


def run(python: str, side: str, case: str, dtype: str, budget: float) -> dict[str, float]:
    """Run a side, and return what it has measured."""
    command = [python, str(HERE / "sides" / "networks.py"), side, case, dtype, "--budget", str(budget)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode:
        raise SystemExit(f"{side} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def best_of(sides: dict[str, str], case: str, dtype: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the milliseconds of each side, after all have found the same."""
    best: dict[str, float] = {}
    close = 1e-9 if dtype == "float64" else 1e-4
    for _ in range(options.rounds):
        found = {side: run(python, side, case, dtype, options.budget) for side, python in sides.items()}
        for side, measured in found.items():
            best[side] = min(best.get(side, math.inf), measured["ms"])
            if any(not math.isclose(measured[key], found["mpiad"][key], rel_tol=close) for key in ("value", "norm")):
                raise SystemExit(f"{side} and mpiad differ in {case}: {measured} and {found['mpiad']}")
    print(f"{case}, {dtype}: {', '.join(f'{side} {ms:.2f} ms' for side, ms in best.items())}")
    report(f"{case}, {dtype}, compiled over interpreted", best["jitted"] / best["mpiad"], at_most=1.0)
    if "torch" in best:
        report(f"{case}, {dtype}, compiled over PyTorch", best["jitted"] / best["torch"], at_most=BESIDE[dtype])
    return best


def projections(options: argparse.Namespace) -> None:
    """Measure the product with leading axes and the flattened one."""
    best: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for case in ("projection", "projection, flattened"):
            found = run(sys.executable, "jitted", case, "float64", options.budget)
            best[case] = [min(pair) for pair in zip(best.get(case, [math.inf] * 2), (found["ms"], found["MB"]))]
    (ms, size), (flat_ms, flat_size) = best.values()
    print(f"projection: {ms:.1f} ms and {size:.0f} MB, flattened by hand {flat_ms:.1f} ms and {flat_size:.0f} MB")
    report("product with leading axes over flattened, time", ms / flat_ms, at_most=1.1)
    report("product with leading axes over flattened, memory", size / flat_size, at_most=1.2)


def main() -> None:
    """Run all cases."""
    options = parser.parse_args()
    sides = {"mpiad": sys.executable, "jitted": sys.executable}
    for peer in ("torch", "jax"):
        if Path(options.python).exists() and not subprocess.run([options.python, "-c", f"import {peer}"]).returncode:
            sides[peer] = options.python
        else:
            report_missing(f"networks beside {peer}", "peer not installed")
    for case in options.cases:
        for dtype in BESIDE:
            best_of(sides, case, dtype, options)
    projections(options)


main()
