"""Tracing: a user's function is called with symbols, which record it as a program.

Values that the function closes over become constants of the program. To exclude values that change at each call, such as
random numbers, a function is traced twice, and refused if the two programs differ. A function that has passed this check
is traced once in each later call.

A function that checks the types of its arguments may compute different results with symbols than with numbers. Therefore
callers compare a few values of the program with the function's (`first_difference`) before they use the program.
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
from mpiad.compiling.function_fingerprint import fingerprint_of, without_floats
from mpiad.compiling.program import Program, Untraceable, place_of, where_raised
from mpiad.compiling.symbolic_arrays import SymbolicArray
from mpiad.compiling.symbols import Symbol

# For each function, the programs confirmed by a second trace. The number of programs is limited, since constants may vary.
_MAX_REPEATED = 16
_repeated: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()
# Tolerance in units of machine epsilon, relative to one plus the largest number in the arguments and results.
_TOLERANCE = 1e4


def trace_program(
    fun: Function,
    arguments: Callable[[Builder], Sequence[Any]],
    outputs: Callable[[Builder, Any], Sequence[int]],
    groups: Mapping[str, int],
) -> Program:
    """Return a function's computation as a program; raise Untraceable if this fails.

    `groups`: the number of scalars in each group of inputs (see `Program`).
    ``arguments(builder)`` returns the symbolic arguments of the function (see `input_array`), and
    ``outputs(builder, result)`` returns the value numbers of the scalars in its result (see `Program`).
    """
    with np.errstate(all="ignore"):
        program = _traced(fun, arguments, outputs, groups)
        confirmed = _repeated.setdefault(identity_of(fun), set())
        # A program that differs only in the values of floats that the function reads needs no second trace.
        reads = without_floats(fingerprint_of(fun))
        form = program if reads is None else (reads, program.structure)
        if form not in confirmed:
            if _traced(fun, arguments, outputs, groups) != program:
                raise Untraceable("it computed something else when it was called again", place_of(fun))
            if len(confirmed) >= _MAX_REPEATED:
                confirmed.clear()
            confirmed.add(form)
    return program


def _traced(fun: Function, arguments: Callable, outputs: Callable, groups: Mapping[str, int]) -> Program:
    builder = Builder()
    try:
        result = outputs(builder, fun(*arguments(builder)))
    except Exception as error:
        # The first refusal is the reason, even if NumPy or the function has replaced the exception by another one.
        reason = builder.refused or f"{type(error).__name__}: {error}"
        raise Untraceable(reason, where_raised(error.__traceback__, fun)) from error
    if builder.refused:  # the function has caught the Refusal
        raise Untraceable(builder.refused, place_of(fun))
    return builder.program(groups, result)


def identity_of(fun: Function) -> Any:
    """Return the code object of a function without wrappers; functions defined by the same lines share the code."""
    while isinstance(fun, partial) or hasattr(fun, "__wrapped__"):
        fun = fun.func if isinstance(fun, partial) else fun.__wrapped__
    return getattr(fun, "__code__", None) or type(fun)


def input_array(
    builder: Builder, group: str, places: range, shape: Shape, dtype: DTypeLike, in_pairs: bool
) -> SymbolicArray:
    """Return inputs of a group as a symbolic array.

    `places`: indices of the inputs in the group, in the C order of the array's entries. `in_pairs`: whether two consecutive
    inputs are the real and the imaginary part of a complex entry.
    """
    numbers = [builder.input(group, place) for place in places]
    if in_pairs:
        numbers = [builder.pair(real, imag) for real, imag in zip(numbers[::2], numbers[1::2])]
    result = np.array(numbers, int).reshape(shape)
    result.flags.writeable = False  # as in calls with numbers
    return SymbolicArray(builder, result, dtype)


def output_numbers(components: Sequence[Symbol], in_pairs: bool) -> list[int]:
    """Return the value numbers of the components; with `in_pairs`, those of each component's real and imaginary part.

    Without `in_pairs`, complex components are refused.
    """
    if in_pairs:
        return [part.number for component in components for part in (component.real, component.imag)]
    for component in components:
        if component.is_complex:
            component.builder.refuse("it returned a complex number where a real one was expected")
    return [component.real.number for component in components]


def first_difference(found: Array, expected: Array, given: Array) -> tuple[int, ...] | None:
    """Return the first index at which `found` differs from `expected` by more than rounding, None if there is none.

    `given`: the arguments of the computation, in the precision of the computation.
    """
    if found.tobytes() == expected.tobytes():
        return None  # the usual case, for speed
    largest = max(float(np.abs(x[np.isfinite(x)]).max(initial=0.0)) for x in (found, expected, given))
    allowed = _TOLERANCE * float(np.finfo(given.dtype).eps) * (1.0 + largest)
    close = np.isclose(found, expected, rtol=0, atol=allowed, equal_nan=True)
    return None if close.all() else tuple(int(i) for i in np.argwhere(~close)[0])
