"""Distributed Fourier transforms beside scipy.fft and mpi4py-fft, and the gradient of a spectral simulation.

    python benchmarks/fft.py [--quick] [--python .venv-peers/bin/python]
    mpiexec -n 2 python benchmarks/fft.py [--quick]

The forward transform of real arrays is compared with `scipy.fft.rfftn` on one rank, and on several with the slabs that a
user would program: scipy.fft on two axes, one Alltoallw with subarray types into a preallocated array, scipy.fft on the
third axis. If mpi4py-fft is installed (`pip install mpi4py-fft`, which needs FFTW and a compiler), its transform without
normalization is also compared, and ten compiled steps of the Taylor-Green vortex (examples/taylor_green.py) with the same
steps on its transforms and NumPy. If ducc0 is installed (`pip install 'mpiad[fft]'`), mpiad's transforms use it; they are
also shown with SciPy's local transforms.

The gradient is that of the energy after these steps with respect to the initial velocity, compared with the simulation. On
one rank, 50 steps of Navier-Stokes on 48³ points are compared with those of Exponax (`benchmarks/sides/vortex_NAME.py`),
the same method with the same modes: J and the norm of the gradient must agree. Each side is a process of its own, started
in turn; Exponax's faster gradient counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import scipy.fft
from mpi4py import MPI
from reaches import report, report_missing
from timing import seconds_of

import mpiad
from mpiad.fft import DistributedFFT
from mpiad.redistribution import fft as implementation

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


def by_mpi4py_fft(whole: np.ndarray) -> Callable[[], np.ndarray]:
    """Return the forward transform of this rank's part by mpi4py-fft; raise an ImportError if it isn't installed."""
    from mpi4py_fft import PFFT, newDistArray

    fft = PFFT(comm, whole.shape, dtype=float)
    u, modes = newDistArray(fft, False, view=True), newDistArray(fft, True, view=True)
    u[...] = whole[fft.local_slice(False)]
    fft.forward(u, modes, normalize=False)
    np.testing.assert_allclose(modes, scipy.fft.rfftn(whole)[fft.local_slice(True)], 1e-12, 1e-12 * whole.size)
    return partial(fft.forward, u, modes, normalize=False)


def by_scipy(forward: Callable[[], object]) -> Callable[[], object]:
    """Return a transform with scipy.fft's local ones, if ducc0 is installed; otherwise raise an ImportError."""
    import ducc0  # noqa: F401

    def transformed() -> object:
        with mock.patch.object(implementation, "_ducc", lambda: None):
            return forward()

    return transformed


def best_times(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the shortest times of the sides, measured alternately, in milliseconds."""
    times = [[seconds_of(side, 1, comm) for side in sides.values()] for _ in range(rounds)]
    return dict(zip(sides, 1e3 * np.min(times, axis=0)))


def compare_transforms(shape: tuple[int, int, int], rounds: int) -> None:
    """Measure the forward transforms, and report the ratios."""
    fft, peer, whole = DistributedFFT(shape), by_hand(shape), np.random.default_rng(0).standard_normal(shape)
    u = whole[fft.owned].copy()
    np.testing.assert_allclose(fft.forward(u), peer(u), 1e-12, 1e-12 * u.size)
    sides: dict[str, Callable[[], object]] = {"mpiad": partial(fft.forward, u), "by hand": partial(peer, u)}
    for name, make in (
        ("mpi4py-fft", partial(by_mpi4py_fft, whole)),
        ("mpiad by scipy.fft", partial(by_scipy, sides["mpiad"])),
    ):
        with suppress(ImportError):
            sides[name] = make()
    ms = best_times(sides, rounds)
    if rank > 0:
        return
    line = f"FFT {'×'.join(map(str, shape))} on {size} rank(s)"
    print(f"{line}, ms: " + ", ".join(f"{side} {time:.3f}" for side, time in ms.items()), flush=True)
    report(f"{line} over scipy.fft, messages by hand", ms["mpiad"] / ms["by hand"], at_most=1.2)
    if "mpi4py-fft" in ms:
        report(f"{line} over mpi4py-fft", ms["mpiad"] / ms["mpi4py-fft"], at_most=1.2)
    else:
        report_missing(f"{line} over mpi4py-fft", "peer not installed")


def steps_by_mpi4py_fft(points: int, steps: int) -> Callable[[], float]:
    """Return the steps of the Taylor-Green vortex by mpi4py-fft and NumPy as a function that returns the energy."""
    from mpi4py_fft import PFFT, newDistArray
    from taylor_green import BOX, VISCOSITY

    fft = PFFT(comm, (points,) * 3, dtype=float, collapse=False)
    velocity, vorticity = newDistArray(fft, False, rank=1, view=True), newDistArray(fft, False, rank=1, view=True)
    modes, start, total, rates = (newDistArray(fft, True, rank=1, view=True) for _ in range(4))
    pressure = newDistArray(fft, True, view=True)
    x, y, z = np.meshgrid(
        *[np.arange(points) * 2 * np.pi / points * side / BOX[0] for side in BOX], indexing="ij", sparse=True
    )
    initial = np.zeros((3, points, points, points))
    initial[0], initial[1] = np.sin(x) * np.cos(y) * np.cos(z), -np.cos(x) * np.sin(y) * np.cos(z)
    velocity[...] = initial[(slice(None), *fft.local_slice(False))]
    for i in range(3):
        fft.forward(velocity[i], start[i])
    half, full = scipy.fft.rfftfreq(points, 1 / points), scipy.fft.fftfreq(points, 1 / points)
    grid = np.meshgrid(full, full, half, indexing="ij")
    k = np.stack([2 * np.pi / side * part[fft.local_slice(True)] for side, part in zip(BOX, grid)])
    square = (k**2).sum(axis=0)
    over_square = k / np.where(square == 0, 1, square)

    def find_rates() -> None:
        for i, j, m in (0, 1, 2), (1, 2, 0), (2, 0, 1):
            fft.backward(modes[i], velocity[i])
            fft.backward(1j * (k[j] * modes[m] - k[m] * modes[j]), vorticity[i])
        for i, j, m in (0, 1, 2), (1, 2, 0), (2, 0, 1):
            fft.forward(velocity[j] * vorticity[m] - velocity[m] * vorticity[j], rates[i])
        np.sum(rates * over_square, axis=0, out=pressure)
        rates[...] -= pressure * k
        rates[...] -= VISCOSITY * square * modes

    def run() -> float:
        before = start.copy()
        modes[...] = before
        for _ in range(steps):
            total[...] = before
            for weight, part in (1 / 6, 1 / 2), (1 / 3, 1 / 2), (1 / 3, 1), (1 / 6, 0):
                find_rates()
                total[...] += 0.01 * weight * rates
                modes[...] = before + 0.01 * part * rates
            before[...] = modes[...] = total
        for i in range(3):
            fft.backward(modes[i], velocity[i])
        return comm.allreduce(np.sum(velocity**2)) / (2 * points**3)

    return run


def compare_steps(points: int, rounds: int) -> None:
    """Measure ten steps of the Taylor-Green vortex by mpiad and mpi4py-fft, and report the ratio."""
    from taylor_green import VISCOSITY, Flow

    line, steps = f"ten Taylor-Green steps on {points}³, {size} rank(s): mpiad over mpi4py-fft", 10
    try:
        peer = steps_by_mpi4py_fft(points, steps)
    except ImportError:
        if rank == 0:
            report_missing(line, "peer not installed")
        return
    flow = Flow((points,) * 3, VISCOSITY, 0.01)
    start, step = flow.vortex(), mpiad.jit(flow.step)

    def ours() -> float:
        modes = start
        for _ in range(steps):
            modes = step(modes)
        return flow.energy(modes)

    np.testing.assert_allclose(ours(), peer(), 1e-11)
    ms = best_times({"mpiad": ours, "mpi4py-fft": peer}, rounds)
    if rank == 0:
        print(f"{line}: {ms['mpiad']:.0f} ms, {ms['mpi4py-fft']:.0f} ms", flush=True)
        report(line, ms["mpiad"] / ms["mpi4py-fft"], at_most=1.0)


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
    if not Path(python).exists() or subprocess.run([python, "-c", "import exponax"], capture_output=True).returncode:
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
        compare_transforms(shape, 10 if options.quick else 40)
    points = 32 if options.quick else 64
    compare_steps(points, 2 if options.quick else 4)
    ratio = gradient_ratio(points, 2 if options.quick else 4)
    report(f"gradient of ten Taylor-Green steps on {points}³, {size} rank(s), over the steps", ratio, at_most=3.5)
    if size == 1:
        compare_exponax(options.python, *((10, 1) if options.quick else (50, 3)))


if __name__ == "__main__":
    main()
