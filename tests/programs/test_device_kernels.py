"""The kernels of programs for devices, compiled to machine code by NVIDIA's compiler, which needs no GPU: none may spill.

Registers beyond those of a thread are put away in memory, which a loop that is bound by memory can't afford.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as onp
import nvrtc
import pytest
from device_double import double, on_device
from device_on_cpu import COMPILER

import mpiad
import mpiad.device.numpy as np
from mpiad.domain import Domain
from mpiad.linalg import compiled_iteration, krylov, solve
from mpiad.programs import device_loops, device_replay
from mpiad.programs.device_loops import OPTIONS, DeviceLoop, compiled
from mpiad.programs.device_replay import DeviceReplays
from mpiad.programs.fusion import Loop, Schedule

pytestmark = [
    pytest.mark.serial,
    pytest.mark.thorough,
    pytest.mark.skipif(nvrtc.library() is None, reason="there is no NVRTC: pip install nvidia-cuda-nvrtc-cu12"),
]
STEPS = 3


def wave(points):
    """Waves with a stencil of 5 points in two dimensions, 7 or 27 in three."""
    shape = (24, 20) if points == 5 else (10, 12, 14)
    domain = Domain(shape, halo=1, periodic=(True, *[False] * (len(shape) - 1)))

    def run(u, v):
        for _ in range(STEPS):
            padded, total = domain.exchange(u, corners=points == 27), 0.0
            for shift in onp.ndindex(*[3] * len(shape)):
                if points == 27 or sum(k != 1 for k in shift) == 1:
                    total = total + padded[tuple(slice(k, k + n) for k, n in zip(shift, shape))]
            u, v = 2 * u - v + 0.1 * (total - (points - 1) * u), u
        return np.sum(u**2)

    return run, 2, shape


def shallow_water():
    domain = Domain((24, 20), halo=1, periodic=(False, True))

    def run(h, u, v):
        for _ in range(STEPS):
            H, U, V = (domain.exchange(x) for x in (h, u, v))
            dx, dy = (lambda x: (x[2:, 1:-1] - x[:-2, 1:-1]) / 2), (lambda x: (x[1:-1, 2:] - x[1:-1, :-2]) / 2)
            w = dx(V) - dy(U)
            h, u, v = (
                h - 0.01 * (dx(H * U) + dy(H * V)),
                u + 0.01 * (w * v - dx(9.81 * H + (U**2 + V**2) / 2) - 1e-3 * u),
                v - 0.01 * (w * u + dy(9.81 * H + (U**2 + V**2) / 2) + 1e-3 * v),
            )
        return np.sum(h**2 + u**2 + v**2)

    return run, 3, (24, 20)


def lattice_boltzmann():
    cx, cy = onp.array([0, 1, 0, -1, 0, 1, -1, -1, 1]), onp.array([0, 0, 1, 0, -1, 1, 1, -1, -1])
    weights = [4 / 9, *[1 / 9] * 4, *[1 / 36] * 4]

    def run(f):
        for _ in range(STEPS):
            f = [np.roll(np.roll(f[k], cx[k], 0), cy[k], 1) for k in range(9)]
            rho = sum(f)
            ux = sum(int(c) * x for c, x in zip(cx, f) if c) / rho
            uy = sum(int(c) * x for c, x in zip(cy, f) if c) / rho
            made = []
            for k in range(9):
                cu = 3 * (int(cx[k]) * ux + int(cy[k]) * uy)
                feq = weights[k] * rho * (1 + cu + cu**2 / 2 - 1.5 * (ux**2 + uy**2))
                made.append(f[k] - 0.6 * (f[k] - feq))
            f = np.stack(made)
        return np.sum(f**2)

    return run, 1, (9, 16, 18)


def reaction_diffusion():
    def laplacian(x):
        return np.roll(x, 1, 0) + np.roll(x, -1, 0) + np.roll(x, 1, 1) + np.roll(x, -1, 1) - 4 * x

    def run(u, v):
        for _ in range(STEPS):
            r = u * v**2
            u, v = u + 0.1 * laplacian(u) - r + 0.03 * (1 - u), v + 0.05 * laplacian(v) + r - 0.09 * v
        return np.sum(u**2 + v**2)

    return run, 2, (24, 20)


def along(padded, axis):
    """Return the derivative of fourth order along an axis, and the second difference, of an array with a halo of two."""
    a = np.swapaxes(padded, 0, axis)[:, 2:-2]
    first = (a[:-4] - 8 * a[1:-3] + 8 * a[3:-1] - a[4:]) / 12
    return [np.swapaxes(x, 0, axis) for x in (first, a[1:-3] - 2 * a[2:-2] + a[3:-1])]


def navier_stokes():
    domain = Domain((20, 24), halo=2, periodic=True)

    def run(u, v, p):
        for _ in range(STEPS):
            (ux, uxx), (uy, uyy), (vx, vxx), (vy, vyy), (px, _), (py, _) = (
                along(domain.exchange(field), axis) for field in (u, v, p) for axis in (0, 1)
            )
            u, v, p = (
                u - 0.01 * (u * ux + v * uy + px - 0.1 * (uxx + uyy)),
                v - 0.01 * (u * vx + v * vy + py - 0.1 * (vxx + vyy)),
                p - 0.01 * (ux + vy) * np.exp(-(p**2)),
            )
        return np.sum(u**2 + v**2 + p**2)

    return run, 3, (20, 24)


PROGRAMS = {
    "wave 5": lambda: wave(5), "wave 7": lambda: wave(7), "wave 27": lambda: wave(27), "shallow water": shallow_water,
    "lattice Boltzmann": lattice_boltzmann, "reaction-diffusion": reaction_diffusion, "Navier-Stokes": navier_stokes,
}  # fmt: skip
MOST = {("lattice Boltzmann", "complex128"): 255, "lattice Boltzmann": 128, "complex128": 128}
CASES = [(name, dtype) for name in PROGRAMS for dtype in ("float32", "float64", "complex128")]


PROPERTIES = re.compile(
    r"'(\w+)' for .*?(\d+) bytes stack frame, (\d+) bytes spill stores.*?Used (\d+) registers", re.DOTALL
)


class Assembler:
    """A launcher that compiles for an architecture, and knows the registers and the memory of each kernel."""

    def __init__(self, architecture):
        self.options, self._texts = (f"--gpu-architecture={architecture}", "--ptxas-options=-v"), {}

    def compiled(self, text, name, options):
        if text not in self._texts:
            machine_code, log = nvrtc.machine_code_of(text, [*options, *self.options])
            assert machine_code, log
            parts = [PROPERTIES.search(part) for part in log.split("Compiling entry function")[1:]]
            self._texts[text] = {
                kernel: SimpleNamespace(local_bytes=int(frame), spilled=int(spilled), registers=int(registers))
                for kernel, frame, spilled, registers in (found.groups() for found in parts)
            }
        return self._texts[text][name]


def kernels_of(run, count, shape, dtype, divides=False):
    """Return the kernels of the value and of its gradient, of the program for the host; `divides`: with interiors."""
    loss = run if onp.dtype(dtype).kind == "f" else lambda *z: np.real(run(*z))
    jitted, arguments = mpiad.jit(loss), [onp.ones(shape, dtype) + k for k in range(count)]
    mpiad.value_and_grad(jitted, tuple(range(count)))(*arguments)
    entries = [entry for entry in jitted.form().jitted._cache.entries.values() if entry is not None]
    assert entries
    loops = []
    for entry in entries:
        schedule = Schedule(entry.replays.schedule.program)
        loops += [DeviceLoop(schedule, at) for at, step in enumerate(schedule.steps) if isinstance(step, Loop)]
    for loop in loops if divides else ():
        loop.interior = [(2, n - 2) for n in loop.loop.shape] if loop.divisible and min(loop.loop.shape) > 4 else None
    return [kernel for loop in loops for kernel in loop.kernels({})]


def entangled(count):
    """A sum whose terms each need all of `count` numbers, so that these are live at the same time."""

    def run(x):
        terms = [np.roll(x, k, 0) * (k + 1.0) for k in range(count)]
        for _ in range(2):
            total = sum(t * t for t in terms)
            terms = [t / (1 + total) + 0.1 * t**3 for t in terms]
        return sum(t * total for t in terms)

    return run


def test_loops_are_divided_until_no_kernel_spills(monkeypatch):
    jitted = mpiad.jit(entangled(58))
    jitted(onp.ones((100, 3)))
    (entry,) = jitted.form().jitted._cache.entries.values()
    schedule = Schedule(entry.replays.schedule.program)
    monkeypatch.setattr(device_replay, "launcher_of", lambda device: Assembler("sm_90"))
    whole = compiled(
        [kernel for at in range(len(schedule.steps)) for kernel in DeviceLoop(schedule, at).kernels({})], Assembler("sm_90")
    )
    assert max(kernel.spilled for kernel in whole) > 0
    ((made, _), *others) = [launch for each in DeviceReplays(schedule, double).launches for launch in each]
    assert others and not any(kernel.spilled for kernel in (made, *[kernel for kernel, _ in others]))


@pytest.mark.parametrize("name", ["wave 7", "shallow water"])
def test_no_kernel_of_an_interior_spills(name):
    """Those of the interiors and edges of loops after exchanges."""
    whole, parts = (kernels_of(*PROGRAMS[name](), "float64", divides) for divides in (False, True))
    assert len(parts) > len(whole)
    kernels = compiled(parts, Assembler("sm_90"))
    assert not any(kernel.spilled for kernel in kernels) and max(kernel.registers for kernel in kernels) <= 64


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_kernel_of_two_entries_spills(name, monkeypatch):
    """Those in single precision, in which a thread of a large loop computes two entries."""
    for limit in ("_MANY", "_LONG"):
        monkeypatch.setattr(device_loops, limit, 1)
    kernels = kernels_of(*PROGRAMS[name](), "float32")
    found = [one for one, kernel in zip(compiled(kernels, Assembler("sm_90")), kernels) if " next = " in kernel.body]
    assert found and not any(one.spilled for one in found) and max(one.registers for one in found) <= 64


@pytest.mark.skipif(COMPILER is None, reason="there is no compiler of C++ for the stand-in")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("method", ["cg", "bicgstab", "gmres"])
def test_no_kernel_of_an_iteration_spills(method, architecture, monkeypatch):
    """Those of solves on the stand-in for a device, with all iterations compiled."""
    domain, kernels, compile_all = Domain((24, 20), halo=1), [], device_replay.compiled
    monkeypatch.setattr(device_replay, "compiled", lambda new, *args: kernels.extend(new) or compile_all(new, *args))
    monkeypatch.setattr(compiled_iteration, "_FIRST_RUNS", 0)
    monkeypatch.setattr(compiled_iteration, "_known", [])

    def matvec(u):
        p = domain.exchange(u)
        return 4.1 * u - p[2:, 1:-1] - p[:-2, 1:-1] - p[1:-1, 2:] - p[1:-1, :-2]

    solve(matvec, on_device(onp.random.default_rng(0).standard_normal((24, 20))), method=method)
    found = compiled(kernels, Assembler(architecture))
    assert found and not any(kernel.spilled for kernel in found)
    # Those of a few numbers run on one multiprocessor.
    assert max(one.registers for one, kernel in zip(found, kernels) if kernel.threads >= 24 * 20) <= 64


@pytest.mark.parametrize("kind", ["f", "c"])
def test_kernels_of_krylov_spaces_do_not_spill(kind):
    text = krylov._device_text(kind)
    assert Assembler("sm_90").compiled(text, "extended_coefficients", OPTIONS).spilled == 0


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name, dtype", CASES)
def test_no_kernel_spills(name, dtype, architecture):
    kernels = compiled(kernels_of(*PROGRAMS[name](), dtype), Assembler(architecture))
    assert not any(kernel.spilled for kernel in kernels)
    assert max(kernel.registers for kernel in kernels) <= next(
        (MOST[x] for x in ((name, dtype), name, dtype) if x in MOST), 64
    )
