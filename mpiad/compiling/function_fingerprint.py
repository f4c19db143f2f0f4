"""The values that a function reads besides its arguments: if they are the same as before, so is its result.

The values are found by Python's names: global names, variables of enclosing functions, default values, and so on through
the functions that it calls. Immutable values, small arrays and pytrees of them are compared by their current values,
and the user's modules and objects by the attributes that are named with them, as in `settings.rate`. NumPy, autograd and
math are assumed constant. Other values can't be followed, and make the result unknown: an object that the function
passes on, properties, generators of random numbers.
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

# Compared by equality.
Fingerprint: TypeAlias = "tuple[Any, ...]"

_STAY = frozenset({"numpy", "autograd", "math", "cmath", "builtins"})
# They read values that no name refers to.
UNSEEN = frozenset({"eval", "exec", "globals", "id", "input", "locals", "open", "vars", "__import__"})
# Limits for an array, and for all values read: comparing more takes longer than tracing.
_MOST_ENTRIES, _MOST_VALUES = 1024, 256
_LOAD_LOCAL = ("LOAD_FAST", "LOAD_FAST_BORROW")
_NOTHING = object()
# The first entries of those parts of a fingerprint that end in numbers.
_NUMBERS = frozenset({float, complex, np.float64, np.complex128, "<f8", "<c16"})


def fingerprint_of(f: Function, *given: Any) -> Fingerprint | None:
    """Return all that a function reads besides its arguments, None if that can't be determined.

    `given` are values that are read with it: the descriptions of its arguments.
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
    """Return a text, the same in other processes, of a function's code and the values that it reads besides its arguments.

    Values that can't be followed are left out, and arrays are represented by a digest of their entries.
    """
    reader = _PortableReader()
    reader.read(f)
    return repr(_portable(tuple(reader.found)))


def _portable(value: object) -> object:
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, _portable(value.co_consts)
    if isinstance(value, frozenset):
        return sorted(map(repr, value))  # whose order is each process's own
    if isinstance(value, tuple):
        return tuple(map(_portable, value))
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    return value if name is None else name  # without its address


def kind_of(fingerprint: Fingerprint | None) -> Fingerprint | None:
    """Return a fingerprint without the values of numbers that aren't integers: the other values that the function reads."""
    if fingerprint is None:
        return None
    return tuple(x[:-1] if isinstance(x, tuple) and x[:1] and x[0] in _NUMBERS else x for x in fingerprint)


class Unknown(Exception):
    """Report that the values that a function reads can't be determined."""


class _Reader:
    def __init__(self) -> None:
        self.found: list[Any] = []
        self._known: set[int] = set()

    def read(self, value: object) -> None:
        """Note a value, and all that it leads to."""
        if len(self.found) > _MOST_VALUES:
            raise Unknown
        _READERS.get(type(value), _Reader._other)(self, value)

    def _plain(self, value: object) -> None:
        # 1, 1.0 and True are equal, and so are 0.0 and -0.0.
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
        # A function of autograd's own reads nothing else; one of the user's that it has wrapped is in its closure.
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
        """Note the reads of a value: an attribute, the next attribute of that, and so on."""
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
    """Continues reading after something Unknown."""

    def read(self, value: object) -> None:
        """Note a value, and all that it leads to."""
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
    """Return whether single attributes of a value are read: for modules, classes and objects of the user's."""
    if isinstance(value, (ModuleType, type)):
        return not _stays(value.__name__ if type(value) is ModuleType else value.__module__)
    return type(value) not in _READERS and hasattr(value, "__dict__")


def attribute_of(value: Any, name: str) -> Any:
    """Return an attribute that is stored, not computed."""
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
    """A name that a code reads, and the attributes that it reads of its value: a, and b of that, in `name.a.b`."""

    kind: str
    name: str
    attributes: tuple[str, ...]


@lru_cache(maxsize=256)
def uses_of(code: CodeType) -> tuple[_Use, ...]:
    """Return a code's reads by global names and by those of enclosing functions, with those of the functions defined in it.

    It is Unknown if it imports modules or defines classes.
    """
    uses = []
    for name, attributes in _loads(code, "LOAD_GLOBAL"):
        uses.append(_Use("global", name, attributes))
    for name, attributes in _loads(code, "LOAD_DEREF"):
        uses += [_Use("around", name, attributes)] if name in code.co_freevars else []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            # Their variables around them are this code's own, unless it has them from around, too.
            uses += [use for use in uses_of(constant) if use.kind == "global" or use.name in code.co_freevars]
    return tuple(dict.fromkeys(uses))


@lru_cache(maxsize=256)
def uses_of_first(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """Return the attributes that a method reads of its object, each time that it names it.

    They are Unknown if the object is passed to a function inside, or the name is assigned to.
    """
    first = code.co_varnames[:1]
    if not first or first[0] in code.co_cellvars:
        raise Unknown
    for instruction in dis.get_instructions(code):
        # Newer Pythons load two names at a time, and it isn't determined here to which one an attribute belongs.
        names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        if "FAST" in instruction.opname and instruction.opname not in _LOAD_LOCAL and first[0] in names:
            raise Unknown
    loads = [load for operation in _LOAD_LOCAL for load in _loads(code, operation)]
    return tuple(dict.fromkeys(attributes for name, attributes in loads if name == first[0]))


def _loads(code: CodeType, operation: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return the names that an operation loads, each with the attributes that are read of it at once."""
    found, instructions = [], list(dis.get_instructions(code))
    for place, instruction in enumerate(instructions):
        if instruction.opname in ("IMPORT_NAME", "LOAD_BUILD_CLASS", "LOAD_NAME", "LOAD_CLASSDEREF"):
            raise Unknown
        if instruction.opname == operation:
            attributes = takewhile(lambda next: next.opname in ("LOAD_ATTR", "LOAD_METHOD"), instructions[place + 1 :])
            found.append((instruction.argval, tuple(next.argval for next in attributes)))
    return found
