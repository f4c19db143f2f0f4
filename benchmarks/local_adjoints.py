"""What a reverse pass costs beside the program itself where nothing is communicated: mpiad and autograd.

    python benchmarks/local_adjoints.py [--size N] [--only CASE ...] [--json FILE]

For each program: its own time on plain arrays, and the time of program and adjoint together (the cotangent is a
full random array) over that, with mpiad's tape and rules and with autograd's. All sides run in one process,
alternated, so that noise hits all of them; the smallest processor time over the repeats is shown (one thread, no
input or output: on an idle machine that is the time on the clock, on a busy one it doesn't count the others). The
gradients are compared before anything is timed.

`reach` is what is aimed at for 10⁶ doubles. At sizes where the
time is Python's, the ratio to a single NumPy call says little; there the two tapes' times are to be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one BLAS thread for all sides

import autograd
import autograd.numpy as anp
import numpy as np
from reaches import report

import mpiad  # raises malloc's thresholds, for all sides

REACH = {"neighbours": 8.0, "stencil": 3.5}
SECONDS = 1.0  # spent on each case


def stencil(u):
    """Take one explicit step of diffusion on the inner points of a grid."""
    inner = u[1:-1, 1:-1]
    return inner + 0.1 * (u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * inner)


def periodic(u):
    """Apply the periodic Laplacian."""
    return anp.roll(u, 1, 0) + anp.roll(u, -1, 0) + anp.roll(u, 1, 1) + anp.roll(u, -1, 1) - 4 * u


def cases(size: int) -> dict[str, tuple[Callable, np.ndarray]]:
    """Return each program with its argument of about `size` doubles."""
    rng = np.random.default_rng(0)
    side = int(size**0.5)
    x, u = rng.uniform(0.5, 1.5, size), rng.uniform(0.5, 1.5, (side, side))
    chosen = rng.integers(0, side, side)
    positive, row = rng.uniform(size=size) < 0.5, rng.uniform(0.5, 1.5, side)
    return {
        "neighbours": (lambda x: x[1:] * x[:-1], x),
        "stencil": (stencil, u),
        "periodic": (periodic, u),
        "columns": (lambda u: anp.sum(u[:, 0] * u[:, -1]) + anp.sum(u * u), u),
        "mask": (lambda x: x[positive], x),
        "rows by list": (lambda u: u[chosen], u),
        "stack": (lambda x: anp.stack([x, 2.0 * x]), x),
        "concatenate": (lambda x: anp.concatenate([x, x]), x),
        "pad": (lambda u: anp.pad(u, 1, "constant"), u),
        "where": (lambda x: anp.where(positive, x, -x), x),
        "maximum": (lambda x: anp.maximum(x, 1.0), x),
        "max": (anp.max, x),
        "max, axis 1": (lambda u: anp.max(u, axis=1), u),
        "min, axis 0": (lambda u: anp.min(u, axis=0), u),
        "sum": (anp.sum, x),
        "mean, axis 0": (lambda u: anp.mean(u, axis=0), u),
        "x + y": (lambda x: x + x[::-1], x),
        "x * row": (lambda u: u * row, u),
        "x * x": (lambda x: x * x, x),
        "1 / x": (lambda x: 1.0 / x, x),
        "x**2": (lambda x: x**2, x),
        "x**3": (lambda x: x**3, x),
        "x**-0.5": (lambda x: x**-0.5, x),
        "sqrt": (anp.sqrt, x),
        "exp": (anp.exp, x),
        "tanh": (anp.tanh, x),
        "abs": (anp.abs, x),
        "dot": (lambda x: anp.dot(x, x), x),
        "sum x**2 **2 / 2": (lambda x: 0.5 * anp.sum((x**2) ** 2), x),
    }


def sides_of(fun: Callable, x: np.ndarray) -> dict[str, Callable]:
    """Return the program alone, and program and adjoint by either tape."""
    value = fun(x)
    g = np.random.default_rng(1).standard_normal(np.shape(value))[()]
    ours, theirs = mpiad.make_vjp(fun), autograd.make_vjp(fun)
    return {"alone": lambda: fun(x), "mpiad": lambda: ours(x)[0](g), "autograd": lambda: theirs(x)[0](g)}


def check(name: str, sides: dict[str, Callable]) -> None:
    """Compare the two gradients before anything is timed."""
    if not np.allclose(sides["mpiad"](), sides["autograd"](), rtol=1e-12, atol=1e-12):
        raise SystemExit(f"{name}: the gradients by mpiad and autograd differ")


def times(sides: dict[str, Callable]) -> dict[str, float]:
    """Return each side's smallest time in µs."""
    start = time.process_time()
    for side in sides.values():
        side()
    once = time.process_time() - start
    inner = max(1, int(2e-3 / once))
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(max(5, int(SECONDS / (inner * once)))):
        for name, side in sides.items():
            start = time.process_time()
            for _ in range(inner):
                side()
            best[name] = min(best[name], (time.process_time() - start) / inner * 1e6)
    return best


def main() -> None:
    """Run the cases and print a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=1_000_000, help="number of doubles")
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--json", help="also write the times to this file")
    options = parser.parse_args()
    rows = []
    print(
        f"{options.size} doubles{'':9}alone µs   mpiad µs   (ratio)   autograd µs   (ratio)   reach",
        flush=True,
    )
    for name, (fun, x) in cases(options.size).items():
        if options.only and name not in options.only:
            continue
        sides = sides_of(fun, x)
        check(name, sides)
        best = times(sides)
        rows.append({"case": name, "size": options.size, **best})
        ours, theirs = best["mpiad"] / best["alone"], best["autograd"] / best["alone"]
        reach = REACH.get(name) if options.size == 1_000_000 else None
        line = f"{best['alone']:10.1f}{best['mpiad']:11.1f}{ours:10.2f}{best['autograd']:14.1f}{theirs:10.2f}"
        print(f"{name:18}{line}{'' if reach is None else f'{reach:8.1f}'}", flush=True)
        if reach is not None:
            report(f"adjoint of {name}, over the program", ours, at_most=reach)
    if options.json:
        Path(options.json).write_text(json.dumps(rows))


main()
