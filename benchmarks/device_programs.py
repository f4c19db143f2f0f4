"""Whole programs on a GPU compared with the same on the host: their numbers and times.

    mpiexec -n 1 python benchmarks/device_programs.py [--json FILE]

- `multigrid`: -∇·(κ∇u) = b with an oscillating κ on 1,024² and 2,048² cells, to 1e-8; value and gradient of Σ u² with
  respect to κ: set-up on the host, the solve, the adjoint solve;
- `wave`: 100 steps of a wave equation on 1,024² cells, value and gradient of its energy with respect to c² in each cell,
  from ten checkpoints;
- `sharded L-BFGS`: 20 iterations on an extended Rosenbrock function of 4 million variables on each rank;
- `training`: a step of SGD with momentum for a network of 784, 1,024, 1,024 and 10 units in single precision, 4,096 images
  on each rank.

Both sides run in this process, in turn; the smallest time of several counts. On the host each rank has one thread. The
largest difference of values and gradients, relative to the largest entry, is shown and must stay within a tolerance.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from mpi4py import MPI
from reaches import report

import mpiad
import mpiad.device.numpy as dnp
from mpiad.device import select, to_device, to_host
from mpiad.linalg import solve_elliptic
from mpiad.parallel import SGD, DistributedOptimizer
from mpiad.timestepping import CheckpointSchedule, scan

comm = MPI.COMM_WORLD.Dup()
Place = Callable[[Any], Any]  # puts arrays where the program runs


class Program(NamedTuple):
    """A program, and how closely its results agree on both sides.

    `make(place)` returns a function without arguments, which returns a pytree of results.
    """

    name: str
    make: Callable[[Place], Callable[[], Any]]
    tolerance: float


def multigrid(cells: int) -> Callable[[Place], Callable[[], Any]]:
    def make(place: Place) -> Callable[[], Any]:
        domain = mpiad.Domain((cells, cells))
        x, y = domain.coordinates()
        kappa = place(np.exp(np.sin(x / 40) * np.cos(y / 30)))
        b = place(np.sin(3 * np.pi * x / cells) * np.cos(2 * np.pi * y / cells))

        def energy(kappa: Any) -> Any:
            return domain.sum(solve_elliptic(domain, kappa, b, spacing=1 / cells) ** 2)

        return lambda: mpiad.value_and_grad(energy)(kappa)

    return make


def wave(cells: int = 1024, steps: int = 100) -> Callable[[Place], Callable[[], Any]]:
    def make(place: Place) -> Callable[[], Any]:
        domain = mpiad.Domain((cells, cells))
        laplacian = domain.laplacian()
        x, y = domain.coordinates()
        start = place(np.exp(-((x - cells / 2) ** 2 + (y - cells / 3) ** 2) / 50))
        square = place(0.2 + 0.05 * np.cos(x / 9) * np.sin(y / 7))

        def step(state: tuple, k: int, square: Any) -> tuple:
            u, before = state
            return 2.0 * u - before + square * laplacian(u), u

        def energy(square: Any) -> Any:
            last, _ = scan(step, (start, start), steps, square, checkpoints=CheckpointSchedule(10, recorded=10))
            return domain.sum(last**2)

        return lambda: mpiad.value_and_grad(energy)(square)

    return make


def sharded(size: int = 4_000_000) -> Callable[[Place], Callable[[], Any]]:
    def make(place: Place) -> Callable[[], Any]:
        start = place(np.tile([-1.2, 1.0], size // 2) + 0.1 * np.sin(np.arange(size) + comm.rank))

        def rosenbrock(x: Any) -> Any:
            odd, even = x[::2], x[1::2]
            return dnp.sum(100 * (even - odd**2) ** 2 + (1 - odd) ** 2)

        def run() -> Any:
            found = mpiad.minimize(
                rosenbrock, start, method="L-BFGS-sharded", objective="sum", options={"maxiter": 20, "gtol": 0.0}
            )
            return found.fun, found.x

        return run

    return make


def training(images: int = 4096) -> Callable[[Place], Callable[[], Any]]:
    def make(place: Place) -> Callable[[], Any]:
        rng = np.random.default_rng(0)
        units = 784, 1024, 1024, 10
        layers = [(rng.normal(size=pair) / np.sqrt(pair[0]), np.zeros(pair[1])) for pair in zip(units, units[1:])]
        params = place([(w.astype(np.float32), b.astype(np.float32)) for w, b in layers])
        pixels = place(rng.random((images * comm.size, 784), np.float32)[images * comm.rank :][:images])
        labels = place(np.eye(10, dtype=np.float32)[rng.integers(0, 10, images)])
        optimizer = DistributedOptimizer(SGD(0.1, momentum=0.9))

        def loss(params: Any, pixels: Any, labels: Any) -> Any:
            h = pixels
            for w, b in params[:-1]:
                h = dnp.tanh(h @ w + b)  # smooth: at a kink rounding would decide
            w, b = params[-1]
            scores = h @ w + b
            return dnp.mean(dnp.log(dnp.sum(dnp.exp(scores), axis=1)) - dnp.sum(scores * labels, axis=1))

        state = optimizer.setup(params)

        def run() -> Any:
            _, updated, value = optimizer.step(state, params, loss, pixels, labels)
            return value, updated

        return run

    return make


PROGRAMS = (
    Program("multigrid, 1,024²", multigrid(1024), 1e-6),
    Program("multigrid, 2,048²", multigrid(2048), 1e-6),
    Program("wave, 1,024², 100 steps", wave(), 1e-10),
    Program("sharded L-BFGS, 4,000,000", sharded(), 1e-6),
    Program("training, 4,096 images", training(), 1e-4),
)


def timed(call: Callable[[], Any], wait: Callable[[], None]) -> float:
    """Return the seconds of a call, of the slowest rank."""
    wait()
    comm.Barrier()
    start = time.perf_counter()
    call()
    wait()
    return comm.allreduce(time.perf_counter() - start, MPI.MAX)


def apart(found: Any, right: Any) -> float:
    """Return the largest difference of two pytrees, relative to the largest entry of each array."""
    if isinstance(right, (tuple, list)):
        return max(map(apart, found, right))
    found, right = np.asarray(to_host(found)), np.asarray(right)
    return float(np.max(np.abs(found - right)) / max(np.max(np.abs(right)), 1e-300))


def main() -> None:
    """Measure all programs, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="programs whose names contain this")
    parser.add_argument("--json", type=Path, help="also write all that was measured to this file")
    options = parser.parse_args()
    try:
        select()
        import cupy
    except (ImportError, RuntimeError) as error:
        sys.exit(f"benchmarks/device_programs.py needs a GPU and CuPy: {error}")
    rows = []
    if comm.rank == 0:
        print(f"{comm.size} ranks{'host, s':>31}{'GPU, s':>10}{'ratio':>8}{'difference':>12}")
    for program in (program for program in PROGRAMS if options.only in program.name):
        on_host, on_gpu = program.make(lambda x: x), program.make(to_device)
        right, found = on_host(), on_gpu()
        host, gpu = float("inf"), float("inf")
        for _ in range(3):
            gpu = min(gpu, *(timed(on_gpu, cupy.cuda.get_current_stream().synchronize) for _ in range(3)))
            host = min(host, timed(on_host, lambda: None)) if host < 10 * gpu or host == float("inf") else host
        error = comm.allreduce(apart(found, right), MPI.MAX)
        rows.append({"program": program.name, "host_s": host, "gpu_s": gpu, "difference": error})
        if comm.rank == 0:
            print(f"{program.name:30}{host:10.3f}{gpu:10.4f}{host / gpu:8.1f}{error:12.1e}", flush=True)
            report(f"{program.name}, GPU over one core of the host", gpu / host)
        assert error <= program.tolerance, f"{program.name}: host and GPU differ by {error:.1e}"
    if options.json and comm.rank == 0:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
