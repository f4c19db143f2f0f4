"""Compiled ensembles on a GPU: 10⁶ and 10⁷ Lorenz systems, their end states and gradients, beside one core of the CPU.

    python benchmarks/ensemble_gpu.py [--n 1000000 10000000] [--rounds 5] [--single] [--json FILE]

The problem is that of `benchmarks/lorenz/problem.py`; parameters and results live on the device. Of each case the smallest
time counts, from the call until the device is idle; compilation isn't counted, and is told apart.

- `ms`, and trajectories per second, beside those of kernels on one core of the CPU (10⁵ trajectories, where llvmlite is);
- GFLOP/s: operations of the program that f was traced to, and of a step's sums, times the steps that were tried; divisions,
  roots and powers count as one each, so it is a lower bound;
- and that as a part of what the device can do, its fused multiply-add units times two times their clock.

Cases: `forward`; `tangent`, the gradient of Σ|u(1)|² by ρ, which a tangent brings along; `adjoint`, the gradient by ρ and
the initial states, for which the steps are taken twice and gone back over.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import autograd.numpy as anp
import numpy as np
from lorenz.problem import ATOL, BETA, RTOL, SIGMA, START, T0, T1, parameters

import mpiad
import mpiad.device
from mpiad.compiling.derivatives import jvp, vjp
from mpiad.device import to_device, to_host
from mpiad.ensemble import RK45, EnsembleGPU, EnsembleProblem, EnsembleVectorized, ODEProblem, solve
from mpiad.ensemble.batch import Parameters
from mpiad.ensemble.compiled.trace import trace

# FP64 and FP32 units of a multiprocessor, by the architecture's number.
UNITS = {70: (32, 64), 75: (2, 64), 80: (32, 64), 86: (2, 128), 87: (2, 128), 89: (2, 128), 90: (64, 128), 100: (64, 128),
         103: (2, 128), 120: (2, 128)}  # fmt: skip
CPU_COUNT = 100_000


def lorenz(u, p, t):
    """Return the derivative."""
    return [SIGMA * (u[1] - u[0]), u[0] * (p[0] - u[2]) - u[1], u[0] * u[1] - BETA * u[2]]


def solved(rho, backend, u0=None, **options):
    """Solve the ensemble with these parameters, shape (N, 1)."""
    problem = ODEProblem(lorenz, np.array(START, rho.dtype), (T0, T1))
    return solve(EnsembleProblem(problem, u0=u0, p=rho), RK45(), backend, rtol=RTOL, atol=ATOL, **options)


def cases(rho, u0, backend):
    """Return what is timed, by name: kernels on either side."""

    def tangent(rho):
        return anp.sum(solved(rho, backend, gradient="tangent", compile=True).u_end ** 2)

    def adjoint(rho, u0):
        return anp.sum(solved(rho, backend, u0, gradient="adjoint", compile=True).u_end ** 2)

    return {
        "forward": lambda: solved(rho, backend, compile=True),
        "tangent": lambda: mpiad.grad(tangent)(rho),
        "adjoint": lambda: mpiad.grad(adjoint, (0, 1))(rho, u0),
    }


def operations(d: int = 3) -> dict[str, int]:
    """Return for each case how many operations a step takes that was tried, at least."""
    tableau = RK45().tableau
    program = trace(lorenz, (d,), Parameters([np.zeros((1, 2))], [True], lambda leaves: leaves[0]), np.float64)
    calls = tableau.stages - 1
    # A sum over m stages is m products, m - 1 sums, a product with h, a sum with u.
    sums = d * sum(2 * np.count_nonzero(row) + 1 for row in tableau.a)
    error = d * (2 * np.count_nonzero(tableau.error) + 6)
    forward = calls * program.cost + sums + error
    tangent = calls * (jvp(program, 1, {"state": None, "parameter": [0]}).cost - program.cost) + sums
    # The stages once more, each one's adjoint, and the transposed sums.
    reverse = calls * (program.cost + vjp(program, {"state": None, "parameter": [0]}).cost) + 2 * sums
    return {"forward": forward, "tangent": forward + tangent, "adjoint": 2 * forward + reverse}


def smallest(call, rounds: int, wait=lambda: None) -> tuple[float, float]:
    """Return the seconds of the first call, and the smallest of the following ones."""
    taken = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        call()
        wait()
        taken.append(time.perf_counter() - begin)
    return taken[0], min(taken[1:])


def peak(single: bool) -> tuple[str, float]:
    """Return the name of the device, and how many operations it can do in a second, at most."""
    import cupy

    device = cupy.cuda.Device()
    name = cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()
    units = UNITS.get(int(device.compute_capability), (0, 0))[int(single)]
    attributes = device.attributes
    return name, attributes["MultiProcessorCount"] * units * 2 * attributes["ClockRate"] * 1e3


def on_one_core(rounds: int) -> dict[str, float]:
    """Return trajectories per second of the CPU's kernels."""
    rho = parameters(CPU_COUNT)[:, None]
    u0 = np.tile(START, (CPU_COUNT, 1))
    timed = cases(rho, u0, EnsembleVectorized())
    return {name: CPU_COUNT / smallest(call, rounds)[1] for name, call in timed.items()}


def measure(n: int, options: argparse.Namespace, most: float, cpu: dict[str, float]) -> list[dict]:
    """Measure all cases of one size, print their rows, and return them."""
    import cupy

    dtype = np.float32 if options.single else np.float64
    rho = to_device(parameters(n).astype(dtype)[:, None])
    u0 = to_device(np.tile(np.array(START, dtype), (n, 1)))
    tried = solved(rho, EnsembleGPU())
    steps = float(np.mean(tried.naccept + tried.nreject))
    rows = []
    for name, call in cases(rho, u0, EnsembleGPU()).items():
        first, seconds = smallest(call, options.rounds, cupy.cuda.get_current_stream().synchronize)
        rate = operations()[name] * steps * n / seconds
        rows.append({"case": name, "n": n, "s": seconds, "first_s": first, "steps": steps, "flops": rate})
        beside = f"{n / seconds / cpu[name]:10.0f}" if name in cpu else f"{'':10}"
        part = f"{100 * rate / most:7.1f} %" if most else ""
        print(f"{name:10}{n:12,}{seconds * 1e3:10.2f}{n / seconds:14.3e}{beside}{rate / 1e9:11.0f}{part}", flush=True)
    return rows


def main() -> None:
    """Measure and print the table; without a GPU say so."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--single", action="store_true", help="float32")
    parser.add_argument("--json", type=Path, help="also write all that was measured to this file")
    options = parser.parse_args()
    try:
        mpiad.device.select()
    except (ImportError, RuntimeError) as error:
        print(f"nothing was measured: {error}")
        return
    name, most = peak(options.single)
    try:
        cpu = on_one_core(options.rounds)
    except ImportError:
        cpu = {}
    print(f"{name}, {'float32' if options.single else 'float64'}: {most / 1e12:.1f} TFLOP/s at most; / CPU: of one core")
    print(f"{'':10}{'N':>12}{'ms':>10}{'per second':>14}{'/ CPU':>10}{'GFLOP/s':>11}")
    rows = [row for n in options.n for row in measure(n, options, most, cpu)]
    check(rows)
    if options.json:
        options.json.write_text(json.dumps({"device": name, "peak": most, "cpu": cpu, "rows": rows}, indent=1))


def check(rows: list[dict]) -> None:
    """Compare a few end states with the CPU's, and print how far they are apart."""
    rho = np.linspace(0, 21, 200)[:, None]
    apart = np.abs(to_host(solved(to_device(rho), EnsembleGPU()).u_end) - solved(rho, EnsembleVectorized()).u_end).max()
    print(f"{len(rows)} rows; end states of 200 trajectories are within {apart:.1e} of the CPU's")


if __name__ == "__main__":
    main()
