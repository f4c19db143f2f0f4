"""What is asked of CuPy, on a module of its name: NumPy's arrays behind the names and signatures that its sources have.

That the names are right, and that they do this on a GPU, only `make test-gpu` can tell.
"""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from mpiad.device.boxes import DeviceBox
from mpiad.transport.devices import device_arrays

pytestmark = pytest.mark.serial


class Stream:
    current: list[Stream] = []

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        self.waited_for: list[object] = []
        self.synchronized, self.captured = 0, None
        self.non_blocking, self.priority = non_blocking, priority
        self.device = Device.current[-1]

    @property
    def ptr(self):
        return id(self)

    def begin_capture(self, mode=None):
        self.captured = []

    def end_capture(self):
        graph, self.captured = Graph(self.captured), None
        return graph

    def __enter__(self):
        if self.device != Device.current[-1]:
            raise RuntimeError("The device that the stream is created on does not match with the current device")
        Stream.current.append(self)
        return self

    def __exit__(self, *args):
        Stream.current.pop()

    def synchronize(self):
        self.synchronized += 1

    def record(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        self.waited_for.append(event)


class Graph:
    def __init__(self, calls):
        self.calls = calls

    def launch(self, stream=None):
        stream = stream or Stream.current[-1]
        assert stream.captured is None and stream.device == Device.current[-1]
        for call in self.calls:
            call()


class KernelFunction:
    """A kernel: within a capture, its launch becomes a part of the graph."""

    num_regs, local_size_bytes = 32, 0

    def __init__(self, run):
        self.run = run

    def __call__(self, grid, block, args):
        def call():
            self.run(grid, block, *args)

        captured = Stream.current[-1].captured
        call() if captured is None else captured.append(call)


class Event:
    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self.stream = None

    def record(self, stream=None):
        self.stream = stream or Stream.current[-1]

    def synchronize(self):
        assert self.stream is not None
        self.stream.synchronize()


class Device:
    current = [0]
    attributes = {"MultiProcessorCount": 7}

    def __init__(self, device=None):
        self.id = device

    def __enter__(self):
        Device.current.append(self.id)
        return self

    def __exit__(self, *args):
        Device.current.pop()


class Memory:
    def __init__(self, values):
        self.ptr = values.ctypes.data

    def copy_to_host_async(self, mem, size, stream=None):
        ctypes.memmove(mem, self.ptr, size)

    def copy_from_host_async(self, mem, size, stream=None):
        ctypes.memmove(self.ptr, mem, size)


class Array:
    __cuda_array_interface__: dict = {}

    def __init__(self, values):
        self.values = values
        self.device = Device(Device.current[-1])

    shape = property(lambda self: self.values.shape)
    dtype = property(lambda self: self.values.dtype)
    size = property(lambda self: self.values.size)
    nbytes = property(lambda self: self.values.nbytes)
    flags = property(lambda self: self.values.flags)
    data = property(lambda self: Memory(self.values))

    def copy(self, order="C"):
        return Array(self.values.copy(order))

    def get(self, stream=None, order="C", out=None, blocking=True):
        # CuPy waits for the stream that is current on the current device, whichever the array's is.
        assert self.device.id == Device.current[-1]
        return self.values.copy()


@pytest.fixture
def arrays(monkeypatch):
    """The array module of device 1 of that CuPy."""
    made = ModuleType("cupy")
    kind = type("ndarray", (Array,), {"__module__": "cupy"})
    monkeypatch.setattr(sys.modules[__name__], "Array", kind)
    made.ndarray = kind
    made.empty = lambda shape, dtype=float, order="C": kind(np.empty(shape, dtype))
    made.full = lambda shape, fill_value, dtype=None, order="C": kind(np.full(shape, fill_value, dtype))
    made.arange = lambda start, stop=None, step=1, dtype=None: kind(np.arange(start, dtype=dtype))
    made.asarray = lambda a, dtype=None, order=None: kind(np.array(a, order=order))
    made.add = SimpleNamespace(at=lambda a, indices, b=None: np.add.at(a.values, indices, b.values))
    made.cuda = SimpleNamespace(
        Device=Device, Stream=Stream, Event=Event, get_current_stream=lambda: Stream.current[-1],
        alloc_pinned_memory=lambda size: memoryview(bytearray(size + 100)), runtime=SimpleNamespace(getDevice=lambda: 1),
    )  # fmt: skip
    monkeypatch.setattr(Stream, "current", [Stream()])
    monkeypatch.setitem(sys.modules, "cupy", made)
    monkeypatch.delitem(sys.modules, "mpiad.transport.devices.cupy_arrays", raising=False)
    monkeypatch.setattr(device_arrays, "_makers", dict(device_arrays._makers))
    with Device(1):
        x = kind(np.arange(3.0))
    yield device_arrays.arrays_of(x)
    # The next test, or a program, loads the one that fits.
    sys.modules.pop("mpiad.transport.devices.cupy_arrays", None)


def test_an_array_is_known_by_the_module_of_its_type(arrays):
    assert (arrays.name, arrays.device, arrays.kind) == ("CuPy", 1, Array)
    assert arrays is device_arrays.arrays_of(arrays.full((2,), 1, float))


def test_a_trace_knows_it_once_the_program_has_loaded_cupy(arrays):
    from autograd.tracer import Box

    assert Box.type_mappings[Array] is DeviceBox
    device_arrays._makers.pop(Array)
    device_arrays.discover()
    assert Array in device_arrays._makers


def test_arrays_are_made_on_the_device(arrays):
    for x, expected in [
        (arrays.full((2, 1), 3, np.float32), [[3], [3]]), (arrays.arange(3), [0, 1, 2]),
        (arrays.to_device(np.array([1.0, 2.0])), [1.0, 2.0]),
    ]:  # fmt: skip
        assert x.device.id == 1
        np.testing.assert_array_equal(x.values, expected)
    assert arrays.empty((2, 3), "c8").dtype == np.complex64 and Device.current == [0]


def test_copies_go_both_ways(arrays):
    x, out = arrays.to_device(np.arange(4.0)), np.zeros(4)
    arrays.copy_to_host(x, out)
    np.testing.assert_array_equal(out, np.arange(4.0))
    pinned = arrays.pinned(32)
    assert pinned.nbytes == 32 and pinned.dtype == np.uint8 and pinned.flags.writeable
    pinned.view(np.float64)[:] = 7.0
    arrays.copy_to_device(pinned.view(np.float64), x)
    np.testing.assert_array_equal(arrays.to_host(x), [7.0] * 4)
    arrays.add_at(x, np.array([1, 1]), arrays.full((2,), 1, float))
    np.testing.assert_array_equal(x.values, [7.0, 9.0, 7.0, 7.0])


def test_contiguous_arrays_are_passed_through(arrays):
    x = arrays.to_device(np.ones((2, 3)))
    assert arrays.contiguous(x) is x and arrays.copy(x) is not x
    x.values = x.values.T
    assert arrays.contiguous(x).flags.c_contiguous
    assert arrays.message(x) is x and arrays.pointer(x) == x.values.ctypes.data
    assert arrays.pointer(arrays.empty((0,), float)) == 0


def test_several_kernels_are_queued_as_a_graph(arrays, monkeypatch):
    from mpiad.transport.devices import cupy_arrays

    queued, launcher = [], arrays.launcher
    kernels = [cupy_arrays.CupyKernel(KernelFunction(lambda *given, k=k: queued.append((k, *given)))) for k in range(5)]
    launches = [(kernel, k + 1, 256, (None, k)) for k, kernel in enumerate(kernels)]
    with Device(1):
        Stream.current.append(Stream())
        alone, together = launcher.sequence(launches[:1]), launcher.sequence(launches)
        monkeypatch.setattr(cupy_arrays, "_MOST_KERNELS", 2)
        parts = launcher.sequence(launches)
        assert not queued  # capturing runs nothing
        for run, count in ((alone, 1), (together, 5), (parts, 5), (parts, 5)):
            run()
            assert [one[0] for one in queued] == list(range(count))
            assert queued[-1][1:3] == ((count,), (256,)) and queued[-1][4] == count - 1
            queued.clear()
        assert arrays.stream() == Stream.current[-1].ptr != Stream().ptr


def test_a_side_stream_and_the_current_one_wait_for_each_other(arrays):
    with Device(1):
        stream = Stream()
        Stream.current.append(stream)
        for fails in (False, True):
            ready = arrays.record()
            try:
                with arrays.side_stream(ready):
                    side = Stream.current[-1]
                    assert side is not stream and side.device == 1 and side.non_blocking and side.priority < 0
                    assert side.waited_for[-1] is ready and len(stream.waited_for) == fails
                    if fails:
                        raise ZeroDivisionError
            except ZeroDivisionError:
                pass
            assert Stream.current[-1] is stream and stream.waited_for[-1].stream is side
        Stream.current.pop()
        other = Stream()
        with other, arrays.side_stream(arrays.record()):
            assert Stream.current[-1] is not side
    assert ready.stream is stream and len(side.waited_for) == 2


class Runtime:
    """CUDA's runtime, with host memory; `log` has the calls that only queue."""

    memcpyDefault = 4  # noqa: N815

    class CUDARuntimeError(RuntimeError):
        def __init__(self, status):
            super().__init__(f"cudaError {status}")
            self.status = status

    def __init__(self):
        self.log, self.blocks, self.limit, self.peers, self.count = [], {}, 1 << 20, True, 2

    def malloc(self, size):
        assert Device.current[-1] == 1
        if size > self.limit:
            raise self.CUDARuntimeError(2 if size < 1 << 40 else 999)
        block = ctypes.create_string_buffer(size)
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free(self, ptr):
        del self.blocks[ptr]

    def ipcGetMemHandle(self, devPtr):  # noqa: N802, N803
        return str(devPtr).encode().ljust(64, b"\0")

    def ipcOpenMemHandle(self, handle, flags):  # noqa: N802
        assert len(handle) == 64 and flags == 1
        return int(handle.rstrip(b"\0"))

    def ipcCloseMemHandle(self, devPtr):  # noqa: N802, N803
        self.log.append(("close", devPtr))

    def hostRegister(self, ptr, size, flags):  # noqa: N802
        self.log.append(("register", ptr, size, flags))

    def hostUnregister(self, ptr):  # noqa: N802
        self.log.append(("unregister", ptr))

    def memcpyAsync(self, dst, src, size, kind, stream):  # noqa: N802
        assert kind == 4 and stream == 7
        ctypes.memmove(dst, src, size)

    def getDeviceCount(self):  # noqa: N802
        return self.count

    def deviceCanAccessPeer(self, device, peer):  # noqa: N802, N803
        return self.peers


class Function:
    """A function of CUDA's driver."""

    def __init__(self, call):
        self.call = call

    def __call__(self, *args):
        for value, kind in zip(args, getattr(self, "argtypes", ())):
            kind(value)
        return self.call(*args)


class Driver:
    """CUDA's driver: the second version of the functions, or the first one alone."""

    def __init__(self, suffix, log, code=0):
        self.functions = {}
        for name in ("cuStreamWaitValue64", "cuStreamWriteValue64"):
            self.functions[name + suffix] = Function(lambda *args, name=name: log.append((name, *args)) or code)
        self.cuMemHostGetDevicePointer_v2 = self.pointer

    def pointer(self, found, host, flags):
        found._obj.value = host.value + (1 << 40)
        return 0

    def __getattr__(self, name):
        if name in self.functions:
            return self.functions[name]
        raise AttributeError(name)

    __getitem__ = __getattr__


@pytest.fixture
def runtime(arrays, monkeypatch):
    """The runtime of that CuPy, whose current stream is number 7."""
    found = Runtime()
    cupy = sys.modules["cupy"]
    cupy.cuda.runtime = found
    cupy.released = []
    cupy.get_default_memory_pool = lambda: SimpleNamespace(free_all_blocks=lambda: cupy.released.append(1))
    monkeypatch.setattr(Stream, "ptr", 7, raising=False)
    monkeypatch.setattr(Device, "attributes", {"ComputeMode": 0}, raising=False)
    return found


@pytest.mark.parametrize("suffix", ["_v2", ""])
def test_memory_is_shared_by_handles_of_whole_blocks(arrays, runtime, monkeypatch, suffix):
    monkeypatch.setattr(ctypes, "CDLL", lambda path: Driver(suffix, runtime.log))
    memory = arrays.memory
    address = memory.allocate(1 << 16)
    assert memory.open(memory.handle(address)) == address
    x, y = arrays.to_device(np.arange(4.0)), np.zeros(4)
    memory.store(address + 512, x)
    memory.load(y, address + 512)
    np.testing.assert_array_equal(y, np.arange(4.0))
    host = np.zeros(4096, np.uint8)
    flag = memory.register(host)
    memory.write(flag + 8, 3)
    memory.wait(flag, 2)
    memory.unregister(host)
    memory.close(address)
    assert flag == host.ctypes.data + (1 << 40)
    assert runtime.log == [
        ("register", host.ctypes.data, 4096, 2), ("cuStreamWriteValue64", 7, flag + 8, 3, 0),
        ("cuStreamWaitValue64", 7, flag, 2, 0), ("unregister", host.ctypes.data), ("close", address),
    ]  # fmt: skip
    memory.free(address)
    assert not runtime.blocks and Device.current == [0]


def test_too_little_memory_and_errors_of_the_driver(arrays, runtime, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda path: Driver("_v2", runtime.log, code=801))
    memory = arrays.memory
    with pytest.raises(MemoryError):
        memory.allocate(1 << 21)
    with pytest.raises(runtime.CUDARuntimeError):
        memory.allocate(1 << 41)
    memory.release_unused()
    assert sys.modules["cupy"].released == [1]
    with pytest.raises(RuntimeError, match="error 801 in the write"):
        memory.write(0, 1)


def test_what_keeps_other_processes_out_is_named(arrays, runtime, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda path: Driver("_v2", runtime.log))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert arrays.memory.obstacle() == ""
    runtime.peers = False
    assert arrays.memory.obstacle() == "GPU 1 has no peer access to 0"
    runtime.peers, runtime.count = True, 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1234")
    Device.attributes["ComputeMode"] = 3
    found = arrays.memory.obstacle()
    assert "names a MIG instance" in found and "exclusive-process compute mode" in found and "shows one GPU" in found
