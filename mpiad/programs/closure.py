"""`Watch`: the check at each call that the objects that a jitted function reads besides its arguments are unchanged.

A trace considers the function's closure constant: global variables, variables of enclosing functions, defaults, attributes
of modules and of the user's objects, arrays, and recursively those of the functions that it calls. A `Watch` records where
each was read, and checks at the next call that it is unchanged: objects by identity, writable arrays by their contents.
NumPy, autograd and this library are assumed constant. If some object can't be followed (one that is passed to a function,
properties, random numbers, communication without the primitives), the function isn't compiled.
"""

from __future__ import annotations

import builtins
import ctypes
import dis
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from autograd.tracer import Box

from mpiad._typing import Array
from mpiad.compiling.function_fingerprint import UNSEEN, Unknown, attribute_of, content_of, uses_of, uses_of_first

# Bitwise comparison of arrays, which each call makes for all writable arrays in the closure.


def _c_comparison() -> Any:
    """Return the C library's memcmp, which needs no temporary arrays; None if it is unavailable."""
    try:
        compare = ctypes.CDLL(None).memcmp
    except (OSError, TypeError, AttributeError):  # not on Windows
        return None
    compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    return compare


_memcmp = _c_comparison()


def same_bits(x: Array, y: Array) -> bool:
    """Return whether two arrays have the same bits."""
    if x is y:
        return True
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if _memcmp is None or not (x.flags.c_contiguous and y.flags.c_contiguous):
        return x.tobytes() == y.tobytes()
    return _memcmp(x.ctypes.data, y.ctypes.data, x.nbytes) == 0


def is_writable(x: Any) -> bool:
    """Return whether an array, or the array of which it is a view, is writable."""
    while isinstance(x, np.ndarray):
        if x.flags.writeable:
            return True
        x = x.base
    return x is not None  # memory not owned by NumPy


_STAY = frozenset({"numpy", "autograd", "math", "cmath", "builtins", "mpiad", "scipy", "operator", "mpi4py"})
_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic, CodeType, range, type(...), np.dtype)
_GONE = object()
_boxes = Box.types
# Attributes of a communicator that may be read without communicating.
_OF_COMMUNICATORS = frozenset({"rank", "size", "Get_rank", "Get_size"})
_COMMUNICATING = frozenset(
    """send bsend ssend isend recv irecv sendrecv bcast gather scatter allgather alltoall reduce allreduce scan
    exscan barrier Send Bsend Ssend Rsend Isend Recv Irecv Sendrecv Sendrecv_replace Bcast Gather Gatherv Scatter Scatterv
    Allgather Allgatherv Alltoall Alltoallv Alltoallw Reduce Allreduce Reduce_scatter Reduce_scatter_block Scan Exscan
    Barrier Ibcast Iallreduce Ireduce Igather Iscatter Iallgather Ialltoall Ibarrier Split Dup Create Free""".split()
)
_MOST = 2000


class Unfollowed(Exception):
    """Raised for an object that can't be followed."""


class HoldsTraced(Exception):
    """Raised for a traced value of an enclosing derivative, which can't be a constant of a program."""


class Watch:
    """The conditions under which a closure is unchanged."""

    def __init__(self) -> None:
        self._terms: list[str] = []
        self._values: dict[str, Any] = {"gone": _GONE, "same_nest": _same_nest, "same_bits": same_bits}
        self._named: set[tuple[int, str]] = set()

    def note(self, term: str, *values: Any) -> None:
        """Add a condition: an expression with the placeholders {0}, {1}, ... for the values."""
        names = [f"x{len(self._values) + k}" for k in range(len(values))]
        self._values.update(zip(names, values))
        self._terms.append(term.format(*names))

    def note_name(self, names: Any, name: str) -> None:
        """Add the condition that a name still refers to the same object."""
        if (id(names), name) not in self._named:
            self._named.add((id(names), name))
            self.note(f"{{0}}({name!r}, gone) is {{1}}", names.get, names.get(name, _GONE))

    @cached_property
    def is_the_same(self) -> Callable[[], bool]:
        """A function that checks all conditions, generated as one expression for speed."""
        return eval(f"lambda: {' and '.join(self._terms) or 'True'}", self._values)


def watch_of(fun: Any, args: Sequence[Any] = (), objects: Sequence[Any] = ()) -> Watch:
    """Return the watch of a function; may raise HoldsTraced or Unfollowed.

    `args`: its positional arguments. `objects`: arguments, or parts of them, that are constants of the trace.
    """
    reader = _Reader()
    try:
        reader.read(fun)
        for value in objects:
            # For the object of a method, the code shows which attributes are read.
            if args and value is args[0] and isinstance(fun, FunctionType):
                reader.read_first(fun, value)
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
    return {name: cell.cell_contents for name, cell in cells if type(_held_by(cell)) in (float, np.float64)}


def with_numbers(fun: FunctionType, numbers: Mapping[str, Any]) -> FunctionType:
    """Return a copy of a function with other values of some variables of enclosing functions."""
    cells = zip(fun.__code__.co_freevars, fun.__closure__ or ())
    around = tuple(CellType(numbers[name]) if name in numbers else cell for name, cell in cells)
    made = FunctionType(fun.__code__, fun.__globals__, fun.__name__, fun.__defaults__, around)
    made.__kwdefaults__, made.__dict__ = fun.__kwdefaults__, fun.__dict__
    return made


def are_alike(fun: FunctionType, other: FunctionType, numbers: Collection[str]) -> bool:
    """Return whether two functions with the same code read the same objects, except for some numbers in their closures."""
    cells = zip(fun.__code__.co_freevars, fun.__closure__ or (), other.__closure__ or ())
    around = all(name in numbers or _held_by(a) is _held_by(b) for name, a, b in cells)
    names = "__globals__", "__defaults__", "__kwdefaults__", "__dict__"
    return around and all(getattr(fun, name) is getattr(other, name) or not getattr(fun, name) for name in names)


def _held_by(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _GONE


class _Reader:
    def __init__(self) -> None:
        self.watch = Watch()
        self.reading = ""
        self._has_communicator = False
        self._names: set[str] = set()
        self._known: set[int] = set()
        self._keep: list[Any] = []  # references, so that identities aren't reused

    def read(self, value: Any) -> None:
        """Add conditions for a value and everything reachable from it."""
        if isinstance(value, _PLAIN) or id(value) in self._known:
            return
        if type(value) in _boxes:
            raise HoldsTraced
        self._known.add(id(value))
        self._keep.append(value)
        if len(self._keep) > _MOST:
            raise Unknown("too many objects")
        self._has_communicator = self._has_communicator or _is_communicator(value)
        for kind, read in _READERS:
            if isinstance(value, kind):
                read(self, value)
                return
        if hasattr(type(value), "__next__"):
            raise Unknown(f"an iterator, {type(value).__name__}")
        if _wrapped(value) is not None:  # a jitted function, for example
            self.read(_wrapped(value))
        elif not _stays(type(value).__module__):
            raise Unknown(f"an object of type {type(value).__name__}")

    def check_communicators(self) -> None:
        """Refuse functions that may use a communicator by another name."""
        if self._has_communicator and self._names & _COMMUNICATING:
            raise Unknown("bare communication")

    def _array(self, value: np.ndarray) -> None:
        if value.dtype == object:
            raise Unknown("an array of objects")
        if is_writable(value):
            self.watch.note("same_bits({0}, {1})", value, value.copy())

    def _nest(self, value: Any) -> None:
        if type(value) is not tuple:
            parts = list(_parts(value))
            self.watch.note("same_nest({0}, {1})" if parts else "not {0}", value, parts)
        for part in _parts(value):
            self.read(part)

    def _function(self, value: FunctionType) -> None:
        module = value.__globals__.get("__name__", "")
        around = dict(zip(value.__code__.co_freevars, value.__closure__ or ()))
        if module == "autograd.tracer":  # a primitive: of NumPy, or one that wraps a user's function
            for cell in around.values():
                self.read(content_of(cell))
            return
        if _stays(module):  # a derivative of a user's function, for example
            for cell in around.values():
                self._held(content_of(cell))
            return
        same = "{0}.__code__ is {1} and {0}.__defaults__ is {2}"
        self.watch.note(same, value, value.__code__, value.__defaults__)
        for part in (value.__defaults__, value.__kwdefaults__, value.__dict__):
            self.read(part)
        self._names.update(_names_in(value.__code__))
        for use in uses_of(value.__code__):
            self.reading = f"{'.'.join((use.name, *use.attributes))} in {value.__qualname__}"
            if use.kind == "around":
                found = content_of(around[use.name])
                self.watch.note("{0}.cell_contents is {1}", around[use.name], found)
                self._used(found, use.attributes)
            elif use.name in value.__globals__:
                found = value.__globals__[use.name]
                self.watch.note_name(value.__globals__, use.name)
                self._used(found, use.attributes)
            elif use.name in UNSEEN or not hasattr(builtins, use.name):
                raise Unknown(use.name)

    def _used(self, value: Any, attributes: tuple[str, ...]) -> None:
        for name in attributes:
            if isinstance(value, ModuleType) and _stays(value.__name__):
                if name == "random":
                    raise Unknown("random numbers")
                value = getattr(value, name, None)
                continue
            if _is_communicator(value):
                if name not in _OF_COMMUNICATORS:
                    raise Unknown("bare communication")
                return
            if _stays(type(value).__module__) and not isinstance(value, (ModuleType, type)):
                break
            if isinstance(value, (*_PLAIN, list, tuple, dict, FunctionType, np.ndarray)) or not hasattr(value, "__dict__"):
                break
            found = _method_of(value, name) or attribute_of(value, name)
            # The namespace in which the attribute was found, and those searched before.
            holders = value.__mro__ if isinstance(value, type) else (value, *type(value).__mro__)
            for names in [holder.__dict__ for holder in holders]:
                self.watch.note_name(names, name)
                if name in names:
                    break
            value = found
        self.read(value)

    def _held(self, value: Any) -> None:
        """Add conditions for the objects that the user passed to a function of the library."""
        known = isinstance(value, (FunctionType, MethodType, partial, np.ndarray, list, tuple, dict))
        if known or type(value) in _boxes or _wrapped(value) is not None:
            self.read(value)

    def _method(self, value: MethodType) -> None:
        if _stays(type(value.__self__).__module__):
            return
        if not isinstance(value.__func__, FunctionType):
            raise Unknown("a method")
        self.read(value.__func__)
        self.read_first(value.__func__, value.__self__)

    def read_first(self, fun: FunctionType, value: Any) -> None:
        """Add conditions for the attributes that a function reads of its first argument."""
        if isinstance(value, (*_PLAIN, *(kind for kind, _ in _READERS))) or _stays(type(value).__module__):
            self.read(value)
            return
        for attributes in uses_of_first(fun.__code__):
            self.reading = f"{'.'.join((fun.__code__.co_varnames[0], *attributes))} in {fun.__qualname__}"
            self._used(value, attributes)

    def _module(self, value: ModuleType) -> None:
        if not _stays(value.__name__):
            raise Unknown(f"all of module {value.__name__}")

    def _partial(self, value: partial) -> None:
        for part in (value.func, value.args, value.keywords):
            self.read(part)

    def _class(self, value: type) -> None:
        # Exceptions don't become operations of a program.
        known = issubclass(value, BaseException) or issubclass(value, tuple) and hasattr(value, "_fields")
        if not known and not _stays(value.__module__):
            raise Unknown(f"class {value.__name__}")

    def _builtin(self, value: BuiltinFunctionType) -> None:
        owner = value.__self__
        if isinstance(owner, ModuleType) and _stays(owner.__name__) and value.__name__ not in UNSEEN:
            return
        raise Unknown(f"{value.__name__}, a function that isn't known")


_READERS: tuple[tuple[Any, Callable[[_Reader, Any], None]], ...] = (
    (np.ndarray, _Reader._array),
    ((list, tuple, dict), _Reader._nest),
    (FunctionType, _Reader._function),
    (MethodType, _Reader._method),
    (ModuleType, _Reader._module),
    (partial, _Reader._partial),
    (type, _Reader._class),
    (np.ufunc, lambda self, value: None),
    (BuiltinFunctionType, _Reader._builtin),
)


def _is_communicator(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "mpi4py" and hasattr(value, "Get_rank")


def _wrapped(value: Any) -> Any:
    """Return the function that is wrapped by an object of the library."""
    return getattr(value, "__wrapped__", None) if _stays(type(value).__module__) else None


def _names_in(code: CodeType) -> set[str]:
    """Return the attributes that a code object and its nested functions read of objects other than their variables."""
    found, is_read = set(), False
    for instruction in dis.get_instructions(code):
        if instruction.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            is_read = instruction.opname in ("LOAD_GLOBAL", "LOAD_DEREF")  # which `_used` compares itself
        elif not is_read:
            found.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names_in(constant)
    return found


def _method_of(value: Any, name: str) -> Any:
    """Return the method (possibly jitted) or attribute of an object with this name; None if there is none."""
    if isinstance(value, (ModuleType, type)):
        return None
    common = getattr(type(value), name, None)
    common = _wrapped(common) or common
    if not isinstance(common, FunctionType):
        return None
    return value.__dict__[name] if name in value.__dict__ else MethodType(common, value)


def _same_nest(nest: Any, copy: list[Any]) -> bool:
    parts = _parts(nest)
    return len(parts) == len(copy) and all(a is b for a, b in zip(parts, copy))


def _parts(nest: Any) -> Any:
    return [part for pair in nest.items() for part in pair] if isinstance(nest, dict) else nest


def _stays(module: str) -> bool:
    return module.partition(".")[0] in _STAY and not module.startswith("numpy.random")
