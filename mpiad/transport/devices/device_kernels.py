"""Kernels on a device: compilation of CUDA C source, and launches.

A device needs a `Launcher` besides its arrays (see `device_arrays`): one object per device, returned by
`launcher_of(arrays)`. Other kinds than CuPy's are added by `register_launcher`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from mpiad.transport.devices.device_arrays import ArrayModule


class DeviceKernel(Protocol):
    """A compiled kernel."""

    registers: int  # per thread
    local_bytes: int  # memory per thread for values that don't fit into registers


class Launcher(Protocol):
    """Compiler and launcher of kernels on one device."""

    multiprocessors: int  # this number of blocks can run at the same time

    def compiled(self, text: str, name: str, options: tuple[str, ...]) -> DeviceKernel:
        """Compile CUDA C for this device, and return the kernel with this name; may be cached per text."""
        ...

    def launch(self, kernel: DeviceKernel, blocks: int, threads: int, arguments: Sequence[Any]) -> None:
        """Queue a run of a kernel, with the numbers of blocks and of threads per block, on the current stream.

        Arguments are C-contiguous device arrays, None for a null pointer, int for ``long long``, float for ``double``, or
        NumPy scalars for their own types.
        """

    def free_bytes(self) -> int:
        """Return the bytes of device memory that can still be allocated."""
        ...


Maker = Callable[[Any], Launcher]

_makers: dict[type, Maker] = {}


def register_launcher(kind: type, maker: Maker) -> None:
    """Register ``maker(arrays) -> Launcher`` for a kind of arrays; it is called often, so it should cache launchers."""
    _makers[kind] = maker


def launcher_of(arrays: ArrayModule) -> Launcher:
    """Return the launcher for the device of these arrays; raise a TypeError for a kind of arrays without a launcher."""
    maker: Any = _makers.get(arrays.kind)
    if maker is None and arrays.name == "CuPy":
        from mpiad.transport.devices.cupy_arrays import launcher_of_device

        register_launcher(arrays.kind, launcher_of_device)
        maker = launcher_of_device
    if maker is None:
        raise TypeError(f"kernels run on CuPy's arrays, but got {arrays.name}'s; cupy.asarray(x) makes one without a copy.")
    return maker(arrays)


def selected_arrays(device: int | None = None) -> ArrayModule:
    """Return the module for arrays on a device; by default on the current one.

    An ImportError without CuPy; a RuntimeError if this process sees no GPU.
    """
    if find_spec("cupy") is None:
        raise ImportError("CuPy isn't installed: pip install mpiad[gpu] for CUDA 12, mpiad[gpu13] for CUDA 13")
    from mpiad.transport.devices.cupy_arrays import current_arrays

    return current_arrays(device)
