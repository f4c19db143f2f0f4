"""Access of MPI to device memory: whether it is CUDA-aware, and page-locked host memory for an MPI that isn't."""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections import deque

import numpy as np
from mpi4py import MPI
from numpy.typing import DTypeLike

from mpiad._typing import Shape
from mpiad.transport.devices import device_settings
from mpiad.transport.devices.device_arrays import ArrayModule, arrays_named
from mpiad.transport.devices.device_settings import device_buffers, gpus_of_node, supports_cuda

# Whether MPI can access device memory is reported by the library, and tested before the first use, since some CUDA-aware
# builds are misconfigured. In the test this process sends arrays to itself. It runs only if the library reports support,
# since other libraries crash. ``MPIAD_CUDA_AWARE`` replaces report and test.

# Open MPI's nonblocking reductions access device memory from the host, and crash; its documentation excludes all
# nonblocking collectives.
_BLOCKING_ONLY = MPI.get_vendor()[0] == "Open MPI"
_LENGTHS = 8, 1 << 16  # MPI uses different protocols for short and long messages
_REMEDY = "Arrays are copied to the host. With MPIAD_CUDA_AWARE=0 they always are."
_log = logging.getLogger("mpiad")
_always_nonblocking = False
_tried: dict[tuple[type, int], bool | None] = {}  # None if the library doesn't report support


def takes_directly(arrays: ArrayModule, nonblocking: bool = False) -> bool:
    """Return whether MPI accesses a device's arrays directly (`nonblocking`: in such collectives); ranks may differ."""
    if _BLOCKING_ONLY and (nonblocking or _always_nonblocking):
        return False
    forced = device_settings.present().cuda_aware
    if forced is not None:
        return forced
    key = arrays.kind, arrays.device
    if key not in _tried:
        _tried[key] = _passes(arrays) if supports_cuda() else None
    return bool(_tried[key])


def set_nonblocking(always: bool) -> None:
    """Set whether blocking collectives are executed as nonblocking ones, as with debug mode or a timeout."""
    global _always_nonblocking
    _always_nonblocking = always


def device_access() -> str:
    """Return as text whether MPI can access device arrays directly, and the source of this information."""
    forced, said = device_settings.present().cuda_aware, device_buffers()
    if forced is not None:
        return f"{'yes' if forced else 'no'}, by MPIAD_CUDA_AWARE={forced:d} (the library itself says: {said})"
    # If the library reports support, CuPy is loaded here, even if the program has no CuPy array.
    if supports_cuda() and importlib.util.find_spec("cupy") is not None and gpus_of_node():
        try:
            takes_directly(arrays_named("CuPy"))
        except Exception as error:  # noqa: BLE001 - CuPy may raise anything while it is loaded
            _log.warning("CuPy is installed, but can't be used: %s: %s.", type(error).__name__, error)
    for (kind, device), passed in _tried.items():
        if passed is not None:
            package = kind.__module__.partition(".")[0]
            said += f"; with arrays of {package} on device {device} it {'works' if passed else 'fails'}"
    return said


def _passes(arrays: ArrayModule) -> bool:
    """Return whether arrays that this process sends to itself arrive unchanged."""
    alone, right = MPI.COMM_SELF.Dup(), True
    try:
        for length in _LENGTHS:
            numbers = np.arange(length) + 0.5  # no zeros, so that entries that were never written are detected
            sent, got = arrays.to_device(numbers), arrays.full((length,), 0, numbers.dtype)
            arrays.synchronize()
            alone.Sendrecv(arrays.message(sent), 0, 0, arrays.message(got), 0, 0)
            right = right and bool((arrays.to_host(got) == numbers).all())
    except Exception as error:  # noqa: BLE001 - after any error, arrays are staged
        _log.warning(
            "MPI reports that it can access device memory, but raised %s: %s. %s", type(error).__name__, error, _REMEDY
        )
        return False
    finally:
        alone.Free()
    if not right:
        _log.warning("MPI reports that it can access device memory, but delivers other numbers than were sent. %s", _REMEDY)
    return right


# Page-locked host memory, through which device arrays are copied if MPI can't access the device.
#
# Locking pages takes longer than copying them, so a pool stores unused memory, in size classes. Memory returns to its pool
# when the last view of it is dropped; MPI's requests hold a view, even after an exception. If the device hasn't finished a
# copy, its event is stored with the memory, and the next user waits for it.


_LEAST = 4096


class PinnedBlock:
    """Memory of a pool in use. `written`, `read`: events after the last queued copy to or from it, or None."""

    __slots__ = ("__array_interface__", "__weakref__", "_memory", "_pool", "read", "written")

    def __init__(self, pool: Pool, memory: np.ndarray):
        self._pool, self._memory = pool, memory
        self.written: object = None
        self.read: object = None
        # An array made from this attribute refers to this object, and all views of that array do.
        self.__array_interface__ = memory.__array_interface__

    def array(self, shape: Shape, dtype: DTypeLike) -> np.ndarray:
        """Return the first part of the memory as an array."""
        dtype = np.dtype(dtype)
        return np.asarray(self)[: dtype.itemsize * int(np.prod(shape))].view(dtype).reshape(shape)

    def __del__(self) -> None:
        self._pool.release(self._memory, (self.written, self.read))


class Pool:
    """Memory for the arrays of one device. `kept`: the unused bytes."""

    def __init__(self, arrays: ArrayModule):
        self._arrays = arrays
        self._idle: dict[int, deque[tuple[np.ndarray, tuple]]] = {}
        # Python may free an object, and so return memory, in the middle of another call.
        self._lock = threading.RLock()
        self.kept = 0
        self._closed = False

    def allocate(self, nbytes: int) -> PinnedBlock:
        """Return memory of at least `nbytes` bytes."""
        size = _size_class(nbytes)
        with self._lock:
            idle = self._idle.get(size)
            memory, after = idle.popleft() if idle else (None, ())
            self.kept -= size if memory is not None else 0
        self._await(after)
        return PinnedBlock(self, self._arrays.pinned(size) if memory is None else memory)

    def release(self, memory: np.ndarray, after: tuple) -> None:
        """Keep memory for its next use, or free it if enough is kept; `after`: events to wait for."""
        with self._lock:
            keeps = not self._closed and self.kept + memory.size <= device_settings.present().pinned
            if keeps:
                self._idle.setdefault(memory.size, deque()).append((memory, after))
                self.kept += memory.size
        if not keeps:
            self._await(after)  # the device may still read it

    def close(self) -> None:
        """Free the unused memory, and memory returned after this call."""
        with self._lock:
            self._closed = True
            idle = [held for queue in self._idle.values() for held in queue]
            self._idle.clear()
            self.kept = 0
        for _, after in idle:
            self._await(after)

    def _await(self, after: tuple) -> None:
        for event in after:
            if event is not None:
                self._arrays.wait(event)


def _size_class(nbytes: int) -> int:
    if nbytes <= _LEAST:
        return _LEAST
    # In steps of an eighth of the next power of two, so at most a quarter is wasted.
    step = 1 << max((nbytes - 1).bit_length() - 3, 0)
    return -(-nbytes // step) * step


_pools: dict[tuple[type, int], Pool] = {}


def pool_of(arrays: ArrayModule) -> Pool:
    """Return the pool of a device."""
    if (key := (arrays.kind, arrays.device)) not in _pools:
        _pools.setdefault(key, Pool(arrays))  # another thread may have stored one
    return _pools[key]


def close_pools() -> None:
    """Free the memory of all pools."""
    for pool in _pools.values():
        pool.close()
    _pools.clear()
