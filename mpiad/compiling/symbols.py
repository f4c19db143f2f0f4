"""Scalars, real or complex, that record the operations applied to them.

They are entries of NumPy's arrays of objects: NumPy's operations on those (a sum, a product of matrices, ``np.sin``) are
recorded element by element. They have no values, so any request for one ends the trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.builder import Builder
from mpiad.compiling.complex_numbers import complex_value
from mpiad.compiling.operations import OPERATIONS

BRANCHES = "it decides by a traced value (if, while, and, or, not): write np.where(u[0] > 0, ...) instead"
_OBJECTS = (
    "it compares, or takes the larger, sign or rounding of, an array that np.array or autograd's np.stack made of traced "
    "values, or decides by one: do that with the components, or put them together by np.concatenate"
)
_VALUES = "it asks for the number that a traced value has (float, int, math.sin instead of np.sin, an index)"


def _operator(operation: str, swapped: bool = False) -> Callable[[Symbol, Any], Any]:
    def method(self: Symbol, other: object) -> Any:
        # The operator of the array is called, and calls this one entry by entry.
        if not isinstance(other, (Symbol, int, float, complex, np.number, np.bool_)):
            return NotImplemented
        if swapped:
            return Symbol(self.builder, number_of(self.builder, other)).call(operation, self)
        return self.call(operation, other)

    return method


class Symbol:
    """A scalar of a program under construction.

    `number`: of its value.
    """

    __slots__ = ("builder", "number")

    def __init__(self, builder: Builder, number: int):
        self.builder, self.number = builder, number

    @property
    def is_boolean(self) -> bool:
        """Whether it is true or false."""
        return self.builder.is_boolean(self.number)

    @property
    def is_complex(self) -> bool:
        """Whether it is a pair of a real and an imaginary part."""
        return self.builder.parts(self.number) is not None

    @property
    def real(self) -> Symbol:
        """Its real part."""
        parts = self.builder.parts(self.number)
        return self.as_number() if parts is None else Symbol(self.builder, parts[0])

    @property
    def imag(self) -> Symbol:
        """Its imaginary part."""
        parts = self.builder.parts(self.number)
        return Symbol(self.builder, self.builder.constant(0.0) if parts is None else parts[1])

    def plus_i(self, imag: Symbol) -> Symbol:
        """Return the complex number of this real part and that imaginary one."""
        return Symbol(self.builder, self.builder.pair(self.number, imag.number))

    def as_number(self) -> Symbol:
        """Return it as a number: true is 1."""
        if not self.is_boolean:
            return self
        one, zero = self.builder.constant(1.0), self.builder.constant(0.0)
        return Symbol(self.builder, self.builder.call("where", self.number, one, zero))

    def truth(self) -> Symbol:
        """Return whether it is not 0."""
        return self if self.is_boolean else self.call("not_equal", 0.0)

    def call(self, operation: str, *others: Any) -> Symbol:
        """Return an operation's value, with this as its first argument."""
        arguments = [self, *(self._as_symbol(other) for other in others)]
        arguments = [x.truth() if operation.startswith("logical") else x.as_number() for x in arguments]
        if any(x.is_complex for x in arguments):
            return complex_value(operation, arguments)
        return Symbol(self.builder, self.builder.call(operation, *(x.number for x in arguments)))

    def _as_symbol(self, other: object) -> Symbol:
        return other if isinstance(other, Symbol) else Symbol(self.builder, number_of(self.builder, other))

    def __getattr__(self, name: str) -> Callable[..., Symbol]:
        # For an array of objects np.sin calls the method sin of each entry.
        if name.startswith("_") or name not in OPERATIONS:
            raise AttributeError(name)
        return lambda *others: self.call(name, *others)

    def conjugate(self) -> Symbol:
        """Return its complex conjugate."""
        return self.real.plus_i(-self.imag) if self.is_complex else self

    def chosen(self, x: Array, y: Array) -> Symbol:
        """Return x if this is true, else y."""
        first, second = self._as_symbol(x), self._as_symbol(y)
        if first.is_complex or second.is_complex:
            return self.chosen(first.real, second.real).plus_i(self.chosen(first.imag, second.imag))
        if not (first.is_boolean and second.is_boolean):
            first, second = first.as_number(), second.as_number()
        return Symbol(self.builder, self.builder.call("where", self.truth().number, first.number, second.number))

    def __neg__(self) -> Symbol:
        return self.call("negative")

    def __pos__(self) -> Symbol:
        return self

    def __abs__(self) -> Symbol:
        return self.call("absolute")

    def __invert__(self) -> Symbol:
        return self.call("logical_not")

    def __bool__(self) -> NoReturn:
        self.builder.refuse(_OBJECTS)

    def __float__(self) -> NoReturn:
        self.builder.refuse(_VALUES)

    __int__ = __index__ = __complex__ = __float__
    __add__, __radd__ = _operator("add"), _operator("add", swapped=True)
    __sub__, __rsub__ = _operator("subtract"), _operator("subtract", swapped=True)
    __mul__, __rmul__ = _operator("multiply"), _operator("multiply", swapped=True)
    __truediv__, __rtruediv__ = _operator("divide"), _operator("divide", swapped=True)
    __pow__, __rpow__ = _operator("power"), _operator("power", swapped=True)
    __and__ = __rand__ = _operator("logical_and")
    __or__ = __ror__ = _operator("logical_or")
    __xor__ = __rxor__ = _operator("not_equal")
    __lt__, __le__ = _operator("less"), _operator("less_equal")
    __gt__, __ge__ = _operator("greater"), _operator("greater_equal")
    __eq__, __ne__ = _operator("equal"), _operator("not_equal")  # type: ignore[assignment]
    # Equality is recorded, too, so that symbols can't be keys.
    __hash__ = None  # type: ignore[assignment]


def number_of(builder: Builder, value: object) -> int:
    """Return the number of a constant, or of a symbol; a Refusal for any other value."""
    if isinstance(value, np.ndarray) and value.shape == ():  # as autograd's array leaves entries of arrays of objects
        value = value.item()
    if isinstance(value, Symbol):
        return value.number
    # Before numbers: Python's booleans are integers.
    if isinstance(value, (bool, np.bool_)):
        return builder.constant(bool(value))
    if isinstance(value, (int, float, np.integer, np.floating)):
        return builder.constant(float(value))
    if isinstance(value, (complex, np.complexfloating)):
        return builder.pair(*(builder.constant(float(part)) for part in (value.real, value.imag)))
    builder.refuse(f"it computes with {type(value).__name__} {value!r:.60}, which isn't a number")


def numbers_of(builder: Builder, value: object) -> Array:
    """Return the numbers of an array, of symbols or of constants; a Refusal for anything else."""
    held = getattr(value, "numbers", None)  # of an array of symbols
    if held is not None:
        return held
    # Other containers of symbols are lists and arrays of objects; both become an array of objects here.
    array = np.asarray(value)
    flat = array.ravel().tolist() if array.dtype.kind in "fiubc" else list(array.ravel())
    return np.array([number_of(builder, part) for part in flat], int).reshape(array.shape)


def choose(condition: Any, x: Array, y: Array) -> Symbol:
    """Return x if the condition, a symbol, is true, else y."""
    return condition.chosen(x, y)
