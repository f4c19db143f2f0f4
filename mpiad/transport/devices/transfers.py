"""Transfers of arrays between MPI and the host or a device, as a whole or in pieces.

A transfer provides the buffers from which MPI reads an array or to which it writes one: `piece(k)` and `blocks(k)`. After
MPI has written piece k, `take(k)` moves it to the array, which `received()` returns at the end. There are three classes:

- `HostTransfer`: MPI accesses the array itself.
- `DirectTransfer`: MPI is CUDA-aware and accesses the device array itself. The current stream is synchronized before MPI
  gets the buffer, since the device may still write there.
- `StagedTransfer`: the array is copied through page-locked host memory. Pieces are copied to the host on a stream for
  copies, all queued at once, so one piece is copied while another one is communicated. Received pieces are copied to the
  device on the current stream.

A piece is a list of index ranges of the flattened array: one range of an array that every rank has as a whole; one range of
each block of an array with one block per rank; or one range of one rank's block. All ranks divide a whole array or a block
in the same way, whether it is on the host or on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np

from mpiad._typing import Array, Buffer
from mpiad.transport.devices.device_arrays import ArrayModule, Spec, arrays_of, result
from mpiad.transport.devices.staging import pool_of, takes_directly

Ranges = list[tuple[int, int]]
BlockBuffer: TypeAlias = "tuple[Buffer, tuple[list[int], list[int]]]"  # a buffer, and counts and displacements of blocks
BufferCall = Callable[[Buffer, Buffer], object]  # of a send buffer and a receive buffer
_WHOLE: list[Ranges] = [[]]  # one piece, whose ranges nobody reads


def outgoing_transfer(
    array: Array, pieces: list[Ranges] = _WHOLE, nonblocking: bool = False, copies: bool = False
) -> Transfer:
    """Begin the transfer of a C-contiguous array that MPI reads; it mustn't change, unless MPI reads private `copies`."""
    if type(array) is np.ndarray or (arrays := arrays_of(array)) is None:
        return HostTransfer(array, pieces)
    if len(pieces) == 1 and takes_directly(arrays, nonblocking):
        return DirectTransfer(arrays.copy(array) if copies else array, arrays, pieces)
    return StagedTransfer(Spec(array.shape, array.dtype, arrays), pieces).loaded(array)


def incoming_transfer(spec: Spec, pieces: list[Ranges] = _WHOLE, nonblocking: bool = False) -> Transfer:
    """Begin the transfer of an array that MPI writes; `nonblocking`: in a nonblocking collective."""
    if spec.arrays is None:
        return HostTransfer(np.empty(spec.shape, spec.dtype), pieces)
    if len(pieces) == 1 and takes_directly(spec.arrays, nonblocking):
        return DirectTransfer(spec.empty(), spec.arrays, pieces)
    return StagedTransfer(spec, pieces)


class HostTransfer:
    """The transfer of a host array."""

    __slots__ = ("_array", "_pieces")

    def __init__(self, array: np.ndarray, pieces: list[Ranges] = _WHOLE):
        self._array, self._pieces = array, pieces

    def piece(self, number: int) -> np.ndarray:
        """Return the buffer of a piece."""
        if len(self._pieces) == 1:
            return self._array
        flat, ranges = self._array.reshape(-1), self._pieces[number]
        if len(ranges) == 1:
            return flat[slice(*ranges[0])]
        return np.concatenate([flat[start:end] for start, end in ranges])

    def blocks(self, number: int) -> BlockBuffer:
        """Return the buffer of a piece, with the counts and displacements of its ranges."""
        ranges = self._pieces[number]
        return self._array, ([end - start for start, end in ranges], [start for start, _ in ranges])

    def take(self, number: int) -> None:
        """Do nothing: MPI has written the piece into the array."""

    def received(self) -> Array:
        """Return the array."""
        return result(self._array)


class DirectTransfer(HostTransfer):
    """The transfer of a device array, as a whole, by a CUDA-aware MPI."""

    __slots__ = ("_arrays",)

    def __init__(self, array: Array, arrays: ArrayModule, pieces: list[Ranges]):
        super().__init__(array, pieces)
        self._arrays = arrays

    def piece(self, number: int) -> Buffer:
        """Return the buffer of the array."""
        self._arrays.synchronize()
        return self._arrays.message(self._array)

    def blocks(self, number: int) -> BlockBuffer:
        """Return the buffer of the array, with the counts and displacements of its blocks."""
        return self.piece(number), super().blocks(number)[1]


class StagedTransfer:
    """The transfer of a device array through host memory; `received` returns a new array."""

    def __init__(self, spec: Spec, pieces: list[Ranges]):
        self._spec = spec
        self._arrays: ArrayModule = spec.arrays  # type: ignore[assignment]
        self._pinned_block = pool_of(self._arrays).allocate(spec.nbytes)
        self._memory = self._pinned_block.array(spec.shape, spec.dtype)
        self._events: list[Any] = []
        self._array: Array = None
        # In each piece the ranges are adjacent in host memory.
        self._pieces = [[(0, self._memory.size)]] if pieces is _WHOLE else pieces
        self._counts = [[end - start for start, end in ranges] for ranges in self._pieces]
        self._starts = [0, *accumulate(map(sum, self._counts))]

    def loaded(self, array: Array) -> StagedTransfer:
        """Queue the copies of all pieces of an array to the host."""
        arrays, flat, in_pieces = self._arrays, array.reshape(-1), len(self._pieces) > 1
        ready = arrays.record() if in_pieces else None
        with arrays.copying_stream() if in_pieces else nullcontext():
            if in_pieces:
                arrays.wait_on_device(ready)  # the current stream may still compute the array
            for number in range(len(self._pieces)):
                for (start, end), host in self._places(number):
                    arrays.copy_to_host(flat[start:end], host)
                self._events.append(arrays.record())
            # The memory is reused only after the last copy, even if an exception prevents the wait for all pieces.
            self._pinned_block.written = self._events[-1]
        return self

    def _places(self, number: int) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
        """Yield the nonempty ranges of a piece, each with its host memory."""
        place, flat = self._starts[number], self._memory.reshape(-1)
        for (start, end), count in zip(self._pieces[number], self._counts[number]):
            if count:
                yield (start, end), flat[place : place + count]
            place += count

    def piece(self, number: int) -> np.ndarray:
        """Return the buffer of a piece; if MPI reads it, after its copy to the host."""
        if self._events:
            self._arrays.wait(self._events[number])
        if len(self._pieces) == 1:
            return self._memory
        return self._memory.reshape(-1)[self._starts[number] : self._starts[number + 1]]

    def blocks(self, number: int) -> BlockBuffer:
        """Return the buffer of a piece, with the counts and displacements of its ranges."""
        counts = self._counts[number]
        return self.piece(number), (counts, [0, *accumulate(counts)][:-1])

    def take(self, number: int) -> None:
        """Queue the copy of a piece to the device."""
        if self._array is None:
            self._array = self._spec.empty()
        flat = self._array.reshape(-1)
        for (start, end), host in self._places(number):
            self._arrays.copy_to_device(host, flat[start:end])
        self._pinned_block.read = self._arrays.record()

    def received(self) -> Array:
        """Return the array on the device."""
        return self._array


Transfer = HostTransfer | StagedTransfer


def communicate(
    call: BufferCall, sent: Array, spec: Spec | None = None, pieces: list[Ranges] = _WHOLE, discards: bool = False
) -> Array:
    """Return the array that MPI writes in ``call(send_buffer, recv_buffer)`` for each piece; zeros if it `discards`."""
    like = spec or sent
    # Without transfers, which take longer than a sum of a few numbers.
    if type(sent) is np.ndarray and len(pieces) == 1 and (spec is None or spec.arrays is None):
        out = np.empty(like.shape, like.dtype)
        call(sent, out)
        if discards:
            out.fill(0)
        return out if out.ndim else out[()]
    spec = spec or Spec.of(sent)
    outgoing, incoming = outgoing_transfer(sent, pieces), incoming_transfer(spec, pieces)
    if discards:
        for number in range(len(pieces)):
            call(outgoing.piece(number), incoming.piece(number))
        return spec.zeros()
    return in_pieces(len(pieces), lambda k: call(outgoing.piece(k), incoming.piece(k)), incoming)


def in_pieces(count: int, call: Callable[[int], object], incoming: Transfer) -> Array:
    """Call ``call(k)``, in which MPI writes piece k, for each of `count` pieces; return the complete array."""
    for number in range(count):
        call(number)
        incoming.take(number)
    return incoming.received()


_LARGEST_ENTRY = 16  # bytes, of a complex128
# A piece of `chunk` bytes is divided among the blocks. With more than 16 blocks, ranges have chunk / 16 bytes, and a piece
# is larger than `chunk`, since ranges are copied separately and mustn't become too short.
_LARGEST_DIVISOR = 16


def of_whole(array: Array | Spec, chunk: int | None) -> list[Ranges]:
    """Return the pieces of an array that every rank has as a whole; one piece if `chunk` is None."""
    if chunk is None:
        return _WHOLE
    return of_block([array.nbytes // array.dtype.itemsize], 0, array.dtype.itemsize, chunk)


def of_blocks(counts: list[int], itemsize: int, chunk: int | None) -> list[Ranges]:
    """Return the pieces of an array with one block per rank; `counts`: the blocks' numbers of entries."""
    starts = [0, *accumulate(counts)]
    if chunk is None:
        return [list(pairwise(starts))]
    return [
        [(begin + start, begin + end) for begin, (start, end) in zip(starts, parts)]
        for parts in _parts(counts, itemsize, chunk)
    ]


def of_block(counts: list[int], rank: int, itemsize: int, chunk: int | None) -> list[Ranges]:
    """Return the pieces of one rank's block; the last ones may be empty."""
    return [[parts[rank]] for parts in _parts(counts, itemsize, chunk)] if chunk is not None else _WHOLE


def _parts(counts: list[int], itemsize: int, chunk: int) -> list[Ranges]:
    """Return the pieces, each as a list of ranges relative to the beginnings of the blocks."""
    part = chunk // min(len(counts), _LARGEST_DIVISOR)
    step = max((part - part % _LARGEST_ENTRY) // itemsize, 1)  # whole entries of any dtype
    return [[(min(start, count), min(start + step, count)) for count in counts] for start in range(0, max(counts), step)]
