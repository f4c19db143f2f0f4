"""Arrays that behave as CuPy's do, without a device: what isn't copied by name raises.

`DeviceArray` carries its values privately and has what `cupy.ndarray` has: the protocols `__array_ufunc__` and
`__array_function__`, operators, indices, some methods, and the attributes of the CUDA array interface, with a pointer
that must not be read. It is stricter than CuPy in that `float(x)`, `bool(x)` and iteration raise, where CuPy copies or
slices silently, and in that arrays of NumPy's are refused wherever CuPy would copy them to the device.

`DoubleArrays` makes them, as mpiad.transport.devices.device_arrays asks. Its queued copies are strict too: host memory
holds rubbish until the copy into it is waited for, and must not change while it is copied from; device memory is given
to MPI only behind a synchronisation, and only inside `cuda_aware()`. All copies are counted in `transfers`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from device_functions import COUNTING, FUNCTIONS, UFUNCS, UFUNCS_AT

from mpiad.transport.devices.device_arrays import register_arrays

_SCALARS = (bool, int, float, complex, np.generic)
_KINDS = "?bhilqBHILQefdFD"
NOT_AN_ADDRESS = 1 << 60


_COMPARISONS = (np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal)


class Transfers:
    """What was copied between host and device, and how often the host waited, since `reset`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.h2d = self.d2h = self.h2d_bytes = self.d2h_bytes = self.synchronizations = 0

    @property
    def copies(self) -> int:
        return self.h2d + self.d2h

    def to_device(self, nbytes: int) -> None:
        self.h2d += 1
        self.h2d_bytes += nbytes

    def to_host(self, nbytes: int) -> None:
        self.d2h += 1
        self.d2h_bytes += nbytes

    def __repr__(self) -> str:
        return f"Transfers(h2d={self.h2d}, d2h={self.d2h}, synchronizations={self.synchronizations})"


transfers = Transfers()


class Memory:
    """The bytes of the arrays that are alive, of those made since `watched_memory`, and the largest number of bytes."""

    def __init__(self) -> None:
        self.bytes = self.peak = 0
        self._known: set[int] = set()

    def note(self, values: np.ndarray) -> None:
        while isinstance(values.base, np.ndarray):
            values = values.base
        if id(values) not in self._known:
            self._known.add(id(values))
            self.bytes += values.nbytes
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(values, self._freed, id(values), values.nbytes)

    def _freed(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.bytes -= nbytes


@contextmanager
def watched_memory() -> Iterator[Memory]:
    """Watch the memory of the arrays that are made inside."""
    memory, make = Memory(), DeviceArray._of

    def noted(values: np.ndarray) -> DeviceArray:
        memory.note(values)
        return make(values)

    DeviceArray._of = staticmethod(noted)  # type: ignore[method-assign]
    try:
        yield memory
    finally:
        DeviceArray._of = staticmethod(make)  # type: ignore[method-assign]


class _Flags:
    def __init__(self, flags: Any):
        self.c_contiguous, self.f_contiguous, self.owndata = flags.c_contiguous, flags.f_contiguous, flags.owndata
        self.forc = self.c_contiguous or self.f_contiguous


class _Device:
    id = 0


class DeviceArray:
    """An array whose values only its own functions, and the copies that are counted, can see."""

    __slots__ = ("__data", "__weakref__")
    __array_priority__ = 100
    device = _Device()

    def __init__(self) -> None:
        raise TypeError("made by mpiad.device.to_device, or by `on_device` of the tests")

    def __del__(self) -> None:
        # Kernels that are queued may have the address. A device's pool reuses memory in the order of the stream, too.
        memory = self.__data if self.__data.base is None else self.__data.base
        if double is not None and double.queue is not None and isinstance(memory, np.ndarray) and memory.flags.owndata:
            double.queue.put(memory)

    # ---- what CuPy's arrays tell of themselves

    shape = property(lambda self: self.__data.shape)
    dtype = property(lambda self: self.__data.dtype)
    ndim = property(lambda self: self.__data.ndim)
    size = property(lambda self: self.__data.size)
    nbytes = property(lambda self: self.__data.nbytes)
    itemsize = property(lambda self: self.__data.itemsize)
    strides = property(lambda self: self.__data.strides)
    flags = property(lambda self: _Flags(self.__data.flags))
    T = property(lambda self: _wrapped(self.__data.T))
    real = property(lambda self: _wrapped(self.__values.real))
    imag = property(lambda self: _wrapped(self.__values.imag if self.dtype.kind == "c" else np.zeros_like(self.__values)))

    @property
    def __cuda_array_interface__(self) -> dict:
        values = self.__data
        return {
            "shape": values.shape, "typestr": values.dtype.str, "descr": [("", values.dtype.str)],
            "version": 3, "stream": 1,
            "strides": None if values.flags.c_contiguous else values.strides,
            "data": (values.ctypes.data + NOT_AN_ADDRESS if values.size else 0, False),
        }  # fmt: skip

    # ---- the two protocols

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if ufunc.__name__ not in UFUNCS:
            return NotImplemented
        out = kwargs.pop("out", ())
        if ufunc in _COMPARISONS:  # a number of NumPy's before the operator arrives as an array
            inputs = tuple([x[()] if type(x) is np.ndarray and x.ndim == 0 else x for x in inputs])
        for x in (*inputs, *out):
            if not isinstance(x, (DeviceArray, np.ndarray, *_SCALARS)):
                return NotImplemented
        if method == "at":
            return _add_at(ufunc, *inputs)
        if method != "__call__" or kwargs.keys() - {"dtype", "casting"}:
            raise TypeError(f"{ufunc.__name__}.{method} with {sorted(kwargs)} isn't what CuPy has")
        done = ufunc(*[_plain(x, ufunc.__name__) for x in inputs], **kwargs)
        if not out:
            return _computed(done)
        if out[0].shape != np.shape(done) or not np.can_cast(done.dtype, out[0].dtype, "same_kind"):
            raise TypeError(f"{ufunc.__name__}: the result doesn't fit into out")
        out[0].__write(..., done)
        return out[0]

    def __array_function__(self, func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
        name = func.__module__.partition(".")[2] + "." + func.__name__
        run = FUNCTIONS.get(name.lstrip("."))
        if run is None:
            return NotImplemented
        if not all(issubclass(t, (DeviceArray, np.ndarray)) for t in types):
            return NotImplemented
        if func.__name__ in COUNTING:
            transfers.to_host(8)
        return _returned(run(func, *_all_plain(args, name), **_all_plain(kwargs, name)), name)

    # ---- conversions: those by name

    def get(self) -> np.ndarray:
        transfers.to_host(self.nbytes)
        return self.__values.copy()

    def item(self) -> Any:
        transfers.to_host(self.nbytes)
        return self.__values.item()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`.")

    def _refused(self, *args: Any) -> Any:
        raise TypeError("a device array isn't copied to the host, or taken apart, unasked")

    __float__ = __int__ = __bool__ = __complex__ = __index__ = __iter__ = tolist = __contains__ = _refused

    def __len__(self) -> int:
        return len(self.__data)

    __hash__ = None  # type: ignore[assignment]

    # ---- elements

    def __getitem__(self, idx: Any) -> DeviceArray:
        if any(isinstance(part, DeviceArray) and part.dtype == bool for part in (idx if type(idx) is tuple else (idx,))):
            transfers.to_host(8)
        is_view = all(
            isinstance(part, (int, slice, type(...), type(None))) for part in (idx if type(idx) is tuple else (idx,))
        )
        found = self.__data[_index(idx)] if is_view else None
        # NumPy copies a single entry.
        return _wrapped(found if isinstance(found, np.ndarray) else self.__values[_index(idx)])

    def __setitem__(self, idx: Any, value: Any) -> None:
        self.__write(_index(idx), _plain(value, "setitem"))

    # ---- methods

    def astype(
        self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True
    ) -> DeviceArray:
        return self if not copy and self.dtype == dtype else _computed(self.__values.astype(dtype, order))

    def copy(self, order: str = "C") -> DeviceArray:
        return _computed(self.__values.copy(order))

    def view(self, dtype: Any = None, type: Any = None) -> DeviceArray:
        # CuPy takes a class that isn't its own for the dtype object, and returns an array that is of no use to anybody.
        if dtype is np.ndarray:
            x = object.__new__(DeviceArray)
            x.__data = np.empty(self.shape, object)
            return x
        return _wrapped(self.__data.view(dtype))

    def fill(self, value: Any) -> None:
        self.__write(..., _plain(value, "fill"))

    def reshape(self, *shape: Any, order: str = "C") -> DeviceArray:
        return _wrapped(
            self.__data.reshape(*shape, order=order)
            if self.flags.c_contiguous
            else self.__values.reshape(*shape, order=order)
        )

    def transpose(self, *axes: Any) -> DeviceArray:
        return _wrapped(self.__data.transpose(*axes))

    def __copy__(self) -> DeviceArray:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> DeviceArray:
        return self.copy()

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype})"

    # ---- for the functions of this file

    @staticmethod
    def _of(values: np.ndarray) -> DeviceArray:
        if values.dtype.char not in _KINDS:
            raise TypeError(f"Unsupported dtype {values.dtype}")
        x = object.__new__(DeviceArray)
        x.__data = values
        return x

    @staticmethod
    def _values(x: DeviceArray) -> np.ndarray:
        return x.__values

    @staticmethod
    def _raw(x: DeviceArray) -> np.ndarray:
        return x.__data

    @staticmethod
    def _write(x: DeviceArray, idx: Any, values: Any) -> None:
        x.__write(idx, values)

    def __write(self, idx: Any, values: Any) -> None:
        """Write in the order of the stream."""
        double._synchronized, data = False, self.__data
        double._put(lambda: data.__setitem__(idx, values))

    @property
    def __values(self) -> np.ndarray:
        """The values, after all that is queued: NumPy's arithmetic doesn't run in the order of a stream."""
        if double.queue is not None:
            double.queue.settle()
        return self.__data


def _operator(ufunc: np.ufunc, swapped: bool = False) -> Any:
    def method(self: DeviceArray, other: Any) -> Any:
        taker = getattr(type(other), "__array_ufunc__", _operator)
        priority = getattr(other, "__array_priority__", 0)
        if taker is None or (taker is _operator and priority > DeviceArray.__array_priority__ and not swapped):
            return NotImplemented
        return ufunc(other, self) if swapped else ufunc(self, other)

    return method


def _in_place(ufunc: np.ufunc) -> Any:
    return lambda self, other: ufunc(self, other, out=self)


def _method(name: str) -> Any:
    return lambda self, *args, **kwargs: getattr(np, name)(self, *args, **kwargs)


for _name, _ufunc in {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.true_divide, "pow": np.power, "mod": np.remainder,
    "floordiv": np.floor_divide, "matmul": np.matmul, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}.items():  # fmt: skip
    setattr(DeviceArray, f"__{_name}__", _operator(_ufunc))
    setattr(DeviceArray, f"__r{_name}__", _operator(_ufunc, True))
    if _name != "matmul":
        setattr(DeviceArray, f"__i{_name}__", _in_place(_ufunc))
for _name, _ufunc in {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal
}.items():  # fmt: skip
    setattr(DeviceArray, f"__{_name}__", _operator(_ufunc))
for _name, _ufunc in {"neg": np.negative, "pos": np.positive, "abs": np.absolute, "invert": np.invert}.items():
    setattr(DeviceArray, f"__{_name}__", lambda self, ufunc=_ufunc: ufunc(self))
for _name in (
    "sum", "prod", "mean", "var", "std", "max", "min", "argmax", "argmin", "cumsum", "cumprod", "any", "all", "clip",
    "dot", "round", "ravel", "squeeze", "swapaxes", "repeat", "take", "diagonal", "trace", "nonzero", "argsort",
    "searchsorted",
):  # fmt: skip
    setattr(DeviceArray, _name, _method(_name))
DeviceArray.flatten = lambda self, order="C": self.ravel(order).copy()  # type: ignore[attr-defined]
DeviceArray.conj = DeviceArray.conjugate = lambda self: np.conjugate(self)  # type: ignore[attr-defined]


def _wrapped(values: Any) -> DeviceArray:
    return DeviceArray._of(values if type(values) is np.ndarray else np.asarray(values))


def _computed(values: Any) -> DeviceArray:
    double._synchronized = False
    return _wrapped(values)


def _returned(done: Any, name: str) -> Any:
    """Wrap what a function returns; what CuPy returns as host values is returned as it is."""
    if isinstance(done, (np.ndarray, np.generic)):
        return _computed(done)
    if isinstance(done, (list, tuple)) and any(isinstance(part, (np.ndarray, np.generic)) for part in done):
        parts = [_returned(part, name) for part in done]
        return type(done)(*parts) if hasattr(done, "_fields") else type(done)(parts)
    return done


def _plain(x: Any, name: str) -> Any:
    if isinstance(x, DeviceArray):
        return DeviceArray._values(x)
    if isinstance(x, np.ndarray):
        raise TypeError(f"{name}: Unsupported type {type(x)}")
    return x


def _all_plain(x: Any, name: str) -> Any:
    if type(x) in (list, tuple):
        return type(x)([_all_plain(part, name) for part in x])
    if type(x) is dict:
        return {key: _all_plain(part, name) for key, part in x.items()}
    return _plain(x, name)


def _index(idx: Any) -> Any:
    """Return an index; one of host arrays or lists is copied to the device, by CuPy too."""
    if isinstance(idx, tuple):
        return tuple([_index(part) for part in idx])
    if isinstance(idx, (np.ndarray, list)):
        transfers.to_device(np.asarray(idx).nbytes)
        return idx
    return DeviceArray._values(idx) if isinstance(idx, DeviceArray) else idx


def _add_at(ufunc: Any, x: DeviceArray, idx: Any, values: Any) -> None:
    if ufunc.__name__ not in UFUNCS_AT:
        raise NotImplementedError(f"`{ufunc.__name__}.at` is not supported yet")
    ufunc.at(DeviceArray._values(x), _index(idx), _plain(values, "at"))


def on_device(values: Any) -> DeviceArray:
    """Return a device array of these values; not counted, so that a test can make its inputs."""
    return DeviceArray._of(np.array(values, order="C"))


def on_host(x: Any) -> Any:
    """Return the values of a device array, of all of them in a nest; not counted, so that a test can look at results."""
    if isinstance(x, DeviceArray):
        return DeviceArray._values(x).copy()
    if isinstance(x, dict):
        return {key: on_host(part) for key, part in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(*map(on_host, x)) if hasattr(x, "_fields") else type(x)(map(on_host, x))
    return x


class DoubleArrays:
    """Makes and copies `DeviceArray`s: an ArrayModule of mpiad.transport.devices.device_arrays."""

    name, takes_host_arrays = "stand-in", False
    kind = DeviceArray
    device = 0

    def __init__(self) -> None:
        self._queued: list[Any] = []
        self._synchronized = True
        self.aware = False
        self.memory: Any = None  # of `device_memory_double`
        self.queue: Any = None
        self._stream = 0

    def _put(self, operation: Any) -> None:
        """Run an operation in the order of the stream."""
        if self.queue is None:
            operation()
        else:
            self.queue.put(operation)

    def empty(self, shape: Any, dtype: Any) -> DeviceArray:
        made = DeviceArray._of(np.empty(shape, dtype))
        DeviceArray._raw(made).reshape(-1).view(np.uint8)[...] = 0xA5  # nobody relies on what is in new memory
        return made

    def full(self, shape: Any, value: Any, dtype: Any) -> DeviceArray:
        return DeviceArray._of(np.full(shape, _plain(value, "full"), dtype))

    def arange(self, stop: int) -> DeviceArray:
        return DeviceArray._of(np.arange(stop))

    def add_at(self, x: DeviceArray, idx: Any, values: Any) -> None:
        _add_at(np.add, x, idx, values)

    def contiguous(self, x: DeviceArray) -> DeviceArray:
        return x if x.flags.c_contiguous else self.copy(x)

    def copy(self, x: DeviceArray) -> DeviceArray:
        return x.copy()

    def to_host(self, x: DeviceArray) -> np.ndarray:
        self._flush(None)
        return x.get()

    def to_device(self, host: np.ndarray) -> DeviceArray:
        transfers.to_device(host.nbytes)
        return on_device(host)

    def copy_to_host(self, x: DeviceArray, out: np.ndarray) -> None:
        values = DeviceArray._values(x)
        _require_alike(values, out)
        transfers.to_host(x.nbytes)
        taken = values.copy()
        out.reshape(-1).view(np.uint8)[...] = 0xA5
        self._queued.append(lambda: np.copyto(out, taken))

    def copy_to_device(self, host: np.ndarray, out: DeviceArray) -> None:
        _require_alike(DeviceArray._raw(out), host)
        transfers.to_device(out.nbytes)
        taken = host.copy()
        DeviceArray._write(out, ..., taken)

        def check() -> None:
            if taken.tobytes() != host.tobytes():
                raise AssertionError("host memory was changed while it was copied from")

        self._queued.append(check)

    def pinned(self, nbytes: int) -> np.ndarray:
        return np.full(nbytes, 0xA5, np.uint8)

    def synchronize(self) -> None:
        transfers.synchronizations += 1
        self._flush(None)
        if self.queue is not None:
            self.queue.settle()
        self._synchronized = True

    def record(self) -> tuple[int, Any]:
        return len(self._queued), None if self.queue is None else self.queue.record()

    def wait(self, event: tuple[int, Any]) -> None:
        transfers.synchronizations += 1
        count, done = event
        if done is not None:
            done.wait()
        self._flush(count)

    @contextmanager
    def side_stream(self, event: tuple[int, Any]) -> Iterator[None]:
        before, self._stream = self._stream, 1 + self._stream
        if self.queue is not None:
            self.queue.put(event[1].wait)
        try:
            yield
        finally:
            _, done = self.record()
            self._stream = before
            if self.queue is not None:
                self.queue.put(done.wait)

    @contextmanager
    def current(self) -> Iterator[None]:
        yield

    def message(self, x: DeviceArray) -> np.ndarray:
        if not self.aware:
            raise AssertionError("device memory was given to an MPI that can't read it")
        if not self._synchronized or self._queued:
            raise AssertionError("device memory was given to MPI while the device may still be writing to it")
        if not x.flags.c_contiguous:
            raise AssertionError("MPI was given an array that isn't contiguous")
        return DeviceArray._values(x)

    def pointer(self, x: DeviceArray) -> int:
        return x.__cuda_array_interface__["data"][0]

    def stream(self) -> int:
        return self._stream

    @contextmanager
    def cuda_aware(self) -> Iterator[None]:
        """Let `message` hand out memory, as MPI would read it on a device."""
        self.aware = True
        try:
            yield
        finally:
            self.aware = False

    def _flush(self, count: int | None) -> None:
        # Events count from the start of the queue: what is done stays in it as None until all is done.
        for k in range(len(self._queued) if count is None else min(count, len(self._queued))):
            finish, self._queued[k] = self._queued[k], None
            if finish is not None:
                finish()
        if not any(self._queued):
            self._queued.clear()


def _require_alike(values: np.ndarray, host: np.ndarray) -> None:
    if values.shape != host.shape or values.dtype != host.dtype:
        raise AssertionError(f"copy between {values.dtype} {values.shape} and {host.dtype} {host.shape}")
    if not (values.flags.c_contiguous and host.flags.c_contiguous):
        raise AssertionError("a queued copy of what isn't contiguous")


def takes_device_memory() -> bool:
    """Tell that arrays may go to MPI as they are: `cuda_aware` says when."""
    return True


double = DoubleArrays()
"""What makes the stand-in's arrays; one device, so there is one."""
register_arrays(DeviceArray, lambda x: double, lambda: double)
