"""`trace`: from the user's f to a program, by one call with symbols.

A complex number is two of the program's scalars, its real part and then its imaginary part.

f is called as the vectorised path calls it: with columns, of which there is one here. So the same texts are accepted, but
for those that need numbers: branches that depend on values, functions of other libraries, places that are looked up by
values.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from mpiad._typing import Array, Function, Shape
from mpiad.compiling.builder import Builder
from mpiad.compiling.complex_parts import is_complex
from mpiad.compiling.program import Program
from mpiad.compiling.refusals import Untraceable, place_of, where_raised
from mpiad.compiling.symbolic_arrays import SymbolicArray
from mpiad.compiling.symbols import Symbol, numbers_of
from mpiad.ensemble.batch import Parameters
from mpiad.ensemble.compiled.layout import layout_of

__all__ = ["identity_of", "trace"]

# Programs of each f that came out the same twice. Constants that change from solve to solve mustn't fill the memory.
_MOST_KNOWN = 16
_repeated: WeakKeyDictionary[Any, set[Program]] = WeakKeyDictionary()


def trace(f: Function, shape: Shape, p: Parameters, dtype: Any, result: Shape | None = None) -> Program:
    """Return what f computes from one trajectory's state, parameters and time.

    Parameters
    ----------
    f : callable
        As in `ODEProblem`.
    shape : tuple of int
        Of one state.
    p : Parameters
        Of which the shapes are used, and the values of what isn't a variable. The program's parameters are numbered as
        `layout_of` says: leaf after leaf, C order within a leaf, those that vary and those that are shared alike.
        `Layout.split` makes both kinds of row for a kernel.
    dtype : dtype
        Of the states.
    result : tuple of int, optional
        The shape of what f returns for one trajectory, real numbers; by default it is a state's derivative.

    Returns
    -------
    Program
        With an output for each scalar of the result, in C order.

    Raises
    ------
    Untraceable
        With the reason and the line of the user's.

    Notes
    -----
    What f closes over is part of the program, as constants: trace again for each solve. A reading of a clock or a random
    number would be one too; f is called twice, and refused where the two programs differ. A program that f has had twice
    before is known.
    """
    with np.errstate(all="ignore"):
        program = _traced(f, shape, p, dtype, result)
        known = _repeated.setdefault(identity_of(f), set())
        if program not in known:
            if _traced(f, shape, p, dtype, result) != program:
                raise Untraceable("it computed something else when it was called again", place_of(f))
            if len(known) >= _MOST_KNOWN:
                known.clear()
            known.add(program)
    return program


def identity_of(f: Function) -> Any:
    """Return what stays the same when f is defined anew by the same lines."""
    while isinstance(f, partial):
        f = f.func
    return getattr(f, "__code__", None) or type(f)


def _traced(f: Function, shape: Shape, p: Parameters, dtype: Any, result: Shape | None) -> Program:
    builder = Builder()
    try:
        value = f(*_inputs(builder, shape, p, dtype))
        components = _components(builder, value, shape if result is None else result)
        outputs = _scalars(components, result is None and is_complex(dtype))
    except Exception as error:
        # The first refusal is the reason, whatever NumPy or f made of it on the way.
        reason = builder.refused or f"{type(error).__name__}: {error}"
        raise Untraceable(reason, where_raised(error.__traceback__, f)) from error
    if builder.refused:  # and f went on
        raise Untraceable(builder.refused, place_of(f))
    return builder.program(math.prod(shape) * (2 if is_complex(dtype) else 1), layout_of(p).size, outputs)


def _inputs(builder: Builder, shape: Shape, p: Parameters, dtype: Any) -> tuple[Any, Any, Any]:
    """Return u, p and t as symbols, of the shapes that one column has."""
    one_by_one = len(shape) > 1

    def made(kind: str, places: range, shape: Shape, in_pairs: bool) -> SymbolicArray:
        scalars = [builder.input(kind, place) for place in places]
        if in_pairs:
            scalars = [builder.pair(real, imag) for real, imag in zip(scalars[::2], scalars[1::2])]
        numbers = np.array(scalars, int).reshape(shape)
        numbers.flags.writeable = False  # as arguments of f are elsewhere
        return SymbolicArray(builder, numbers, dtype)

    leaves = list(p.leaves)
    for part in layout_of(p).parts:
        # A matrix state comes alone, without an axis for trajectories.
        column = (1,) if part.varies and not one_by_one else ()
        leaves[part.place] = made("parameter", part.scalars, (*part.shape, *column), part.complex)
    places = range(math.prod(shape) * (2 if is_complex(dtype) else 1))
    u = made("state", places, shape if one_by_one else (*shape, 1), is_complex(dtype))
    time = np.array(builder.input("time")).reshape(() if one_by_one else (1,))
    return u, p.build(leaves), SymbolicArray(builder, time, dtype)


def _components(builder: Builder, value: Any, shape: Shape) -> list[Symbol]:
    """Return the components of what f returned."""
    if not shape:
        parts = [value]
    elif len(shape) == 1 and isinstance(value, (list, tuple)):
        parts = list(value)
    else:
        parts = list(numbers_of(builder, value).reshape(-1, 1))
        return _counted(builder, [int(part[0]) for part in parts], shape)
    return _counted(builder, [_one(builder, part) for part in parts], shape)


def _one(builder: Builder, part: Any) -> int:
    numbers: Array = numbers_of(builder, part)
    if numbers.size != 1:
        builder.refuse(f"it returned a component of shape {numbers.shape} for one column")
    return int(numbers.ravel()[0])


def _counted(builder: Builder, numbers: list[int], shape: Shape) -> list[Symbol]:
    if len(numbers) != math.prod(shape):
        builder.refuse(f"it returned {len(numbers)} components for {math.prod(shape)}")
    return [Symbol(builder, number) for number in numbers]


def _scalars(components: list[Symbol], in_pairs: bool) -> list[int]:
    """Return the numbers of real values: the components themselves, or their parts."""
    if in_pairs:
        return [part.number for component in components for part in (component.real, component.imag)]
    for component in components:
        if component.is_complex:
            component.builder.refuse("it returned a complex number where a real one was expected")
    return [component.real.number for component in components]
