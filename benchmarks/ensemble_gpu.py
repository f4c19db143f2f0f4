"""Ensembles on a GPU: end states and gradients compared with one CPU core, and with diffrax on the same GPU.

    python benchmarks/ensemble_gpu.py [--n 10000 32768 524288 1000000 10000000] [--rounds 7] [--no-peer] [--json FILE]

Lorenz systems (`benchmarks/lorenz/problem.py`: RK45, rtol 1e-6) in double and in single precision, and Robertson's kinetics
(`benchmarks/stiff/systems.py`: Rodas5P, rtol 1e-6) in double precision. Parameters and results are on the device. Cases:

- `forward`: the states at the end;
- `tangent`: value and gradient of Σ|u|² with respect to one parameter (Lorenz), by a tangent that the solve carries along;
- `adjoint`: the same with respect to all parameters and the initial states. It includes a second run of the forward
  kernel, which records the steps.

Columns: `call` is the time from the call until the device is idle, `kernels` the time of the kernels alone, by events
of the device; the smallest of several rounds each, after the compilation. `/ core` is the number of trajectories per
second divided by that of compiled ensembles on one CPU core (llvmlite). `arrays` is the call without kernels, by
`EnsembleVectorized` on the device. At the end the same for a network of two layers of 64 units, for which there is no CUDA
kernel: arrays on the device compared with kernels on one CPU core. `peak` is the part of the device's arithmetic peak that
the kernels reach: the operations of f and of a step's sums, times the
steps tried, where divisions, roots and powers count as one each; so it is a lower bound. `memory` is the part of the
device's copy rate that the recorded steps take, written once and read once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval
from choice.systems import CASES, DEEP
from lorenz import problem as lorenz_problem
from lorenz.problem import ATOL, BETA, RTOL, SIGMA, START, T0, T1
from reaches import report, report_missing
from stiff import systems

import mpiad
import mpiad.device
from mpiad.compiling.derivatives import jvp, vjp
from mpiad.device import is_device_array, to_device, to_host
from mpiad.ensemble import (
    RK45,
    BatchSum,
    EnsembleGPU,
    EnsembleProblem,
    EnsembleVectorized,
    ODEProblem,
    Rodas5P,
    remake,
    solve,
)
from mpiad.ensemble.batch import Parameters
from mpiad.ensemble.compiled.trace import trace

HERE = Path(__file__).resolve().parent
# FP64 and FP32 units of a multiprocessor, by the architecture's number.
UNITS = {70: (32, 64), 75: (2, 64), 80: (32, 64), 86: (2, 128), 87: (2, 128), 89: (2, 128), 90: (64, 128), 100: (64, 128),
         103: (2, 128), 120: (2, 128)}  # fmt: skip
CPU_COUNT = {"lorenz": 50_000, "robertson": 5_000}
# Published for GPUs of the same class: states at N = 524,288, value and gradient at N = 32,768.
TARGETS = {("forward", 524_288): 0.66, ("adjoint", 32_768): 1.0}
MOST_STIFF = 1_000_000
# Trajectories of a loss that is summed in batches, those of a batch, and the aim for the value with its gradient.
SUMMED, BATCH, SUMMED_TARGET = 1_000_000_000, 10_000_000, 3.0


class Case(NamedTuple):
    """A right-hand side, and how its ensemble is solved."""

    name: str
    f: Callable
    start: tuple
    span: tuple
    alg: Any
    tolerances: dict
    parameters: Callable  # of N, shape (N, m)


def lorenz(u, p, t):
    """Return the derivative."""
    return [SIGMA * (u[1] - u[0]), u[0] * (p[0] - u[2]) - u[1], u[0] * u[1] - BETA * u[2]]


ROBERTSON = systems.SYSTEMS["robertson"]
SYSTEMS = (
    Case("lorenz", lorenz, START, (T0, T1), RK45(), {"rtol": RTOL, "atol": ATOL},
         lambda n: lorenz_problem.parameters(n)[:, None]),
    Case("robertson", ROBERTSON.f, tuple(ROBERTSON.u0), (0.0, ROBERTSON.end), Rodas5P(),
         {"rtol": 1e-6, "atol": systems.atol(1e-6)}, lambda n: systems.parameters("robertson", n)),
)  # fmt: skip


def solved(case: Case, p, backend, u0=None, **options):
    """Solve the ensemble with these parameters, shape (N, m)."""
    ode = ODEProblem(case.f, np.array(case.start, p.dtype), case.span)
    kernels = isinstance(backend, EnsembleGPU) or not is_device_array(getval(p))
    return solve(EnsembleProblem(ode, u0=u0, p=p), case.alg, backend, compile=kernels, **case.tolerances, **options)


def calls(case: Case, p, u0, backend) -> dict[str, Callable[[], Any]]:
    """Return what is timed, by name."""

    def tangent(p):
        return anp.sum(solved(case, p, backend, gradient="tangent").u_end ** 2)

    def adjoint(p, u0):
        return anp.sum(solved(case, p, backend, u0, gradient="adjoint").u_end ** 2)

    found = {
        "forward": lambda: solved(case, p, backend),
        "tangent": lambda: mpiad.value_and_grad(tangent)(p),
        "adjoint": lambda: mpiad.value_and_grad(adjoint, (0, 1))(p, u0),
    }
    if case.alg.tableau.implicit:
        del found["tangent"]  # Rosenbrock methods have none on GPUs
    return found


def operations(d: int = 3) -> dict[str, int]:
    """Return for each case of the Lorenz systems the number of operations of a step that was tried, at least."""
    tableau = RK45().tableau
    program = trace(lorenz, (d,), Parameters([np.zeros((1, 2))], [True], lambda leaves: leaves[0]), np.float64)
    stages = tableau.stages - 1
    # A sum over m stages is m products, m - 1 sums, a product with h, a sum with u.
    sums = d * sum(2 * np.count_nonzero(row) + 1 for row in tableau.a)
    error = d * (2 * np.count_nonzero(tableau.error) + 6)
    forward = stages * program.cost + sums + error
    wanted = {"state": None, "parameter": [0]}
    tangent = stages * (jvp(program, wanted).cost - program.cost) + sums
    # The stages once more, each one's adjoint, and the transposed sums.
    reverse = stages * (program.cost + vjp(program, wanted).cost) + 2 * sums
    return {"forward": forward, "tangent": forward + tangent, "adjoint": 2 * forward + reverse}


@contextmanager
def kernel_times() -> Iterator[list[float]]:
    """Measure the milliseconds of each kernel that is launched inside; they are there at the end."""
    import cupy

    from mpiad.transport.devices.cupy_arrays import CupyLauncher

    plain, events, found = CupyLauncher.launch, [], []

    def launch(*arguments):
        pair = cupy.cuda.Event(), cupy.cuda.Event()
        pair[0].record()
        plain(*arguments)
        pair[1].record()
        events.append(pair)

    CupyLauncher.launch = launch
    try:
        yield found
    finally:
        CupyLauncher.launch = plain
    cupy.cuda.get_current_stream().synchronize()
    found += [cupy.cuda.get_elapsed_time(*pair) for pair in events]


def smallest(call, rounds: int, wait=lambda: None) -> tuple[float, float]:
    """Return the seconds of the first call, and the smallest of the following ones."""
    taken = []
    for _ in range(rounds + 1):
        wait()
        begin = time.perf_counter()
        call()
        wait()
        taken.append(time.perf_counter() - begin)
    return taken[0], min(taken[1:])


class Device(NamedTuple):
    """The device's name, its operations per second in double and single precision, its bytes per second."""

    name: str
    peaks: tuple[float, float]
    copied: float


def device() -> Device:
    """Return what the device can do at most: arithmetic by its units and clock, copies measured."""
    import cupy

    here = cupy.cuda.Device()
    name = cupy.cuda.runtime.getDeviceProperties(here.id)["name"].decode()
    cycles = here.attributes["MultiProcessorCount"] * 2 * here.attributes["ClockRate"] * 1e3
    units = UNITS.get(int(here.compute_capability), (0, 0))
    x = cupy.random.random(1 << 28)
    y = cupy.empty_like(x)
    seconds = smallest(lambda: cupy.copyto(y, x), 5, cupy.cuda.get_current_stream().synchronize)[1]
    return Device(name, (units[0] * cycles, units[1] * cycles), 2 * x.nbytes / seconds)


def on_one_core(case: Case) -> dict[str, float]:
    """Return trajectories per second of the CPU's kernels."""
    n = CPU_COUNT[case.name]
    timed = calls(case, case.parameters(n), np.tile(case.start, (n, 1)), EnsembleVectorized())
    return {name: n / smallest(call, 3)[1] for name, call in timed.items()}


def peer(case: Case, name: str, n: int) -> float | None:
    """Return the seconds that diffrax takes on the same device, in double precision; None if that can't be measured."""
    python = HERE.parent / ".venv-peers" / "bin" / "python"
    python = str(python) if python.exists() else sys.executable
    kind = {"adjoint": "gradient", "tangent": "gradient, tangent"}.get(name, name)
    command = [python, str(HERE / "lorenz" / "side_diffrax.py"), kind, str(n), "--budget", "2"]
    if case.name == "robertson":
        command = [python, str(HERE / "stiff" / "side_diffrax.py"), case.name, kind, "Kvaerno5", str(n), "--rtol", "1e-6"]
    environment = {**os.environ, "JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
        return json.loads(done.stdout.splitlines()[-1])["s"]
    except (subprocess.TimeoutExpired, IndexError):
        return None


def measure(case: Case, n: int, dtype, here: Device, cpu: dict[str, float], rounds: int, peers: bool) -> list[dict]:
    """Measure all cases of one size, print their rows, and return them."""
    import cupy

    single, stiff = dtype == np.float32, case.alg.tableau.implicit
    p = to_device(case.parameters(n).astype(dtype))
    u0 = to_device(np.tile(np.array(case.start, dtype), (n, 1)))
    sol = solved(case, p, EnsembleGPU())
    tried, taken = float(np.mean(sol.naccept + sol.nreject)), float(np.mean(sol.naccept))
    tape = 2 * n * taken * (len(case.start) * np.dtype(dtype).itemsize + 16)
    rows = []
    for name, call in calls(case, p, u0, EnsembleGPU()).items():
        first, seconds = smallest(call, rounds, cupy.cuda.get_current_stream().synchronize)
        best: list[float] = []
        for _ in range(3):
            with kernel_times() as found:
                call()
            best = [min(pair) for pair in zip(best, found)] or found
        kernels = sum(best) / 1e3
        row = {"system": case.name, "dtype": np.dtype(dtype).name, "case": name, "n": n, "call_s": seconds,
               "kernels_s": kernels, "first_s": first, "tried": tried, "per_core": n / seconds / cpu[name]}  # fmt: skip
        if case.name == "lorenz" and here.peaks[single]:
            row["peak"] = operations()[name] * tried * n / kernels / here.peaks[single]
        if name == "adjoint":
            row["memory"] = tape / (sum(best[1:]) / 1e3) / here.copied
        if peers and n in (32_768, 524_288) and not (single or (stiff and n > 32_768)):
            seconds = peer(case, name, n)
            row |= {} if seconds is None else {"diffrax_s": seconds}
        if not single and n in (32_768, 1_000_000) and not (stiff and n > 32_768):
            by_arrays = calls(case, p, u0, EnsembleVectorized())[name]
            row["arrays_s"] = smallest(by_arrays, 2, cupy.cuda.get_current_stream().synchronize)[1]
        rows.append(row)
        print(line(row), flush=True)
        if not single and (name, n) in TARGETS and case.name == "lorenz":
            report(f"Lorenz on a GPU, {name}, N = {n:,}, call, ms", row["call_s"] * 1e3, at_most=TARGETS[name, n])
            report(f"Lorenz on a GPU, {name}, N = {n:,}, kernels, ms", kernels * 1e3, at_most=TARGETS[name, n])
    return rows


def line(row: dict) -> str:
    """Return a row of the table."""
    part = lambda key: f"{100 * row[key]:7.1f} %" if key in row else f"{'':9}"  # noqa: E731
    others = "".join(f"{row[key] * 1e3:10.2f}" if key in row else f"{'':10}" for key in ("arrays_s", "diffrax_s"))
    return (
        f"{row['system']:10}{row['dtype']:9}{row['case']:9}{row['n']:11,}{row['call_s'] * 1e3:9.2f}"
        f"{row['kernels_s'] * 1e3:9.3f}{row['n'] / row['call_s']:11.2e}{row['per_core']:9.0f}"
        f"{part('peak')}{part('memory')}{others}"
    )


def main() -> None:
    """Measure and print the table; without a GPU say so."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, nargs="+", default=[10_000, 32_768, 524_288, 1_000_000, 10_000_000])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-peer", action="store_true", help="leave diffrax out")
    parser.add_argument("--json", type=Path, help="also write all that was measured to this file")
    options = parser.parse_args()
    try:
        mpiad.device.select()
    except (ImportError, RuntimeError) as error:
        print(f"nothing was measured: {error}")
        return
    here = device()
    double, single = (peak / 1e12 for peak in here.peaks)
    print(f"{here.name}: {double:.1f} TFLOP/s double, {single:.1f} single, copies {here.copied / 1e12:.2f} TB/s")
    heads = ("call ms", "kernels"), ("per second",), ("/ core", "peak", "memory"), ("arrays", "diffrax")
    print(f"{'N':>40}" + "".join(f"{h:>{w}}" for w, group in zip((9, 11, 9, 10), heads) for h in group))
    rows = []
    for case in SYSTEMS:
        cpu = on_one_core(case)
        stiff = case.alg.tableau.implicit
        for dtype in (np.float64,) if stiff else (np.float64, np.float32):
            for n in options.n:
                if not stiff or n <= MOST_STIFF:
                    rows += measure(case, n, dtype, here, cpu, options.rounds, not options.no_peer)
    rows += in_batches()
    rows += networks()
    check()
    if options.json:
        options.json.write_text(json.dumps({"device": here._asdict(), "rows": rows}, indent=1))


def summed(rho, size: int):
    """Return the sum over Lorenz systems of the squares of their end states, computed in batches; rho: shape (n, 1)."""
    total = BatchSum(lambda sol, numbers: anp.sum(sol.u_end**2))
    problem = EnsembleProblem(ODEProblem(lorenz, np.array(START), (T0, T1)), p=rho, reduction=total)
    return solve(problem, RK45(), EnsembleGPU(), batch_size=size, rtol=RTOL, atol=ATOL).u


def in_batches(n: int = SUMMED, size: int = BATCH, rounds: int = 2) -> list[dict]:
    """Measure the value of a sum over n Lorenz systems, and its gradient with respect to each parameter."""
    import cupy

    line = f"Lorenz on a GPU, value and gradient, {n:.0e} in batches of {size:.0e}, s"
    pool, wait = cupy.get_default_memory_pool(), cupy.cuda.get_current_stream().synchronize
    pool.free_all_blocks()
    # The parameters, the gradients of all batches, and their product with the cotangent.
    if cupy.cuda.runtime.memGetInfo()[0] < 4 * 8 * n:
        report_missing(line, "the parameters and their gradient exceed the memory")
        return []
    rho, row = cupy.linspace(0.0, 21.0, n)[:, None], {"system": "lorenz", "case": "in batches", "n": n, "size": size}
    row["call_s"] = smallest(partial(mpiad.value_and_grad(partial(summed, size=size)), rho), rounds, wait)[1]
    row["forward_s"] = smallest(partial(summed, rho, size), rounds, wait)[1]
    row["bytes"] = pool.total_bytes()
    print(f"{line}: {row['call_s']:.2f}, value alone {row['forward_s']:.2f}, {row['bytes'] / 1e9:.1f} GB", flush=True)
    report(line, row["call_s"], at_most=SUMMED_TARGET)
    return [row]


def networks(counts: tuple[int, ...] = (1_000, 100_000)) -> list[dict]:
    """Measure a right-hand side without a CUDA kernel: arrays on the device, and kernels on one CPU core."""
    import cupy

    case, rows = CASES["two layers of width 64, gradient"], []
    wait = cupy.cuda.get_current_stream().synchronize
    for n in counts:
        u0 = np.random.default_rng(1).uniform(0.5, 1.5, (n, 2))

        def energy(p, u0, backend):
            problem = EnsembleProblem(remake(DEEP[64], p=p), u0=u0)
            return anp.sum(solve(problem, case.alg, backend, rtol=case.rtol, atol=case.atol).u_end ** 2)

        gradient = mpiad.value_and_grad(energy)
        on_host, on_device = (DEEP[64].p, u0), to_device((DEEP[64].p, u0))
        for name, run in {"forward": energy, "gradient": gradient}.items():
            core = smallest(partial(run, *on_host, EnsembleVectorized()), 2)[1]
            seconds = smallest(partial(run, *on_device, EnsembleGPU()), 2, wait)[1]
            rows.append({"system": "network", "case": name, "n": n, "arrays_s": seconds, "core_s": core})
            print(
                f"network, {name:9}{n:>9,}: arrays {seconds * 1e3:.1f} ms, kernels on one core {core * 1e3:.1f} ms",
                flush=True,
            )
    return rows


def check() -> None:
    """Compare end states and gradients of 200 trajectories with the CPU's, and print their largest relative difference."""
    for case in SYSTEMS:
        p, u0 = case.parameters(200), np.tile(case.start, (200, 1))
        on_host = calls(case, p, u0, EnsembleVectorized())
        on_gpu = calls(case, to_device(p), to_device(u0), EnsembleGPU())
        value = relative(to_host(on_gpu["forward"]().u_end), on_host["forward"]().u_end)
        slopes = max(relative(to_host(a), b) for a, b in zip(on_gpu["adjoint"]()[1], on_host["adjoint"]()[1]))
        print(f"{case.name}: compared with the CPU, end states differ by {value:.1e} and gradients by {slopes:.1e}")


def relative(found: np.ndarray, right: np.ndarray) -> float:
    """Return the largest difference, relative to the largest entry of each column."""
    return float(np.max(np.abs(found - right) / np.max(np.abs(right), axis=0)))


if __name__ == "__main__":
    main()
