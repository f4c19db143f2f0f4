"""Device memory without a device, which processes share: POSIX shared memory, and a stream that runs behind the program.

`MemoryDouble` fills `mpiad.transport.devices.device_arrays.DeviceMemory` for the arrays of `device_double`. Kernels,
copies, writes and waits are queued, and a thread for each stream runs them in order, each after a random time, as a device
does; the host sees the arrays of the stand-in only after all that is queued on the current stream. A block that is freed
while another process has it open, or that is opened twice, is an error, as is memory of the host that the device writes a
flag to and that isn't registered.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import random
import threading
import time
from contextlib import contextmanager

import numpy as np
from device_double import DeviceArray, double


class Stream(threading.Thread):
    """What is queued, in order. `late`: the largest time, in seconds, between two operations."""

    def __init__(self, late):
        super().__init__(daemon=True, name="device-double")
        self.late, self._queue, self._failure = late, queue.SimpleQueue(), None
        self._random = random.Random(os.getpid())
        self.start()

    def run(self):
        while (operation := self._queue.get()) is not None:
            if not callable(operation):
                continue
            if self.late:
                time.sleep(self._random.uniform(0, self.late))
            try:
                operation()
            except Exception as error:
                self._failure = error

    def put(self, operation):
        self._queue.put(operation)

    def record(self):
        """Return an event after all that is queued."""
        done = threading.Event()
        self._queue.put(done.set)
        return done

    def settle(self):
        """Wait until all that is queued has run."""
        self.record().wait()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise AssertionError("an operation of the device failed") from failure


class Streams:
    """The current stream of the stand-in, and others. Each has a thread of its own."""

    def __init__(self):
        self._streams, self._late = [Stream(0.0)], 0.0

    @property
    def current(self):
        while len(self._streams) <= double.stream():
            self._streams.append(Stream(self._late))
        return self._streams[double.stream()]

    @property
    def late(self):
        return self._late

    @late.setter
    def late(self, seconds):
        self._late = seconds
        for stream in self._streams:
            stream.late = seconds

    def put(self, operation):
        self.current.put(operation)

    def record(self):
        return self.current.record()

    def settle(self):
        self.current.settle()

    def end(self):
        for stream in self._streams:
            stream.settle()
            stream.put(None)


class MemoryDouble:
    """Memory of the stand-in's device: `limit` bytes of it; with `broken`, blocks of other processes contain zeros."""

    def __init__(self):
        self.stream, self.limit, self.broken, self.released = Streams(), 1 << 40, "", 0
        self.blocks, self.opened, self.registered = {}, {}, {}
        self.copies = 0  # stored and loaded

    @property
    def used(self):
        return sum(len(block) for _, block in self.blocks.values())

    def allocate(self, nbytes):
        assert nbytes >= 2 << 20
        if self.used + nbytes > self.limit:
            raise MemoryError
        file = os.memfd_create("device-double")
        os.ftruncate(file, nbytes)
        block = mmap.mmap(file, nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(block))
        self.blocks[address] = file, block
        return address

    def free(self, address):
        file, _ = self.blocks.pop(address)
        os.close(file)

    def release_unused(self):
        self.released += 1

    def handle(self, address):
        file, block = self.blocks[address]
        return f"{os.getpid()} {file} {len(block)}".encode().ljust(64)

    def open(self, handle):
        if self.broken:
            raise OSError(self.broken)
        assert handle not in [found for found, _ in self.opened.values()], "opened twice"
        pid, file, nbytes = map(int, handle.split())
        found = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
        block = mmap.mmap(found, nbytes)
        os.close(found)
        address = ctypes.addressof(ctypes.c_char.from_buffer(block))
        self.opened[address] = handle, block
        return address

    def close(self, address):
        del self.opened[address]

    def register(self, memory):
        address = memory.ctypes.data
        self.registered[address] = memory
        return address

    def unregister(self, memory):
        del self.registered[memory.ctypes.data]

    def store(self, address, x):
        values = _values(x)
        self.copies += 1
        self.stream.put(lambda: ctypes.memmove(address, values.ctypes.data, values.nbytes))

    def load(self, x, address):
        values = _values(x)
        self.copies += 1
        self.stream.put(lambda: ctypes.memmove(values.ctypes.data, address, values.nbytes))

    def array(self, address, shape, dtype, owner):
        return DeviceArray._of(np.asarray(_Owned(address, shape, dtype, (owner, self.blocks[self._block_at(address)]))))

    def _block_at(self, address):
        return next(start for start, (_, block) in self.blocks.items() if start <= address < start + len(block))

    def write(self, flag, value):
        number = self._number(flag)
        self.stream.put(lambda: number.fill(value))

    def wait(self, flag, value):
        number = self._number(flag)

        def until():
            while number < value:
                time.sleep(1e-4)

        self.stream.put(until)

    def _number(self, flag):
        memory = next(m for m in self.registered.values() if m.ctypes.data <= flag < m.ctypes.data + m.nbytes)
        assert flag % 8 == 0
        return memory[flag - memory.ctypes.data :][:8].view(np.int64).reshape(())

    def obstacle(self):
        return "the stand-in is broken" if self.broken else ""


class _Owned:
    """Memory at an address, which is its owner's."""

    def __init__(self, address, shape, dtype, owner):
        self._owner = owner
        self.__array_interface__ = {
            "shape": shape, "typestr": dtype.str, "data": (address, False), "version": 3
        }  # fmt: skip


def _values(x):
    values = DeviceArray._raw(x) if isinstance(x, DeviceArray) else x
    assert values.flags.c_contiguous
    return values


@contextmanager
def streams():
    """Let the stand-in queue what it does, without memory for other processes."""
    double.queue = made = Streams()
    try:
        yield made
    finally:
        remove()


def install():
    """Give the stand-in a device's memory; return it."""
    if getattr(double, "memory", None) is None:
        double.memory = MemoryDouble()
        double.queue = double.memory.stream
    return double.memory


def remove():
    """Take the memory away, after all that is queued has run."""
    if double.queue is not None:
        double.queue.end()
    double.memory = double.queue = None
