"""Staging of large device arrays in pieces: one piece is copied while another one is communicated.

A `ChunkedTransfer` provides MPI's buffers for the pieces (`piece`, `blocks`), and takes each piece after MPI has written it
(`take`). A device array goes through page-locked host memory: the copies of all pieces to the host are queued at once, on a
stream for copies; `piece` waits for the event after its copy. Received pieces are copied to the device on the current
stream.

A piece is a list of index ranges of the flattened array: one range if every rank has the whole array, or one range of every
rank's block. The pieces are the same on all ranks, wherever the arrays are.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.transport.devices import device_settings
from mpiad.transport.devices.device_arrays import ArrayModule, Spec, arrays_of, result
from mpiad.transport.devices.staging import PinnedBlock, pool_of


def outgoing_transfer(array: Array, pieces: list[Ranges]) -> ChunkedTransfer:
    """Begin the transfer of an array that MPI reads."""
    arrays = arrays_of(array)
    if arrays is None:
        return _OnHost(array, pieces)
    return _Staged(Spec(array.shape, array.dtype, arrays), pieces).loaded(array)


def incoming_transfer(spec: Spec, pieces: list[Ranges], pinned_block: PinnedBlock | None = None) -> ChunkedTransfer:
    """Begin the transfer of an array that MPI writes; `pinned_block`: page-locked memory, if already allocated."""
    if spec.arrays is None:
        return _OnHost(spec.empty(), pieces)
    return _Staged(spec, pieces, pinned_block)


def in_place_transfer(array: Array, pieces: list[Ranges], private: bool = False) -> ChunkedTransfer:
    """Begin the transfer of an array that MPI reads and overwrites; the result is a new array.

    `private`: on the host the array's own memory is overwritten, since nobody else uses it.
    """
    if type(array) is np.ndarray and not private:
        return _OnHost(np.empty_like(array), pieces, array)
    return outgoing_transfer(array, pieces)


class _OnHost:
    """A host array, which MPI reads and writes directly; if there is a `source`, each piece is first copied from it."""

    def __init__(self, array: np.ndarray, pieces: list[Ranges], source: np.ndarray | None = None):
        self._array, self._pieces = array, pieces
        self.memory = array.reshape(-1)
        self._source = None if source is None else source.reshape(-1)

    def piece(self, number: int) -> np.ndarray:
        ranges = self._pieces[number]
        if len(ranges) > 1:
            return np.concatenate([self.memory[start:end] for start, end in ranges])
        start, end = ranges[0]
        if self._source is not None:
            self.memory[start:end] = self._source[start:end]
        return self.memory[start:end]

    def blocks(self, number: int) -> list[Any]:
        ranges = self._pieces[number]
        return [self.memory, ([end - start for start, end in ranges], [start for start, _ in ranges])]

    def take(self, number: int) -> None:
        """Do nothing, since MPI has written the piece into the array."""

    def received(self) -> Array:
        return result(self._array)


class _Staged:
    """A device array, staged through host memory; the result is a new array."""

    def __init__(self, spec: Spec, pieces: list[Ranges], pinned_block: PinnedBlock | None = None):
        self._spec, self._pieces = spec, pieces
        self._arrays: ArrayModule = spec.arrays  # type: ignore[assignment]
        self._counts = [[end - start for start, end in ranges] for ranges in pieces]
        self._starts = [0, *accumulate(map(sum, self._counts))]
        self._pinned_block = pinned_block or pool_of(self._arrays).allocate(spec.nbytes)
        self.memory = self._pinned_block.array((self._starts[-1],), spec.dtype)
        self._events: list[Any] = []
        self._array: Array = None

    def loaded(self, array: Array) -> _Staged:
        arrays, flat, ready = self._arrays, array.reshape(-1), self._arrays.record()
        with arrays.copying_stream():
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
        place = self._starts[number]
        for (start, end), count in zip(self._pieces[number], self._counts[number]):
            if count:
                yield (start, end), self.memory[place : place + count]
            place += count

    def piece(self, number: int) -> np.ndarray:
        if self._events:
            self._arrays.wait(self._events[number])
        return self.memory[self._starts[number] : self._starts[number + 1]]

    def blocks(self, number: int) -> list[Any]:
        """Return a piece with the counts and displacements of its ranges, which are adjacent in host memory."""
        counts = self._counts[number]
        return [self.piece(number), (counts, [0, *accumulate(counts)][:-1])]

    def take(self, number: int) -> None:
        if self._array is None:
            self._array = self._spec.empty()
        flat = self._array.reshape(-1)
        for (start, end), host in self._places(number):
            self._arrays.copy_to_device(host, flat[start:end])
        self._pinned_block.read = self._arrays.record()

    def received(self) -> Array:
        return self._array


ChunkedTransfer = _OnHost | _Staged
Ranges = list[tuple[int, int]]

_LARGEST_ENTRY = 16  # bytes, of a complex128
# The ranges of a piece are copied separately, so with many ranks they mustn't become too short.
_MOST_PARTS = 16


def bounds(size: int, itemsize: int, chunk: int | None = None) -> Ranges:
    """Return the ranges of the pieces of an array of `size` entries; `chunk`: maximum number of bytes of a piece."""
    chunk = device_settings.present().chunk if chunk is None else chunk
    step = (chunk - chunk % _LARGEST_ENTRY) // itemsize  # whole entries of any dtype
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def of_whole(size: int, itemsize: int, chunk: int | None = None) -> list[Ranges]:
    """Return the pieces of an array that every rank has as a whole."""
    return [[part] for part in bounds(size, itemsize, chunk)]


def of_blocks(counts: list[int], itemsize: int) -> list[Ranges]:
    """Return the pieces of an array with one block per rank; `counts`: the blocks' numbers of entries."""
    starts = [0, *accumulate(counts)]
    return [
        [(begin + start, begin + end) for begin, (start, end) in zip(starts, parts)] for parts in _parts(counts, itemsize)
    ]


def of_block(counts: list[int], rank: int, itemsize: int) -> list[Ranges]:
    """Return the pieces of one rank's block; the last ones may be empty."""
    return [[parts[rank]] for parts in _parts(counts, itemsize)]


def _parts(counts: list[int], itemsize: int) -> list[Ranges]:
    """Return the pieces, each as a list of ranges relative to the beginnings of the blocks."""
    chunk = device_settings.present().chunk
    step = max(chunk // min(len(counts), _MOST_PARTS) // itemsize, 1)
    return [[(min(start, count), min(start + step, count)) for count in counts] for start in range(0, max(counts), step)]
