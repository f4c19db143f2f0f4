"""The GPUs of this node, found without loading their libraries."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

_CUDA, _ROCM = Path("/proc/driver/nvidia/gpus"), Path("/sys/class/kfd/kfd/topology/nodes")
_ANSWER_SECONDS = 3


def gpus_of_node() -> list[str]:
    """Return the names of this node's GPUs, including those hidden by the environment."""
    return _of_the_driver() or _of_nvidia_smi() or _of_rocm()


def _of_the_driver() -> list[str]:
    names = []
    for file in sorted(_CUDA.glob("*/information")):
        lines = file.read_text(errors="replace").splitlines()
        names += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return names


def _of_nvidia_smi() -> list[str]:
    program = shutil.which("nvidia-smi")
    if not program:
        return []
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_ANSWER_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [line.partition(":")[2].partition("(")[0].strip() for line in lines if line.startswith("GPU ")]


def _of_rocm() -> list[str]:
    names = []
    for file in sorted(_ROCM.glob("*/properties")):
        facts = dict(line.split(maxsplit=1) for line in file.read_text(errors="replace").splitlines() if " " in line)
        if facts.get("simd_count", "0") != "0":  # the others are CPUs
            names.append(f"AMD GPU (gfx {facts.get('gfx_target_version', '?')})")
    return names


def may_be_used() -> bool:
    """Return whether this process might use a GPU, without running a program."""
    # In WSL and some containers the driver shows no folder, but nvidia-smi is installed.
    return bool(visible(1) and (_of_the_driver() or shutil.which("nvidia-smi") or _of_rocm()))


def visible(count: int) -> list[str]:
    """Return the GPUs that this process may use, as the environment names them; by default their numbers."""
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if name in os.environ:
            chosen = [word.strip() for word in os.environ[name].split(",")]
            return [word for word in chosen if word not in ("", "-1", "NoDevFiles")]
    return [str(number) for number in range(count)]


def device_of(local_rank: int, count: int) -> str:
    """Return the GPU of this process: CuPy's current device if CuPy is loaded, else chosen by the local rank."""
    seen = visible(count)
    if not seen:
        return ""
    cupy = sys.modules.get("cupy")
    number = cupy.cuda.runtime.getDevice() if cupy is not None else local_rank % len(seen)
    return seen[number] if number < len(seen) else str(number)
