"""Changes of arrays in place, in functions that are traced: operators such as `+=`, views, and arrays to write into.

An in-place operator gives the traced array a new value and a new node, so the array changes under all its names, and
records keep the old value. Arrays that share memory with the old value would have to change, too. They become *stale*: any
use of a stale array raises an error. To find them, each trace notes results that share memory with an argument (views, and
arguments that are returned), since NumPy decides which results do.

Functions that write into an array that they are given would write values without derivatives, and are refused.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, NoReturn, TypeAlias
from weakref import ref

import autograd.numpy as anp
import numpy as np
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.tracer import Box, getval, notrace_primitives

from mpiad._typing import Array, Function, Tree
from mpiad.compiling.watch import content_of
from mpiad.differentiation.segment_sum import Segments
from mpiad.pytrees import flatten
from mpiad.transport.core import calls
from mpiad.transport.core.tracing import tracing

_boxes = Box.types
Node: TypeAlias = Any
"""A node of a trace: an `OrderedNode` or a `TangentNode`."""

# Functions that write into an array that they are given.

_WRITING = frozenset(getattr(np, name) for name in "copyto fill_diagonal place put put_along_axis putmask".split())
_KEYWORD_ONLY = sys.maxsize


@functools.cache
def _outputs(fun: Callable) -> tuple[tuple[str, int], ...]:
    """Return names and positions of the parameters by which a function gets arrays to write into."""
    fun = getattr(fun, "fun", fun)  # autograd's primitives have NumPy's function as an attribute
    if fun in _WRITING or isinstance(getattr(fun, "__self__", None), np.ufunc) and fun.__name__ == "at":
        return (("", 0),)
    if isinstance(fun, np.ufunc):
        return tuple([("out", fun.nin + k) for k in range(fun.nout)])
    if (getattr(fun, "__module__", None) or "numpy").split(".")[0] not in ("numpy", "scipy"):
        return ()
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # written in C; the signature of `dot` is known since NumPy 2.4
        return (("out", 2 if fun is np.dot else _KEYWORD_ONLY),)
    names = [(x.name, _KEYWORD_ONLY if x.kind is x.KEYWORD_ONLY else k) for k, x in enumerate(parameters)]
    copies = fun is np.nan_to_num
    return tuple(
        [(name, k) for name, k in names if name == "out" or name.startswith("overwrite_") or copies and name == "copy"]
    )


def writes_into_argument(fun: Callable, args: Sequence[Array], kwargs: dict[str, Array]) -> bool:
    """Return whether a call writes into an array that it is given."""
    for name, position in _outputs(fun):
        x = args[position] if len(args) > position else kwargs.get(name)
        if x is not None and x is not (name == "copy"):  # arrays, or True for `overwrite_input`, or False for `copy`
            return True
    return False


def refuse_writing(fun: Callable, args: Sequence[Array], kwargs: dict[str, Array]) -> None:
    """Raise a TypeError for a call with traced values that writes into an array that it is given."""
    if writes_into_argument(fun, args, kwargs):
        name = getattr(fun, "__name__", repr(fun))
        if getattr(fun, "fun", fun) in _WRITING:
            raise TypeError(
                f"{name} can't be differentiated when it gets an array to write into, and it returns nothing else. Make "
                "a new array by np.where, np.concatenate or np.stack of autograd.numpy, for example with the mask "
                "np.eye(n) == 1."
            )
        raise TypeError(
            f"{name} can't be differentiated when it gets an array to write into, which holds plain values only. Take its "
            f"result, y = {name}(x, ...), or make a new array by np.where, np.concatenate or np.stack of autograd.numpy."
        )


# Arrays that share memory.

# Functions that read shapes and dtypes only, so their arguments may be stale.
_OF_SHAPES = frozenset(
    getattr(anp, name)
    for name in "shape ndim size result_type iscomplexobj isscalar zeros_like ones_like empty_like".split()
)


class SharedMemory(list):
    """The arrays of one trace that share memory: pairs of weak references to a node and to its value."""

    changed = ""  # the user's line that has changed some of the arrays in place
    has_constants = False  # whether an array that isn't traced shares the memory
    limit = 64  # of the length, beyond which pairs without a value are removed

    def add(self, node: Node, values: list[Array]) -> None:
        """Add the values of a node, and those that are known to share memory with them."""
        known = getattr(node, "memory", None)
        if known is self:
            return
        self += [(ref(node), ref(x)) for x in values] if known is None else known
        node.memory = self
        for other in [] if known is None else [pair[0]() for pair in known]:
            if other is not None:
                other.memory = self
        if len(self) > self.limit:
            self[:] = [pair for pair in self if pair[1]() is not None]
            self.limit = 2 * len(self) + 64


def _arrays_in(x: Array) -> list[Array]:
    if type(x) is np.ndarray:
        return [x]
    x = getval(x)
    parts = map(getval, x) if isinstance(x, (tuple, list)) else [x]
    return [part for part in parts if hasattr(part, "strides") and not isinstance(part, np.generic)]


def is_unusual(value: Array, args: tuple) -> bool:
    """Return whether a result may share memory with an argument, or there is no result."""
    # Most results have memory of their own, and aren't passed to `noted`.
    return value is None or getattr(value, "base", value) is not None or value is args[0] or value is args[-1]


def noted(
    node: Node,
    value: Array,
    fun: Callable,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    argnums: Sequence[int],
    parents: Sequence[Node],
) -> tuple:
    """Check a call that is recorded, and note whether its result shares memory; return the arguments for the record."""
    if value is args[-1] or value is None or kwargs or len(args) > 2:
        refuse_writing(fun, args, kwargs)
    if is_unusual(value, args):
        note_sharing(node, value, args, argnums, parents)
    if type(value) not in _boxes:
        return args
    return tuple(map(as_it_is, args))


def as_it_is(x: Array) -> Array:
    """Return an array in its present state: arrays of an enclosing trace may change in place after they are recorded."""
    return type(x)(x._value, x._trace, x._node) if type(x) in _boxes else x


def note_sharing(node: Node, value: Array, args: tuple, argnums: Sequence[int], parents: Sequence[Node]) -> None:
    """Note which arguments share memory with the result of a call."""
    results, memory = _arrays_in(value), None
    for k, parent in zip(argnums, parents):
        values = _arrays_in(args[k])
        if _may_share(results, values):
            memory = memory or getattr(parent, "memory", None) or SharedMemory()
            memory.add(node, results)
            memory.add(parent, values)
    if memory is None and any(_may_share(results, _arrays_in(x)) for k, x in enumerate(args) if k not in argnums):
        memory = SharedMemory()
        memory.add(node, results)
        memory.has_constants = True


def _may_share(xs: list[Array], ys: list[Array]) -> bool:
    pairs = [(x, y) for x in xs for y in ys]
    return any(
        x is y or type(x) is type(y) and (getattr(x, "base", None) is y or np.may_share_memory(x, y)) for x, y in pairs
    )


def assign(x: Array, new: Array) -> None:
    """Give a traced array the value and the node of another one; all arrays that share its memory become stale."""
    if tracing.recorder is not None and any(x is argument for argument in tracing.arguments):
        tracing.recorder.refuse(CHANGED_ARGUMENT)
    memory: SharedMemory | None = getattr(x._node, "memory", None)
    if memory is not None:
        _make_stale(memory, x._node, _arrays_in(x))
    x._value, x._trace, x._node = new._value, new._trace, new._node


def _make_stale(memory: SharedMemory, node: Node, values: list[Array]) -> None:
    line = calls.site_of(sys._getframe(2)).text
    if memory.has_constants:
        raise RuntimeError(
            f"{line} changes a traced array in place that shares memory with a plain array, which can't hold derivatives. "
            "Write y = y + 1 instead of y += 1, or copy the plain array before."
        )
    memory.changed = line
    for other, x in [(node_of(), value_of()) for node_of, value_of in memory]:
        if other not in (None, node) and x is not None and any(np.shares_memory(x, y) for y in values):
            other.__class__ = other.stale


def raise_stale(node: Node) -> NoReturn:
    """Raise a RuntimeError for a stale array; the `tape` of its node."""
    raise RuntimeError(
        "an array is used whose memory was changed in place under another name (a view of it, or its base), by "
        f"{node.memory.changed}; a traced array doesn't see this change. Use the array that was changed, or write "
        "y = y + 1 instead of y += 1."
    )


class _Untraced:
    """A function without derivatives, as an element of the set in which autograd looks the function up in each call.

    It has the hash of the function, so the set compares it with this function only: just before autograd calls the function
    with plain values. Nothing else checks the arguments of this call, among which may be stale arrays, and arrays to write
    into.
    """

    def __init__(self, fun: Function):
        self._fun = fun

    def __hash__(self) -> int:
        return hash(self._fun)

    def __eq__(self, fun: object) -> bool:
        if fun is not self._fun:
            return False
        call = sys._getframe(1).f_locals
        refuse_writing(self._fun, call["args"], call["kwargs"])
        if fun not in _OF_SHAPES:
            for x in call["args"]:
                if type(x) in _boxes:
                    getattr(x._node, "tape", None)  # raises for a stale array
        return True


class _UntracedFunctions(set):
    """Autograd's functions without derivatives for a type of nodes; `checked`: the same functions, as `_Untraced`."""

    def __init__(self, functions: set[Function]):
        super().__init__(functions)
        self.checked = set(map(_Untraced, functions))

    def add(self, fun: Function) -> None:
        """Add a function; autograd calls this method in `register_notrace`."""
        super().add(fun)
        self.checked.add(_Untraced(fun))


def register(kind: type, foreign: type, stale: type) -> None:
    """Register a type of nodes with autograd, and the type of its stale nodes; `foreign`: autograd's type."""
    functions = notrace_primitives[foreign] = _UntracedFunctions(notrace_primitives[foreign])
    notrace_primitives[kind] = functions.checked
    notrace_primitives[stale] = _OF_SHAPES  # type: ignore[assignment]


# Under ``MPIAD_DEBUG=1``, checksums of the arrays that a record holds: the program may change them after they are read.


class Reads:
    """The arrays that adjoints hold, each with checksums and the user's lines that read it."""

    def __init__(self) -> None:
        self._arrays: dict[int, tuple[Array, list[tuple[int, str]]]] = {}

    def note(self, pull: Function | None) -> None:
        """Note the arrays that an adjoint holds."""
        line = calls.site_of(sys._getframe(1)).text
        for x in _held(pull, set()):
            self._arrays.setdefault(id(x), (x, []))[1].append((_checksum(x), line))

    def problem(self) -> str:
        """Return a text that names an array that has changed, and the line that read it; "" if none has."""
        for x, reads in self._arrays.values():
            present = _checksum(x)
            for line in (line for checksum, line in reads if checksum != present):
                return (
                    f"{line} reads an array of shape {x.shape} and dtype {x.dtype} that was changed in place afterwards, "
                    "but the derivative needs the values that were read. Write c = c * 2 instead of c *= 2, or pass a copy "
                    "of the array."
                )
        return ""

    def require_unchanged(self) -> None:
        """Raise a RuntimeError if an array has changed."""
        problem = self.problem()
        if problem:
            raise RuntimeError(problem)


def _checksum(x: Array) -> int:
    return zlib.crc32(np.ascontiguousarray(x).view(np.uint8).data) if x.size else 0


_HOLDERS = tuple, list, dict, functools.partial, FunctionType, Segments


def _held(x: object, seen: set[int]) -> Iterator[Array]:
    """Yield the arrays in the closure of a function, also in SciPy's matrices, except the memory of compiled programs."""
    x = getval(x)
    if isinstance(x, np.ndarray):
        if x.dtype != object and not getattr(x, "is_working_memory", False):
            yield x
    # Of the library's objects, segments refer to an array of the user's; others, such as ghosts and patterns, hold copies.
    elif id(x) not in seen and (isinstance(x, _HOLDERS) or type(x).__module__.startswith("scipy.sparse.")):
        seen.add(id(x))
        if isinstance(x, functools.partial):
            parts: Any = (x.func, x.args, x.keywords)
        elif isinstance(x, FunctionType):
            parts = [content_of(cell) for cell in x.__closure__ or ()]
        else:
            parts = x if isinstance(x, (tuple, list)) else list((x if isinstance(x, dict) else vars(x)).values())
        for part in parts:
            yield from _held(part, seen)


# In-place operators. They act on nodes of this library only; otherwise y += 1 means y = y + 1, as in plain autograd.


def _in_place(name: str, change: Function) -> Function:
    operation = getattr(anp, name)

    def method(self: Array, other: Array) -> Array:
        node, plain = self._node, getval(self)
        # Scalars are immutable. A traced array of a compiled program has a `value`.
        if not hasattr(type(node), "stale") or isinstance(getattr(plain, "value", plain), (float, complex, np.generic)):
            return NotImplemented
        shape, dtype = self.shape, self.dtype
        new = operation(self, other)
        writable = getattr(getattr(plain, "flags", None), "writeable", True)
        fits = np.shape(getval(new)) == shape and np.can_cast(anp.result_type(new), dtype, "same_kind")
        if not fits or not writable:
            similar = np.zeros(shape, dtype)
            similar.flags.writeable = writable
            change(similar, np.ones(np.shape(getval(other)), anp.result_type(other)))  # raises NumPy's error
        if type(new) not in _boxes:  # a value without derivatives
            new = type(self)(new, self._trace, type(node).constant())
        if new.dtype != dtype:
            new = new.astype(dtype)
        if not shape:
            new = anp.array(new)  # NumPy's operations return scalars instead of arrays of shape ()
        assign(self, new)
        return self

    return method


_OPERATORS = "add sub mul truediv floordiv mod pow matmul".split()
_FUNCTIONS = "add subtract multiply true_divide floor_divide mod power matmul".split()
for _operator, _function in zip(_OPERATORS, _FUNCTIONS):
    setattr(ArrayBox, f"__i{_operator}__", _in_place(_function, getattr(operator, f"i{_operator}")))


CHANGED_ARGUMENT = "it changes an argument in place: work on a copy, or write y = x + 1 instead of x += 1"


def keeping_arguments(fun: Function) -> Function:
    """Return a function that can't be compiled if it changes arguments in place: the caller wouldn't see it.

    It may change lists and dicts that it returns, such as the state of a step.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        given = leaves_of([*args, *kwargs.values()])
        around, tracing.arguments = tracing.arguments, [x for _, part in given for x in part if type(x) in _boxes]
        try:
            made = fun(*args, **kwargs)
        finally:
            tracing.arguments = around
        refuse_changes(given, made)
        return made

    return called


def leaves_of(args: Sequence[Tree]) -> list[tuple[Tree, list[object]]]:
    """Return a function's arguments with their leaves, for `refuse_changes`."""
    return [(x, flatten(x)[0]) for x in args]


def refuse_changes(given: list[tuple[Tree, list[object]]], made: Tree) -> None:
    """End a trace in failure if the function has changed a list or dict that it doesn't return."""
    for x, before in given:
        after = flatten(x)[0] if isinstance(x, (list, dict, tuple)) else before
        is_same = len(after) == len(before) and all(map(operator.is_, after, before))
        if not is_same and tracing.recorder is not None and not _contains(made, x):
            tracing.recorder.refuse(CHANGED_ARGUMENT)


def _contains(tree: Tree, part: object) -> bool:
    if tree is part or not isinstance(tree, (list, tuple, dict)):
        return tree is part
    return any(_contains(x, part) for x in (tree.values() if isinstance(tree, dict) else tree))
