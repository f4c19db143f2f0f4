"""Page-locked host memory, through which arrays travel between a device and an MPI that can't read it.

Locking pages takes longer than copying them, so unused memory is kept for the next array, in size classes. Memory is
returned to its pool when the last view is dropped; MPI's requests hold a view, even after an exception. If the device
hasn't finished a copy, its event is kept with the memory, and the next user waits for it.
"""

from __future__ import annotations

import threading
from collections import deque

import numpy as np
from numpy.typing import DTypeLike

from mpiad._typing import Shape
from mpiad.transport.devices import device_settings
from mpiad.transport.devices.device_arrays import ArrayModule

_LEAST = 4096


class Loan:
    """Memory of a pool in use. `written`, `read`: events after the last queued copy to or from it, or None."""

    __slots__ = ("__array_interface__", "__weakref__", "_memory", "_pool", "read", "written")

    def __init__(self, pool: Pool, memory: np.ndarray):
        self._pool, self._memory, self.written, self.read = pool, memory, None, None
        # An array made from this attribute refers to this object, and all views of that array do.
        self.__array_interface__ = memory.__array_interface__

    def array(self, shape: Shape, dtype: DTypeLike) -> np.ndarray:
        """Return the first part of the memory as an array."""
        dtype = np.dtype(dtype)
        return np.asarray(self)[: dtype.itemsize * int(np.prod(shape))].view(dtype).reshape(shape)

    def __del__(self) -> None:
        self._pool.take_back(self._memory, (self.written, self.read))


class Pool:
    """Memory for the arrays of one device. `in_use`, `kept`: the bytes in use, and the unused bytes."""

    def __init__(self, arrays: ArrayModule):
        self._arrays = arrays
        self._idle: dict[int, deque[tuple[np.ndarray, tuple]]] = {}
        # Python may free an object, and so return memory, in the middle of another call.
        self._lock = threading.RLock()
        self.in_use = self.kept = 0
        self._closed = False

    def lend(self, nbytes: int) -> Loan:
        """Return memory of at least `nbytes` bytes."""
        size = _size_class(nbytes)
        with self._lock:
            idle = self._idle.get(size)
            memory, after = idle.popleft() if idle else (None, ())
            self.kept -= size if memory is not None else 0
            self.in_use += size
        self._await(after)
        if memory is None:
            try:
                memory = self._arrays.pinned(size)
            except BaseException:
                self.in_use -= size
                raise
        return Loan(self, memory)

    def take_back(self, memory: np.ndarray, after: tuple) -> None:
        """Keep memory for its next use, or free it if enough is kept; `after`: events to wait for."""
        with self._lock:
            self.in_use -= memory.size
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
    key = arrays.kind, arrays.device
    found = _pools.get(key)
    if found is None:
        found = _pools.setdefault(key, Pool(arrays))  # another thread may have stored one
    return found


def close_pools() -> None:
    """Free the memory of all pools."""
    for pool in _pools.values():
        pool.close()
    _pools.clear()
