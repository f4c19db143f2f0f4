"""The words that kernels of a program for devices read: addresses of arrays, and numbers among the arguments."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np

from mpiad._typing import Array, Scalar
from mpiad.transport.devices.device_arrays import ArrayModule

_WORD, _SLOT = 8, 2  # bytes of a word, and words of a number
_UPLOADS = 4  # the number of copies that may be under way


class Words:
    """Memory on the device, with one word for each array of a loop, and a slot for each number.

    Words that have changed are copied to the device before kernels are queued, in the order of the stream.
    """

    def __init__(self, device: ArrayModule, loops: Mapping[int, Sequence[int]], numbers: Sequence[int]):
        # `loops`: the buffers of each loop; `numbers`: the buffers that may contain numbers of the host.
        self._device, self._is_stale = device, True
        self._places: dict[int, list[int]] = {}  # the words of each buffer
        self._starts: dict[int, int] = {}  # the first word of each loop
        size = 0
        for at, buffers in loops.items():
            self._starts[at] = size
            for place, b in enumerate(buffers, size):
                self._places.setdefault(b, []).append(place)
            size += len(buffers)
        self._slots = {b: size + _SLOT * k for k, b in enumerate(numbers)}
        self._host = np.zeros(max(size + _SLOT * len(numbers), 1), np.int64)
        self._there = device.empty(self._host.shape, self._host.dtype)
        self._uploads: deque[tuple[object, Array]] = deque()  # events, and the page-locked memory that they wait for

    def of_loop(self, at: int) -> Array:
        """Return the words of a loop, on the device."""
        return self._there[self._starts[at] :]

    def __contains__(self, b: int) -> bool:
        return b in self._places

    def store(self, b: int, address: int) -> None:
        """Store the address of a buffer."""
        for place in self._places.get(b, ()):
            if self._host[place] != address:
                self._host[place], self._is_stale = address, True

    def store_number(self, b: int, value: Scalar, dtype: np.dtype) -> bool:
        """Store a number and its address; return whether there is a slot for it."""
        slot = self._slots.get(b)
        if slot is None:
            return False
        words = self._host[slot : slot + _SLOT].view(np.uint8)
        bits = np.frombuffer(np.asarray(value, dtype).tobytes(), np.uint8)
        if not np.array_equal(words[: len(bits)], bits):
            words[: len(bits)], self._is_stale = bits, True
        self.store(b, self._device.pointer(self._there) + _WORD * slot)
        return True

    def upload(self) -> None:
        """Copy the words to the device, if they have changed."""
        if not self._is_stale:
            return
        if len(self._uploads) < _UPLOADS:
            memory = self._device.pinned(self._host.nbytes)[: self._host.nbytes].view(np.int64)
        else:
            event, memory = self._uploads.popleft()
            self._device.wait(event)
        memory[:] = self._host
        self._device.copy_to_device(memory, self._there)
        self._uploads.append((self._device.record(), memory))
        self._is_stale = False

    def __del__(self) -> None:
        # The page-locked memory may be used again as soon as it is freed.
        with suppress(Exception):
            for event, _ in self._uploads:
                self._device.wait(event)
