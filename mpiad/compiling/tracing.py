"""From a function of the user's to a program, by calls with symbols.

Values that the function closes over are part of the program, as constants. A reading of a clock or a random number would
be one, too: a function is called twice, and refused if the two programs differ. A program that occurred twice is known.

A function that checks the kinds of its arguments may compute something else with numbers than with symbols: callers compare
a few values of both (`first_difference`) before they replace one by the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import DTypeLike

from mpiad._typing import Array, Function, Shape
from mpiad.compiling.builder import Builder
from mpiad.compiling.function_fingerprint import fingerprint_of, kind_of
from mpiad.compiling.program import Program, Untraceable, place_of, where_raised
from mpiad.compiling.symbolic_arrays import SymbolicArray
from mpiad.compiling.symbols import Symbol

# Programs of each function that were traced twice alike. Constants that vary between calls mustn't fill the memory.
_MOST_KNOWN = 16
_repeated: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()
# Tolerance relative to the largest term that may have been canceled, in units of rounding.
_ROUNDINGS = 1e4


def traced(
    fun: Function,
    arguments: Callable[[Builder], Sequence[Any]],
    outputs: Callable[[Builder, Any], Sequence[int]],
    groups: Mapping[str, int],
) -> Program:
    """Return a function's computation as a program of these groups of inputs; or raise Untraceable.

    ``arguments(builder)`` returns its arguments (see `input_array`), ``outputs(builder, value)`` the numbers of
    the scalars in its result.
    """
    with np.errstate(all="ignore"):
        program = _traced(fun, arguments, outputs, groups)
        known = _repeated.setdefault(identity_of(fun), set())
        # Other values of the numbers that it reads need no second call: their sources were found constant.
        reads = kind_of(fingerprint_of(fun))
        seen = program if reads is None else (reads, program.structure)
        if seen not in known:
            if _traced(fun, arguments, outputs, groups) != program:
                raise Untraceable("it computed something else when it was called again", place_of(fun))
            if len(known) >= _MOST_KNOWN:
                known.clear()
            known.add(seen)
    return program


def _traced(fun: Function, arguments: Callable, outputs: Callable, groups: Mapping[str, int]) -> Program:
    builder = Builder()
    try:
        made = outputs(builder, fun(*arguments(builder)))
    except Exception as error:
        # The first refusal is the reason, even if NumPy or the function has raised another exception for it.
        reason = builder.refused or f"{type(error).__name__}: {error}"
        raise Untraceable(reason, where_raised(error.__traceback__, fun)) from error
    if builder.refused:  # and the function continued
        raise Untraceable(builder.refused, place_of(fun))
    return builder.program(groups, made)


def identity_of(fun: Function) -> Any:
    """Return an object that is equal for functions defined by the same lines: its code; wrappers (`wraps`) are removed."""
    while isinstance(fun, partial) or hasattr(fun, "__wrapped__"):
        fun = fun.func if isinstance(fun, partial) else fun.__wrapped__
    return getattr(fun, "__code__", None) or type(fun)


def input_array(
    builder: Builder, group: str, places: range, shape: Shape, dtype: DTypeLike, in_pairs: bool
) -> SymbolicArray:
    """Return inputs of a group as an array that a function takes.

    Their places in the group are those of the array's entries in C order; `in_pairs` each two of them are the real and the
    imaginary part of an entry.
    """
    numbers = [builder.input(group, place) for place in places]
    if in_pairs:
        numbers = [builder.pair(real, imag) for real, imag in zip(numbers[::2], numbers[1::2])]
    made = np.array(numbers, int).reshape(shape)
    made.flags.writeable = False  # as arguments of functions are elsewhere
    return SymbolicArray(builder, made, dtype)


def scalars(components: Sequence[Symbol], in_pairs: bool) -> list[int]:
    """Return the numbers of real values: the components themselves, or in pairs their parts; complex ones only in pairs."""
    if in_pairs:
        return [part.number for component in components for part in (component.real, component.imag)]
    for component in components:
        if component.is_complex:
            component.builder.refuse("it returned a complex number where a real one was expected")
    return [component.real.number for component in components]


def first_difference(found: Array, expected: Array, given: Array) -> tuple[int, ...] | None:
    """Return the index at which a program's values differ from a function's by more than rounding, None if there is none.

    They were computed from `given`, which is in the precision of the computation.
    """
    if found.tobytes() == expected.tobytes():
        return None  # nearly always, and each call comes here
    largest = max(float(np.abs(x[np.isfinite(x)]).max(initial=0.0)) for x in (found, expected, given))
    allowed = _ROUNDINGS * float(np.finfo(given.dtype).eps) * (1.0 + largest)
    close = np.isclose(found, expected, rtol=0, atol=allowed, equal_nan=True)
    return None if close.all() else tuple(int(i) for i in np.argwhere(~close)[0])
