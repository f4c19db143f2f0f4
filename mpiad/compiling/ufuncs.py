"""NumPy's elementwise functions on arrays of symbols, by their entries."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from mpiad._typing import Array, Axis
from mpiad.compiling.operations import OPERATIONS
from mpiad.compiling.symbols import Symbol, choose, numbers_of

if TYPE_CHECKING:
    from mpiad.compiling.symbolic_arrays import SymbolicArray


def of_ufunc(
    like: SymbolicArray, ufunc: np.ufunc, method: str, inputs: Sequence[Any], keywords: Mapping[str, Any]
) -> SymbolicArray:
    """Return the result of a function of NumPy's, or a method of it, for arrays some of which are symbolic.

    A Refusal if it isn't in the catalogue.
    """
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
    """Return the implementation of a function of NumPy's, or of SciPy's, for symbols; None if it isn't in the catalogue."""
    return _UFUNCS.get(ufunc) or _SPECIAL.get(ufunc.__name__)


def entrywise(like: SymbolicArray, function: Callable[..., Symbol], *inputs: Any) -> SymbolicArray:
    """Return a function of symbols of each entry, broadcast as NumPy does."""
    builder, arrays = like.builder, [numbers_of(like.builder, x) for x in inputs]
    if any(array.shape != arrays[0].shape for array in arrays):
        arrays = np.broadcast_arrays(*arrays)
    entries = zip(*(array.ravel().tolist() for array in arrays))
    made = [function(*(Symbol(builder, number) for number in parts)).number for parts in entries]
    return like.like(np.array(made, int).reshape(arrays[0].shape))


def reduced(
    like: SymbolicArray,
    ufunc: np.ufunc,
    array: Array,
    axis: Axis = 0,
    dtype: DTypeLike | None = None,
    keepdims: bool = False,
    **others: Any,
) -> SymbolicArray:
    """Return a function of two arguments over all entries along an axis, one after the other."""
    if others:
        like.builder.refuse(f"it calls numpy.{ufunc.__name__}.reduce with {', '.join(others)}=")
    objects = _objects(like, array)
    axes = range(objects.ndim) if axis is None else np.atleast_1d(axis) % max(objects.ndim, 1)
    others_first = [i for i in range(objects.ndim) if i not in axes]
    kept = [objects.shape[i] for i in others_first]
    rows = np.transpose(objects, [*others_first, *axes]).reshape(math.prod(kept), -1)
    if not rows.shape[1]:
        like.builder.refuse(f"it calls numpy.{ufunc.__name__}.reduce of nothing")
    made = [_folded(_REDUCED[ufunc], row).number for row in rows]
    shape = [1 if i in axes else n for i, n in enumerate(objects.shape)] if keepdims else kept
    return like.like(np.array(made, int).reshape(shape))


def _folded(function: Callable[..., Symbol], row: Array) -> Symbol:
    # Ties of three and more share derivatives equally, which pairs don't.
    if len(row) > 2 and function in _OF_MANY:
        return row[0].call(_OF_MANY[function], *row[1:])
    total = row[0]
    for entry in row[1:]:
        total = function(total, entry)
    return total


def _objects(like: SymbolicArray, value: object) -> Array:
    """Return an array of objects all of which are symbols."""
    return like.like(numbers_of(like.builder, value)).objects()


def _direct(name: str) -> Callable[..., Symbol]:
    return lambda x, *others: x.call(name, *others)


# Sums and products of booleans are boolean to NumPy, and numbers to its sums along an axis.
def _add(x: Symbol, y: Symbol) -> Symbol:
    return x | y if x.is_boolean and y.is_boolean else x + y


def _multiply(x: Symbol, y: Symbol) -> Symbol:
    return x & y if x.is_boolean and y.is_boolean else x * y


def _floor_divide(x: Symbol, y: Symbol) -> Symbol:
    rest = x.fmod(y)
    whole = (x - rest) / y  # but for rounding
    below = (rest != 0.0) & ((rest < 0.0) ^ (y < 0.0))
    return choose(y == 0.0, (x / y).trunc(), choose(below, whole - 1.0, whole).rint())


# Doesn't overflow; of two equal infinities the difference would be NaN.
def _logaddexp(x: Symbol, y: Symbol) -> Symbol:
    return choose(x == y, 0.5 * x + 0.5 * y + math.log(2.0), x.maximum(y) + (-abs(x - y)).exp().log1p())


def _isinf(x: Symbol) -> Any:
    return abs(x) == math.inf


_UFUNCS: dict[np.ufunc, Callable[..., Symbol]] = {
    function: _direct(name)
    for name in OPERATIONS
    if isinstance(function := OPERATIONS[name].function, np.ufunc)
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
    np.isinf: _isinf,
    np.isfinite: lambda x: abs(x) < math.inf,
    np.logical_xor: lambda x, y: x.truth() ^ y.truth(),
    np.bitwise_and: lambda x, y: x & y,
    np.bitwise_or: lambda x, y: x | y,
    np.bitwise_xor: lambda x, y: x ^ y,
    np.invert: lambda x: ~x,
}  # fmt: skip

# SciPy's, which is not imported for them.
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
