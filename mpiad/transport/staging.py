"""Access of MPI to the memory of an array: directly, or through page-locked memory of the host.

There are three classes with the same methods. `lent` returns the buffer that MPI reads for a C-contiguous array, which
mustn't change until then, and `copied` the same in private memory; `room` makes the array that MPI writes to, `buffer`
returns MPI's view of it, and `home` returns the received array, on the device of the input. An array of the host is its
own buffer. So is one on a device, if MPI takes device memory; the current stream is then waited for before MPI sees any
of it, since the device may still be writing there (also to new memory: it may have been another array's). Otherwise it is
staged: copied to the host, waited for, and received data are copied back by a copy queued on the current stream, so
that later computations on the stream use them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from mpiad._typing import Array, Buffer, Shape
from mpiad.transport.cuda_aware import takes_directly
from mpiad.transport.device_arrays import ArrayModule
from mpiad.transport.pinned import Loan, pool_of

Room: TypeAlias = Any
"""Where an array comes to: what one of the ways has made, and takes itself."""


class _Host:
    """Arrays of the host."""

    def lent(self, array: np.ndarray) -> np.ndarray:
        """Return the array."""
        return array

    def copied(self, array: np.ndarray) -> np.ndarray:
        """Return a copy."""
        return array.copy()

    def room(self, shape: Shape, dtype: DTypeLike) -> Room:
        """Make an array."""
        return np.empty(shape, dtype)

    def buffer(self, room: np.ndarray) -> np.ndarray:
        """Return the array."""
        return room

    def home(self, room: np.ndarray) -> Array:
        """Return the array; a NumPy scalar if it has no dimensions, as NumPy's own functions do."""
        return room if room.ndim else room[()]


HOST = _Host()


class Direct:
    """Arrays of a device whose memory MPI takes."""

    def __init__(self, arrays: ArrayModule):
        self.arrays = arrays

    def lent(self, array: Array) -> Buffer:
        """Return the array for MPI, when the device has finished it."""
        self.arrays.synchronize()
        return self.arrays.message(array)

    def copied(self, array: Array) -> Buffer:
        """Return a copy on the device for MPI."""
        return self.lent(self.arrays.copy(array))

    def room(self, shape: Shape, dtype: DTypeLike) -> Room:
        """Make an array on the device."""
        return self.arrays.empty(shape, dtype)

    def buffer(self, room: Array) -> Buffer:
        """Return it for MPI, when nothing else is written there."""
        self.arrays.synchronize()
        return self.arrays.message(room)

    def home(self, room: Array) -> Array:
        """Return the array."""
        return room


class Landing(NamedTuple):
    """Host memory for a received array that is then copied to a device."""

    loan: Loan
    array: np.ndarray


class Staged:
    """Arrays of a device whose memory MPI can't read."""

    def __init__(self, arrays: ArrayModule):
        self.arrays, self._pool = arrays, pool_of(arrays)

    def lent(self, array: Array) -> np.ndarray:
        """Return a copy on the host, complete."""
        return self.copied(array)

    def copied(self, array: Array) -> np.ndarray:
        """Return a copy on the host, complete."""
        host = self._pool.lend(array.nbytes).array(array.shape, array.dtype)
        self.arrays.copy_to_host(array, host)
        self.arrays.wait(self.arrays.record())  # MPI reads it at once, ignoring streams
        return host

    def room(self, shape: Shape, dtype: DTypeLike) -> Room:
        """Borrow memory on the host."""
        loan = self._pool.lend(np.dtype(dtype).itemsize * int(np.prod(shape)))
        return Landing(loan, loan.array(shape, dtype))

    def buffer(self, room: Landing) -> np.ndarray:
        """Return that memory."""
        return room.array

    def home(self, room: Landing) -> Array:
        """Queue the copy to the device, and return its array."""
        out = self.arrays.empty(room.array.shape, room.array.dtype)
        self.arrays.copy_to_device(room.array, out)
        room.loan.read = self.arrays.record()  # the next user of the memory waits for this copy
        return out


Way = _Host | Direct | Staged


def way_of(arrays: ArrayModule | None, nonblocking: bool = False) -> Way:
    """Return the class of transfers to MPI, or to its nonblocking collectives; `arrays` is None on the host."""
    if arrays is None:
        return HOST
    return Direct(arrays) if takes_directly(arrays, nonblocking) else Staged(arrays)
