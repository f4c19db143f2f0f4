"""`TracedArray`: the arrays in a trace of a function, whose operations are recorded.

A traced array has a number in the trace, and a value with the shape and dtype of the array in a run. If the function
branches on a value, or passes it to code that doesn't use NumPy's protocols, the trace fails, and the function is
interpreted. The rest of the library handles traced arrays like arrays on devices.
"""

from __future__ import annotations

import gc
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dis import opmap
from functools import partial
from traceback import walk_stack
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple, NoReturn

import autograd.numpy.numpy_wrapper
import numpy as np
from autograd.core import primitive_jvps, primitive_vjps
from autograd.tracer import Box, getval
from numpy.typing import DTypeLike

from mpiad._typing import Array, Index, Shape
from mpiad.differentiation.advice import SUMS, in_place_of_scipy
from mpiad.differentiation.rules.einsum import contraction
from mpiad.differentiation.rules.protocol import COMPOSED, COMPOSITIONS, substitute
from mpiad.differentiation.rules.scipy_solvers import bind_keywords
from mpiad.transport import Spec
from mpiad.transport.core.calls import Site
from mpiad.transport.devices.device_arrays import ArrayModule, arrays_of, is_device_array, register_arrays

# The data of a trace: its steps, and traced arrays.

# The types of numbers that take the precision of the other operand.
PYTHON_NUMBERS = frozenset({int, float, complex})


class Ref(NamedTuple):
    """A reference to a traced value, by number, among the arguments of a step."""

    number: int


class Constant(NamedTuple):
    """A reference to an array that isn't traced, by its index in `Recorder.constants`, among the arguments of a step."""

    number: int


class Step(NamedTuple):
    """A step of a trace: a call of a function or a communication."""

    kind: str  # "call", "communicate", "operate", "opaque" or "settle"
    fun: Any  # callable or Operation
    # Arrays in `args` and `kwargs` are replaced by `Ref` and `Constant`.
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[int, ...]  # numbers of the results
    site: Site  # the user's line
    part: int = 0  # part of the program: 0 is the function, and later parts are reverse passes
    # For a communication in an adjoint or tangent rule: "adjoint" or "tangent", and name and site of the forward call.
    rule: tuple[str, str, Site] | None = None
    combined: bool = False  # for a communication: whether reverse passes that run together make it once for all of them


class Abandoned(BaseException):
    """Raised to leave a trace at the user's `line`; not an Exception, so that the user's handlers don't catch it."""

    def __init__(self, reason: str, line: str):
        super().__init__(f"{line}: {reason}")


class KnownInRun(Abandoned):
    """Raised to leave a trace at a call whose result only a run can tell; the function may be traced after a run."""


def plain(x: Any) -> Any:
    """Return arguments with traced arrays replaced by their values."""
    return mapped(x, lambda x: x if not isinstance(x, TracedArray) else x.value.item() if x.weak else x.value)


def mapped(x: Any, leaf: Callable[[Any], Any]) -> Any:
    """Apply a function to each leaf of nested tuples, lists, dicts and slices."""
    kind = type(x)
    if kind is tuple or kind is list:
        return kind([mapped(part, leaf) for part in x])
    if kind is dict:
        return {key: mapped(part, leaf) for key, part in x.items()}
    if kind is slice:
        return slice(*(mapped(part, leaf) for part in (x.start, x.stop, x.step)))
    return leaf(x)


_ATOMS = (np.generic, str, bytes, int, float, complex, type(None), type, ModuleType, CodeType)
_ATOM_CLASSES = frozenset({np.float64, np.int64, str, bytes, int, float, bool, complex, type(None), type})
_MOST_OBJECTS = 500


def hides_traced(x: Any, most: int = _MOST_OBJECTS) -> bool:
    """Return whether one of the first objects to which x refers is an array of a trace that `plain` doesn't replace."""
    objects, seen = deque([(x, True)]), set[int]()  # each with whether `plain` replaces arrays in it
    while objects and len(seen) < most:
        x, is_argument = objects.popleft()  # the nearest first
        x = getval(x)
        if isinstance(x, TracedArray):
            if not is_argument and x.recorder.open:
                return True
            continue
        is_atom = not x.dtype.hasobject if isinstance(x, np.ndarray) else isinstance(x, _ATOMS)
        if is_atom or id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, np.ndarray):
            parts: Sequence[Any] = x.ravel().tolist()
        elif isinstance(x, FunctionType):  # its global variables aren't parts of it
            parts = x.__closure__, x.__defaults__, x.__kwdefaults__, x.__dict__
        else:
            parts = gc.get_referents(x)
        is_argument = is_argument and isinstance(x, (tuple, list, dict))
        objects += [(part, is_argument) for part in parts if type(part) not in _ATOM_CLASSES]
    return False


def untraced(params: Any, device: ArrayModule | None = None) -> Any:
    """Return the parameters of an operation with specs of arrays on the host, or a device, instead of traced arrays."""
    return replaced(
        params, Spec, lambda spec: spec._replace(arrays=device) if isinstance(spec.arrays, _TracedArrays) else spec
    )


def replaced(params: Any, kind: type, leaf: Callable[[Any], object]) -> Any:
    """Return parameters of an operation in which `leaf` replaces the objects of a class, also those in tuples and lists."""
    if isinstance(params, kind):
        return leaf(params)
    if not isinstance(params, (tuple, list)) or isinstance(params, Spec):
        return params
    parts = [replaced(part, kind, leaf) for part in params]
    return params._make(parts) if hasattr(params, "_make") else type(params)(parts)  # type: ignore[attr-defined]


_boxes = Box.types
_NEEDED = "if, while, and, or, not, float, int, item, math.sin"
CONTROL_FLOW = f"control flow depends on a traced value ({_NEEDED}): write np.where(x > 0, ...)"
# Functions whose results depend on the shapes and dtypes of the arguments only.
_STATIC = frozenset(
    getattr(np, name) for name in "can_cast common_type iscomplexobj isrealobj ndim result_type shape size".split()
)
_OF_MEMORY = frozenset({np.may_share_memory, np.shares_memory})


# Python's arithmetic on numbers raises exceptions where NumPy's returns inf or nan, and its integers don't overflow.
PYTHON_OPERATORS: dict[np.ufunc, Callable[..., object]] = {
    np.add: operator.add, np.subtract: operator.sub, np.multiply: operator.mul, np.true_divide: operator.truediv,
    np.floor_divide: operator.floordiv, np.remainder: operator.mod, np.power: operator.pow, np.negative: operator.neg,
    np.positive: operator.pos, np.absolute: operator.abs,
}  # fmt: skip
PYTHON_COMPARISONS: dict[np.ufunc, Callable[..., object]] = {
    np.equal: operator.eq,
    np.not_equal: operator.ne,
    np.less: operator.lt,
    np.less_equal: operator.le,
    np.greater: operator.gt,
    np.greater_equal: operator.ge,
    np.bitwise_and: operator.and_,
    np.bitwise_or: operator.or_,
    np.bitwise_xor: operator.xor,
}


def is_number_of(kind: str, x: Any) -> bool:
    """Return whether a program can hold a number of Python in an array of this kind of dtype."""
    return type(x) is {"i": int, "f": float, "c": complex, "b": bool}[kind] and (kind != "i" or -(2**63) <= x < 2**63)


def _binary(ufunc: np.ufunc, swapped: bool = False) -> Callable[[TracedArray, Any], Any]:
    def method(self: TracedArray, other: Any) -> Any:
        if type(other) in _boxes:
            return NotImplemented
        if ufunc is np.multiply and isinstance(other, (list, tuple, str)) and isinstance(self.value, np.integer):
            return other * operator.index(self)  # Python repeats a sequence
        given = (other, self) if swapped else (self, other)
        is_weak = other.weak if isinstance(other, TracedArray) else type(other) in PYTHON_NUMBERS or type(other) is bool
        if not (self.weak and is_weak):
            return self.recorder.call(ufunc, given, {})
        if ufunc in PYTHON_OPERATORS and all(_is_bool(x) for x in given):  # for Python they are the integers 0 and 1
            given = (_as_integer(given[0]), _as_integer(given[1]))
        if ufunc is np.power and all(np.result_type(x).kind in "iu" for x in plain(given)):
            mapped(given, ask_for_integer)  # ends the trace: NumPy's powers of integers overflow, unlike Python's
        return self.recorder.weaken(self.recorder.call(ufunc, given, {}))

    return method


def _is_bool(x: object) -> bool:
    return x.dtype.kind == "b" if isinstance(x, TracedArray) else type(x) is bool


def _as_integer(x: object) -> object:
    """Return a Python boolean as an integer."""
    return x.recorder.weaken(x.recorder.call(np.add, (x, 0), {})) if isinstance(x, TracedArray) else int(bool(x))


_raised = _binary(np.power)


def _power(self: TracedArray, other: Any) -> Any:
    is_number = self.shape and self.dtype.kind == "b" and isinstance(other, (int, float, np.number))
    if is_number and other == 2 and (np.zeros(1, bool) ** other).dtype == np.int8:
        return _raised(self.astype(np.int8), 2)  # NumPy squares the array, and np.square of booleans is int8
    if self.weak and self.dtype.kind == "i" and type(other) is int and other in (2, 3):
        return self * self if other == 2 else self * self * self  # unlike powers, products aren't beyond NumPy's integers
    return _raised(self, other)


def _unary(ufunc: np.ufunc) -> Callable[[TracedArray], Any]:
    def method(self: TracedArray) -> Any:
        given = _as_integer(self) if self.weak and _is_bool(self) else self
        made = self.recorder.call(ufunc, (given,), {})
        return self.recorder.weaken(made) if self.weak else made

    return method


def _in_place(ufunc: np.ufunc) -> Callable[[TracedArray, Any], Any]:
    binary = _binary(ufunc)

    def method(self: TracedArray, other: Any) -> Any:
        if type(other) in _boxes:
            return NotImplemented
        # A NumPy scalar is immutable: Python assigns the new value to the variable.
        if not isinstance(self.value, np.ndarray):
            return binary(self, other)
        return self.recorder.write(self, ufunc, (self, other))

    return method


_STORES = {opmap.get("STORE_SUBSCR"), opmap.get("STORE_SLICE")}


def reason_of_conversion(frame: FrameType) -> str:
    """Return reason and advice if a frame sets or takes entries of a plain array, or is `full`'s or SciPy's; else ""."""
    code = frame.f_code
    if code.co_name == "_wrapfunc" and frame.f_locals.get("method") == "take":
        return _INDEX
    if code.co_name in ("full", "full_like") and frame.f_globals["__name__"].startswith("numpy."):
        return f"it calls numpy.{code.co_name} with a traced value, which makes a plain array: call autograd.numpy's"
    if _is_in_scipy(frame):
        return in_place_of_scipy(outer for outer, _ in walk_stack(frame)) or (
            "it passes traced values to a function of SciPy that only takes plain arrays: call the function of "
            "autograd.scipy, if it has a derivative there, write its formula with functions of autograd.numpy, or leave "
            "this part out of the jitted function"
        )
    if code.co_code[frame.f_lasti] in _STORES:
        return (
            "it writes traced values into an array of numbers, b[i] = x: join the parts by np.stack or np.concatenate of "
            f"autograd.numpy, or write np.where (without derivatives, b may begin as np.zeros_like(x)); {SUMS}"
        )
    return ""


def _is_in_scipy(frame: FrameType | None) -> bool:
    """Return whether SciPy called a frame, directly or through NumPy; its sparse matrices have advice of their own."""
    while frame is not None and (name := frame.f_globals.get("__name__", "")).startswith("numpy."):
        frame = frame.f_back
    return frame is not None and name.startswith("scipy.") and not name.startswith("scipy.sparse")


def _is_ours(frame: FrameType) -> bool:
    """Return whether a frame is of this library or of autograd."""
    return frame.f_globals.get("__name__", "").startswith(("mpiad.", "autograd."))


_MAY_DIFFER = "whose memory may differ in other calls"
_IN_MEMORY = "flags", "strides", "base", "data", "ctypes"


_INDEX = "it indexes an array of numbers by traced integers: pass this array as an argument"


def _as_number(self: TracedArray) -> NoReturn:
    self.ask_for_value(reason_of_conversion(sys._getframe(1)) or CONTROL_FLOW)


class TracedArray:
    """An array in a function that is being traced; `value` is a NumPy array or scalar."""

    __slots__ = ("__weakref__", "number", "recorder", "stale", "value", "weak")
    __array_priority__ = 50.0

    def __init__(self, recorder: Any, number: Any, value: Any):
        # The number in the trace; in a trace of scalars (`ScalarRecorder`), the array of symbols.
        self.recorder, self.number, self.value = recorder, number, value
        self.stale: Any = None  # the array through which its memory was overwritten, if any
        self.weak = False  # whether it is a Python number, which takes the precision of the other operand

    @property
    def dtype(self) -> np.dtype:
        """The dtype."""
        return self.value.dtype

    @property
    def shape(self) -> Shape:
        """The lengths of its axes."""
        return self.value.shape

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self.value)))

    def __hash__(self) -> int:
        # Dicts and sets distinguish numbers by their values.
        return self.ask_for_value() if isinstance(self.value, np.generic) else object.__hash__(self)

    def __repr__(self) -> str:
        return f"<traced array of {self.dtype}, shape {self.shape}>"

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(type(x) in _boxes for x in inputs):
            return NotImplemented
        if method == "outer":
            x, y = inputs
            return ufunc(np.reshape(x, (*np.shape(x), *[1] * np.ndim(y))), y, **kwargs)
        out = kwargs.pop("out", None)
        fun = ufunc if method == "__call__" else getattr(ufunc, method)
        if out is None:
            return self.recorder.call(fun, inputs, kwargs)
        self.recorder.require_open()
        out_is_plain = f"it writes traced values into an array of numbers (numpy.{ufunc.__name__} with out=)"
        self.recorder.refuse(f"{out_is_plain}: take its result, or write a = a + x instead of a += x; {SUMS}")

    def __array_function__(self, function: Callable, types: Any, args: tuple, kwargs: dict) -> Any:
        if function in _OF_MEMORY and not _is_ours(sys._getframe(1)):
            self.recorder.require_open()
            self.recorder.refuse(f"it calls numpy.{function.__name__} of traced arrays, {_MAY_DIFFER}")
        if function in _STATIC or function in _OF_MEMORY:
            return function(*plain(args), **plain(kwargs))
        if function is np.einsum and type(args[0]) is str and not kwargs.keys() - {"optimize"}:
            made = contraction(args[0], args[1:])
            if made is not None:
                return made
        if function in COMPOSITIONS:
            return COMPOSITIONS[function](*args, **kwargs)
        return self.recorder.call(function, args, kwargs)

    def __getitem__(self, key: Index) -> Any:
        if type(key) is tuple and not key and not self.value.ndim:
            return self
        parts = key if type(key) is tuple else (key,)
        if any(isinstance(part, TracedArray) and part.dtype == bool for part in parts):
            self.ask_for_value("it selects entries with a mask of traced values: write np.where(mask, x, 0)")
        for part in parts:  # x[k : k + 3] has the same shape for all k
            if type(part) is slice and (part.step is not None or not isinstance(part.start, type(part.stop))):
                mapped(part, ask_for_integer)
        return self.recorder.call(take, (self, key), {})

    def __setitem__(self, key: Index, value: Any) -> None:
        self.recorder.set_entries(self, key, value)

    def astype(self, dtype: Any, order: str = "K", casting: str = "unsafe", subok: bool = True, copy: bool = True) -> Any:
        """Return the array in another dtype."""
        if np.dtype(dtype) == self.dtype and not copy:
            return self
        return self.recorder.call(cast, (self, np.dtype(dtype)), {})

    def reshape(self, *shape: Any, order: str = "C") -> Any:
        """Return the array in another shape."""
        new = shape[0] if len(shape) == 1 and not isinstance(shape[0], (int, np.integer)) else shape
        return self.recorder.call(np.reshape, (self, new), {} if order == "C" else {"order": order})

    def copy(self, order: str = "C") -> Any:
        """Return a copy, by default in another order than `np.copy`."""
        return self.recorder.call(np.copy, (self, order), {})

    def __copy__(self) -> Any:
        return self.copy()

    def __deepcopy__(self, memo: object) -> Any:
        return self.copy()

    def flatten(self, order: str = "C") -> Any:
        """Return a copy with one axis."""
        return self.ravel(order).copy()

    def transpose(self, *axes: Any) -> Any:
        """Return the array with its axes in another order."""
        given = axes[0] if len(axes) == 1 and not isinstance(axes[0], (int, np.integer)) else axes or None
        return self.recorder.call(np.transpose, (self, given), {})

    def view(self, kind: Any = None) -> Any:
        """Return the array itself; autograd calls this method of results."""
        return self if kind in (None, np.ndarray) else self.ask_for_value(f"it views traced values as {kind}")

    def __getattr__(self, name: str) -> Any:
        if name in ("ndim", "size", "itemsize", "nbytes", "device"):
            return getattr(self.value, name)
        if name in _PARTS:
            return self.recorder.call(_PARTS[name], (self,), {})
        if name == "mT":
            return np.swapaxes(self, -1, -2)
        if name == "clip":  # whose bounds have other defaults and names than those of the function
            return lambda min=None, max=None, **kwargs: self.recorder.call(np.clip, (self, min, max), kwargs)
        if name in _METHODS:
            return lambda *args, **kwargs: self.recorder.call(_METHODS[name], (self, *args), kwargs)
        if _is_ours(sys._getframe(1)):
            if name in ("strides", "flags"):
                return getattr(self.value, name)
        elif not name.startswith("_") and hasattr(plain(self), name):
            # User code may catch an AttributeError, and take the branch for other types.
            self.recorder.require_open()
            if name in _IN_MEMORY:
                self.recorder.refuse(f"it reads {name} of a traced array, {_MAY_DIFFER}")
            function = f", such as np.{name}" if hasattr(np, name) else ""
            self.recorder.refuse(f"a traced array has no {name!r}: call a function of autograd.numpy{function}")
        raise AttributeError(f"a traced array has no {name!r}")

    # Operations that need the values, and therefore end the trace in failure.

    def ask_for_value(self, reason: str = CONTROL_FLOW) -> NoReturn:
        """End the trace in failure."""
        self.recorder.require_open()
        end: Callable[[TracedArray, str], NoReturn] = self.recorder.ask
        end(self, reason)

    def item(self, *args: Any) -> NoReturn:
        """End the trace in failure: an entry is a value."""
        self.ask_for_value()

    def __index__(self) -> int:
        """Return an index of a list or of a plain array, or end the trace; see `Recorder.decision`."""
        self.recorder.require_open()
        return self.recorder.decision(self, int, _INDEX if self.shape else CONTROL_FLOW)

    def __bool__(self) -> bool:
        """Return what determines the function's control flow, or end the trace; see `Recorder.decision`."""
        self.recorder.require_open()
        return self.recorder.decision(self, bool, CONTROL_FLOW)

    __float__ = __int__ = __complex__ = _as_number
    __round__ = tolist = item

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __format__(self, spec: str) -> str:
        if not spec and (self.shape or self.dtype.kind not in "iu"):
            return repr(self)
        self.ask_for_value("it formats a traced value as text")

    def __str__(self) -> str:
        return format(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        # numpy.array and numpy.asarray call this method, and their results can't be traced arrays.
        return self.recorder.plain_array(self, dtype)

    __add__, __radd__, __iadd__ = _binary(np.add), _binary(np.add, True), _in_place(np.add)
    __sub__, __rsub__, __isub__ = _binary(np.subtract), _binary(np.subtract, True), _in_place(np.subtract)
    __mul__, __rmul__, __imul__ = _binary(np.multiply), _binary(np.multiply, True), _in_place(np.multiply)
    __truediv__, __rtruediv__ = _binary(np.true_divide), _binary(np.true_divide, True)
    __itruediv__ = _in_place(np.true_divide)
    __floordiv__, __rfloordiv__ = _binary(np.floor_divide), _binary(np.floor_divide, True)
    __mod__, __rmod__ = _binary(np.remainder), _binary(np.remainder, True)
    __ifloordiv__, __imod__ = map(_in_place, (np.floor_divide, np.remainder))
    __iand__, __ior__, __ixor__ = map(_in_place, (np.bitwise_and, np.bitwise_or, np.bitwise_xor))
    __pow__, __rpow__, __ipow__ = _power, _binary(np.power, True), _in_place(np.power)
    __matmul__, __rmatmul__, __imatmul__ = _binary(np.matmul), _binary(np.matmul, True), _in_place(np.matmul)
    __and__, __rand__ = _binary(np.bitwise_and), _binary(np.bitwise_and, True)
    __or__, __ror__ = _binary(np.bitwise_or), _binary(np.bitwise_or, True)
    __xor__, __rxor__ = _binary(np.bitwise_xor), _binary(np.bitwise_xor, True)
    __lt__, __le__, __gt__, __ge__ = map(_binary, (np.less, np.less_equal, np.greater, np.greater_equal))
    __eq__, __ne__ = _binary(np.equal), _binary(np.not_equal)  # type: ignore[assignment]
    __neg__, __pos__, __abs__, __invert__ = map(_unary, (np.negative, np.positive, np.absolute, np.invert))


def ask_for_integer(x: Any) -> None:
    """End the trace in failure if x is a traced integer, which determines a shape: it must be a constant."""
    if isinstance(x, TracedArray) and x.dtype.kind in "iu" and not x.shape:
        x.ask_for_value()


def take(x: Array, key: Index) -> Array:
    """Return x[key]."""
    return x[key]


def cast(x: Array, dtype: np.dtype) -> Array:
    """Return x, an array or a number of Python, in another dtype."""
    return (x if is_device_array(x) else np.asarray(x)).astype(dtype)


def with_entries(x: Array, key: Index, value: Array) -> Array:
    """Return a copy of x with entries set."""
    made = x.copy() if is_device_array(x) else np.array(x)
    made[key] = value
    return made


def number_on_host(x: Array) -> Array:
    """Return an array of shape () as a number on the host."""
    arrays = arrays_of(x)
    return x if arrays is None else arrays.to_host(x)[()]


def added_at(x: Array, idx: Index, values: Array) -> Array:
    """Return a copy of x with values added at an index, in which entries may be repeated."""
    total, arrays = x.copy(), arrays_of(x)
    np.add.at(total, idx, values) if arrays is None else arrays.add_at(total, idx, values)
    return total


def scale_of(x: Array, dtype: np.dtype) -> Array:
    """Return the power of two by which x is multiplied before its reciprocal is computed; 1 unless x is huge or tiny."""
    small, large = np.finfo(dtype).tiny, 1 / np.finfo(dtype).tiny
    if is_device_array(x):
        return np.where(abs(x) > large, 1 / 16, np.where(abs(x) < small, 2.0**64, 1.0)).astype(dtype)
    return dtype.type(1 / 16 if abs(x) > large else 2.0**64 if abs(x) < small else 1)


def quotient(x: Array, inverse: Array, out: Array | None = None, **kwargs: Any) -> Array:
    """Return the quotient of x by a scalar, given the inverse of the scalar; the arguments are those of `np.multiply`."""
    return np.multiply(x, inverse, out, **kwargs)


def array_of(x: Any, *args: Any, **kwargs: Any) -> Array:
    """Return `numpy.array` of an argument; in a trace, the argument holds traced arrays."""
    return np.array(x, *args, **kwargs)


# Attributes and methods that correspond to functions of NumPy.
_PARTS: dict[str, Callable[..., Any]] = {"T": np.transpose, "real": np.real, "imag": np.imag}
_METHODS: dict[str, Callable[..., Any]] = {
    name: getattr(np, name)
    for name in """sum prod mean std var max min any all ravel squeeze swapaxes repeat take dot clip cumsum cumprod trace
    diagonal conj conjugate argmax argmin round""".split()
}


# Support for traced arrays beyond NumPy's protocols.
#
# `array` and `stack` of autograd.numpy call numpy.array, for which NumPy has no protocol. Therefore, as long as there are
# traces, the name of NumPy in autograd's module refers to a replacement whose `array` handles traced arrays.

numpy_wrapper: Any = autograd.numpy.numpy_wrapper


class _TracedArrays:
    """The `ArrayModule` of the traced arrays of one trace."""

    name, kind, device, takes_host_arrays = "traced", TracedArray, 0, True

    def __init__(self, recorder: Any):
        self.recorder = recorder

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TracedArrays) and other.recorder is self.recorder

    def __hash__(self) -> int:
        return id(self.recorder)

    def empty(self, shape: Shape, dtype: DTypeLike) -> Array:
        return self.full(shape, 0, dtype)

    def full(self, shape: Shape, value: Array | float, dtype: DTypeLike) -> Array:
        return self.recorder.call(np.full, (tuple(shape), value, np.dtype(dtype)), {})

    def arange(self, stop: int) -> Array:
        return np.arange(stop)

    def add_at(self, x: Any, idx: Index, values: Any) -> None:
        x[...] = x.recorder.call(added_at, (x, idx, values), {})

    def contiguous(self, x: Array) -> Array:
        return x  # the compiled program determines the memory layout

    def copy(self, x: Array) -> Array:
        return x.copy()

    def is_on_host(self, x: Array) -> bool:
        """Return whether a traced value is a number on the host, in a trace of arrays on a device."""
        return self.recorder.device is not None and x.number in self.recorder.on_host

    def to_device(self, x: Array) -> Array:
        return x if self.recorder.device is None else self.recorder.capture(x)

    def to_host(self, x: Array) -> Array:
        if self.recorder.device is None:
            return x
        if x.shape:
            self.recorder.refuse("it copies arrays to the host, and programs for devices copy numbers only")
        return self.recorder.call(number_on_host, (x,), {})


def _arrays_of(x: Any) -> Any:
    x.recorder.require_open()
    return _TracedArrays(x.recorder)


# The `ArrayModule` lacks the methods for transfers: a trace ends in failure before they are called.
register_arrays(TracedArray, _arrays_of)


class _NumPy:
    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def array(x: Any, *args: Any, **kwargs: Any) -> Any:
        traced = _traced(x)
        return np.array(x, *args, **kwargs) if traced is None else traced.recorder.call(array_of, (x, *args), kwargs)


def _traced(x: Any) -> Any:
    if isinstance(x, TracedArray):
        return x
    if isinstance(x, (list, tuple)):
        return next((found for part in x if (found := _traced(part)) is not None), None)
    return None


# SciPy's functions that aren't ufuncs, `asarray` and `full` have no protocol either: autograd's record their calls with
# traced arrays. Each trace looks for new ones, since autograd.scipy may be imported later.
_known_primitives: set[Callable] = set()


def _called(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call a function of SciPy or NumPy, or record the call if an argument is traced."""
    traced = _traced([*args, *kwargs.values()])
    if traced is None:
        return function(*args, **kwargs)
    if function in COMPOSITIONS:
        return COMPOSITIONS[function](*args, **kwargs)
    return traced.recorder.call(function, args, kwargs)


def _let_functions_record() -> None:
    bind_keywords()
    for fun in (primitive_vjps.keys() | primitive_jvps.keys() | COMPOSED) - _known_primitives:
        _known_primitives.add(fun)
        function: Any = getattr(fun, "fun", None)
        package = (getattr(function, "__module__", None) or "").removeprefix("autograd.")
        if fun in COMPOSED or package.startswith("scipy.") and not isinstance(function, np.ufunc):
            recording: Any = partial(_called, function)
            recording.__wrapped__ = function
            substitute(fun, recording)


def let_arrays_be_traced(on: bool) -> None:
    """Switch the support for traced arrays in `array` of autograd.numpy on or off."""
    numpy_wrapper._np = _NumPy() if on else np
    if on:
        _let_functions_record()
