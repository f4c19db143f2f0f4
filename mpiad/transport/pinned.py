"""Page-locked host memory, through which arrays travel between a device and an MPI that can't read it.

To lock pages takes longer than to copy them, so memory that was used once is kept for the next array, in classes of
size a quarter of an octave apart. It is lent as an array, and returned when the last view of that array is dropped:
a request of MPI's (under way, also one that an exception has abandoned) holds such a view. A copy
that the device hasn't finished yet leaves its event with the memory, and the next user waits for it.
"""

from __future__ import annotations

import threading
from collections import deque

import numpy as np
from numpy.typing import DTypeLike

from mpiad._typing import Shape
from mpiad.transport import device_settings
from mpiad.transport.device_arrays import ArrayModule

_LEAST = 4096


class Loan:
    """Memory of a pool in use; it goes back when neither this object nor a view of its array is left.

    `written`, `read` (or None): behind the last copy that was queued into it, and from it.
    """

    __slots__ = ("__array_interface__", "__weakref__", "_memory", "_pool", "read", "written")

    def __init__(self, pool: Pool, memory: np.ndarray):
        self._pool, self._memory, self.written, self.read = pool, memory, None, None
        # An array made from this attribute refers to this object, and all views of that array do.
        self.__array_interface__ = memory.__array_interface__

    def array(self, shape: Shape, dtype: DTypeLike) -> np.ndarray:
        """Return the memory as an array, or the first part of it."""
        dtype = np.dtype(dtype)
        return np.asarray(self)[: dtype.itemsize * int(np.prod(shape))].view(dtype).reshape(shape)

    def __del__(self) -> None:
        self._pool.take_back(self._memory, (self.written, self.read))


class Pool:
    """Memory for the arrays of one device.

    `lent`, `kept`: bytes in use, and bytes that wait for their next use.
    """

    def __init__(self, arrays: ArrayModule):
        self._arrays = arrays
        self._idle: dict[int, deque[tuple[np.ndarray, tuple]]] = {}
        # Memory may be returned in the middle of another call, whenever Python frees an object.
        self._lock = threading.RLock()
        self.lent = self.kept = 0
        self._closed = False

    def lend(self, nbytes: int) -> Loan:
        """Lend at least `nbytes` bytes."""
        size = _size_class(nbytes)
        with self._lock:
            idle = self._idle.get(size)
            memory, after = idle.popleft() if idle else (None, ())
            self.kept -= size if memory is not None else 0
            self.lent += size
        self._await(after)
        if memory is None:
            try:
                memory = self._arrays.pinned(size)
            except BaseException:
                self.lent -= size
                raise
        return Loan(self, memory)

    def take_back(self, memory: np.ndarray, after: tuple) -> None:
        """Keep memory for its next use, or free it if enough is kept."""
        with self._lock:
            self.lent -= memory.size
            keeps = not self._closed and self.kept + memory.size <= device_settings.present().pinned
            if keeps:
                self._idle.setdefault(memory.size, deque()).append((memory, after))
                self.kept += memory.size
        if not keeps:
            self._await(after)  # the device may still read it

    def close(self) -> None:
        """Free the memory that is kept, and memory that is returned after this call."""
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
    # An eighth of the next power of two: four classes to the octave, so a quarter is wasted at most.
    step = 1 << max((nbytes - 1).bit_length() - 3, 0)
    return -(-nbytes // step) * step


_pools: dict[tuple[type, int], Pool] = {}


def pool_of(arrays: ArrayModule) -> Pool:
    """Return the pool of a device, made at its first use."""
    key = arrays.kind, arrays.device
    found = _pools.get(key)
    if found is None:
        found = _pools.setdefault(key, Pool(arrays))  # another thread may have made it
    return found


def close_pools() -> None:
    """Free the memory of all pools."""
    for pool in _pools.values():
        pool.close()
    _pools.clear()
