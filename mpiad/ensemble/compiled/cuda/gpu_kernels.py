"""Kernels on devices, by their texts: each is compiled once in a process for each device."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from typing import Any, NamedTuple

from mpiad.transport.device_kernels import DeviceKernel, Launcher

__all__ = ["Loaded", "loaded", "threads_per_block"]

_log = logging.getLogger("mpiad")

_lock = threading.RLock()
_known: dict[tuple[Any, str], Loaded] = {}


class Loaded(NamedTuple):
    """A kernel on a device.

    Parameters
    ----------
    text : str
        Its source.
    """

    kernel: DeviceKernel
    text: str


def loaded(launcher: Launcher, text: str, name: str, options: tuple[str, ...]) -> Loaded:
    """Return a kernel of a text, compiled where this process hasn't done so for this device.

    Parameters
    ----------
    text : str
        CUDA C.
    name : {"forward", "reverse"}
    """
    key = launcher, hashlib.sha256("\n".join([name, *options, text]).encode()).hexdigest()
    # Under the lock: a second thread waits for the first one's kernel instead of compiling it, too.
    with _lock:
        if key not in _known:
            started = time.perf_counter()
            kernel = launcher.compiled(text, name, options)
            _log.info(
                "solve: the %s kernel was compiled for the GPU in %.2f s; each thread takes %d registers and %d bytes of "
                "local memory.", name, time.perf_counter() - started, kernel.registers, kernel.local_bytes,
            )  # fmt: skip
            _known[key] = Loaded(kernel, text)
        return _known[key]


def threads_per_block(count: int, multiprocessors: int) -> int:
    """Return how many threads a block has: 128, fewer where two blocks wouldn't come to each multiprocessor.

    A block leaves when its longest trajectory has ended, so it isn't larger than what hides latency. Registers never limit
    it: 256 threads may have the 255 that are the most there are.
    """
    return next((threads for threads in (128, 64) if count >= 2 * threads * multiprocessors), 32)
