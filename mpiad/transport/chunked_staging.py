"""Large arrays on their way between their memory and MPI, piece by piece: one is copied while another one travels.

A passage gives MPI its memory for one piece after another, and takes each back when MPI is done with it. An array of the
host uses its own memory. One on a device goes through page-locked memory of the host, as consecutive pieces:
all copies to the host are queued at once, on the stream for copies, with an event behind each piece. MPI gets a
piece when its event is over; its copy back is queued on the current stream.

Pieces are lists of ranges of the flat array. If all ranks have the whole array, a piece is one range. If the array
has a block for each rank, a piece is a range of every block: each call then keeps all ranks busy, as the whole would.
All this follows from data known to all ranks, so they cut alike wherever their arrays lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.transport import device_settings
from mpiad.transport.buffers import Spec, result
from mpiad.transport.device_arrays import ArrayModule, arrays_of
from mpiad.transport.pinned import Loan, pool_of


def departing(array: Array, pieces: list[Ranges]) -> ChunkedTransfer:
    """Begin the passage of an array that MPI reads."""
    arrays = arrays_of(array)
    if arrays is None:
        return _OnHost(array, pieces)
    return _Staged(Spec(array.shape, array.dtype, arrays), pieces).loaded(array)


def arriving(spec: Spec, pieces: list[Ranges], loan: Loan | None = None) -> ChunkedTransfer:
    """Begin the passage of an array that MPI writes; `loan` is memory that was borrowed for it before."""
    if spec.arrays is None:
        return _OnHost(spec.empty(), pieces)
    return _Staged(spec, pieces, loan)


def passing(array: Array, pieces: list[Ranges], private: bool = False) -> ChunkedTransfer:
    """Begin the transfer of an array that MPI reads and overwrites; the result is a new array.

    `private`: nobody else uses the array, so on the host its own memory is overwritten.
    """
    if type(array) is np.ndarray and not private:
        return _OnHost(np.empty_like(array), pieces, array)
    return departing(array, pieces)


class _OnHost:
    """An array of the host. MPI reads and writes `memory`, flat; pieces to be overwritten are copied from `source`."""

    def __init__(self, array: np.ndarray, pieces: list[Ranges], source: np.ndarray | None = None):
        self._array, self._pieces = array, pieces
        self.memory = array.reshape(-1)
        self._source = None if source is None else source.reshape(-1)

    def piece(self, number: int) -> np.ndarray:
        """Return MPI's memory for a piece, contiguous; a copy to be read, if the piece isn't in one place."""
        ranges = self._pieces[number]
        if len(ranges) > 1:
            return np.concatenate([self.memory[start:end] for start, end in ranges])
        start, end = ranges[0]
        if self._source is not None:
            self.memory[start:end] = self._source[start:end]
        return self.memory[start:end]

    def blocks(self, number: int) -> list[Any]:
        """Return the same for MPI's functions that take counts and places for each rank: the array, and which parts."""
        ranges = self._pieces[number]
        return [self.memory, ([end - start for start, end in ranges], [start for start, _ in ranges])]

    def take(self, number: int) -> None:
        """Take a piece from MPI, which has written it: here it is already in its place."""

    def home(self) -> Array:
        """Return the array, when all pieces were taken."""
        return result(self._array)


class _Staged:
    """An array of a device, through memory of the host; the result is a new array."""

    def __init__(self, spec: Spec, pieces: list[Ranges], loan: Loan | None = None):
        self._spec, self._pieces = spec, pieces
        self._arrays: ArrayModule = spec.arrays  # type: ignore[assignment]
        self._counts = [[end - start for start, end in ranges] for ranges in pieces]
        self._starts = [0, *accumulate(map(sum, self._counts))]
        self._loan = loan or pool_of(self._arrays).lend(spec.nbytes)
        self.memory = self._loan.array((self._starts[-1],), spec.dtype)
        self._events: list[Any] = []
        self._array: Array = None

    def loaded(self, array: Array) -> _Staged:
        """Queue the copies of all pieces to the host."""
        arrays, flat, ready = self._arrays, array.reshape(-1), self._arrays.record()
        with arrays.copying_stream():
            arrays.wait_on_device(ready)  # the array may still be computed, on the stream of the arithmetic
            for number in range(len(self._pieces)):
                for (start, end), host in self._places(number):
                    arrays.copy_to_host(flat[start:end], host)
                self._events.append(arrays.record())
            # The next user of the memory waits for the last copy: an exception may end the waiting for pieces.
            self._loan.written = self._events[-1]
        return self

    def _places(self, number: int) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
        """Yield the ranges of a piece that aren't empty, each with its place in the memory."""
        place = self._starts[number]
        for (start, end), count in zip(self._pieces[number], self._counts[number]):
            if count:
                yield (start, end), self.memory[place : place + count]
            place += count

    def piece(self, number: int) -> np.ndarray:
        """Return the memory of a piece, when the device has written it."""
        if self._events:
            self._arrays.wait(self._events[number])
        return self.memory[self._starts[number] : self._starts[number + 1]]

    def blocks(self, number: int) -> list[Any]:
        """Return the same with the counts of its parts, which lie one behind the other."""
        counts = self._counts[number]
        return [self.piece(number), (counts, [0, *accumulate(counts)][:-1])]

    def take(self, number: int) -> None:
        """Queue the copy of a piece to the device."""
        if self._array is None:
            self._array = self._spec.empty()
        flat = self._array.reshape(-1)
        for (start, end), host in self._places(number):
            self._arrays.copy_to_device(host, flat[start:end])
        self._loan.read = self._arrays.record()

    def home(self) -> Array:
        """Return the array on the device."""
        return self._array


ChunkedTransfer = _OnHost | _Staged
Ranges = list[tuple[int, int]]

_LARGEST_ENTRY = 16  # bytes, of a complex128
# Each block's part of a piece is copied by itself, so among many ranks it mustn't become too short for that.
_MOST_PARTS = 16


def bounds(size: int, itemsize: int, chunk: int | None = None) -> Ranges:
    """Return the begins and ends of the pieces of an array of `size` entries; `chunk` is the most bytes of one."""
    chunk = device_settings.present().chunk if chunk is None else chunk
    step = (chunk - chunk % _LARGEST_ENTRY) // itemsize  # whole entries of any dtype
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def of_whole(size: int, itemsize: int, chunk: int | None = None) -> list[Ranges]:
    """Return the pieces of an array that is cut from its front to its end."""
    return [[part] for part in bounds(size, itemsize, chunk)]


def of_blocks(counts: list[int], itemsize: int) -> list[Ranges]:
    """Return the pieces of an array that has one block of so many entries for each rank."""
    starts = [0, *accumulate(counts)]
    return [
        [(begin + start, begin + end) for begin, (start, end) in zip(starts, parts)] for parts in _parts(counts, itemsize)
    ]


def of_block(counts: list[int], rank: int, itemsize: int) -> list[Ranges]:
    """Return the pieces of one rank's block, as an array of its own; the last ones may be empty."""
    return [[parts[rank]] for parts in _parts(counts, itemsize)]


def _parts(counts: list[int], itemsize: int) -> list[Ranges]:
    """Return the pieces, each as a range of every block, counted from the block's begin."""
    chunk = device_settings.present().chunk
    step = max(chunk // min(len(counts), _MOST_PARTS) // itemsize, 1)
    return [[(min(start, count), min(start + step, count)) for count in counts] for start in range(0, max(counts), step)]
