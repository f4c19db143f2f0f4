"""Properties that the MPI library reports."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

import mpi4py
from mpi4py import MPI

_LEVELS = {getattr(MPI, f"THREAD_{name.upper()}"): name for name in ("single", "funneled", "serialized", "multiple")}
_QUERIES = {"CUDA": "MPIX_Query_cuda_support", "ROCm": "MPIX_Query_rocm_support"}
_NUMBERS = {"CUDA": 0, "ROCm": 2}  # MPIX_GPU_SUPPORT_CUDA, MPIX_GPU_SUPPORT_HIP


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
    if not maps.exists():
        return ""
    for line in maps.read_text().splitlines():
        file = line.rpartition(" ")[2]
        if Path(file).name.startswith(("libmpi.", "libmpi_abi.", "libmpich.")):
            return file
    return ""


def device_buffers() -> str:
    """Return as text whether the library reports that it can access device memory."""
    kinds = device_kinds()
    return "unknown" if kinds is None else f"yes ({', '.join(kinds)})" if kinds else "no"


def device_kinds() -> list[str] | None:
    """Return the kinds of devices whose memory the library reports to access, such as "CUDA"; None without a report."""
    path = _path()
    asked = _asked(path)
    if asked:
        return [kind for kind, answer in asked.items() if answer]
    info = MPI.COMM_WORLD.Get_info()
    reported = (info.Get("mpi_memory_alloc_kinds") or "").split(",")  # of MPI 4.1
    info.Free()
    words = {word.split(":")[0] for word in reported}
    return [kind for kind, name in (("CUDA", "cuda"), ("ROCm", "rocm")) if name in words] if reported != [""] else None


def _asked(path: str) -> dict[str, bool]:
    # mpi4py doesn't wrap these extensions. CDLL returns the library that is already loaded.
    try:
        loaded = ctypes.CDLL(path or None)
    except OSError:
        return {}
    if hasattr(loaded, "MPIX_GPU_query_support"):
        # MPICH. Before version 4, its other function ends the process if MPICH was built without GPUs.
        found, supported = {}, ctypes.c_int(0)
        for kind, number in _NUMBERS.items():
            answers = loaded.MPIX_GPU_query_support(number, ctypes.byref(supported)) == MPI.SUCCESS
            found[kind] = answers and bool(supported.value)
        return found
    return {kind: bool(getattr(loaded, name)()) for kind, name in _QUERIES.items() if hasattr(loaded, name)}
