"""The functions of the kernel language that Python doesn't have (see `translation`), as Python functions.

Kernels import them. In a kernel that is folded (see `folding`), their calls become expressions.
"""

from __future__ import annotations

import ast
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from operator import add
from typing import Any, TypeVar

import numpy as np

from mpiad.compiling.folding import Expression, Memory, Variables, called, current, expression, is_folding, variable

Number = TypeVar("Number")
Function = TypeVar("Function", bound=Callable[..., Any])

_NAMES = {"single": "np.float32", "double": "np.float64"}


def _of_kernels(function: Function) -> Function:
    """Return a function whose calls with expressions are expressions."""

    def call(*arguments: Any) -> Any:
        if not any(isinstance(x, Expression) for x in arguments):
            return function(*arguments)
        return expression(_NAMES.get(function.__name__, function.__name__), *arguments)

    return call  # type: ignore[return-value]


@_of_kernels
def where(condition: Any, x: Number, y: Number) -> Number:
    """Return x if a condition is true, otherwise y; both are computed."""
    return x if condition else y


@_of_kernels
def fma(x: float, y: float, z: float) -> float:
    """Return x y + z, in kernels rounded once if the processor has an instruction for this."""
    return x * y + z


@_of_kernels
def bits_of(x: float) -> int:
    """Return the integer with the bits of a double."""
    return struct.unpack("<q", struct.pack("<d", x))[0]


@_of_kernels
def number_of(bits: int) -> float:
    """Return the double with the bits of an integer."""
    return np.float64(struct.unpack("<d", struct.pack("<Q", bits % 2**64))[0])


@_of_kernels
def claimed(row: Any, n: int) -> int:
    """Add n to the first entry of an array, atomically, and return the previous value."""
    before = int(row[0])
    row[0] += n
    return before


@_of_kernels
def fetched(array: Any, row: int) -> None:
    """Load a row of an array into the caches; the row may be outside of the array."""


def lanes(count: int) -> Any:
    """Return the range of a loop that computes several successive lanes by vector instructions."""
    return expression("lanes", count) if is_folding() else range(count)


def attribute(name: str) -> Expression | None:
    """Set an attribute of the kernel: "aligned_stack", "wide_vectors", or "rolled_loops" not to unroll constant ranges."""
    return expression(name) if is_folding() else None


def total(terms: Iterable[Number]) -> Number:
    """Return the sum of at least one term, from left to right."""
    return reduce(add, terms)  # type: ignore[type-var]


@_of_kernels
def single(x: float) -> float:
    """Return a number in single precision."""
    return np.float32(x)  # type: ignore[return-value]


@_of_kernels
def double(x: float) -> float:
    """Return a number in double precision."""
    return np.float64(x)


class Row(Memory):
    """The entries of an array with given first indices."""

    def __init__(self, array: Any, *first: Any, count: int = 0):
        self._array, self._first, self.count = array, first, count

    def __iter__(self) -> Iterator[Any]:
        return (self.place(c) for c in range(self.count))

    def place(self, *indices: Any) -> Any:
        """Return an entry."""
        return self._array[(*self._first, *indices)]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._array[(*self._first, index)] = value


class Vector(Variables):
    """Variables with the indices 0 to `count` - 1."""

    def __init__(self, name: str, count: int):
        super().__init__(name)
        self.count = count

    def __iter__(self) -> Iterator[Expression]:
        return (self.place(c) for c in range(self.count))


class _Stack(Memory):
    """An array on the stack, whose indices may be variables."""

    def __init__(self, count: int, dtype: str):
        kind = Expression(ast.Attribute(ast.Name("np"), dtype))
        self.array = variable(expression("on_stack", count, kind), current().target + "_")

    def place(self, *indices: Any) -> Expression:
        """Return an entry."""
        return self.array[indices[0]]


def vector(count: int, rolled: bool = False, dtype: str = "float64") -> Any:
    """Return new variables with the indices 0 to `count` - 1; `rolled`: as an array, whose indices may be variables."""
    if not is_folding():
        return np.zeros(count, dtype)
    return _Stack(count, dtype) if rolled else Vector(current().fresh(), count)


def table(shape: tuple[int, ...]) -> Any:
    """Return new variables with several indices each."""
    return Variables(current().fresh()) if is_folding() else np.zeros(shape)


def constants(numbers: Sequence[float]) -> Any:
    """Return an array of constants whose indices may be variables."""
    return expression("constants", *numbers) if is_folding() else np.array(numbers)


def call_function(name: str, outputs: Sequence[Any], *inputs: Any) -> None:
    """Append the call of a function of the text, which writes to the arrays among the outputs, its first arguments."""
    results = [x for one in outputs if not isinstance(one, _Stack) for x in one]
    arrays = [x.array for x in outputs if isinstance(x, _Stack)]
    called(name, results, [*arrays, *_flat(inputs)])


def separate(name: str, function: Callable[..., object], *arguments: Any) -> None:
    """Call a function of arrays, which a kernel's text contains once under this name, instead of inlining it."""
    if not is_folding():
        function(*arguments)
        return
    parameters = [Expression(ast.Name(f"a{n}")) for n in range(len(arguments))]
    current().function(name, lambda: function(*parameters), [f"a{n}" for n in range(len(arguments))])
    call_function(name, (), *arguments)


def _flat(inputs: Iterable[Any]) -> Iterator[Any]:
    for x in inputs:
        if isinstance(x, _Stack):
            yield x.array
        elif isinstance(x, Vector | Row | list | tuple):
            yield from _flat(x)
        else:
            yield x
