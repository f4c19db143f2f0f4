"""The GPUs of this node, the reports of the MPI library, and the settings for the communication of device arrays.

The settings are read from the environment and made equal on all ranks: a setting on one rank applies to all, since not
every launcher passes variables on to all ranks. All ranks or none sum large arrays, even host arrays, by an exchange of
blocks. So at the start the ranks agree whether MPI may get device memory from any of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import NamedTuple, TypeVar

import mpi4py
import numpy as np
from mpi4py import MPI

from mpiad._typing import Comm
from mpiad.environment_variables import switch
from mpiad.transport.launcher import output_of

_CUDA = Path("/proc/driver/nvidia/gpus")


def gpus_of_node() -> list[str]:
    """Return the names of this node's NVIDIA GPUs, including those hidden by the environment."""
    if names := _of_the_driver():
        return names
    lines = output_of("nvidia-smi", "-L").splitlines()
    return [line.partition(":")[2].partition("(")[0].strip() for line in lines if line.startswith("GPU ")]


def _of_the_driver() -> list[str]:
    lines = [
        line
        for file in sorted(_CUDA.glob("*/information"))
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines()
    ]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


def may_use_gpu() -> bool:
    """Return whether this process might use a GPU, without running a program."""
    # In WSL and some containers the driver shows no folder, but nvidia-smi is installed.
    return bool(visible(1) and (_of_the_driver() or shutil.which("nvidia-smi")))


def visible(count: int) -> list[str]:
    """Return the GPUs that this process may use, as named in the environment, by default the numbers below `count`."""
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        return [str(number) for number in range(count)]
    chosen = [word.strip() for word in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]
    return [word for word in chosen if word not in ("", "-1", "NoDevFiles")]


def device_of(local_rank: int, count: int) -> str:
    """Return the GPU of this process: CuPy's current device if CuPy is loaded, else chosen by the local rank."""
    seen = visible(count)
    if not seen:
        return ""
    cupy = sys.modules.get("cupy")
    number = cupy.cuda.runtime.getDevice() if cupy is not None else local_rank % len(seen)
    return seen[number] if number < len(seen) else str(number)


_LEVELS = {getattr(MPI, f"THREAD_{name.upper()}"): name for name in ("single", "funneled", "serialized", "multiple")}
_CUDA_SUPPORT = 0  # MPIX_GPU_SUPPORT_CUDA


class Library(NamedTuple):
    """An MPI library."""

    vendor: str  # such as "MPICH"
    version: str  # such as "5.0.2"
    standard: str  # the version of the MPI standard that it follows
    threads: str  # level of thread support: "single", "funneled", "serialized" or "multiple"
    path: str  # its file, "" if the system doesn't report it
    takes_device_buffers: str  # whether it accesses GPU memory: "yes (CUDA)", "no" or "unknown"
    mpi4py: str  # version of mpi4py


def library() -> Library:
    """Return the properties that the loaded MPI library reports; MPI must be initialized."""
    vendor, version = MPI.get_vendor()
    path, standard = _path(), _dotted(MPI.Get_version())
    threads = _LEVELS[MPI.Query_thread()]
    return Library(vendor, _dotted(version), standard, threads, path, device_buffers(), mpi4py.__version__)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _path() -> str:
    maps = Path("/proc/self/maps")
    files = (
        [line.rpartition(" ")[2] for line in maps.read_text(encoding="utf-8", errors="replace").splitlines()]
        if maps.exists()
        else []
    )
    return next((file for file in files if Path(file).name.startswith(("libmpi.", "libmpi_abi.", "libmpich."))), "")


def device_buffers() -> str:
    """Return as text whether the library reports that it can access device memory."""
    return {None: "unknown", False: "no", True: "yes (CUDA)"}[supports_cuda()]


def supports_cuda() -> bool | None:
    """Return whether the library reports that it can access the memory of CUDA devices; None without a report."""
    # mpi4py doesn't wrap these extensions. CDLL returns the library that is already loaded.
    with contextlib.suppress(OSError):
        loaded = ctypes.CDLL(_path() or None)
        if hasattr(loaded, "MPIX_GPU_query_support"):
            # MPICH. Before version 4, its other function ends the process if MPICH was built without GPUs.
            supported = ctypes.c_int(0)
            answers = loaded.MPIX_GPU_query_support(_CUDA_SUPPORT, ctypes.byref(supported)) == MPI.SUCCESS
            return answers and bool(supported.value)
        if hasattr(loaded, "MPIX_Query_cuda_support"):
            return bool(loaded.MPIX_Query_cuda_support())
    info = MPI.COMM_WORLD.Get_info()
    reported = info.Get("mpi_memory_alloc_kinds")  # of MPI 4.1
    info.Free()
    return "cuda" in [kind.split(":")[0] for kind in reported.split(",")] if reported else None


T = TypeVar("T")

_MOST = np.iinfo(np.int64).max
_EXCHANGED = 4 << 20  # bytes


class DeviceSettings(NamedTuple):
    """The settings for the communication of device arrays."""

    cuda_aware: bool | None = None  # whether MPI accesses device memory directly; None: test it
    pinned: int = 256 << 20  # bytes of unused page-locked host memory that are kept
    exchanged: float = inf  # bytes of the largest array that isn't summed by an exchange of blocks
    ipc: bool = True  # whether ranks of a node read each other's device memory, if they can


_present = DeviceSettings()


def present() -> DeviceSettings:
    """Return the current settings."""
    return _present


def put(settings: DeviceSettings) -> DeviceSettings:
    """Change the settings, which must be the same on all ranks; return the previous ones."""
    global _present
    before, _present = _present, settings
    return before


def exchanges(nbytes: int) -> bool:
    """Return whether arrays of this size are summed by an exchange of blocks; the same on all ranks."""
    return nbytes > _present.exchanged


def from_environment() -> DeviceSettings:
    """Return the settings in the environment; raise a ValueError for an invalid value."""
    given, default = os.environ.get("MPIAD_DEVICE_PINNED", ""), DeviceSettings().pinned
    if given and not (given.isascii() and given.isdecimal() and int(given) < _MOST):
        raise ValueError(f"MPIAD_DEVICE_PINNED must be a number of bytes, 0 or more, but got {given!r}.")
    pinned, ipc = int(given) if given else default, switch("MPIAD_CUDA_IPC", True)
    return DeviceSettings(switch("MPIAD_CUDA_AWARE", None), pinned, ipc=ipc)


def start(comm: Comm) -> None:
    """Agree on the settings in all ranks' environments; a ValueError on all ranks if a value is invalid; collective."""

    def numbers(wanted: DeviceSettings) -> list[float]:
        # Each flag is 0 if a condition holds, so the minimum is 0 if it holds on any rank: MPIAD_CUDA_AWARE is 0; it is 1;
        # there may be device arrays; MPI accesses them directly; or MPIAD_CUDA_IPC is 0.
        brings, pinned = may_bring_arrays(), wanted.pinned if os.environ.get("MPIAD_DEVICE_PINNED") else inf
        asks = [wanted.cuda_aware is not False, wanted.cuda_aware is not True]
        return [*asks, not brings, not (brings and supports_cuda()), pinned, wanted.ipc]

    least = minima_over_ranks(comm, from_environment, numbers, "MPIAD_CUDA_AWARE or MPIAD_DEVICE_PINNED")
    cuda_aware = None if least[0] and least[1] else bool(least[0])  # if ranks request both 0 and 1: 0, which always works
    direct = not least[3] if cuda_aware is None else cuda_aware and not least[2]
    pinned = DeviceSettings().pinned if least[4] == inf else int(least[4])
    put(DeviceSettings(cuda_aware, pinned, _EXCHANGED if direct else inf, bool(least[5])))


def minima_over_ranks(
    comm: Comm, read: Callable[[], T], numbers: Callable[[T], list[float]], variables: str
) -> list[float]:
    """Return minima over the ranks of ``numbers(read())``; raise a ValueError of `read` on all ranks; collective."""
    wrong, mine = None, list[float]()
    try:
        mine = numbers(read())
    except ValueError as error:
        wrong = error
    if comm.allreduce(wrong is not None, MPI.LOR):
        raise wrong or ValueError(f"{variables} has an invalid value on another rank.")
    least = np.empty(len(mine))
    comm.Allreduce(np.array(mine, float), least, MPI.MIN)
    return least.tolist()


def may_bring_arrays() -> bool:
    """Return whether this process could have arrays on a GPU, without loading libraries."""
    return ("cupy" in sys.modules or importlib.util.find_spec("cupy") is not None) and may_use_gpu()
