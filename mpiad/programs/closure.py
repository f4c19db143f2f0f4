"""`Watch`: the check at each call that the objects that a jitted function reads besides its arguments are unchanged.

A trace considers these objects (see `FunctionReader`) constant. A `Watch` records the variable, attribute or container from
which each object was read, and checks at the next call that it still refers to the same object, and that the contents of
writable arrays are unchanged. If an object can't be followed, or the function communicates without the primitives, the
function isn't compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from types import CellType, FunctionType
from typing import Any

import numpy as np
from autograd.tracer import Box

from mpiad._typing import Array
from mpiad.compiling.function_reader import (
    MISSING,
    FunctionReader,
    Unknown,
    attributes_of_results,
    content_of,
    parts_of,
)

# Bitwise comparison of arrays: each call compares all writable arrays in the closure.

_FEW_BYTES = 50_000  # up to which copies take less time than comparing the arrays


def same_bits(x: Array, y: Array) -> bool:
    """Return whether two arrays have the same bits."""
    if x is y:
        return True
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if x.nbytes < _FEW_BYTES or not (x.flags.c_contiguous and y.flags.c_contiguous):
        return np.ndarray.tobytes(x) == np.ndarray.tobytes(y)  # compares the data of masked arrays, too
    return np.array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))


def is_writable(x: Any) -> bool:
    """Return whether an array, or the array of which it is a view, is writable."""
    while isinstance(x, np.ndarray):
        if x.flags.writeable:
            return True
        x = x.base
    return x is not None  # memory not owned by NumPy


_boxes = Box.types
# Attributes of a communicator that may be read without communicating.
_OF_COMMUNICATORS = frozenset({"rank", "size", "Get_rank", "Get_size"})
_MAX_OBJECTS = 2000


class Unfollowed(Exception):
    """Raised for an object that can't be followed."""


class HoldsTraced(Exception):
    """Raised for a traced value of an enclosing derivative, which can't be a constant of a program."""


class Watch:
    """The conditions under which a closure is unchanged."""

    def __init__(self) -> None:
        self._terms: list[str] = []
        self._values: dict[str, Any] = {"gone": MISSING, "same_parts": _same_parts, "same_bits": same_bits}

    def note(self, term: str, *values: Any) -> None:
        """Add a condition: an expression with the placeholders {0}, {1}, ... for the values."""
        names = [f"x{len(self._values) + k}" for k in range(len(values))]
        self._values.update(zip(names, values))
        self._terms.append(term.format(*names))

    @cached_property
    def is_the_same(self) -> Callable[[], bool]:
        """A function that checks all conditions, generated as one expression for speed."""
        return eval(f"lambda: {' and '.join(self._terms) or 'True'}", self._values)


def watch_of(fun: Any, args: Sequence[Any] = (), objects: Sequence[Any] = ()) -> Watch:
    """Return the watch of a function; may raise HoldsTraced or Unfollowed.

    `args`: its positional arguments. `objects`: those leaves of its arguments that are constants of the trace.
    """
    reader = _Reader()
    try:
        reader.read(fun)
        for value in objects:
            # If the first argument is the object of a method, the code shows which of its attributes are read.
            if args and value is args[0] and isinstance(fun, FunctionType):
                reader.read_first_argument(fun, value)
            else:
                reader.reading = ""
                reader.read(value)
        reader.check_communicators()
    except Unknown as error:
        raise Unfollowed(reader.reading or str(error)) from None
    return reader.watch


def closed_over_numbers(fun: Any) -> dict[str, float]:
    """Return the variables of enclosing functions that a function uses and that are floats, by name."""
    if type(fun) is not FunctionType or not fun.__closure__:
        return {}
    cells = zip(fun.__code__.co_freevars, fun.__closure__)
    return {name: cell.cell_contents for name, cell in cells if type(content_of(cell)) in (float, np.float64)}


def with_numbers(fun: FunctionType, numbers: Mapping[str, Any]) -> FunctionType:
    """Return a copy of a function with other values of some variables of enclosing functions."""
    cells = zip(fun.__code__.co_freevars, fun.__closure__ or ())
    closure = tuple(CellType(numbers[name]) if name in numbers else cell for name, cell in cells)
    copy = FunctionType(fun.__code__, fun.__globals__, fun.__name__, fun.__defaults__, closure)
    copy.__kwdefaults__, copy.__dict__ = fun.__kwdefaults__, fun.__dict__
    return copy


def are_alike(fun: FunctionType, other: FunctionType, numbers: Collection[str]) -> bool:
    """Return whether two functions with the same code read the same objects, apart from `numbers` in their closures."""
    cells = zip(fun.__code__.co_freevars, fun.__closure__ or (), other.__closure__ or ())
    same_closure = all(name in numbers or content_of(a) is content_of(b) for name, a, b in cells)
    names = "__globals__", "__defaults__", "__kwdefaults__", "__dict__"
    return same_closure and all(getattr(fun, name) is getattr(other, name) or not getattr(fun, name) for name in names)


class _Reader(FunctionReader):
    constant_modules = FunctionReader.constant_modules | {"mpiad", "scipy", "operator", "mpi4py"}

    def __init__(self) -> None:
        super().__init__()
        self.watch = Watch()
        # Names: those of the communicators' methods, and those of the attributes that are read from unknown objects.
        self._communicating: set[str] = set()
        self._names: set[str] = set()
        self._noted: set[tuple[int, str]] = set()  # the names in namespaces, by `id`, that have a condition
        self._known: dict[int, Any] = {}  # by `id`; the references keep the ids from being used again

    def check_communicators(self) -> None:
        """Refuse functions that may use a communicator by another name."""
        if self._names & self._communicating - _OF_COMMUNICATORS:
            raise Unknown("bare communication")

    def is_known(self, value: Any) -> bool:
        if id(value) in self._known:
            return True
        self._known[id(value)] = value
        if len(self._known) > _MAX_OBJECTS:
            raise Unknown("too many objects")
        return False

    def array(self, value: np.ndarray) -> None:
        if is_writable(value):
            self.watch.note("same_bits({0}, {1})", value, value.copy())

    def container(self, value: Any, parts: list[Any]) -> None:
        if not isinstance(value, (tuple, frozenset, slice, partial)):
            self.watch.note("same_parts({0}, {1})" if parts else "not {0}", value, parts)

    def function(self, value: FunctionType) -> None:
        same = "{0}.__code__ is {1} and {0}.__defaults__ is {2}"
        self.watch.note(same, value, value.__code__, value.__defaults__)
        self._names |= attributes_of_results(value.__code__)

    def variable(self, cell: CellType, value: Any) -> None:
        self.watch.note("{0}.cell_contents is {1}", cell, value)

    def name(self, names: Mapping[str, Any], name: str) -> None:
        if (id(names), name) not in self._noted:
            self._noted.add((id(names), name))
            self.watch.note(f"{{0}}({name!r}, gone) is {{1}}", names.get, names.get(name, MISSING))

    def other(self, value: Any) -> None:
        if type(value) in _boxes:
            raise HoldsTraced
        if _is_communicator(value):
            self._communicating.update(name for name in dir(value) if callable(getattr(type(value), name, None)))
        super().other(value)

    def read_held(self, value: Any) -> None:
        if type(value) in _boxes:
            raise HoldsTraced
        super().read_held(value)

    def library_object(self, value: Any) -> None:
        if not type(value).__module__.startswith(("mpiad", "mpi4py", "autograd")):
            self.read_state(value)

    def attribute(self, value: Any, name: str) -> Any:
        if not _is_communicator(value):
            return super().attribute(value, name)
        if name not in _OF_COMMUNICATORS:
            raise Unknown("bare communication")
        return None


def _is_communicator(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "mpi4py" and hasattr(value, "Get_rank")


def _same_parts(container: Any, parts: list[Any]) -> bool:
    found = parts_of(container)
    return len(found) == len(parts) and all(a is b for a, b in zip(found, parts))
