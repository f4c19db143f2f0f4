"""`ScalarRecorder`: a trace of a function that translates each operation to instructions of a scalar program immediately.

The `number` of a traced array is an array of symbols, one per entry. Its `value` is a placeholder, from which NumPy
computes shapes, dtypes and errors of results. NumPy's functions that move entries, or add and multiply them, are applied to
the arrays of symbols, whose views have the same memory. Other functions have rules (see `compiling.numpy_functions`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NoReturn

import numpy as np
from numpy.typing import DTypeLike

from mpiad._typing import Array, Axis, Index, Shape
from mpiad.compiling.numpy_functions import Rule, Unsupported, rule_of
from mpiad.compiling.program import Builder
from mpiad.compiling.symbols import Symbol, number_of
from mpiad.differentiation.rules.interpolation import entries_of, interpolated
from mpiad.programs.recorder import reason_against
from mpiad.programs.traced_array import TracedArray, array_of, cast, mapped, plain, take

# The maximum number of operations limits the time of a trace.
_MAX_OPERATIONS = 50_000
_OF_MANY = {"maximum": "largest", "minimum": "smallest"}


class ScalarRecorder:
    """A trace in progress: the receiver of the calls of `TracedArray`, and the `Translator` of rules."""

    kind = TracedArray

    def __init__(self, real: DTypeLike):
        self.builder, self._real = Builder(_MAX_OPERATIONS), np.dtype(real)  # of the program's real numbers

    def refuse(self, reason: str) -> NoReturn:
        """Store the reason why the function can't be compiled, and raise a Refusal."""
        self.builder.refuse(reason)

    def ask(self, x: TracedArray, reason: str) -> NoReturn:
        """Refuse an operation that needs the value of x."""
        self.refuse(reason)

    def decision(self, x: TracedArray, kind: type, reason: str) -> NoReturn:
        """End the trace in failure, since the function needs the value of x."""
        self.ask(x, reason)

    def require_open(self) -> None:
        """Do nothing: the arrays have no values that could be used after the trace."""

    # The methods of `ProgramRecorder` that a function reaches: it runs traced in functions of this library, too.
    ended = is_abstract = open = True

    def looked_up(self, call: str) -> NoReturn:
        """Refuse a communication."""
        self.refuse(f"it calls {call}, which communicates: only computations on one rank can be compiled")

    def communicate(self, operation: Any, x: Any, params: Any) -> NoReturn:
        """Refuse a communication."""
        self.looked_up(operation.__name__)

    def operate(self, operator: Any, args: tuple, kwargs: dict[str, Any]) -> NoReturn:
        """Refuse an operator of `mpiad.extend`, whose rules the derivatives of the program would ignore."""
        self.refuse(f"it calls the operator {operator.__name__}, whose derivative rules can't be compiled")

    def constant_on_device(self, x: object) -> NoReturn:
        """Refuse copies to a device."""
        self.refuse("it copies arrays to a device")

    def constant(self, x: Any) -> Any:
        """Return an array whose derivatives are zero; an argument without traced values is returned unchanged."""
        x = self.traced(x)
        if not isinstance(x, TracedArray) or x.dtype == bool:
            return x
        return TracedArray(self, _as_array([symbol.call("stop_gradient") for symbol in x.number.flat], x.shape), x.value)

    def entered_body(self) -> None:
        """Do nothing at the beginning of an operator's body."""

    def input(self, group: str, places: range, shape: Shape, in_pairs: bool = False, boolean: bool = False) -> TracedArray:
        """Return inputs of a group, in C order, as a read-only array; `in_pairs`: real and imaginary parts of entries."""
        symbols = [Symbol(self.builder, self.builder.input(group, place)) for place in places]
        if in_pairs:
            symbols = [real.plus_i(imag) for real, imag in zip(symbols[::2], symbols[1::2])]
        if boolean:
            symbols = [symbol.truth() for symbol in symbols]
        array, value = _as_array(symbols, shape), np.ones(shape, self._dtype_of(symbols))
        array.flags.writeable = value.flags.writeable = False
        return TracedArray(self, array, value)

    def symbols(self, x: Array) -> Array:
        """Return the entries of an array of symbols or constants; raise a Refusal for anything else."""
        if isinstance(x, TracedArray):
            return x.number
        array = np.asarray(x)
        flat = list(array.ravel()) if array.dtype == object else array.ravel().tolist()
        if array.dtype == object and all(type(entry) is Symbol for entry in flat):
            return array
        return _as_array([Symbol(self.builder, number_of(self.builder, entry)) for entry in flat], array.shape)

    def plain_array(self, x: TracedArray, dtype: DTypeLike | None) -> Array:
        """Return the entries: np.array([u[0], u[1]]) needs a plain array, and can't be intercepted differently."""
        if dtype is not None and np.dtype(dtype) != object:
            self.refuse(
                f"it puts traced values into an array of {np.dtype(dtype)}: return a list of the components, or begin with "
                "np.zeros_like(u)"
            )
        if x.dtype == bool:  # NumPy would compute with the symbols as with objects, and count where booleans are joined
            self.refuse("it joins conditions by np.array or np.stack: join the numbers, and compare their array")
        return x.number.copy()

    def traced(self, x: Any) -> Any:
        """Return an array of symbols as a traced array, and other arguments unchanged."""
        # NumPy's conversions of traced arrays make object arrays of symbols.
        if type(x) is not Symbol and not (isinstance(x, np.ndarray) and x.dtype == object):
            return x
        symbols = self.symbols(x)
        return TracedArray(self, symbols, np.ones(symbols.shape, self._dtype_of(symbols.ravel().tolist())))

    def _dtype_of(self, symbols: Sequence[Symbol]) -> np.dtype:
        if symbols and all(x.is_boolean for x in symbols):
            return np.dtype(bool)
        return np.result_type(self._real, np.complex64) if any(x.is_complex for x in symbols) else self._real

    def call(self, fun: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Translate the call of a NumPy function."""
        owner = getattr(fun, "__self__", None)
        package = f"numpy.{owner.__name__}" if isinstance(owner, np.ufunc) else getattr(fun, "__module__", "numpy")
        name, reason = f"{package}.{fun.__name__}", reason_against(fun, args, kwargs)
        if reason:
            self.refuse(f"it calls {name}, {reason}")
        rule = _RULES.get(fun) or rule_of(fun)
        if rule is None and fun not in _ON_ENTRIES:
            self.refuse(f"it calls {name}, which isn't among the functions that can be compiled")
        args, kwargs = mapped(tuple(args), self.traced), kwargs and mapped(kwargs, self.traced)
        made = fun(*plain(args), **(kwargs and plain(kwargs)))
        if rule is None:
            if fun in _COMBINING and made.dtype == bool:
                self.refuse(f"it calls {name} with booleans, whose sum is True or False: write np.any(x & y)")
            if fun is take:
                self._check_index(args[1])
            return self._wrapped(fun(*mapped(args, _entries), **mapped(kwargs, _entries)), made)
        try:
            self.shape, self.dtype = made.shape, made.dtype
            found = rule(self, *args, **kwargs).number.ravel().tolist()
            return TracedArray(self, _as_array([x.of_kind(made.dtype.kind) for x in found], made.shape), made)
        except Unsupported as error:
            self.refuse(f"it calls {name} with {error}")
        except TypeError as error:  # the rule doesn't have a parameter, and Python's message names it
            self.refuse(f"it calls {name}, whose rule {str(error).partition('() ')[2] or error}")

    def _wrapped(self, symbols: Any, value: Any) -> Any:
        if isinstance(symbols, (list, tuple)):
            return [self._wrapped(*pair) for pair in zip(symbols, value)]
        return TracedArray(self, self.symbols(symbols), value)

    def write(self, target: TracedArray, fun: Callable, args: Sequence[Array]) -> TracedArray:
        """Call a function that writes into an array, whose views change, too."""
        made = self.call(fun, args, {})
        np.copyto(target.value, made.value, casting="same_kind")
        target.number[...] = made.number
        return target

    def set_entries(self, target: TracedArray, key: Index, value: Array) -> None:
        """Set entries of an array and of its views."""
        value = mapped(value, self.traced)
        self._check_index(key)
        target.value[key] = plain(value)
        symbols = self.symbols(value)
        target.number[key] = symbols if symbols.shape else symbols.item()

    def _check_index(self, key: Index) -> None:
        if any(isinstance(part, TracedArray) for part in (key if isinstance(key, tuple) else (key,))):
            self.refuse("it uses traced values as an index: write np.where(u > 0, ...) instead")

    def elementwise(self, name: str, function: Callable[..., Symbol], *args: Array) -> TracedArray:
        """Apply a function of symbols to each entry of arrays, which are broadcast."""
        arrays = [self.symbols(x) for x in args]
        if any(array.shape != arrays[0].shape for array in arrays):
            arrays = np.broadcast_arrays(*arrays)
        return self._value([function(*entries) for entries in zip(*[x.ravel().tolist() for x in arrays])], arrays[0].shape)

    def reduce(
        self, name: str, x: Array, axis: Axis = None, dtype: object = None, out: None = None, keepdims: bool = False
    ) -> TracedArray:
        """Reduce an array along axes by a binary function, from the first entry to the last."""
        entries = self.symbols(x)
        axes = range(entries.ndim) if axis is None else np.atleast_1d(axis) % max(entries.ndim, 1)
        kept = [i for i in range(entries.ndim) if i not in axes]
        shape = tuple([entries.shape[i] for i in kept])
        rows = np.transpose(entries, [*kept, *axes]).reshape(math.prod(shape), -1)
        if not rows.shape[1]:
            raise Unsupported("an array without entries")
        # If three or more entries are equal, their derivatives must be equal; pairwise maxima would give other derivatives.
        of_many = _OF_MANY.get(name) if rows.shape[1] > 2 else None
        found = [row[0].call(of_many, *row[1:]) if of_many else reduce(lambda x, y: x.call(name, y), row) for row in rows]
        return self._value(found, shape)

    def full(self, value: Array) -> TracedArray:
        """Return an array with the entries of `value`, which is broadcast."""
        return self._value(np.broadcast_to(self.symbols(value), self.shape).ravel().tolist(), self.shape)

    def _value(self, symbols: Sequence[Symbol], shape: Shape) -> TracedArray:
        return TracedArray(self, _as_array(symbols, shape), np.empty(shape, self.dtype))


def _as_array(symbols: Sequence[Symbol], shape: Shape) -> Array:
    return np.fromiter(symbols, object, len(symbols)).reshape(shape)


def _entries(x: Any) -> Any:
    return x.number if isinstance(x, TracedArray) else x


def _cast(t: ScalarRecorder, x: TracedArray, dtype: np.dtype) -> TracedArray:
    if dtype.kind not in "bfc" or (dtype.kind == "f" and x.dtype.kind == "c"):
        t.refuse(f"it makes {dtype} of traced values{' that are complex' * (x.dtype.kind == 'c')}")
    return x


def _entries_of(t: ScalarRecorder, table: Array, index: Array) -> TracedArray:
    """Return the entries of a table, constants or an array among the parameters, at computed indices."""
    number = t.builder.table(np.ravel(_entries(table)))
    if number is None:
        raise Unsupported("computed values in the table; expected constants, or an array in p, not multiples of it")
    found = [Symbol(t.builder, t.builder.lookup(number, i.number)) for i in t.symbols(index).ravel().tolist()]
    return t.traced(_as_array(found, np.shape(index)))


def _interpolated(
    t: ScalarRecorder, x: TracedArray, xp: Array, fp: Array, left: Array = None, right: Array = None, period: Array = None
) -> TracedArray:
    if period is not None:
        raise Unsupported("period=")
    xp, fp = (part if isinstance(part, TracedArray) else t.traced(np.asarray(part)) for part in (xp, fp))
    if not np.iscomplexobj(fp):
        return interpolated(x, xp, fp, left, right)
    real, imag = ([y if y is None else part(y) for y in (fp, left, right)] for part in (np.real, np.imag))
    return interpolated(x, xp, *real) + 1j * interpolated(x, xp, *imag)


_RULES: dict[Callable, Rule] = {
    cast: _cast,
    entries_of: _entries_of,
    np.interp: _interpolated,
}

# Functions that add, multiply or subtract entries, which isn't arithmetic of numbers for booleans.
_COMBINING = {np.dot, np.vdot, np.inner, np.outer, np.matmul, np.tensordot, np.einsum, np.kron, np.convolve, np.diff}
# Functions that move entries, or add and multiply them.
_ON_ENTRIES: set[object] = _COMBINING | {
    take, array_of, np.reshape, np.ravel, np.transpose, np.squeeze, np.expand_dims, np.moveaxis, np.rollaxis,
    np.swapaxes, np.roll, np.flip, np.flipud, np.fliplr, np.rot90, np.repeat, np.tile, np.broadcast_to, np.broadcast_arrays,
    np.take, np.delete, np.split, np.array_split, np.atleast_1d, np.atleast_2d, np.atleast_3d, np.diagonal, np.resize,
    np.copy, np.append, np.concatenate, np.stack, np.vstack, np.hstack, np.dstack, np.column_stack, np.cross,
    np.cumsum, np.cumprod, np.trace, np.ediff1d, np.diag, np.tril, np.triu,
}  # fmt: skip
