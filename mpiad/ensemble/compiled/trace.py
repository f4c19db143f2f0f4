"""`trace`: from the user's f to a program of groups of inputs "state", "parameter" and "time".

A complex number is two of the program's scalars, its real part and then its imaginary part.

f is called as by the vectorized path: with columns, of which there is one here. So the same functions are accepted, except
those that need numbers: branches that depend on values, functions of other libraries, indexing by values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from mpiad._typing import Array, Function, Shape
from mpiad.compiling.arguments import from_row_parts, is_complex, real_dtype, row_parts
from mpiad.compiling.builder import Builder
from mpiad.compiling.program import Program, Untraceable, evaluated, place_of
from mpiad.compiling.symbolic_arrays import SymbolicArray
from mpiad.compiling.symbols import Symbol, numbers_of
from mpiad.compiling.tracing import first_difference, input_array, scalars, traced
from mpiad.ensemble.batch import Batch, Parameters
from mpiad.ensemble.compiled.parameter_packing import packing_of
from mpiad.ensemble.derivative import derivative_of
from mpiad.ensemble.trial import MOVED

Called: TypeAlias = Callable[[Array, Any, Array], Array]

_COLUMNS = 5


def trace(f: Function, shape: Shape, p: Parameters, dtype: DTypeLike, result: Shape | None = None) -> Program:
    """Return the program of f, as in `ODEProblem`, of one trajectory's state, parameters and time; may raise Untraceable.

    The program has one output per scalar of f's result for one trajectory, in C order: of real numbers in the shape
    `result`, by default that of a state's derivative. Of `p` only the shapes are used, and the values of leaves that aren't
    variables. The program's parameters are numbered as in `packing_of`: leaf after leaf, C order within a leaf, both those
    that vary and those that are shared. `ParameterPacking.split` creates both kinds of rows for a kernel. Untraceable gives
    the reason, and the user's line.
    """
    width = 2 if is_complex(dtype) else 1
    groups = {"state": math.prod(shape) * width, "parameter": packing_of(p).size, "time": 1}

    def outputs(builder: Builder, value: object) -> list[int]:
        return scalars(_components(builder, value, shape if result is None else result), result is None and width == 2)

    return traced(f, lambda builder: _inputs(builder, shape, p, dtype), outputs, groups)


def _inputs(builder: Builder, shape: Shape, p: Parameters, dtype: DTypeLike) -> tuple[Any, Any, Any]:
    """Return u, p and t as symbols, in the shapes of one column."""
    one_by_one, in_pairs = len(shape) > 1, is_complex(dtype)
    leaves = list(p.leaves)
    for part in packing_of(p).parts:
        # A matrix state is passed alone, without an axis for trajectories.
        column = (1,) if part.varies and not one_by_one else ()
        own = (*part.shape, *column)
        leaves[part.place] = input_array(builder, "parameter", part.scalars, own, dtype, part.complex)
    places = range(math.prod(shape) * (2 if in_pairs else 1))
    u = input_array(builder, "state", places, shape if one_by_one else (*shape, 1), dtype, in_pairs)
    time = np.array(builder.input("time")).reshape(() if one_by_one else (1,))
    return u, p.build(leaves), SymbolicArray(builder, time, dtype)


def _components(builder: Builder, value: object, shape: Shape) -> list[Symbol]:
    if not shape:
        parts = [value]
    elif len(shape) == 1 and isinstance(value, (list, tuple)):
        parts = list(value)
    else:
        parts = list(numbers_of(builder, value).reshape(-1, 1))
        return _counted(builder, [int(part[0]) for part in parts], shape)
    return _counted(builder, [_one(builder, part) for part in parts], shape)


def _one(builder: Builder, part: object) -> int:
    numbers: Array = numbers_of(builder, part)
    if numbers.size != 1:
        builder.refuse(f"it returned a component of shape {numbers.shape} for one column")
    return int(numbers.ravel()[0])


def _counted(builder: Builder, numbers: list[int], shape: Shape) -> list[Symbol]:
    if len(numbers) != math.prod(shape):
        builder.refuse(f"it returned {len(numbers)} components for {math.prod(shape)}")
    return [Symbol(builder, number) for number in numbers]


def verify(program: Program, batch: Batch, fun: Function | None = None, called: Called | None = None) -> None:
    """Compare a program with f at the initial states of a few trajectories, which are plain arrays.

    Or with another function of the user, `fun`, of which ``called(u, p, t)`` returns an array, shape (rows, n). Raises
    Untraceable if they differ by more than rounding.
    """
    if not batch.size:
        return
    ids, u, t = _columns(batch)
    with np.errstate(all="ignore"):
        if called is None:
            expected = np.empty_like(u)
            derivative_of(batch.f, batch.shape).write(expected, u, batch.p.columns(ids, len(batch.shape) > 1), t)
        else:
            expected = called(u, batch.p.columns(ids), t)
    rows = np.empty((len(program.outputs), u.shape[1]), u.real.dtype)
    for row, value in zip(rows, evaluated(program, row_parts(u), _parameters(batch, ids), [t])):
        row[:] = value
    found = from_row_parts(rows, expected.dtype)
    place = first_difference(found, expected, u)
    if place is not None:
        i, j = place
        raise Untraceable(
            f"it returns {expected[i, j]} for component {i} of u = {u[:, j].tolist()}, but {found[i, j]} was traced: does "
            "it look at the types of its arguments, or keep something from call to call?",
            place_of(fun or batch.f),
        )


def _columns(batch: Batch) -> tuple[Array, Array, Array]:
    ids = np.resize(np.arange(batch.size), _COLUMNS)
    u, t = batch.u0[:, ids], batch.start[ids].astype(real_dtype(batch.u0.dtype))
    if is_complex(u):
        # Off the real axis, since on it a trace that has lost imaginary parts would be right: such as those of NumPy's
        # object arrays, which are zero for all objects.
        u[:, 1:] += MOVED * (1 + np.abs(u[:, 1:])) * np.exp(1j * np.arange(u[:, 1:].size)).reshape(u[:, 1:].shape)
    u.flags.writeable = t.flags.writeable = False
    return ids, u, t


def _parameters(batch: Batch, ids: Array) -> list[Any]:
    leaves = [leaf[..., ids] if varies else leaf for leaf, varies in zip(batch.p.leaves, batch.p.varies)]
    rows = packing_of(batch.p).numbers(leaves, len(ids), real_dtype(batch.u0.dtype))
    return [rows[j] for j in range(len(rows))]
