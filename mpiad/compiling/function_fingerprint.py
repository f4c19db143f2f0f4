"""Fingerprints of functions: the values that a function reads besides its arguments.

A function whose fingerprint is unchanged returns the same result for the same arguments.

The values are found by name in the function's bytecode: global variables, variables of enclosing functions, default
values, and recursively those of the functions that it calls. Immutable values, small arrays and pytrees of them enter by
value. Of the user's modules and objects, those attributes enter that the code names, such as `rate` in `settings.rate`.
NumPy, autograd and math are assumed constant. A function has no fingerprint if it reads other values, for example
properties, generators of random numbers, or an object that it passes to another function.
"""

from __future__ import annotations

import builtins
import dis
import hashlib
from functools import lru_cache, partial
from itertools import takewhile
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpiad._typing import Function

Fingerprint: TypeAlias = "tuple[Any, ...]"

_STAY = frozenset({"numpy", "autograd", "math", "cmath", "builtins"})
# Functions that read values to which no name in the code refers.
UNSEEN = frozenset({"eval", "exec", "globals", "id", "input", "locals", "open", "vars", "__import__"})
# Maximum number of entries of an array, and of values in a fingerprint: comparing more takes longer than tracing.
_MOST_ENTRIES, _MOST_VALUES = 1024, 256
_LOAD_LOCAL = ("LOAD_FAST", "LOAD_FAST_BORROW")
_NOTHING = object()
# Types of floating-point values, which come first in the corresponding parts of a fingerprint.
_FLOATS = frozenset({float, complex, np.float64, np.complex128, "<f8", "<c16"})


def fingerprint_of(f: Function, *given: Any) -> Fingerprint | None:
    """Return a function's fingerprint, None if it can't be determined.

    `given`: further values that enter the fingerprint, such as descriptions of the arguments.
    """
    reader = _Reader()
    try:
        reader.read(f)
        for value in given:
            reader.read(value)
    except Unknown:
        return None
    return tuple(reader.found)


def text_of(f: Function) -> str:
    """Return a text of a function's code and of the values that it reads; it is the same in all processes.

    Values that can't be determined are represented by their types, and arrays by a digest of their entries.
    """
    reader = _PortableReader()
    reader.read(f)
    return repr(_portable(tuple(reader.found)))


def _portable(value: object) -> object:
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, _portable(value.co_consts)
    if isinstance(value, frozenset):
        return sorted(map(repr, value))  # the order of a set varies between processes
    if isinstance(value, tuple):
        return tuple(map(_portable, value))
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    return value if name is None else name  # the repr would contain its address


def without_floats(fingerprint: Fingerprint | None) -> Fingerprint | None:
    """Return a fingerprint without the values of floating-point numbers and arrays."""
    if fingerprint is None:
        return None
    return tuple(x[:-1] if isinstance(x, tuple) and x[:1] and x[0] in _FLOATS else x for x in fingerprint)


class Unknown(Exception):
    """Report that a function has no fingerprint."""


class _Reader:
    def __init__(self) -> None:
        self.found: list[Any] = []
        self._known: set[int] = set()

    def read(self, value: object) -> None:
        """Append a value, and all values that can be reached from it."""
        if len(self.found) > _MOST_VALUES:
            raise Unknown
        _READERS.get(type(value), _Reader._other)(self, value)

    def _plain(self, value: object) -> None:
        # The type and the text distinguish values that compare equal: 1, 1.0 and True, or 0.0 and -0.0.
        self.found.append((type(value), value.hex() if type(value) is float else repr(value)))

    def _text(self, value: str | bytes) -> None:
        self.found.append(value)

    def _array(self, value: np.ndarray) -> None:
        if value.size > _MOST_ENTRIES or value.dtype.kind not in "biufc":
            raise Unknown
        self.found.append((value.dtype.str, value.shape, value.tobytes()))

    def _nest(self, value: list | tuple) -> None:
        self.found.append((type(value), len(value)))
        for part in value:
            self.read(part)

    def _dict(self, value: dict) -> None:
        self.found.append((dict, len(value)))
        for pair in value.items():
            self._nest(pair)

    def _function(self, value: FunctionType) -> None:
        module = value.__globals__.get("__name__", "")
        # Functions of constant modules read nothing that changes. A user's function that autograd has wrapped is in the
        # closure of the wrapper.
        if module != "autograd.tracer" and _stays(module):
            self.found.append(value)
            return
        if id(value) in self._known:
            self.found.append((FunctionType, "again", value.__code__))
            return
        self._known.add(id(value))
        code = value.__code__
        self.found.append(code)
        around = dict(zip(code.co_freevars, value.__closure__ or ()))
        if module == "autograd.tracer":
            for cell in around.values():
                self.read(content_of(cell))
            return
        for part in (value.__dict__, value.__defaults__, value.__kwdefaults__):
            self.read(part)
        for use in uses_of(code):
            self.found.append(use)
            if use.kind == "around":
                self._used(content_of(around[use.name]), use.attributes)
            elif use.name in value.__globals__:
                self._used(value.__globals__[use.name], use.attributes)
            elif use.name in UNSEEN or not hasattr(builtins, use.name):
                raise Unknown

    def _used(self, value: object, attributes: tuple[str, ...]) -> None:
        """Append what a chain of attributes of a value refers to, as far as the chain can be followed."""
        for name in attributes:
            if not _is_followed(value):
                break
            value = attribute_of(value, name)
        self.read(value)

    def _method(self, value: MethodType) -> None:
        if not isinstance(value.__func__, FunctionType):
            raise Unknown
        self.read(value.__func__)
        for attributes in uses_of_first(value.__func__.__code__):
            self.found.append(attributes)
            self._used(value.__self__, attributes)

    def _module(self, value: ModuleType) -> None:
        if not _stays(value.__name__):
            raise Unknown
        self.found.append(value)

    def _partial(self, value: partial) -> None:
        self.found.append(partial)
        for part in (value.func, value.args, value.keywords):
            self.read(part)

    def _other(self, value: object) -> None:
        if isinstance(value, np.generic):
            self.found.append((type(value), value.tobytes()))
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            self._nest(value)
        elif isinstance(value, type) or type(value) in _FUNCTIONS_OF_NUMPY:
            if not _stays(getattr(value, "__module__", None) or "numpy"):
                raise Unknown
            self.found.append(value)
        else:
            raise Unknown

    def _builtin(self, value: BuiltinFunctionType) -> None:
        # A method of an object, such as a generator of random numbers, has this type, too.
        if not isinstance(value.__self__, ModuleType) or value.__name__ in UNSEEN:
            raise Unknown
        self._module(value.__self__)
        self.found.append(value)


class _PortableReader(_Reader):
    """A reader that replaces unknown values by their types."""

    def read(self, value: object) -> None:
        """Append a value, and all values that can be reached from it."""
        try:
            if type(value) is np.ndarray and value.dtype.kind in "biufc":
                self.found.append((value.dtype.str, value.shape, hashlib.blake2b(value.tobytes()).digest()))
            else:
                super().read(value)
        except Unknown:
            self.found.append(type(value).__name__)


_FUNCTIONS_OF_NUMPY = frozenset({np.ufunc, type(np.dot)})
_READERS: dict[type, Any] = {
    bool: _Reader._plain, int: _Reader._plain, float: _Reader._plain, complex: _Reader._plain,
    type(None): _Reader._plain,
    str: _Reader._text, bytes: _Reader._text, np.ndarray: _Reader._array, list: _Reader._nest, tuple: _Reader._nest,
    dict: _Reader._dict, FunctionType: _Reader._function, ModuleType: _Reader._module, partial: _Reader._partial,
    BuiltinFunctionType: _Reader._builtin, MethodType: _Reader._method,
}  # fmt: skip


def _stays(module: str) -> bool:
    return module.partition(".")[0] in _STAY


def content_of(cell: CellType) -> Any:
    """Return the value of a variable of an enclosing function."""
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        raise Unknown from None


def _is_followed(value: object) -> bool:
    """Return whether attributes of a value are read one by one: those of the user's modules, classes and objects."""
    if isinstance(value, (ModuleType, type)):
        return not _stays(value.__name__ if type(value) is ModuleType else value.__module__)
    return type(value) not in _READERS and hasattr(value, "__dict__")


def attribute_of(value: Any, name: str) -> Any:
    """Return an attribute that is stored; one that is computed is Unknown."""
    kind = type(value)
    if kind is ModuleType:
        own, bases = value.__dict__, ()
    elif kind is type:
        own, bases = {}, value.__mro__
    elif kind.__getattribute__ in (object.__getattribute__, SimpleNamespace.__getattribute__):
        own, bases = value.__dict__, kind.__mro__
    else:
        raise Unknown
    common = next((base.__dict__[name] for base in bases if name in base.__dict__), _NOTHING)
    # A method, a property or a slot.
    if hasattr(type(common), "__get__") or (common is _NOTHING and name not in own):
        raise Unknown
    return own.get(name, common)


class _Use(NamedTuple):
    """A name that a code object reads, and the chain of attributes that follows it: ("a", "b") in `name.a.b`."""

    kind: str  # "global", or "around" for a variable of an enclosing function
    name: str
    attributes: tuple[str, ...]


@lru_cache(maxsize=256)
def uses_of(code: CodeType) -> tuple[_Use, ...]:
    """Return the global variables and variables of enclosing functions that a code object reads.

    The functions defined in it are included. Code that imports modules or defines classes is Unknown.
    """
    uses = []
    for name, attributes in _loads(code, "LOAD_GLOBAL"):
        uses.append(_Use("global", name, attributes))
    for name, attributes in _loads(code, "LOAD_DEREF"):
        uses += [_Use("around", name, attributes)] if name in code.co_freevars else []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            # A variable of an enclosing function is this code's own, unless it comes from a function around this one.
            uses += [use for use in uses_of(constant) if use.kind == "global" or use.name in code.co_freevars]
    return tuple(dict.fromkeys(uses))


@lru_cache(maxsize=256)
def uses_of_first(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """Return the chains of attributes that a method reads of its first parameter, `self`.

    They are Unknown if a nested function uses `self`, or if it is assigned to.
    """
    first = code.co_varnames[:1]
    if not first or first[0] in code.co_cellvars:
        raise Unknown
    for instruction in dis.get_instructions(code):
        # Newer Pythons have instructions that load two names; to which of them an attribute belongs isn't analyzed.
        names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        if "FAST" in instruction.opname and instruction.opname not in _LOAD_LOCAL and first[0] in names:
            raise Unknown
    loads = [load for operation in _LOAD_LOCAL for load in _loads(code, operation)]
    return tuple(dict.fromkeys(attributes for name, attributes in loads if name == first[0]))


def _loads(code: CodeType, operation: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return the names that a bytecode operation loads, each with the chain of attributes that follows."""
    found, instructions = [], list(dis.get_instructions(code))
    for place, instruction in enumerate(instructions):
        if instruction.opname in ("IMPORT_NAME", "LOAD_BUILD_CLASS", "LOAD_NAME", "LOAD_CLASSDEREF"):
            raise Unknown
        if instruction.opname == operation:
            attributes = takewhile(lambda next: next.opname in ("LOAD_ATTR", "LOAD_METHOD"), instructions[place + 1 :])
            found.append((instruction.argval, tuple(next.argval for next in attributes)))
    return found
