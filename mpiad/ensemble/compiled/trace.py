"""`trace` translates the user's f to a scalar program with the inputs "state", "parameter" and "time".

A complex number is represented by two scalars, its real and its imaginary part. f is called with symbols, in arrays of one
column. A function can't be traced if it needs values: for branches, for indices, or for functions of other libraries.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import autograd.tracer
import numpy as np
from numpy.typing import DTypeLike

from mpiad._typing import Array, Function, Shape
from mpiad.compiling.arguments import from_row_parts, is_complex, parts, real_dtype, row_parts
from mpiad.compiling.function_fingerprint import fingerprint_of, is_of_a_package, without_floats
from mpiad.compiling.program import Program, Untraceable, evaluated, place_of
from mpiad.compiling.symbols import Symbol
from mpiad.ensemble.batch import Batch, Parameters
from mpiad.ensemble.derivative import derivative_of
from mpiad.programs.scalar_recorder import ScalarRecorder
from mpiad.programs.traced_array import TracedArray
from mpiad.pytrees import is_variable
from mpiad.transport.core.calls import site_of_trace
from mpiad.transport.core.tracing import restoring_state, tracing

# There are three kinds of leaves of the parameters: leaves that differ between trajectories, leaves shared by all, and
# shared leaves that can't be differentiated (integers, booleans, strings, functions). The leaves of the third kind are
# constants of the program: f may branch on them, and another value gives another program.


class PackedLeaf(NamedTuple):
    """One leaf whose numbers are inputs of a program."""

    place: int  # index of the leaf
    shape: Shape  # shape of the leaf for one trajectory
    varies: bool  # whether it differs between trajectories
    first: int  # the index of its first scalar among the parameters; the others follow in C order
    complex: bool = False  # whether its numbers are complex, represented by two scalars each
    discrete: str = ""  # the dtype of rows of booleans, or of integers whose sums and products wrap around

    @property
    def scalars(self) -> range:
        """The indices of its scalars among the parameters."""
        return range(self.first, self.first + math.prod(self.shape) * (2 if self.complex else 1))


@dataclass(frozen=True)
class ParameterPacking:
    """The numbering of the scalars of a program's parameters."""

    parts: tuple[PackedLeaf, ...]  # in the order of their leaves, and so of their scalars

    @property
    def size(self) -> int:
        """The number of scalars."""
        return self.parts[-1].scalars.stop if self.parts else 0

    @cached_property
    def varying(self) -> tuple[int, ...]:
        """The indices of the scalars that differ between trajectories."""
        return tuple(j for part in self.parts if part.varies for j in part.scalars)

    @cached_property
    def shared(self) -> tuple[int, ...]:
        """The indices of the scalars that all trajectories share."""
        return tuple(j for part in self.parts if not part.varies for j in part.scalars)

    def split(self, leaves: Sequence[Any] | Mapping[int, Any], count: int, dtype: DTypeLike) -> tuple[Array, Array]:
        """Return the varying parameters, shape (m, count), and the shared ones, (k,), in a real dtype."""
        rows, numbers = [np.empty((0, count), dtype)], [np.empty(0, dtype)]
        for part in self.parts:
            leaf: Any = leaves[part.place]
            if part.varies:
                rows.append(row_parts(np.reshape(leaf, (math.prod(part.shape), count))))
            else:
                numbers.append(parts(np.ravel(leaf)) if part.complex else leaf)
        return np.concatenate(rows, dtype=dtype), np.concatenate(numbers, axis=None, dtype=dtype)

    def numbers(self, leaves: list[Any], count: int, dtype: DTypeLike) -> dict[int, Any]:
        """Return the scalars of `count` trajectories by their indices, in a real dtype, on the leaves' device."""
        rows: dict[int, Any] = {}
        for part in self.parts:
            leaf: Any = np.reshape(leaves[part.place], (math.prod(part.shape), count) if part.varies else -1)
            halves = [half.astype(dtype, copy=False) for half in ((leaf.real, leaf.imag) if part.complex else (leaf,))]
            rows |= zip(part.scalars, (half[j] for j in range(len(leaf)) for half in halves))
        return rows

    def joined(self, varying: Array, shared: Array, count: int) -> dict[int, Array]:
        """Return arrays in the shapes of leaves, by their indices, from rows of `count` numbers in the order of `split`."""
        rows, result = {True: varying, False: shared}, {}
        for part in self.parts:
            stop = len(part.scalars)
            numbers, rows[part.varies] = rows[part.varies][:stop], rows[part.varies][stop:]
            numbers = numbers[::2] + 1j * numbers[1::2] if part.complex else numbers
            result[part.place] = numbers.reshape((*part.shape, count) if part.varies else part.shape)
        return result


def packing_of(p: Parameters) -> ParameterPacking:
    """Return the numbering of the scalars of an ensemble's parameters."""
    parts: list[PackedLeaf] = []
    first = 0
    for place, (leaf, varies) in enumerate(zip(p.leaves, p.varies)):
        if varies or is_variable(leaf):
            shape = getattr(leaf, "shape", ())
            shape, in_pairs = shape[:-1] if varies else shape, is_complex(leaf)
            is_discrete = varies and leaf.dtype.kind in "biu" and leaf.dtype != np.int64
            parts.append(PackedLeaf(place, shape, varies, first, in_pairs, str(leaf.dtype) if is_discrete else ""))
            first += math.prod(shape) * (2 if in_pairs else 1)
    return ParameterPacking(tuple(parts))


def names_of(packing: ParameterPacking) -> tuple[str, ...]:
    """Return the names of a program's parameters: p0, p1, … per trajectory, and s0, s1, … shared by all."""
    named = {j: f"{kind}{i}" for kind in "ps" for i, j in enumerate(packing.varying if kind == "p" else packing.shared)}
    return tuple(named[j] for j in range(packing.size))


# A function of u, p and t, with one column per trajectory.
Called: TypeAlias = Callable[[Array, Any, Array], Array]

_COLUMNS = 5  # number of trajectories in the comparison of a program with f
# Tolerance in units of machine epsilon, relative to one plus the largest number in the arguments and results.
_TOLERANCE = 1e4
_MOVED = 0.01  # relative size of the perturbation of complex states in this comparison

# For each function, the programs confirmed by a second trace. The number of programs is limited, since constants may vary.
_MAX_REPEATED = 16
_repeated: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()


def program_of(
    batch: Batch, fun: Function | None = None, called: Called | None = None, result: Shape | None = None
) -> Program:
    """Return the verified program of a batch's f, or of `fun` as evaluated by `called` for several columns."""
    fun = fun or batch.f
    program = trace(fun, batch.shape, batch.p, batch.u0.dtype, result)
    # The times of events are double, but a program has one precision.
    if called is not None and program.reads("time") and real_dtype(batch.u0.dtype) != np.float64:
        raise Untraceable(f"it looks at time, which is double, and u0 is {batch.u0.dtype}", place_of(fun))
    verify(program, batch, fun, called)
    return program


def trace(f: Function, shape: Shape, p: Parameters, dtype: DTypeLike, result: Shape | None = None) -> Program:
    """Return the program of f, as in `ODEProblem`, for one trajectory; may raise Untraceable.

    The program has one output per scalar of the result of f, in C order, and its parameters are numbered as in
    `packing_of`. `result`: shape of a real result; by default it is the derivative of a state.

    Values that f closes over become constants of the program. To exclude values that change at each call, such as random
    numbers, f is traced twice, and refused if the two programs differ. A function that has passed this check is traced once
    in each later call.
    """
    with np.errstate(all="ignore"):
        program = _traced(f, shape, p, dtype, result)
        confirmed = _repeated.setdefault(identity_of(f), set())
        # A program that differs only in the values of floats that the function reads needs no second trace.
        reads = without_floats(fingerprint_of(f))
        form = program if reads is None else (reads, program.structure)
        if form not in confirmed:
            if _traced(f, shape, p, dtype, result) != program:
                raise Untraceable("it computed something else when it was called again", place_of(f))
            if len(confirmed) >= _MAX_REPEATED:
                confirmed.clear()
            confirmed.add(form)
    return program


def identity_of(fun: Function) -> object:
    """Return the code object of a function without wrappers; functions defined by the same lines share the code."""
    while isinstance(fun, partial) or hasattr(fun, "__wrapped__"):
        fun = fun.func if isinstance(fun, partial) else fun.__wrapped__
    return getattr(fun, "__code__", None) or type(fun)


def _traced(f: Function, shape: Shape, p: Parameters, dtype: DTypeLike, result: Shape | None) -> Program:
    recorder, in_pairs, packing = ScalarRecorder(real_dtype(dtype)), is_complex(dtype), packing_of(p)
    builder, leaves = recorder.builder, list(p.leaves)
    groups = {"state": math.prod(shape) * (2 if in_pairs else 1), "parameter": packing.size, "time": 1}
    # If states are matrices, f is called for one trajectory at a time; otherwise for a batch with one column.
    column = () if len(shape) > 1 else (1,)
    for part in packing.parts:
        if part.discrete not in ("", "bool"):
            text = f"p has rows of {part.discrete}, in which NumPy's sums and products wrap around: pass float64"
            raise Untraceable(text, place_of(f))
        symbol_shape = (*part.shape, *column) if part.varies else part.shape
        is_boolean = part.discrete == "bool"
        leaves[part.place] = recorder.input("parameter", part.scalars, symbol_shape, part.complex, is_boolean)
    u = recorder.input("state", range(groups["state"]), (*shape, *column), in_pairs)
    try:
        with restoring_state(), _autograd_replaced():
            # A scalar recorder lacks methods that are called only after `looked_up`, which refuses.
            around, tracing.recorder = tracing.recorder, recorder  # type: ignore[assignment]
            value = f(u, p.build(leaves), recorder.input("time", range(1), column))
            tracing.recorder = around
        components = _components(recorder, value, shape if result is None else result)
        if in_pairs and result is None:
            components = [part for x in components for part in (x.real, x.imag)]
        elif any(x.is_complex for x in components):
            recorder.refuse("it returned a complex number where a real one was expected")
    except Exception as error:
        # The first refusal is the reason, even if NumPy or the function has replaced the exception by another one.
        reason = builder.refused or f"{type(error).__name__}: {error}".removesuffix(".")
        site = site_of_trace(error.__traceback__)
        raise Untraceable(reason, f"{site.file}:{site.line}" if site.file else place_of(f)) from error
    if builder.refused:  # the function has caught the Refusal
        raise Untraceable(builder.refused, place_of(f))
    program = builder.program(groups, [x.as_number().number for x in components])
    varying = set(packing.varying)
    for group, first, count in program.tables:
        # Kernels read a table from one of their arrays of parameters.
        if group != "parameter" or 0 < len(varying.intersection(range(first, first + count))) < count:
            entries = "components of u" if group == "state" else "parameters per trajectory and shared ones"
            reason = f"it looks up values in a table of {entries}; expected constants, or an array in p"
            raise Untraceable(reason, place_of(f))
    return program


# Traces contain no boxes, by which autograd finds derivative rules. So functions of autograd are replaced in a trace: the
# first function that a primitive calls, the one by which `stop_gradient` and `notrace_primitive` get plain values, and the
# one that `getval` calls, since functions that have imported `getval` call the original.
_tracer: Any = autograd.tracer
_find_boxes, _getval, _isbox, _replacing = _tracer.find_top_boxed_args, _tracer.getval, _tracer.isbox, threading.RLock()


@contextmanager
def _autograd_replaced() -> Iterator[None]:
    with _replacing:
        around = _tracer.find_top_boxed_args, _tracer.getval, _tracer.isbox
        _tracer.find_top_boxed_args, _tracer.getval, _tracer.isbox = _boxes_of, _plain, _is_box
        try:
            yield
        finally:
            _tracer.find_top_boxed_args, _tracer.getval, _tracer.isbox = around


def _boxes_of(args: Sequence[object]) -> object:
    """Return the boxes among the arguments of a primitive; refuse a primitive of the user in a trace."""
    primitive, recorder = sys._getframe(1).f_locals["f_wrapped"], tracing.recorder
    if isinstance(recorder, ScalarRecorder) and not is_of_a_package(primitive):
        name = getattr(primitive, "__name__", "without a name")
        recorder.refuse(f"it calls the autograd primitive {name}, whose derivative rules can't be compiled")
    return _find_boxes(args)


def _plain(x: object) -> object:
    recorder = tracing.recorder
    return recorder.constant(_getval(x)) if isinstance(recorder, ScalarRecorder) else _getval(x)


def _is_box(x: object) -> bool:
    """Return whether x is a box; refuse a user's call of the original `getval`, after which x would be differentiated."""
    getter, recorder = sys._getframe(1), tracing.recorder
    if isinstance(x, TracedArray) and isinstance(recorder, ScalarRecorder) and getter.f_code is _getval.__code__:
        user: Any = getter.f_back
        if not user.f_globals.get("__name__", "").startswith(("autograd.", "mpiad.")):
            recorder.refuse("it calls getval, imported from autograd.tracer; expected mpiad.stop_gradient")
    return _isbox(x)


def _components(recorder: ScalarRecorder, value: Array, shape: Shape) -> list[Symbol]:
    components: list[Symbol] = []
    if shape and not (len(shape) == 1 and isinstance(value, (list, tuple))):
        components += recorder.symbols(value).ravel().tolist()
    else:
        for part in value if shape else [value]:
            symbols = recorder.symbols(part)
            if symbols.size != 1:
                recorder.refuse(f"it returned a component of shape {symbols.shape} for one column")
            components.append(symbols.item())
    if len(components) != math.prod(shape):
        recorder.refuse(f"it returned {len(components)} components for {math.prod(shape)}")
    return components


def verify(program: Program, batch: Batch, fun: Function, called: Called | None = None) -> None:
    """Raise Untraceable if a program of `fun` differs at a few initial states from f, or from ``called``."""
    # They differ if f checks the types of its arguments, and computes something else with traced arrays than with numbers.
    if not batch.size:
        return
    ids, u, t = _columns(batch)
    with np.errstate(all="ignore"):
        if called is None:
            expected = np.empty_like(u)
            derivative_of(batch.f, batch.shape).write(expected, u, batch.p.columns(ids, len(batch.shape) > 1), t)
        else:
            expected = called(u, batch.p.columns(ids), t)
    numbers = packing_of(batch.p).numbers(batch.p.chosen(ids), len(ids), u.real.dtype)
    parameters = [numbers[j] for j in range(len(numbers))]
    rows = np.empty((len(program.outputs), u.shape[1]), u.real.dtype)
    for row, value in zip(rows, evaluated(program, row_parts(u), parameters, [t])):
        row[:] = value
    values = from_row_parts(rows, expected.dtype)
    if values.tobytes() == expected.tobytes():
        return  # the usual case, for speed
    largest = max(float(np.abs(x[np.isfinite(x)]).max(initial=0.0)) for x in (values, expected, u))
    allowed = _TOLERANCE * float(np.finfo(u.dtype).eps) * (1.0 + largest)
    if not (close := np.isclose(values, expected, rtol=0, atol=allowed, equal_nan=True)).all():
        i, j = np.argwhere(~close)[0]
        raise Untraceable(
            f"it returns {expected[i, j]} for component {i} of u = {u[:, j].tolist()}, but {values[i, j]} was traced: does "
            "it look at the types of its arguments, or at state that changes between calls?",
            place_of(fun),
        )


def _columns(batch: Batch) -> tuple[Array, Array, Array]:
    ids = np.resize(np.arange(batch.size), _COLUMNS)
    u, t = batch.u0[:, ids], batch.start[ids].astype(real_dtype(batch.u0.dtype))
    if is_complex(u):
        # At real u, f agrees even with a trace that has lost imaginary parts: for example, np.imag of symbols is zero.
        u[:, 1:] += _MOVED * (1 + np.abs(u[:, 1:])) * np.exp(1j * np.arange(u[:, 1:].size)).reshape(u[:, 1:].shape)
    u.flags.writeable = t.flags.writeable = False
    return ids, u, t
