"""CUDA C on CuPy's devices, as `device_kernels` asks for it. Loaded when the first kernel is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import cupy
import numpy as np

from mpiad.transport.cupy_arrays import CupyArrays, on_device


class CupyKernel:
    """A kernel of NVRTC's; see `device_kernels.DeviceKernel`."""

    def __init__(self, function: Any):
        self.function = function
        self.registers, self.local_bytes = int(function.num_regs), int(function.local_size_bytes)


class CupyLauncher:
    """Compiles and runs kernels on one device; see `device_kernels.Launcher`, also for all methods."""

    def __init__(self, arrays: CupyArrays):
        self._arrays = arrays
        self.multiprocessors = int(cupy.cuda.Device(arrays.device).attributes["MultiProcessorCount"])

    def compiled(self, text: str, name: str, options: tuple[str, ...]) -> CupyKernel:
        """Compile a text; CuPy keeps the machine code on disk for the next process."""
        with self._arrays.current():
            return CupyKernel(cupy.RawModule(code=text, options=options, backend="nvrtc").get_function(name))

    def launch(self, kernel: Any, blocks: int, threads: int, arguments: Sequence[Any]) -> None:
        """Queue a run."""
        given = tuple([np.uintp(0) if x is None else x for x in arguments])
        with self._arrays.current():
            kernel.function((blocks,), (threads,), given)

    def free_bytes(self) -> int:
        """Return the free memory of the device, and the unused memory of CuPy's pool."""
        with self._arrays.current():
            free, _ = cupy.cuda.runtime.memGetInfo()
            return int(free) + int(cupy.get_default_memory_pool().free_bytes())


@cache
def _on(device: int) -> CupyLauncher:
    return CupyLauncher(on_device(device))


def launcher_of_device(arrays: CupyArrays) -> CupyLauncher:
    """Return the launcher of kernels for the device of these arrays."""
    return _on(arrays.device)


def current_arrays(device: int | None = None) -> CupyArrays:
    """Return the module for arrays on a device, by default the current one; a RuntimeError if this process sees no GPU."""
    try:
        return on_device(int(cupy.cuda.runtime.getDevice()) if device is None else device)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise RuntimeError(f"CuPy {cupy.__version__} finds no GPU that this process may use: {error}") from error
