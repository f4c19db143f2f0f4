"""The CUDA kernels for a GPU: PTX by NVRTC and nvcc, machine code by ptxas, where these are; none of them needs a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess

import numpy as np
import nvrtc
import pytest
from kernels_on_cpu import parameters_of, plan_of
from traced_right_hand_sides import SYSTEMS

from mpiad.ensemble import RK4, RK45, PIController, Rodas5P, Tsit5
from mpiad.ensemble.backends import EnsembleGPU
from mpiad.ensemble.compiled.trace import trace

pytestmark = pytest.mark.serial

METHODS = {"RK45": RK45(), "Tsit5": Tsit5(controller=PIController()), "RK4": RK4(), "Rodas5P": Rodas5P()}


def plan(name, dtype=np.float64, method="RK45", **options):
    system = SYSTEMS[name]
    given = parameters_of(system.p, False)
    return plan_of(system.f, given, np.zeros((system.states, 1), dtype), METHODS[method], **options)


def events(name):
    """Return an event that ends its trajectory, and one on the way."""
    system = SYSTEMS[name]
    given = parameters_of(system.p, False)
    conditions = (lambda u, p, t: u[0] * u[1] - t, lambda u, p, t: np.sqrt(p[0]) - u[2])
    programs = [trace(one, (system.states,), given, np.float64, result=()) for one in conditions]
    return (programs[0], True, 0), (programs[1], False, -1)


def directions(name):
    return ("u", 0), ("s", 0)


@pytest.mark.skipif(nvrtc.library() is None, reason="there is no NVRTC: pip install nvidia-cuda-nvrtc-cu12")
@pytest.mark.parametrize("architecture", ["compute_80", "compute_90"])
@pytest.mark.parametrize("name, dtype, method", [
    ("lorenz", np.float64, "RK45"), ("lorenz", np.float32, "Tsit5"), ("powers", np.float32, "RK45"),
    ("elementary", np.float64, "RK45"), ("piecewise", np.float64, "RK4"), ("limits", np.float32, "RK45"),
    ("lorenz", np.float32, "Rodas5P"),
])  # fmt: skip
def test_nvrtc_makes_ptx_of_it_without_a_warning(name, dtype, method, architecture):
    options = [*EnsembleGPU().options, f"--gpu-architecture={architecture}"]
    carried = () if method == "Rodas5P" else directions(name)
    for kernel, along in (("forward", ()), ("forward", carried), ("reverse", ())):
        ptx, log = nvrtc.ptx_of(plan(name, dtype, method, directions=along).text(kernel), options)
        assert ptx, log
        # Functions and numbers that this f doesn't need are declared all the same.
        assert set(re.findall(r"warning #(\d+)", log)) <= {"177", "550"}, log
        assert f".entry {kernel}" in ptx


@pytest.mark.skipif(nvrtc.library() is None, reason="there is no NVRTC: pip install nvidia-cuda-nvrtc-cu12")
def test_contraction_is_an_option():
    text = plan("lorenz").text("forward")
    ptx = {
        contract: nvrtc.ptx_of(text, [*EnsembleGPU(contract=contract).options, "--gpu-architecture=compute_90"])[0]
        for contract in (True, False)
    }
    # Functions as pow are made of fused operations either way.
    assert ptx[True].count("fma.rn.f64") > ptx[False].count("fma.rn.f64") + 50


@pytest.mark.skipif(nvrtc.library() is None, reason="there is no NVRTC: pip install nvidia-cuda-nvrtc-cu12")
def test_a_mistake_is_found():
    ptx, log = nvrtc.ptx_of(plan("lorenz").text("forward").replace("auto now =", "auto then ="), ["--std=c++14"])
    assert ptx is None and "error" in log


@pytest.mark.few(1)
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
@pytest.mark.parametrize("name, dtype, watched, method", [
    ("lorenz", np.float64, False, "RK45"),
    pytest.param("powers", np.float32, False, "RK45", marks=pytest.mark.thorough),
    pytest.param("lorenz", np.float64, True, "RK45", marks=pytest.mark.thorough),
    ("lorenz", np.float64, True, "Rodas5P"),
])  # fmt: skip
def test_nvcc_makes_ptx_of_it(name, dtype, watched, method, tmp_path):
    options = {"events": events(name)} if watched else {"directions": (("u", 1), ("s", 0))}
    for kernel in ("forward", "reverse"):
        (tmp_path / "kernel.cu").write_text(plan(name, dtype, method, **options).text(kernel))
        command = ["nvcc", "--ptx", "-Werror", "all-warnings", "-diag-suppress", "177,550", "kernel.cu", "-o", "kernel.ptx"]
        made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50)
        assert made.returncode == 0, made.stderr
        ptx = (tmp_path / "kernel.ptx").read_text()
        assert f".entry {kernel}" in ptx
        if name == "lorenz":
            # The state lives in registers: nothing is kept in memory of the thread's own.
            assert ".local" not in ptx


@pytest.mark.thorough
@pytest.mark.skipif(None in (shutil.which("nvcc"), shutil.which("ptxas")), reason="there is no nvcc with ptxas")
@pytest.mark.parametrize("architecture", [pytest.param("sm_80", marks=pytest.mark.thorough), "sm_90"])
def test_the_lorenz_kernels_stay_in_registers(architecture, tmp_path):
    for kernel in ("forward", "reverse"):
        (tmp_path / "kernel.cu").write_text(plan("lorenz").text(kernel))
        command = ["nvcc", f"-arch={architecture}", "-cubin", "-Xptxas", "-v", "kernel.cu", "-o", "kernel.cubin"]
        made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50)
        assert made.returncode == 0, made.stderr
        registers = [int(number) for number in re.findall(r"Used (\d+) registers", made.stderr)]
        spilled = [int(number) for number in re.findall(r"(\d+) bytes spill", made.stderr)]
        assert len(registers) == 1 and max(registers) <= 168 and not any(spilled), made.stderr
