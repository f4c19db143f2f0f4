"""Distributed Fourier transforms beside scipy.fft and messages by hand, and the gradient of a spectral simulation.

    python benchmarks/fft.py [--quick] [--python .venv-peers/bin/python]
    mpiexec -n 2 python benchmarks/fft.py [--quick]

The forward transform of real arrays is compared with `scipy.fft.rfftn` on one rank, and on several with the slabs that a
user would program: scipy.fft on two axes, one Alltoallw with subarray types into a preallocated array, scipy.fft on the
third axis. The gradient is that of the energy after ten steps of the Taylor-Green vortex (examples/taylor_green.py) with
respect to the initial velocity, compared with the simulation. On one rank, 50 steps of Navier-Stokes on 48³ points are
compared with those of Exponax (`benchmarks/sides/vortex_NAME.py`), the same method with the same modes: J and the norm of
the gradient must agree. Each side is a process of its own, started in turn; Exponax's faster gradient counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import scipy.fft
from mpi4py import MPI
from reaches import report, report_missing
from timing import seconds_of

import mpiad
from mpiad.fft import DistributedFFT

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

SIDES = Path(__file__).resolve().parent / "sides"
PEERS = SIDES.parent.parent / ".venv-peers" / "bin" / "python"
SHAPES = (64, 64, 64), (128, 128, 128), (30, 45, 50)
comm = MPI.COMM_WORLD.Dup()
rank, size = comm.rank, comm.size


def by_hand(shape: tuple[int, int, int]) -> Callable[[np.ndarray], np.ndarray]:
    """Return the forward transform of this rank's slab by scipy.fft and mpi4py."""
    if size == 1:
        return scipy.fft.rfftn
    n, m = shape[0], shape[1]
    planes, lines = ([len(part) for part in np.array_split(np.arange(length), size)] for length in (n, m))
    half, kind = shape[2] // 2 + 1, MPI.DOUBLE_COMPLEX
    before, after = (planes[rank], m, half), (n, lines[rank], half)
    sent, received = [], []
    for s in range(size):
        part, start = (planes[rank], lines[s], half), (0, sum(lines[:s]), 0)
        sent.append(kind.Create_subarray(before, part, start).Commit())
        part, start = (planes[s], lines[rank], half), (sum(planes[:s]), 0, 0)
        received.append(kind.Create_subarray(after, part, start).Commit())
    out, ones, zeros = np.empty(after, complex), [1] * size, [0] * size

    def forward(u: np.ndarray) -> np.ndarray:
        modes = scipy.fft.rfft2(u, axes=(1, 2))
        comm.Alltoallw([modes, (ones, zeros), sent], [out, (ones, zeros), received])
        return scipy.fft.fft(out, axis=0)

    return forward


def compare_transforms(shape: tuple[int, int, int], rounds: int) -> float:
    """Return the ratio of the times of the two transforms, measured alternately."""
    fft, peer = DistributedFFT(shape), by_hand(shape)
    u = np.random.default_rng(0).standard_normal(shape)[fft.owned].copy()
    np.testing.assert_allclose(fft.forward(u), peer(u), 1e-12, 1e-12 * u.size)
    times = [[seconds_of(partial(f, u), 1, comm) for f in (fft.forward, peer)] for _ in range(rounds)]
    ours, theirs = np.min(times, axis=0)
    if rank == 0:
        print(f"{shape}: mpiad {ours * 1e3:.2f} ms, by hand {theirs * 1e3:.2f} ms, ratio {ours / theirs:.2f}", flush=True)
    return ours / theirs


def gradient_ratio(points: int, rounds: int) -> float:
    """Return the time of the gradient of ten Taylor-Green steps, divided by that of the steps."""
    from taylor_green import VISCOSITY, Flow

    flow = Flow((points,) * 3, VISCOSITY, 0.01)
    u = flow.fft.backward(flow.vortex())

    def energy(u: np.ndarray) -> float:
        modes = flow.fft.forward(u)
        for _ in range(10):
            modes = flow.step(modes)
        return flow.energy(modes)

    gradient = mpiad.value_and_grad(energy)
    times = [[seconds_of(partial(f, u), 1, comm) for f in (energy, gradient)] for _ in range(rounds)]
    forward, both = np.min(times, axis=0)
    if rank == 0:
        print(
            f"{points}³, ten steps: {forward:.3f} s, with the gradient {both:.3f} s, ratio {both / forward:.2f}", flush=True
        )
    return both / forward


def compare_exponax(python: str, steps: int, rounds: int) -> None:
    """Measure the steps of Exponax and mpiad, and report the ratios."""
    if subprocess.run([python, "-c", "import exponax"], capture_output=True).returncode:
        report_missing("Navier-Stokes beside Exponax", "peer not installed")
        return
    best: dict[str, dict[str, float]] = {"mpiad": {}, "exponax": {}}
    checks = {}
    for side, program in [("mpiad", sys.executable), ("exponax", python)] * rounds:
        command = [program, str(SIDES / f"vortex_{side}.py"), str(steps), "--budget", "0"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
        checks[side] = found["check"]
        for case, ms in found["ms"].items():
            best[side][case] = min(ms, best[side].get(case, ms))
    np.testing.assert_allclose(checks["mpiad"], checks["exponax"], 1e-9)
    theirs = best["exponax"]
    theirs["gradient"] = min(theirs["gradient"], theirs.pop("gradient, steps again"))
    for case, ms in best["mpiad"].items():
        print(f"Navier-Stokes on 48³, ms per step: {case} mpiad {ms:.1f}, Exponax {theirs[case]:.1f}", flush=True)
        report(f"Navier-Stokes on 48³, {steps} steps, {case}: mpiad over Exponax", ms / theirs[case], at_most=0.7)


def main() -> None:
    """Measure, and report the ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and a gradient on 32³ points")
    parser.add_argument("--python", default=str(PEERS), help="Exponax's interpreter")
    options = parser.parse_args()
    for shape in SHAPES:
        ratio = compare_transforms(shape, 10 if options.quick else 40)
        report(f"FFT {'×'.join(map(str, shape))} on {size} rank(s) over scipy.fft, messages by hand", ratio, at_most=1.2)
    points = 32 if options.quick else 64
    ratio = gradient_ratio(points, 2 if options.quick else 4)
    report(f"gradient of ten Taylor-Green steps on {points}³, {size} rank(s), over the steps", ratio, at_most=3.5)
    if size == 1:
        compare_exponax(options.python, *((10, 1) if options.quick else (50, 3)))


if __name__ == "__main__":
    main()
