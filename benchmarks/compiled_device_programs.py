"""Compiled programs on a GPU: waves, shallow water and conjugate gradients, beside a copy of a large array.

    mpiexec -n 1 python benchmarks/compiled_device_programs.py [--json FILE] [--only NAME]

- `copy`: the rate at which a large array is copied, read and written bytes together;
- `wave 512³`, in single and double precision, by `Domain.exchange` and slices, 20 steps: the forward pass moves at least
  four arrays per cell and step, the adjoint seven; shown are both as parts of the rate of the copy, and the time of the
  gradient over that of four arrays;
- `wave 1024²`, 100 steps in double precision with ten checkpoints: value and gradient, also without `jit`;
- `shallow water`, 180 × 360, 900 × 1,800 and 3,600 × 7,200 cells: the time of a step over that of twelve arrays;
- `CG`, a matrix-free five-point operator on 2,048²: the time of an iteration, over that of CuPy's `cg`.

All sides run in this process, in turn; the smallest time of several counts. Each first call is shown, too: it compiles.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from reaches import report

import mpiad
import mpiad.device.numpy as dnp
from mpiad.device import select, to_device
from mpiad.linalg import solve
from mpiad.timestepping import scan

results: list[dict[str, Any]] = []
budget = time.monotonic() + 420.0  # seconds for everything


def timed(call: Callable[[], Any], repeats: int = 5) -> tuple[float, float]:
    """Return the seconds of the first call, and the smallest of later ones."""
    import cupy

    wait, seconds = cupy.cuda.get_current_stream().synchronize, list[float]()
    for _ in range(repeats + 1):
        wait()
        start = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - start)
        if time.monotonic() > budget and len(seconds) > 1:
            break
    return seconds[0], min(seconds[1:])


def note(name: str, seconds: float, first: float, **ratios: float) -> None:
    results.append({"name": name, "seconds": seconds, "first_call_s": first, **ratios})
    parts = "".join(f"  {key} {value:.3f}" for key, value in ratios.items())
    print(f"{name:44}{1e3 * seconds:12.3f} ms  first call {first:6.2f} s{parts}", flush=True)
    for key, value in ratios.items():
        report(f"{name}: {key}", value)


def copy_rate() -> float:
    """Return the bytes per second of a copy."""
    x = to_device(np.zeros(1 << 27))
    y = x.copy()
    first, seconds = timed(lambda: y.__setitem__(..., x), 20)
    rate = 2 * x.nbytes / seconds
    note("copy of 1 GiB", seconds, first, terabytes_per_second=rate / 1e12)
    return rate


def waves(rate: float, cells: int, dtype: str, steps: int) -> None:
    domain = mpiad.Domain((cells,) * 3, halo=1, periodic=True)
    u = to_device(np.random.default_rng(0).standard_normal((cells,) * 3).astype(dtype))
    c = to_device(np.full((cells,) * 3, 0.1, dtype))

    def step(u: Any, v: Any, c: Any) -> Any:
        p = domain.exchange(u)
        total = p[2:, 1:-1, 1:-1] + p[:-2, 1:-1, 1:-1] + p[1:-1, 2:, 1:-1] + p[1:-1, :-2, 1:-1]
        return 2 * u - v + c * (total + p[1:-1, 1:-1, 2:] + p[1:-1, 1:-1, :-2] - 6 * u), u

    def energy(u: Any, c: Any) -> Any:
        v = u
        for _ in range(steps):
            u, v = step(u, v, c)
        return dnp.sum(u**2)

    jitted, bytes_ = mpiad.jit(energy), u.nbytes * steps
    first, forward = timed(lambda: jitted(u, c), 3)
    note(f"wave {cells}³ {dtype}, {steps} steps", forward, first, of_copy_rate=4 * bytes_ / forward / rate)
    first, both = timed(lambda: mpiad.value_and_grad(jitted, (0, 1))(u, c), 3)
    rest = both - forward
    note(f"wave {cells}³ {dtype}, gradient", both, first, over_four_arrays=both * rate / (4 * bytes_),
         adjoint_of_copy_rate=7 * bytes_ / rest / rate)  # fmt: skip


def checkpointed(cells: int = 1024, steps: int = 100) -> None:
    domain = mpiad.Domain((cells, cells), halo=1)
    x, y = domain.coordinates()
    start = to_device(np.exp(-((x - cells / 2) ** 2 + (y - cells / 3) ** 2) / 50))
    square = to_device(0.2 + 0.05 * np.cos(x / 9) * np.sin(y / 7))

    def step(state: tuple, k: int, square: Any) -> tuple:
        u, before = state
        p = domain.exchange(u)
        return 2 * u - before + square * (p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * u), u

    times = {}
    for name, function in (("jit", mpiad.jit(step)), ("interpreted", step)):
        energy = lambda square: dnp.sum(scan(function, (start, start), steps, square, checkpoints=10)[0] ** 2)  # noqa: E731, B023
        first, times[name] = timed(lambda: mpiad.value_and_grad(energy)(square), 5 if name == "jit" else 1)  # noqa: B023
        note(f"wave {cells}², {steps} steps, 10 checkpoints, {name}", times[name], first)
    report("wave 1024², jit over interpreted", times["jit"] / times["interpreted"])


def shallow_water(rate: float, shape: tuple[int, int], dtype: str, steps: int = 50) -> None:
    domain = mpiad.Domain(shape, halo=1, periodic=(False, True))
    rng = np.random.default_rng(1)
    h, u, v = (to_device((1e-2 * rng.standard_normal(shape) + k).astype(dtype)) for k in (1, 0, 0))

    def step(state: tuple, k: int) -> tuple:
        h, u, v = state
        H, U, V = (domain.exchange(x) for x in (h, u, v))
        dx, dy = (lambda x: (x[2:, 1:-1] - x[:-2, 1:-1]) / 2), (lambda x: (x[1:-1, 2:] - x[1:-1, :-2]) / 2)
        w, kinetic = dx(V) - dy(U), 9.81 * H + (U**2 + V**2) / 2
        return h - 0.01 * (dx(H * U) + dy(H * V)), u + 0.01 * (w * v - dx(kinetic)), v - 0.01 * (w * u + dy(kinetic))

    jitted = mpiad.jit(step)
    energy = lambda h: dnp.sum(scan(jitted, (h, u, v), steps)[0] ** 2)  # noqa: E731
    name = f"shallow water {shape[0]} × {shape[1]} {dtype}"
    first, forward = timed(lambda: energy(h))
    note(f"{name}, a step", forward / steps, first / steps, over_twelve_arrays=forward / steps * rate / (12 * h.nbytes))
    first, both = timed(lambda: mpiad.value_and_grad(energy)(h))
    note(f"{name}, a step with its gradient", both / steps, first / steps)


def conjugate_gradients(rate: float, cells: int = 2048) -> None:
    import cupyx.scipy.sparse.linalg as peer

    b = to_device(np.random.default_rng(2).standard_normal((cells, cells)))

    def product(u: Any) -> Any:
        return 4.01 * u - dnp.roll(u, 1, 0) - dnp.roll(u, -1, 0) - dnp.roll(u, 1, 1) - dnp.roll(u, -1, 1)

    jitted, calls = mpiad.jit(product), list[int]()
    first, ours = timed(lambda: solve(jitted, b, method="cg", rtol=1e-8), 2)

    def counted(x: Any) -> Any:
        calls.append(1)
        return product(x.reshape(cells, cells)).ravel()

    operator = peer.LinearOperator((cells**2,) * 2, counted, dtype=b.dtype)
    runs: list[int] = []
    _, theirs = timed(lambda: runs.append(peer.cg(operator, b.ravel(), tol=1e-8)[1]), 2)
    each = ours / (len(calls) / len(runs))
    note(
        f"CG {cells}², an iteration", each, first, over_cupy=ours / theirs, over_eleven_arrays=each * rate / (11 * b.nbytes)
    )


def main() -> None:
    """Measure all programs for which there is time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="programs whose names contain this")
    parser.add_argument("--json", type=Path, help="also write all that was measured to this file")
    options = parser.parse_args()
    try:
        select()
    except (ImportError, RuntimeError) as error:
        sys.exit(f"benchmarks/compiled_device_programs.py needs a GPU and CuPy: {error}")
    rate = copy_rate()
    programs: dict[str, Callable[[], None]] = {
        "wave 1024²": checkpointed,
        **{f"shallow {n}": lambda n=n: shallow_water(rate, (n, 2 * n), "float64") for n in (180, 900, 3600)},
        "shallow single": lambda: shallow_water(rate, (900, 1800), "float32"),
        "CG": lambda: conjugate_gradients(rate),
        "wave 512 single": lambda: waves(rate, 512, "float32", 20),
        "wave 512 double": lambda: waves(rate, 512, "float64", 20),
    }
    for name, program in programs.items():
        if options.only in name and time.monotonic() < budget:
            program()
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
