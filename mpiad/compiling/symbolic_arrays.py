"""Arrays of symbols, to which NumPy dispatches its functions.

An array holds the value numbers of its entries (see `Program`). NumPy's functions that only move entries are applied to the
array of value numbers, so views are supported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, NoReturn

import numpy as np
from numpy.typing import DTypeLike

from mpiad._typing import Array, Axis, Index, Shape
from mpiad.compiling.builder import Builder
from mpiad.compiling.operations import OPERATIONS
from mpiad.compiling.symbols import BRANCHES, Symbol, choose, numbers_of

# NumPy's elementwise functions.


def of_ufunc(
    like: SymbolicArray, ufunc: np.ufunc, method: str, inputs: Sequence[Any], keywords: Mapping[str, Any]
) -> SymbolicArray:
    """Return the result of a ufunc or of its method `method`; raise a Refusal if it isn't supported."""
    if method == "reduce" and ufunc in _REDUCED:
        return reduced(like, ufunc, *inputs, **keywords)
    if method == "outer":
        first, second = (_objects(like, x) for x in inputs)
        inputs, method = [first.reshape(first.shape + (1,) * second.ndim), second], "__call__"
    if method == "__call__" and ufunc is np.matmul:
        return like.like(numbers_of(like.builder, np.matmul(*(_objects(like, x) for x in inputs))))
    function = scalar_function(ufunc)
    if method != "__call__" or function is None:
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        like.builder.refuse(f"it calls numpy.{name}, which isn't among the functions that can be compiled")
    return entrywise(like, function, *inputs)


def scalar_function(ufunc: np.ufunc) -> Callable[..., Symbol] | None:
    """Return the implementation of a ufunc of NumPy or SciPy for symbols; None if it isn't supported."""
    return _UFUNCS.get(ufunc) or _SPECIAL.get(ufunc.__name__)


def entrywise(like: SymbolicArray, function: Callable[..., Symbol], *inputs: Any) -> SymbolicArray:
    """Apply a function of symbols to each entry of arrays, which are broadcast."""
    builder, arrays = like.builder, [numbers_of(like.builder, x) for x in inputs]
    if any(array.shape != arrays[0].shape for array in arrays):
        arrays = np.broadcast_arrays(*arrays)
    entries = zip(*(array.ravel().tolist() for array in arrays))
    result = [function(*(Symbol(builder, number) for number in parts)).number for parts in entries]
    return like.like(np.array(result, int).reshape(arrays[0].shape))


def reduced(
    like: SymbolicArray,
    ufunc: np.ufunc,
    array: Array,
    axis: Axis = 0,
    dtype: DTypeLike | None = None,
    keepdims: bool = False,
    **others: Any,
) -> SymbolicArray:
    """Reduce an array along an axis by a binary function, from the first entry to the last."""
    if others:
        like.builder.refuse(f"it calls numpy.{ufunc.__name__}.reduce with {', '.join(others)}=")
    objects = _objects(like, array)
    axes = range(objects.ndim) if axis is None else np.atleast_1d(axis) % max(objects.ndim, 1)
    kept_axes = [i for i in range(objects.ndim) if i not in axes]
    kept = [objects.shape[i] for i in kept_axes]
    rows = np.transpose(objects, [*kept_axes, *axes]).reshape(math.prod(kept), -1)
    if not rows.shape[1]:
        like.builder.refuse(f"it calls numpy.{ufunc.__name__}.reduce of nothing")
    result = [_folded(_REDUCED[ufunc], row).number for row in rows]
    shape = [1 if i in axes else n for i, n in enumerate(objects.shape)] if keepdims else kept
    return like.like(np.array(result, int).reshape(shape))


def _folded(function: Callable[..., Symbol], row: Array) -> Symbol:
    # If three or more entries are equal, their derivatives must be equal; pairwise maxima would give other derivatives.
    if len(row) > 2 and function in _OF_MANY:
        return row[0].call(_OF_MANY[function], *row[1:])
    return reduce(function, row)


def _objects(like: SymbolicArray, value: object) -> Array:
    return like.like(numbers_of(like.builder, value)).objects()


def _direct(name: str) -> Callable[..., Symbol]:
    return lambda x, *others: x.call(name, *others)


# In NumPy, sums and products of two booleans are boolean, but the sum of a boolean array along an axis is a number.
def _add(x: Symbol, y: Symbol) -> Symbol:
    return x | y if x.is_boolean and y.is_boolean else x + y


def _multiply(x: Symbol, y: Symbol) -> Symbol:
    return x & y if x.is_boolean and y.is_boolean else x * y


def _floor_divide(x: Symbol, y: Symbol) -> Symbol:
    rest = x.fmod(y)
    whole = (x - rest) / y  # an integer, up to rounding
    below = (rest != 0.0) & ((rest < 0.0) ^ (y < 0.0))
    return choose(y == 0.0, (x / y).trunc(), choose(below, whole - 1.0, whole).rint())


# This formula doesn't overflow. Equal arguments are treated separately: the difference of equal infinities is NaN.
def _logaddexp(x: Symbol, y: Symbol) -> Symbol:
    return choose(x == y, 0.5 * x + 0.5 * y + math.log(2.0), x.maximum(y) + (-abs(x - y)).exp().log1p())


_UFUNCS: dict[np.ufunc, Callable[..., Any]] = {
    function: _direct(name) for name in OPERATIONS if isinstance(function := OPERATIONS[name].function, np.ufunc)
} | {
    np.add: _add,
    np.multiply: _multiply,
    np.positive: lambda x: x.as_number(),
    np.conjugate: lambda x: x.conjugate(),
    np.fabs: abs,
    np.square: lambda x: x * x,
    np.reciprocal: lambda x: 1.0 / x,
    np.float_power: lambda x, y: x**y,
    np.exp2: lambda x: 2.0**x,
    np.logaddexp: _logaddexp,
    np.deg2rad: lambda x: x * (math.pi / 180),
    np.radians: lambda x: x * (math.pi / 180),
    np.rad2deg: lambda x: x * (180 / math.pi),
    np.degrees: lambda x: x * (180 / math.pi),
    np.floor_divide: _floor_divide,
    np.heaviside: lambda x, y: choose(x != x, x, choose(x == 0.0, y, choose(x > 0.0, 1.0, 0.0))),
    np.isnan: lambda x: x != x,
    np.isinf: lambda x: abs(x) == math.inf,
    np.isfinite: lambda x: abs(x) < math.inf,
    np.logical_xor: lambda x, y: x.truth() ^ y.truth(),
    np.bitwise_and: lambda x, y: x & y,
    np.bitwise_or: lambda x, y: x | y,
    np.bitwise_xor: lambda x, y: x ^ y,
    np.invert: lambda x: ~x,
}

# Ufuncs of SciPy, by name, to avoid importing SciPy.
_SPECIAL = {name: _direct(name) for name in ("erf", "erfc", "expit", "logit")}

_maximum, _minimum = _direct("maximum"), _direct("minimum")
_OF_MANY = {_maximum: "largest", _minimum: "smallest"}
_REDUCED: dict[np.ufunc, Callable[..., Symbol]] = {
    np.add: lambda x, y: x + y,
    np.multiply: lambda x, y: x * y,
    np.maximum: _maximum,
    np.minimum: _minimum,
    np.logical_and: _direct("logical_and"),
    np.logical_or: _direct("logical_or"),
}


# NumPy's functions that aren't elementwise.
#
# Functions that only move entries are applied to the array of value numbers. Functions that add and multiply are applied to
# an object array of symbols, which record the operations.

# The maximum number of entries of an interpolation table; each entry costs one comparison per evaluation.
_LONGEST_TABLE = 64


def _moved(function: Callable, like: SymbolicArray, array: Array, *args: Any, **kwargs: Any) -> Any:
    """Apply a function that rearranges the entries of its first argument."""
    result = function(numbers_of(like.builder, array), *args, **kwargs)
    return [like.like(part) for part in result] if isinstance(result, (list, tuple)) else like.like(result)


def _joined(function: Callable, like: SymbolicArray, arrays: Array, *args: Any, **kwargs: Any) -> SymbolicArray:
    return like.like(function([numbers_of(like.builder, array) for array in arrays], *args, **kwargs))


def _computed(function: Callable, like: SymbolicArray, *args: Any, **kwargs: Any) -> SymbolicArray:
    """Apply a function that adds and multiplies entries."""
    given = [name for name in ("out", "where", "dtype", "initial") if name in kwargs]
    if given:
        like.builder.refuse(f"it calls numpy.{function.__name__} with {', '.join(given)}=")
    named = {name: _as_objects(like, x) for name, x in kwargs.items()}
    return like.like(numbers_of(like.builder, function(*(_as_objects(like, x) for x in args), **named)))


def _as_objects(like: SymbolicArray, value: object) -> Any:
    if isinstance(value, type(like)):
        return value.objects()
    if isinstance(value, (list, tuple)):
        return type(value)(_as_objects(like, part) for part in value)
    return value


def _where(like: SymbolicArray, condition: object, *choices: Any) -> SymbolicArray:
    if len(choices) != 2:
        like.builder.refuse("it looks for the indices at which a traced condition is true: give np.where three arguments")
    return entrywise(like, choose, condition, *choices)


def _select(like: SymbolicArray, conditions: Sequence[Array], choices: Sequence[Array], default: Array = 0) -> Any:
    result = default
    # Backwards: the first true condition is applied last, so it decides.
    for condition, choice in zip(reversed(conditions), reversed(choices)):
        result = entrywise(like, choose, condition, choice, result)
    return result


def _clip(like: SymbolicArray, array: Array, a_min: Array = None, a_max: Array = None, **others: Any) -> Any:
    lower, upper = others.pop("min", a_min), others.pop("max", a_max)
    if others:
        like.builder.refuse(f"it calls numpy.clip with {', '.join(others)}=")
    # maximum and minimum would have derivative 1/2 at a bound, but autograd's clip has derivative 0.
    if lower is not None:
        array = entrywise(like, lambda x, y: choose(x <= y, y, x), array, lower)
    if upper is not None:
        array = entrywise(like, lambda x, y: choose(x >= y, y, x), array, upper)
    return array


def _reduced(ufunc: np.ufunc, like: SymbolicArray, array: Array, axis: Axis = None, **kwargs: Any) -> SymbolicArray:
    return reduced(like, ufunc, array, axis, **kwargs)


def _mean(like: SymbolicArray, array: Array, axis: Axis = None, **kwargs: Any) -> SymbolicArray:
    total = reduced(like, np.add, array, axis, **kwargs)
    return total / (np.size(numbers_of(like.builder, array)) // max(total.size, 1))


def _norm(like: SymbolicArray, x: Array, ord: int | None = None, axis: Axis = None, keepdims: bool = False) -> Any:  # noqa: A002
    if ord not in (None, 2) or (ord == 2 and not isinstance(axis, int) and np.ndim(numbers_of(like.builder, x)) > 1):
        like.builder.refuse(f"it calls numpy.linalg.norm with ord={ord!r}")
    return np.sqrt(reduced(like, np.add, np.real(x * np.conjugate(x)), axis, keepdims=keepdims))


def _angle(like: SymbolicArray, z: Array, deg: bool = False) -> SymbolicArray:
    angle: Any = np.arctan2(z.imag, z.real)
    return angle * (180 / np.pi) if deg else angle


def _sinc(like: SymbolicArray, x: Array) -> SymbolicArray:
    def one(x: Symbol) -> Symbol:
        # As in NumPy, 0 is replaced by a tiny number, so that the result at 0 is 1.
        y = np.pi * choose(x == 0.0, 1e-20, x)
        return y.sin() / y

    return entrywise(like, one, x)


def _rounded(like: SymbolicArray, x: Array, decimals: int = 0) -> SymbolicArray:
    if decimals:
        like.builder.refuse(f"it calls numpy.round with decimals={decimals}")
    return np.rint(x)


def _filled(value: float | None) -> Callable:
    def result(like: SymbolicArray, array: Array, *args: Any, shape: Shape | None = None, **_: Any) -> SymbolicArray:
        fill = args[0] if value is None else complex(value) if np.iscomplexobj(array) else value
        numbers = np.empty(np.shape(numbers_of(like.builder, array)) if shape is None else shape, int)
        numbers[...] = numbers_of(like.builder, fill)
        return like.like(numbers)

    return result


def _interpolated(
    like: SymbolicArray, x: Array, xp: Array, fp: Array, left: object = None, right: object = None, period: object = None
) -> SymbolicArray:
    """Return `numpy.interp`, computed by one comparison per interval; refuse tables that are traced or too long."""
    traced = any(isinstance(part, type(like)) for part in (xp, fp, left, right, period))
    if traced or period is not None or np.size(xp) > _LONGEST_TABLE:
        like.builder.refuse(
            f"it calls numpy.interp with {'traced values in the table' if traced else f'a table of {np.size(xp)} entries'}"
            f"{' and a period' if period is not None else ''}; expected at most {_LONGEST_TABLE} constants and no period"
        )
    places, values = np.asarray(xp, float), np.asarray(fp, complex if np.iscomplexobj(fp) else float)
    low, high = (values[end] if given is None else given for end, given in ((0, left), (-1, right)))
    slopes = np.diff(values) / np.diff(places)

    def one(x: Symbol) -> Symbol:
        result = choose(x < places[0], low, values[0])
        # The last `choose` with a true condition decides, which is the one for the interval that contains x.
        for place, value, slope in zip(places, values, slopes):
            result = choose(x >= place, slope * (x - place) + value, result)
        result = choose(x == places[-1], values[-1], choose(x > places[-1], high, result))
        return choose(x != x, x, result)

    return entrywise(like, one, x)


def _polynomial(like: SymbolicArray, coefficients: Iterable[Array], x: Array) -> Any:
    result = 0.0 * x
    for coefficient in coefficients:
        result = result * x + coefficient
    return result


# np.diag, np.tril etc. aren't supported: the zeros that they insert would be taken for value number 0.
_MOVING = (
    np.reshape, np.ravel, np.transpose, np.squeeze, np.expand_dims, np.moveaxis, np.rollaxis, np.swapaxes, np.roll,
    np.flip, np.flipud, np.fliplr, np.rot90, np.repeat, np.tile, np.broadcast_to, np.take, np.delete, np.split,
    np.array_split, np.atleast_1d, np.atleast_2d, np.atleast_3d, np.diagonal, np.resize,
)  # fmt: skip
_JOINING = (np.concatenate, np.stack, np.vstack, np.hstack, np.dstack, np.column_stack)
_COMPUTING = (
    np.dot, np.vdot, np.inner, np.outer, np.tensordot, np.einsum, np.kron, np.cross, np.cumsum, np.cumprod, np.diff,
    np.trace, np.convolve, np.ediff1d,
)  # fmt: skip

_REDUCING: dict[Callable, np.ufunc] = {
    np.sum: np.add, np.prod: np.multiply, np.max: np.maximum, np.amax: np.maximum, np.min: np.minimum,
    np.amin: np.minimum, np.all: np.logical_and, np.any: np.logical_or,
}  # fmt: skip

# Each function takes a symbolic array (`like`), for the builder and the dtype, and then NumPy's arguments.
FUNCTIONS: dict[Callable, Callable[..., Any]] = {
    **{function: partial(_moved, function) for function in _MOVING},
    **{function: partial(_joined, function) for function in _JOINING},
    **{function: partial(_computed, function) for function in _COMPUTING},
    **{function: partial(_reduced, ufunc) for function, ufunc in _REDUCING.items()},
    np.append: lambda like, array, values, axis=None: _joined(np.concatenate, like, (array, values), axis),
    np.broadcast_arrays: lambda like, *arrays: [
        like.like(array) for array in np.broadcast_arrays(*(numbers_of(like.builder, array) for array in arrays))
    ],
    np.where: _where,
    np.select: _select,
    np.clip: _clip,
    np.mean: _mean,
    np.linalg.norm: _norm,
    np.sinc: _sinc,
    np.interp: _interpolated,
    np.polyval: _polynomial,
    np.round: _rounded,
    np.zeros_like: _filled(0.0),
    np.empty_like: _filled(0.0),
    np.ones_like: _filled(1.0),
    np.full_like: _filled(None),
    np.copy: lambda like, array, *_, **__: like.like(numbers_of(like.builder, array).copy()),
    np.real: lambda like, array: array.real,
    np.imag: lambda like, array: array.imag,
    np.angle: _angle,
    np.iscomplexobj: lambda like, array: array.dtype.kind == "c",
    np.isrealobj: lambda like, array: array.dtype.kind != "c",
    np.shape: lambda like, array: np.shape(numbers_of(like.builder, array)),
    np.ndim: lambda like, array: np.ndim(numbers_of(like.builder, array)),
    np.size: lambda like, array, axis=None: np.size(numbers_of(like.builder, array), axis),
    np.result_type: lambda like, *arrays: np.result_type(
        *(array.dtype if isinstance(array, type(like)) else array for array in arrays)
    ),
}

# Methods of arrays, by name.
METHODS: dict[str, Callable[..., Any]] = {
    name: getattr(np, name)
    for name in (
        "sum", "prod", "mean", "max", "min", "any", "all", "ravel", "squeeze", "swapaxes", "repeat", "take", "dot", "clip",
        "cumsum", "cumprod", "trace", "copy", "diagonal", "conj", "conjugate",
    )
} | {
    "flatten": np.ravel, "reshape": lambda array, *shape: array.like(array.numbers.reshape(*shape)),
    "transpose": lambda array, *axes: array.like(array.numbers.transpose(*axes)),
}  # fmt: skip


class SymbolicArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of values that are unknown during the trace.

    `builder`: the program under construction. `numbers`: the value numbers of the entries. `dtype`: a real or complex
    dtype, which gives the precision.
    """

    def __init__(self, builder: Builder, numbers: Array, dtype: DTypeLike):
        self.builder, self.numbers, self._dtype = builder, np.asarray(numbers), np.dtype(dtype)

    @property
    def dtype(self) -> np.dtype:
        """The dtype that a NumPy array with these entries would have."""
        flat = self.numbers.ravel().tolist()
        if flat and all(map(self.builder.is_boolean, flat)):
            return np.dtype(bool)
        if any(self.builder.parts(number) for number in flat):
            return np.result_type(self._dtype, np.complex64)
        return self._dtype.type(0).real.dtype

    @property
    def shape(self) -> Shape:
        """The lengths of the axes."""
        return self.numbers.shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.numbers.ndim

    @property
    def size(self) -> int:
        """The number of entries."""
        return self.numbers.size

    @property
    def T(self) -> SymbolicArray:
        """The transposed array."""
        return self.like(self.numbers.T)

    @property
    def real(self) -> SymbolicArray:
        """The real parts."""
        return self._each(lambda symbol: symbol.real)

    @property
    def imag(self) -> SymbolicArray:
        """The imaginary parts."""
        return self._each(lambda symbol: symbol.imag)

    def _each(self, function: Callable[[Symbol], Symbol]) -> SymbolicArray:
        result = [function(symbol).number for symbol in self.objects().ravel()]
        return self.like(np.array(result, int).reshape(self.shape))

    def like(self, numbers: Array) -> SymbolicArray:
        """Return an array with other value numbers of the same program."""
        return SymbolicArray(self.builder, numbers, self._dtype)

    def objects(self) -> Array:
        """Return the entries as an object array of symbols."""
        # Filled in one dimension; otherwise NumPy would treat symbols as possible sequences.
        result = np.empty(self.numbers.shape, object)
        result.reshape(-1)[:] = [Symbol(self.builder, number) for number in self.numbers.ravel().tolist()]
        return result

    def astype(self, dtype: DTypeLike, **_: Any) -> SymbolicArray:
        """Return the array as real or complex numbers; other dtypes are refused."""
        kind, own = np.dtype(dtype).kind, self.dtype
        if kind not in "fc" or (kind == "f" and own.kind == "c"):
            self.builder.refuse(f"it makes {np.dtype(dtype)} of traced values{' that are complex' * (own.kind == 'c')}")
        return self._each(Symbol.as_number if kind == "f" else lambda symbol: symbol.real.plus_i(symbol.imag))

    def view(self, dtype: DTypeLike | None = None) -> SymbolicArray:
        """Return the array itself; autograd calls this method."""
        if dtype not in (None, np.ndarray):
            self.builder.refuse(f"it reinterprets the bits of traced values as {dtype}")
        return self

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        # np.array([u[0], u[1]]) calls this method, and can't be intercepted differently.
        if dtype is not None and np.dtype(dtype) != object:
            self.builder.refuse(
                f"it puts traced values into an array of {np.dtype(dtype)}: return a list of the components, or begin with "
                "np.zeros_like(u)"
            )
        return self.objects()

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", (None,))
        if kwargs and method == "__call__":
            self.builder.refuse(f"it calls numpy.{ufunc.__name__} with {', '.join(kwargs)}=")
        result = of_ufunc(self, ufunc, method, inputs, kwargs)
        if out[0] is None:
            return result
        if not isinstance(out[0], SymbolicArray):
            self.builder.refuse("it writes traced values into an array of numbers (out=, +=)")
        # Values are written in place, so that views get the new values. The arguments of the traced function are read-only.
        out[0].numbers[...] = result.numbers
        return out[0]

    def __array_function__(self, function: Callable, types: object, args: tuple, kwargs: dict) -> Any:
        result = FUNCTIONS.get(function)
        if result is None:
            name = f"{function.__module__}.{function.__name__}"
            self.builder.refuse(f"it calls {name}, which isn't among the functions that can be compiled")
        return result(self, *args, **kwargs)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or name not in METHODS:
            raise AttributeError(f"traced values have no {name!r}")
        return partial(METHODS[name], self)

    def __getitem__(self, key: Index) -> SymbolicArray:
        self._check_key(key)
        return self.like(self.numbers[key])

    def __setitem__(self, key: Index, value: Array) -> None:
        self._check_key(key)
        self.numbers[key] = numbers_of(self.builder, value)

    def _check_key(self, key: object) -> None:
        if any(isinstance(part, SymbolicArray) for part in (key if isinstance(key, tuple) else (key,))):
            self.builder.refuse("it uses traced values as an index: write np.where(u > 0, ...) instead")

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self.numbers)))

    def __bool__(self) -> NoReturn:
        self.builder.refuse(BRANCHES)

    def __float__(self) -> NoReturn:
        Symbol(self.builder, 0).__float__()

    __int__ = __index__ = __complex__ = __float__
