"""Access of MPI to the memory of arrays: directly, or through page-locked memory on the host.

There are three classes with the same methods:

- `send_buffer(array)`: the buffer from which MPI reads a C-contiguous array, which mustn't change until then.
- `send_copy(array)`: the buffer of a private copy.
- `destination(shape, dtype)`: memory for a received array. `recv_buffer(destination)`: the buffer to which MPI writes.
  `received(destination)`: the received array, on the device.

MPI accesses host arrays directly (`_Host`), and if it is CUDA-aware also device arrays (`Direct`). Then the current stream
is synchronized before MPI gets a buffer, since the device may still write there. Otherwise device arrays are staged
(`Staged`): copied to the host before they are sent. Received data are copied to the device on the current stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from mpiad._typing import Array, Buffer, Shape
from mpiad.transport.core.buffers import Spec
from mpiad.transport.devices.cuda_aware import takes_directly
from mpiad.transport.devices.device_arrays import ArrayModule, arrays_of
from mpiad.transport.devices.pinned import Loan, pool_of

Destination: TypeAlias = Any  # the result of `destination`


class _Host:
    def send_buffer(self, array: np.ndarray) -> np.ndarray:
        return array

    def send_copy(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def destination(self, shape: Shape, dtype: DTypeLike) -> Destination:
        return np.empty(shape, dtype)

    def recv_buffer(self, destination: np.ndarray) -> np.ndarray:
        return destination

    def received(self, destination: np.ndarray) -> Array:
        return destination if destination.ndim else destination[()]


HOST = _Host()


class Direct:
    """Transfers of device arrays by a CUDA-aware MPI."""

    def __init__(self, arrays: ArrayModule):
        self.arrays = arrays

    def send_buffer(self, array: Array) -> Buffer:
        """Return the buffer of an array after the device has computed it."""
        self.arrays.synchronize()
        return self.arrays.message(array)

    def send_copy(self, array: Array) -> Buffer:
        """Return the buffer of a copy on the device."""
        return self.send_buffer(self.arrays.copy(array))

    def destination(self, shape: Shape, dtype: DTypeLike) -> Destination:
        """Allocate an array on the device."""
        return self.arrays.empty(shape, dtype)

    def recv_buffer(self, destination: Array) -> Buffer:
        """Return the buffer after previous writes of the device to this memory."""
        self.arrays.synchronize()
        return self.arrays.message(destination)

    def received(self, destination: Array) -> Array:
        """Return the array."""
        return destination


class StagedDestination(NamedTuple):
    """Host memory for a received array, which is then copied to a device."""

    loan: Loan
    array: np.ndarray


class Staged:
    """Transfers of device arrays by an MPI that isn't CUDA-aware."""

    def __init__(self, arrays: ArrayModule):
        self.arrays, self._pool = arrays, pool_of(arrays)

    def send_copy(self, array: Array) -> np.ndarray:
        """Return a complete copy on the host."""
        host = self._pool.lend(array.nbytes).array(array.shape, array.dtype)
        self.arrays.copy_to_host(array, host)
        self.arrays.wait(self.arrays.record())  # since MPI ignores streams
        return host

    send_buffer = send_copy

    def destination(self, shape: Shape, dtype: DTypeLike) -> Destination:
        """Allocate memory on the host, from a pool."""
        loan = self._pool.lend(np.dtype(dtype).itemsize * int(np.prod(shape)))
        return StagedDestination(loan, loan.array(shape, dtype))

    def recv_buffer(self, destination: StagedDestination) -> np.ndarray:
        """Return the host memory."""
        return destination.array

    def received(self, destination: StagedDestination) -> Array:
        """Queue the copy to the device, and return the array there."""
        out = self.arrays.empty(destination.array.shape, destination.array.dtype)
        self.arrays.copy_to_device(destination.array, out)
        destination.loan.read = self.arrays.record()  # the memory is reused after this copy
        return out


Transfer = _Host | Direct | Staged


def transfer_of(arrays: ArrayModule | None, nonblocking: bool = False) -> Transfer:
    """Return the transfers for arrays of a device, or of the host if `arrays` is None.

    `nonblocking`: for nonblocking collectives, which may need staging although MPI is CUDA-aware.
    """
    if arrays is None:
        return HOST
    return Direct(arrays) if takes_directly(arrays, nonblocking) else Staged(arrays)


def send_buffer(array: Array) -> Buffer:
    """Return the buffer from which MPI reads a C-contiguous array in a blocking call."""
    return transfer_of(arrays_of(array)).send_buffer(array)


def communicate(call: Callable[[Any, Buffer], object], sent: Array | None, spec: Spec) -> Array:
    """Return the array with this spec that MPI writes in ``call(send_buffer, recv_buffer)``; it reads `sent`, if any."""
    transfer = transfer_of(spec.arrays)
    destination = transfer.destination(spec.shape, spec.dtype)
    call(None if sent is None else send_buffer(sent), transfer.recv_buffer(destination))
    return transfer.received(destination)
