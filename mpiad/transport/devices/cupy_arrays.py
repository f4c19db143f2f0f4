"""CuPy's arrays and kernels for `device_arrays`; loaded when they are first needed, since it imports CuPy."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, cached_property, partial
from typing import Any

import cupy
import numpy as np
from numpy.typing import DTypeLike

from mpiad._typing import Array, Buffer, Scalar, Shape

# Of a graph: capturing and instantiating more at once takes memory and time that grow with their number.
_MOST_KERNELS = 1000


class CupyArrays:
    """CuPy's arrays on one device; `device_arrays.ArrayModule` describes the methods."""

    name, takes_host_arrays = "CuPy", False
    kind = cupy.ndarray

    def __init__(self, device: int):
        self.device = device
        self._side_streams: dict[int, cupy.cuda.Stream] = {}  # by address of the current stream

    @cached_property
    def launcher(self) -> CupyLauncher:
        """Compiles and runs kernels on this device."""
        return CupyLauncher(self)

    @cached_property
    def memory(self) -> CudaMemory:
        """Memory of this device that other processes can open."""
        return CudaMemory(self)

    def current(self) -> AbstractContextManager[object]:
        """Make this device the current one."""
        return cupy.cuda.Device(self.device)

    def empty(self, shape: Shape, dtype: DTypeLike) -> Array:
        """Make an uninitialized array."""
        with self.current():
            return cupy.empty(shape, dtype)

    def full(self, shape: Shape, value: Scalar, dtype: DTypeLike) -> Array:
        """Make an array filled with one number."""
        with self.current():
            # `full` launches a kernel.
            return cupy.full(shape, value, dtype) if value else cupy.zeros(shape, dtype)

    def arange(self, stop: int) -> Array:
        """Make an array of integers."""
        with self.current():
            return cupy.arange(stop, dtype=np.int64)

    def add_at(self, x: Array, idx: object, values: Array) -> None:
        """Add to elements, atomically; the order of the additions isn't fixed."""
        with self.current():
            cupy.add.at(x, idx, values)

    def contiguous(self, x: Array) -> Array:
        """Return `x`, or a C-contiguous copy."""
        return x if x.flags.c_contiguous else self.copy(x)

    def copy(self, x: Array) -> Array:
        """Return a C-contiguous copy."""
        with self.current():
            return x.copy(order="C")

    def to_host(self, x: Array) -> np.ndarray:
        """Return a NumPy array of the same values."""
        with self.current():
            return x.get()

    def to_device(self, host: np.ndarray) -> Array:
        """Return a CuPy array of the same values."""
        with self.current():
            x = cupy.asarray(host, order="C")
            # The copy may still read pinned memory of the caller.
            cupy.cuda.get_current_stream().synchronize()
            return x

    def copy_to_host(self, x: Array, out: np.ndarray) -> None:
        """Queue a copy into host memory."""
        with self.current():
            x.data.copy_to_host_async(out.ctypes.data, x.nbytes)

    def copy_to_device(self, host: np.ndarray, out: Array) -> None:
        """Queue a copy from host memory."""
        with self.current():
            out.data.copy_from_host_async(host.ctypes.data, out.nbytes)

    def pinned(self, nbytes: int) -> np.ndarray:
        """Return page-locked host memory, from CuPy's pool."""
        return np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)

    def synchronize(self) -> None:
        """Wait for the current stream."""
        with self.current():
            cupy.cuda.get_current_stream().synchronize()

    def record(self) -> object:
        """Return an event after everything queued on the current stream."""
        with self.current():
            event = cupy.cuda.Event(disable_timing=True)
            event.record()
            return event

    def wait(self, event: Any) -> None:
        """Wait for an event on the host."""
        event.synchronize()

    @contextmanager
    def side_stream(self, event: Any) -> Iterator[None]:
        """Queue on another stream after an event."""
        with self.current():
            stream = cupy.cuda.get_current_stream()
            if stream.ptr not in self._side_streams:
                # The default stream waits for streams that aren't `non_blocking`. Smaller numbers are higher priorities.
                self._side_streams[stream.ptr] = cupy.cuda.Stream(non_blocking=True, priority=-1)
            side = self._side_streams[stream.ptr]
            side.wait_event(event)
            try:
                with side:
                    yield
            finally:
                stream.wait_event(side.record(cupy.cuda.Event(disable_timing=True)))

    def message(self, x: Array) -> Buffer:
        """Return the array: mpi4py reads `__cuda_array_interface__`."""
        return x

    def pointer(self, x: Array) -> int:
        """Return the address on the device."""
        return x.data.ptr if x.size else 0

    def stream(self) -> int:
        """Return the address of the current stream of this device."""
        with self.current():
            return int(cupy.cuda.get_current_stream().ptr)


@cache
def on_device(device: int) -> CupyArrays:
    """Return the module for CuPy's arrays on the device of this number."""
    return CupyArrays(device)


def arrays_of_device(x: Array) -> CupyArrays:
    """Return the module for arrays on the device of `x`."""
    return on_device(x.device.id)


def current_arrays(device: int | None = None) -> CupyArrays:
    """Return the module for a device; if it is None, use the current one, or raise a RuntimeError if there is no GPU."""
    try:
        return on_device(int(cupy.cuda.runtime.getDevice()) if device is None else device)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise RuntimeError(f"CuPy {cupy.__version__} finds no GPU that this process may use: {error}") from error


class CupyKernel:
    """A kernel compiled by NVRTC."""

    def __init__(self, function: Any):
        self.function = function
        self.registers, self.local_bytes = int(function.num_regs), int(function.local_size_bytes)


class CupyLauncher:
    """Compiles and runs kernels on one device; `device_arrays.Launcher` describes the methods."""

    def __init__(self, arrays: CupyArrays):
        self._arrays = arrays
        self.multiprocessors = int(cupy.cuda.Device(arrays.device).attributes["MultiProcessorCount"])

    def compiled(self, text: str, name: str, options: tuple[str, ...]) -> CupyKernel:
        """Compile CUDA C; CuPy caches the machine code on disk."""
        with self._arrays.current():
            return CupyKernel(cupy.RawModule(code=text, options=options, backend="nvrtc").get_function(name))

    def launch(self, kernel: Any, blocks: int, threads: int, arguments: Sequence[object]) -> None:
        """Queue a run."""
        given = tuple([np.uintp(0) if x is None else x for x in arguments])
        with self._arrays.current():
            kernel.function((blocks,), (threads,), given)

    def sequence(self, launches: Sequence[tuple[CupyKernel, int, int, Sequence[object]]]) -> Callable[[], None]:
        """Return a function that queues kernels: several ones as graphs of at most `_MOST_KERNELS`."""
        if len(launches) == 1:
            return partial(self.launch, *launches[0])
        parts = [launches[k : k + _MOST_KERNELS] for k in range(0, len(launches), _MOST_KERNELS)]
        graphs = [self._graph(part) for part in parts]

        def queue() -> None:
            with self._arrays.current():
                for graph in graphs:
                    graph.launch()

        return queue

    def _graph(self, launches: Sequence[tuple[CupyKernel, int, int, Sequence[object]]]) -> Any:
        """Return the graph of kernels, which is captured on a stream of its own and runs on the current one."""
        with self._arrays.current(), cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            try:
                for one in launches:
                    self.launch(*one)
            finally:
                graph = stream.end_capture()
        return graph

    def free_bytes(self) -> int:
        """Return the sum of the free memory of the device and the unused memory of CuPy's pool."""
        with self._arrays.current():
            free, _ = cupy.cuda.runtime.memGetInfo()
            return int(free) + int(cupy.get_default_memory_pool().free_bytes())


# A function of CUDA's driver, ``cuStream...(stream, address, value, flags)``: CuPy doesn't wrap it.
_ARGUMENTS = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint)
_AT_LEAST, _WRITE = 0, 0  # CU_STREAM_WAIT_VALUE_GEQ; CU_STREAM_WRITE_VALUE_DEFAULT, which orders earlier writes before it
_MAPPED = 2  # cudaHostRegisterMapped
_NO_MEMORY = 2  # cudaErrorMemoryAllocation
_LAZY_PEERS = 1  # cudaIpcMemLazyEnablePeerAccess
_MODES = {1: "exclusive", 2: "prohibited", 3: "exclusive-process"}


class CudaMemory:
    """Memory of one device that other processes open by CUDA IPC; `device_arrays.DeviceMemory` describes the methods.

    Only memory by plain `cudaMalloc` has handles, of whole allocations; that of pools and managed memory has none.
    """

    def __init__(self, arrays: CupyArrays):
        self._arrays = arrays
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._wait, self._write = self._function("cuStreamWaitValue64"), self._function("cuStreamWriteValue64")

    def _function(self, name: str) -> Callable[..., int]:
        # The second version has been in the driver since CUDA 11.7.
        found = getattr(self._driver, f"{name}_v2", None) or self._driver[name]
        found.argtypes, found.restype = _ARGUMENTS, ctypes.c_int
        return found

    def allocate(self, nbytes: int) -> int:
        """Allocate a block by `cudaMalloc`."""
        with self._arrays.current():
            try:
                return int(cupy.cuda.runtime.malloc(nbytes))
            except cupy.cuda.runtime.CUDARuntimeError as error:
                if error.status != _NO_MEMORY:
                    raise
                raise MemoryError(str(error)) from None

    def free(self, address: int) -> None:
        """Free a block."""
        with self._arrays.current():
            cupy.cuda.runtime.free(address)

    def release_unused(self) -> None:
        """Free the unused memory of CuPy's pool."""
        with self._arrays.current():
            cupy.get_default_memory_pool().free_all_blocks()

    def handle(self, address: int) -> bytes:
        """Return the handle of a block."""
        with self._arrays.current():
            return bytes(cupy.cuda.runtime.ipcGetMemHandle(address))

    def open(self, handle: bytes) -> int:
        """Open another process's block."""
        with self._arrays.current():
            return int(cupy.cuda.runtime.ipcOpenMemHandle(handle, _LAZY_PEERS))

    def close(self, address: int) -> None:
        """Close another process's block."""
        with self._arrays.current():
            cupy.cuda.runtime.ipcCloseMemHandle(address)

    def register(self, memory: np.ndarray) -> int:
        """Page-lock host memory, and return its address on the device."""
        address = ctypes.c_uint64()
        with self._arrays.current():
            cupy.cuda.runtime.hostRegister(memory.ctypes.data, memory.nbytes, _MAPPED)
            host = ctypes.c_void_p(memory.ctypes.data)
            self._require(self._driver.cuMemHostGetDevicePointer_v2(ctypes.byref(address), host, 0), "register")
        return address.value

    def unregister(self, memory: np.ndarray) -> None:
        """Unlock host memory."""
        with self._arrays.current():
            cupy.cuda.runtime.hostUnregister(memory.ctypes.data)

    def store(self, address: int, x: Array) -> None:
        """Queue a copy to the device."""
        self._copy(address, _address_of(x), x.nbytes)

    def load(self, x: Array, address: int) -> None:
        """Queue a copy from the device."""
        self._copy(_address_of(x), address, x.nbytes)

    def array(self, address: int, shape: Shape, dtype: np.dtype, owner: object) -> Array:
        """Return an array at an address."""
        with self._arrays.current():
            nbytes = dtype.itemsize * math.prod(shape)
            memory = cupy.cuda.UnownedMemory(address, nbytes, owner, self._arrays.device)
            return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

    def _copy(self, destination: int, source: int, nbytes: int) -> None:
        with self._arrays.current():
            stream, kind = cupy.cuda.get_current_stream().ptr, cupy.cuda.runtime.memcpyDefault
            cupy.cuda.runtime.memcpyAsync(destination, source, nbytes, kind, stream)

    def write(self, flag: int, value: int) -> None:
        """Queue the write of a number."""
        with self._arrays.current():
            self._require(self._write(cupy.cuda.get_current_stream().ptr, flag, value, _WRITE), "write")

    def wait(self, flag: int, value: int) -> None:
        """Queue a wait for a number."""
        with self._arrays.current():
            self._require(self._wait(cupy.cuda.get_current_stream().ptr, flag, value, _AT_LEAST), "wait")

    def _require(self, code: int, step: str) -> None:
        if code:
            raise RuntimeError(f"CUDA's driver returned the error {code} in the {step} of a message between devices")

    def obstacle(self) -> str:
        """Return a known reason why other processes can't open blocks."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        with self._arrays.current():
            attributes = cupy.cuda.Device(self._arrays.device).attributes
            count = cupy.cuda.runtime.getDeviceCount()
            others = [k for k in range(count) if k != self._arrays.device]
            apart = [k for k in others if not cupy.cuda.runtime.deviceCanAccessPeer(self._arrays.device, k)]
        mode = _MODES.get(attributes["ComputeMode"], "")
        reasons = [
            ("MIG" in visible, f"CUDA_VISIBLE_DEVICES={visible} names a MIG instance, which shares no memory with others"),
            (bool(mode), f"the GPU is in {mode} compute mode (nvidia-smi -c DEFAULT)"),
            (
                bool(visible) and count == 1,
                f"CUDA_VISIBLE_DEVICES={visible} shows one GPU: let each rank see those of the others, too, and call "
                "mpiad.device.select()",
            ),
            (bool(apart), f"GPU {self._arrays.device} has no peer access to {', '.join(map(str, apart))}"),
        ]
        return "; ".join(text for holds, text in reasons if holds)


def _address_of(x: Array) -> int:
    return int(x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr)
