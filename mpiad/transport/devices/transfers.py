"""Transfers of arrays between MPI and the host or a device.

A transfer provides the `buffer` from which MPI reads an array, or to which it writes one, which `received()` then returns.
There are three classes:

- `HostTransfer`: MPI accesses the array itself.
- `DirectTransfer`: MPI is CUDA-aware and accesses the device array itself. The current stream is synchronized before MPI
  gets the buffer, since the device may still write there.
- `StagedTransfer`: the array is copied through page-locked host memory.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpiad._typing import Array, Buffer
from mpiad.transport.devices.device_arrays import ArrayModule, Spec, arrays_of, result
from mpiad.transport.devices.staging import pool_of, takes_directly

BufferCall = Callable[[Buffer, Buffer], object]  # of a send buffer and a receive buffer


def outgoing_transfer(array: Array, nonblocking: bool = False, copies: bool = False) -> Transfer:
    """Begin the transfer of a C-contiguous array that MPI reads; it mustn't change, unless MPI reads private `copies`."""
    if type(array) is np.ndarray or (arrays := arrays_of(array)) is None:
        return HostTransfer(array)
    if takes_directly(arrays, nonblocking):
        return DirectTransfer(arrays.copy(array) if copies else array, arrays)
    return StagedTransfer(Spec(array.shape, array.dtype, arrays), array)


def incoming_transfer(spec: Spec, nonblocking: bool = False) -> Transfer:
    """Begin the transfer of an array that MPI writes; `nonblocking`: in a nonblocking collective."""
    if spec.arrays is None:
        return HostTransfer(np.empty(spec.shape, spec.dtype))
    if takes_directly(spec.arrays, nonblocking):
        return DirectTransfer(spec.empty(), spec.arrays)
    return StagedTransfer(spec)


class HostTransfer:
    """The transfer of a host array."""

    __slots__ = ("buffer",)

    def __init__(self, array: np.ndarray):
        self.buffer: Buffer = array

    def received(self) -> Array:
        """Return the array, after MPI has written it."""
        return result(self.buffer)


class DirectTransfer:
    """The transfer of a device array by a CUDA-aware MPI."""

    def __init__(self, array: Array, arrays: ArrayModule):
        self._array, self._arrays = array, arrays

    @property
    def buffer(self) -> Buffer:
        """The buffer of the array."""
        self._arrays.synchronize()
        return self._arrays.message(self._array)

    def received(self) -> Array:
        """Return the array, after MPI has written it."""
        return self._array


class StagedTransfer:
    """The transfer of a device array through host memory: of `array`, or of a new array that MPI writes."""

    def __init__(self, spec: Spec, array: Array = None):
        self._spec = spec
        self._arrays: ArrayModule = spec.arrays  # type: ignore[assignment]
        self._pinned_block = pool_of(self._arrays).allocate(spec.nbytes)
        self._memory = self._pinned_block.array(spec.shape, spec.dtype)
        if array is not None and array.size:
            self._arrays.copy_to_host(array, self._memory)
            self._pinned_block.written = self._arrays.record()

    @property
    def buffer(self) -> np.ndarray:
        """The host memory; if MPI reads it, after the copy to it."""
        if self._pinned_block.written is not None:
            self._arrays.wait(self._pinned_block.written)
        return self._memory

    def received(self) -> Array:
        """Return an array on the device, after MPI has written the memory."""
        array = self._spec.empty()
        if array.size:
            self._arrays.copy_to_device(self._memory, array)
            self._pinned_block.read = self._arrays.record()
        return array


Transfer = HostTransfer | DirectTransfer | StagedTransfer


def communicate(call: BufferCall, sent: Array, spec: Spec | None = None, discards: bool = False) -> Array:
    """Return the array that MPI writes in ``call(send_buffer, recv_buffer)``; zeros if it `discards`."""
    # Without transfers, which take longer than a sum of a few numbers.
    if type(sent) is np.ndarray and (spec is None or spec.arrays is None):
        like = spec or sent
        out = np.empty(like.shape, like.dtype)
        call(sent, out)
        if discards:
            out.fill(0)
        return out if out.ndim else out[()]
    spec = spec or Spec.of(sent)
    outgoing, incoming = outgoing_transfer(sent), incoming_transfer(spec)
    call(outgoing.buffer, incoming.buffer)
    return spec.zeros() if discards else incoming.received()
