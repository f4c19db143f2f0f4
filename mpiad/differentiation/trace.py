"""Traced runs of functions: in reverse mode on an `OrderedTape`, in forward mode on a `TangentTape`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from autograd.tracer import Box, getval

import mpiad.differentiation.array_methods  # noqa: F401 (sets the methods of traced arrays)
from mpiad._typing import Argnum, Array, Shape, Shared, Tree
from mpiad.differentiation.forward import TangentTape
from mpiad.differentiation.in_place import as_it_is
from mpiad.differentiation.objective import PendingError
from mpiad.differentiation.rules.scipy_solvers import bind_keywords
from mpiad.differentiation.tape import LibraryTape, OrderedTape, Recording, trace_list, unboxed, without_ended_traces
from mpiad.errors import RequestError
from mpiad.primitives.cotangents import conformed, spec_like
from mpiad.pytrees import flatten, is_variable, refuse_objects
from mpiad.transport.core.tracing import restoring_state
from mpiad.transport.devices.device_arrays import discover, is_device_array

_box_types = Box.types


class Variables(NamedTuple):
    """The differentiated arguments: all leaves, the indices of the variables among them, and the builder of the pytree."""

    leaves: list[Any]
    places: list[int]
    build: Callable[[list[Any]], Tree]
    shared: Sequence[int] = ()  # indices into `places`: the variables of which all ranks hold copies

    def shared_shapes(self) -> tuple[tuple[Shape, np.dtype], ...]:
        """Return shape and dtype of each shared variable."""
        leaves = [self.leaves[self.places[k]] for k in self.shared]
        return tuple([(leaf.shape, leaf.dtype) for leaf in leaves])

    def filled(self, values: Sequence[Array], otherwise: Callable[[Array], Array] | None = None) -> Tree:
        """Build the pytree with these values of the variables, and ``otherwise(leaf)`` for other leaves."""
        leaves = list(self.leaves)
        if otherwise is not None and len(values) < len(leaves):
            variables = set(self.places)
            leaves = [leaf if k in variables else otherwise(leaf) for k, leaf in enumerate(leaves)]
        for place, value in zip(self.places, values):
            leaves[place] = value
        return self.build(leaves)


class Traced(NamedTuple):
    """A traced run: the leaves of its result, their positions on the tape (-1 for constants), and the record."""

    values: list[Any]
    places: list[int]
    build: Callable[[list[Any]], Tree]
    recording: Recording
    problem: PendingError | None


def variables_of(args: tuple, argnum: Argnum, call: str, shared: Shared = False) -> Variables:
    """Return the variables among the arguments; raise a TypeError or ValueError if an option or a leaf is invalid."""
    if getattr(argnum, "ndim", 1) == 0:
        argnum = operator.index(argnum)  # type: ignore[arg-type]  # a traced integer becomes a constant of the trace
    try:
        chosen = args[argnum] if isinstance(argnum, (int, np.integer)) else tuple([args[i] for i in argnum])
    except IndexError:
        raise TypeError(
            f"{call}: argnum={argnum!r} refers to positional arguments, but only {len(args)} were given."
        ) from None
    if not isinstance(argnum, (int, np.integer)) and len({i % len(args) for i in argnum}) != len(argnum):
        raise ValueError(f"{call}: argnum={argnum!r} contains an argument twice.")
    leaves, build = flatten(chosen)
    leaves = [_with_dtype(leaf) for leaf in leaves]
    places = [place for place, leaf in enumerate(leaves) if is_variable(leaf)]
    if not places:
        raise _without_variables(leaves, argnum, call)
    if len(places) < len(leaves):
        refuse_objects(chosen, f"argument {argnum!r}", call)
        for i, part in () if isinstance(argnum, (int, np.integer)) else zip(argnum, chosen):
            parts = flatten(part)[0]
            if parts and all(map(_is_integer, parts)):
                raise _without_variables(parts, i, call)
    if not isinstance(shared, (tuple, list)):
        return Variables(leaves, places, build, range(len(places)) if shared else ())
    booleans = all(isinstance(flag, (bool, np.bool_)) for flag in shared)
    if not isinstance(chosen, tuple) or len(shared) != len(chosen) or not booleans:
        raise ValueError(
            f"{call}: shared must be a boolean, or a tuple with a boolean for each of several arguments, but got "
            f"{shared!r} with argnum={argnum!r}."
        )
    flags = [flag for flag, part in zip(shared, chosen) for _ in flatten(part)[0]]
    return Variables(leaves, places, build, [k for k, place in enumerate(places) if flags[place]])


def _is_integer(leaf: Array) -> bool:
    return isinstance(leaf, int) or getattr(getattr(leaf, "dtype", None), "kind", None) in ("b", "i", "u")


def _without_variables(leaves: Sequence[Array], argnum: Argnum, call: str) -> TypeError:
    names = {type(leaf).__name__ + (f" of dtype {leaf.dtype}" if hasattr(leaf, "dtype") else "") for leaf in leaves}
    kinds = ", ".join(sorted(names)) or "nothing"
    advice = " A rank that has no values passes np.zeros(0)." if "NoneType" in names else ""
    return TypeError(
        f"{call}: argument {argnum!r} holds {kinds}, but only floating-point numbers and arrays have derivatives. "
        f"Pass floats (3.0 instead of 3) or an array of dtype float32, float64, complex64 or complex128.{advice}"
    )


def _with_dtype(leaf: Array) -> Array:
    # Python numbers become NumPy scalars, because the box of a Python number has no dtype.
    if type(leaf) is float:
        return np.float64(leaf)
    if type(leaf) is complex:
        return np.complex128(leaf)
    leaf = without_ended_traces(leaf)
    if type(leaf) in _box_types and not hasattr(leaf, "dtype") and isinstance(getval(leaf), (float, complex)):
        return leaf * np.float64(1.0)  # a number traced by plain autograd
    return as_it_is(leaf)


def arguments_with(args: tuple, argnum: Argnum, chosen: Tree) -> list[Tree]:
    """Return the arguments with those at `argnum` replaced by `chosen`."""
    new = list(args)
    if isinstance(argnum, (int, np.integer)):
        new[argnum] = chosen
    else:
        for i, value in zip(argnum, chosen):
            new[i] = value
    return new


def trace_backwards(
    fun: Callable[[Tree], Tree],
    variables: Variables,
    of_cotangents: bool = False,
    passes: str = "several",
    repeats: str = "",
) -> Traced:
    """Run a function in reverse mode, with its variables traced; `of_cotangents`, `passes` and `repeats` as in `Tape`."""
    discover()
    bind_keywords()
    tape, builds = OrderedTape(of_cotangents, passes), list[Any]()
    tape.repeats = repeats

    def called(boxes: list[Array]) -> list[Array]:
        leaves, build = flatten(fun(variables.filled(boxes)))
        builds.append(build)
        return leaves

    values, places, recording = trace_list(called, [variables.leaves[place] for place in variables.places], tape)
    return Traced(values, places, builds[0], recording, unfinished(tape))


def trace_forwards(
    fun: Callable[[Tree], Tree], variables: Variables, tangents: Sequence[Array], repeats: str = ""
) -> tuple[Tree, Tree]:
    """Run a function in forward mode; return its result and the tangent of the result; `repeats` as in `Tape`."""
    discover()
    bind_keywords()
    tape = TangentTape()
    tape.repeats = repeats
    with restoring_state():
        with tape:
            boxes = [tape.variable(variables.leaves[place], g) for place, g in zip(variables.places, tangents)]
            out = fun(variables.filled(boxes))
            problem = unfinished(tape)
            if problem is not None:
                raise problem.kind(problem.text)
            leaves, build = flatten(out)
            results = [unboxed(leaf, tape) for leaf in leaves]
        tape.close()
    return build([value for value, _ in results]), build([_tangent(value, node) for value, node in results])


def no_derivative(leaf: Array) -> Array:
    """Return the derivative for a leaf that isn't a variable: zeros for integers and arrays, None for other objects."""
    if isinstance(leaf, np.ndarray) and leaf.dtype == object and any(type(part) in _box_types for part in leaf.flat):
        raise TypeError(
            "a result is an object array of traced values, which NumPy makes from a list of traced arrays. Join "
            "the arrays before the call, with array, stack, concatenate or vstack of autograd.numpy."
        )
    if is_device_array(leaf):
        return np.zeros_like(leaf)
    return np.zeros_like(leaf)[()] if isinstance(leaf, (bool, int, np.integer, np.bool_, np.ndarray)) else None


def _tangent(value: Array, node: Any) -> Array:
    if not is_variable(value):
        return no_derivative(value)
    return conformed(None if node is None else node.g, spec_like(value))


def unfinished(tape: LibraryTape) -> PendingError | None:
    """Return the problem of a trace with requests that weren't waited for, or arrays that changed; None without any."""
    if not tape.requests:
        changed = "" if tape.reads is None else tape.reads.problem()
        return PendingError(RuntimeError, changed) if changed else None
    # In reverse mode the problem isn't raised here, so that all ranks can raise it together before the reverse pass.
    waiting = list(tape.requests.values())
    tape.requests.clear()
    for channel, pending in tape.channels:
        if pending:
            channel.mark("A trace ended before its requests were waited for.")
    listed = ", ".join(map(repr, waiting[:4])) + (", ..." if len(waiting) > 4 else "")
    for request in waiting:
        request.done, request.tape = True, None
    return PendingError(
        RequestError,
        f"{len(waiting)} request(s) were never waited for in the trace that started them: {listed}. "
        "Call mpi_wait or mpi_waitall before the function returns.",
    )
