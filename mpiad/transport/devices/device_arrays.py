"""Device arrays: recognition, functions that create and copy them, and kernels.

A device array is an object whose type has `__cuda_array_interface__`. Beyond NumPy's protocols (`__array_ufunc__`,
`__array_function__`), the library needs only the functions in `ArrayModule`: one object for each device, returned by
`arrays_of(x)`. Kernels, from CUDA C source, are compiled and launched by the `Launcher` of a device, returned by
`launcher_of(arrays)`. Other kinds than CuPy's are added by `register_arrays`. Arithmetic and communication never turn a
host array into a device array, or the reverse.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from mpiad._typing import Array, Buffer, Scalar, Shape


class ArrayModule(Protocol):
    """The functions that make and copy arrays of one kind, on one device.

    Two modules are equal if arrays of one can be used with arrays of the other without a copy: same kind, same
    device. All arrays made are C-contiguous. A queued operation may continue after the call returns, in the order of
    the current stream, as arithmetic on device arrays does.

    Attributes
    ----------
    name : str
        Name of the arrays in error messages, such as "CuPy".
    kind : type
        Type of the arrays.
    device : int
        Number of the device.
    takes_host_arrays : bool
        Whether NumPy arrays may be combined with them, as constants: False on a device, and True for arrays in the trace of
        a compiled program.
    """

    name: str
    kind: type
    device: int
    takes_host_arrays: bool

    def empty(self, shape: Shape, dtype: DTypeLike) -> Array:
        """Make an uninitialized array."""

    def full(self, shape: Shape, value: Scalar, dtype: DTypeLike) -> Array:
        """Make an array filled with one Python or NumPy number, which is passed to the device without a copy of memory."""

    def arange(self, stop: int) -> Array:
        """Make an array of the integers from 0 to `stop` - 1, of dtype int64."""

    def add_at(self, x: Array, idx: object, values: Array) -> None:
        """Add values to the elements at an index, in place; for a repeated index all of its values are added."""

    def contiguous(self, x: Array) -> Array:
        """Return `x` itself if it is C-contiguous, else a C-contiguous copy (queued)."""

    def copy(self, x: Array) -> Array:
        """Return a C-contiguous copy, also if `x` is contiguous (queued)."""

    def to_host(self, x: Array) -> np.ndarray:
        """Return a NumPy array of the same values, complete when the call returns."""
        ...

    def to_device(self, host: np.ndarray) -> Array:
        """Return a device array of the same values; `host` may be changed when the call returns."""

    def copy_to_host(self, x: Array, out: np.ndarray) -> None:
        """Queue the copy of a C-contiguous array into C-contiguous host memory of the same shape and dtype.

        `out` must exist, and must not be read, until `synchronize` or the `wait` for a later event has returned.
        """

    def copy_to_device(self, host: np.ndarray, out: Array) -> None:
        """Queue the copy of C-contiguous host memory into a C-contiguous array of the same shape and dtype.

        `host` must exist unchanged until `synchronize`, or the `wait` for a later event.
        """

    def pinned(self, nbytes: int) -> np.ndarray:
        """Return `nbytes` of page-locked host memory as a NumPy array of dtype uint8; freed when the array is dropped."""
        ...

    def synchronize(self) -> None:
        """Wait until everything queued on the current stream is done."""

    def record(self) -> object:
        """Return an event after everything queued on the current stream, for `wait`."""

    def wait(self, event: object) -> None:
        """Wait on the host until everything before an event is done."""

    def side_stream(self, event: object) -> AbstractContextManager[object]:
        """Return a context whose operations run at the same time as those queued on the current stream after an event.

        They are queued on another stream, with a higher priority than that of the default stream. At the end of the
        context, also after an exception, the current stream waits for them; the host doesn't.
        """
        ...

    def current(self) -> AbstractContextManager[object]:
        """Return a context in which this module's device is the current one of the thread."""
        ...

    def message(self, x: Array) -> Buffer:
        """Return the buffer of a C-contiguous array for a CUDA-aware MPI: it has the array's shape, dtype and nbytes."""

    def pointer(self, x: Array) -> int:
        """Return the address of the first element on the device, 0 for an empty array."""
        ...

    def stream(self) -> Hashable:
        """Return what identifies the current stream of the thread."""
        ...


Maker = Callable[[Array], ArrayModule]

_makers: dict[type, Maker] = {}
_current_modules: dict[type, Callable[[], ArrayModule]] = {}
_listeners: list[Callable[[type], None]] = []
# `arrays_of` is called at each operation, so the most common result is a lookup in a set.
_on_host = frozenset({np.ndarray, np.float64, np.float32, float, int, bool, complex, type(None), np.bool_, np.int64})


def arrays_of(x: Array) -> ArrayModule | None:
    """Return the module for arrays of the kind and device of `x`, which is untraced; None if it isn't a device array."""
    kind = type(x)
    if kind in _on_host:
        return None
    maker = _makers.get(kind)
    if maker is None:
        if not hasattr(kind, "__cuda_array_interface__"):
            return None
        maker = _register_cupy(kind)
    return maker(x)


def arrays_named(name: str) -> ArrayModule:
    """Return the module for arrays with this name on this process's current device; raise a TypeError if unknown."""
    if name == "CuPy":
        return selected_arrays()
    for here in _current_modules.values():
        found = here()
        if found.name == name:
            return found
    raise TypeError(f"another rank sends an array on a device ({name}), and no such arrays are known to this process.")


def is_device_array(x: Array) -> bool:
    """Return whether an untraced value is a device array; its kind needn't be registered.

    Examples
    --------
    >>> print(mpiad.device.is_device_array(np.ones(3)))
    False
    """
    kind = type(x)
    return kind not in _on_host and (kind in _makers or hasattr(kind, "__cuda_array_interface__"))


def is_array(x: Array) -> bool:
    """Return whether an untraced value is an array, on the host or on a device."""
    return isinstance(x, np.ndarray) or is_device_array(x)


def named(x: Array) -> str:
    """Return the name of a value's type for error messages, and its device, since CuPy's type is also named ndarray."""
    arrays = arrays_of(x) if is_device_array(x) else None
    kind = type(x).__name__
    return kind if arrays is None else f"{kind} on device {arrays.device} ({arrays.name})"


def register_arrays(kind: type, maker: Maker, here: Callable[[], ArrayModule] | None = None) -> None:
    """Register the functions that make arrays of a kind.

    Parameters
    ----------
    kind : type
        Type of the arrays; it has `__cuda_array_interface__`, `__array_ufunc__` and `__array_function__`.
    maker : callable
        ``maker(x) -> ArrayModule`` returns the module for the device of `x`. It is called often: cache the modules.
    here : callable, optional
        ``here() -> ArrayModule`` returns the module for this process's current device. It is called on a rank that
        receives such an array, and has none among its arguments.
    """
    _makers[kind] = maker
    if here is not None:
        _current_modules[kind] = here
    for listener in _listeners:
        listener(kind)


def when_registered(listener: Callable[[type], None]) -> None:
    """Call a function with each kind of arrays that is or will be registered."""
    # Kinds may be registered later: CuPy is often imported after this library.
    _listeners.append(listener)
    for kind in _makers:
        listener(kind)


def discover() -> None:
    """Register CuPy's arrays if the program has loaded CuPy: autograd may get them before this library does."""
    # CuPy is never imported here: that takes a second, and most programs have no GPU.
    kind = getattr(sys.modules.get("cupy"), "ndarray", None)
    if kind is not None and kind not in _makers:
        _register_cupy(kind)


def _register_cupy(kind: type) -> Maker:
    """Register CuPy's arrays, or a subclass, when the first one appears."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "cupy":
            from mpiad.transport.devices.cupy_arrays import arrays_of_device

            register_arrays(kind, arrays_of_device)
            return arrays_of_device
    raise TypeError(
        f"got a device array of type {kind.__module__}.{kind.__qualname__}, but only CuPy's are known. cupy.asarray(x) "
        "makes one of it without a copy."
    )


class Spec(NamedTuple):
    """Shape and dtype of an array, and the module that makes arrays on its device; None for the host."""

    shape: Shape
    dtype: np.dtype
    arrays: ArrayModule | None = None

    @classmethod
    def of(cls, array: Array) -> Spec:
        """Return the spec of an array."""
        return cls(array.shape, array.dtype, arrays_of(array))

    @property
    def differentiable(self) -> bool:
        """Return whether arrays like this one carry derivatives."""
        return self.dtype.kind in "fc"

    @property
    def nbytes(self) -> int:
        """Bytes of an array like this one."""
        return self.dtype.itemsize * math.prod(self.shape)

    def empty(self) -> Array:
        """Return a new uninitialized array."""
        return np.empty(self.shape, self.dtype) if self.arrays is None else self.arrays.empty(self.shape, self.dtype)

    def zeros(self) -> Array:
        """Return a new array of zeros; on the host a NumPy scalar for shape ()."""
        if self.arrays is not None:
            return self.arrays.full(self.shape, 0, self.dtype)
        return np.zeros(self.shape, self.dtype) if self.shape else self.dtype.type(0)


def copied(array: Array) -> Array:
    """Return a C-contiguous copy on the same device; on the host a NumPy scalar for an array without dimensions."""
    arrays = arrays_of(array)
    return result(array.copy()) if arrays is None else arrays.copy(array)


def equal_on_device(x: Array, y: Array) -> bool:
    """Return whether two arrays of the same shape and dtype on a device have the same bytes."""
    arrays: ArrayModule = arrays_of(x)  # type: ignore[assignment]
    x, y = (arrays.contiguous(each).reshape(-1).view(np.uint8) for each in (x, y))
    return bool(arrays.to_host(np.all(x == y)))


def contiguous(array: Array) -> Array:
    """Return an array with the same values on the same device, C-contiguous; without a copy if possible."""
    arrays = arrays_of(array)
    return np.ascontiguousarray(array) if arrays is None else arrays.contiguous(array)


def empty_like(u: Array, shape: Shape) -> Array:
    """Return a C-contiguous uninitialized array with the dtype and device of `u`."""
    return Spec(shape, u.dtype, arrays_of(u)).empty()


def zeros_like(u: Array, shape: Shape) -> Array:
    """Return a C-contiguous array of zeros, with the dtype and device of `u`."""
    arrays = arrays_of(u)
    return np.zeros(shape, u.dtype) if arrays is None else arrays.full(shape, 0, u.dtype)


def result(array: Array) -> Array:
    """Return a received array; on the host a NumPy scalar if it has no dimensions, as NumPy's functions do."""
    return array[()] if type(array) is np.ndarray and not array.ndim else array


class DeviceKernel(Protocol):
    """A compiled kernel."""

    registers: int  # per thread
    local_bytes: int  # memory per thread for values that don't fit into registers


# The arguments of `Launcher.launch`.
Launch: TypeAlias = tuple[DeviceKernel, int, int, Sequence[object]]


class Launcher(Protocol):
    """Compiler and launcher of kernels on one device."""

    multiprocessors: int  # at least this number of blocks can run at the same time

    def compiled(self, text: str, name: str, options: tuple[str, ...]) -> DeviceKernel:
        """Compile CUDA C for this device, and return the kernel with this name; may be cached per text."""
        ...

    def launch(self, kernel: DeviceKernel, blocks: int, threads: int, arguments: Sequence[object]) -> None:
        """Queue a kernel with C-contiguous device arrays, None (null pointer), int, float or NumPy scalars."""

    def sequence(self, launches: Sequence[Launch]) -> Callable[[], None]:
        """Return a function that queues kernels one after the other, each with the arguments of `launch`."""
        ...

    def free_bytes(self) -> int:
        """Return the bytes of device memory that can still be allocated."""
        ...


class DeviceMemory(Protocol):
    """Memory of one device that other processes can open, with operations queued on the current stream.

    Host memory is page-locked, except for that of `store` and `load`.
    """

    def allocate(self, nbytes: int) -> int:
        """Return the address of a new block, of 2 MiB or more; raise a MemoryError if there is none."""
        ...

    def free(self, address: int) -> None:
        """Free a block, which no other process has opened."""

    def release_unused(self) -> None:
        """Free unused memory that other allocators of this process keep."""

    def handle(self, address: int) -> bytes:
        """Return 64 bytes by which another process can open a block."""
        ...

    def open(self, handle: bytes) -> int:
        """Return the address of another process's block in this one."""
        ...

    def close(self, address: int) -> None:
        """End the access to another process's block."""

    def register(self, memory: np.ndarray) -> int:
        """Page-lock host memory; return its address on the device."""
        ...

    def unregister(self, memory: np.ndarray) -> None:
        """End the effect of `register`."""

    def store(self, address: int, x: Array) -> None:
        """Queue the copy of a C-contiguous array, on the host or the device, to an address on the device."""

    def load(self, x: Array, address: int) -> None:
        """Queue the copy from an address on the device into a C-contiguous array, on the host or the device."""

    def array(self, address: int, shape: Shape, dtype: np.dtype, owner: object) -> Array:
        """Return the array at an address on the device, which refers to `owner`."""

    def write(self, flag: int, value: int) -> None:
        """Queue the write of a 64-bit number, after which other devices and hosts see all earlier ones."""

    def wait(self, flag: int, value: int) -> None:
        """Let the stream, but not the host, wait until a 64-bit number is at least `value`."""

    def obstacle(self) -> str:
        """Return a known reason why other processes can't open blocks of this device; "" if there is none."""
        ...


def memory_of(arrays: ArrayModule) -> DeviceMemory | None:
    """Return the memory of the device of these arrays; None for a kind of arrays whose memory can't be shared."""
    return getattr(arrays, "memory", None)


def launcher_of(arrays: ArrayModule) -> Launcher:
    """Return the launcher for the device of these arrays; raise a TypeError for a kind of arrays without a launcher."""
    found: Launcher | None = getattr(arrays, "launcher", None)
    if found is None:
        raise TypeError(f"kernels run on CuPy's arrays, but got {arrays.name}'s; cupy.asarray(x) makes one without a copy.")
    return found


def selected_arrays(device: int | None = None) -> ArrayModule:
    """Return the module for arrays on a device, by default the current one; ImportError or RuntimeError without any."""
    if find_spec("cupy") is None:
        raise ImportError("CuPy isn't installed: pip install mpiad[gpu] for CUDA 12, mpiad[gpu13] for CUDA 13")
    from mpiad.transport.devices.cupy_arrays import current_arrays

    return current_arrays(device)
