"""`FunctionReader`: a traversal of all objects that a function reads besides its arguments.

These are its defaults, the global variables and variables of enclosing functions that its bytecode names, and recursively
the objects that the functions among them read. The reader follows only those attributes of the user's modules, classes and
objects that the code names, such as `rate` in `settings.rate`. Some libraries are assumed to be constant. A function can't
be followed if it reads anything else, for example properties, iterators, random numbers, or an object of a user's class
that it passes to another function.

Subclasses of the reader record the objects: that of `fingerprint_of` records values, and that of `watch_of` in `programs`
records conditions under which the objects are unchanged.
"""

from __future__ import annotations

import builtins
import dis
from collections import deque
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any, TypeAlias

import numpy as np

# Functions that read objects that the code doesn't name.
_HIDDEN_READS = frozenset({"eval", "exec", "globals", "id", "input", "locals", "open", "vars", "__import__"})
_NUMBERS_AND_TEXTS = frozenset({type(None), bool, int, float, complex, str, bytes})
_PLAIN = (*_NUMBERS_AND_TEXTS, np.generic, CodeType, range, type(...), np.dtype)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque, MappingProxyType, slice, partial)
_VALUES = (*_PLAIN, *_CONTAINERS, np.ndarray)  # read as a whole
_FUNCTIONS_IN_C = (np.ufunc, type(np.dot), MethodDescriptorType, WrapperDescriptorType)
_STANDARD_LOOKUPS = {kind.__getattribute__ for kind in (object, SimpleNamespace, *_VALUES)}
MISSING, _UNFOLLOWED = object(), object()


class Unknown(Exception):
    """Raised for an object that can't be followed."""


class FunctionReader:
    """A traversal of the objects that a function reads; subclasses record the objects."""

    constant_modules = frozenset({"numpy", "autograd", "math", "cmath", "builtins", "collections"})

    def __init__(self) -> None:
        self.reading = ""  # the expression in the user's code that is being read

    # ---- what subclasses record

    def constant(self, value: Any) -> None:
        """Record a number, a text, code, a class, or a module or function of a constant library."""

    def is_known(self, value: Any) -> bool:
        """Return whether an object was read before, and needn't be read again; may note that it is read now."""
        raise NotImplementedError

    def array(self, value: np.ndarray) -> None:
        """Record an array."""

    def container(self, value: Any, parts: list[Any]) -> None:
        """Record a container; its parts are read afterwards."""

    def function(self, value: FunctionType) -> None:
        """Record a user's function; the objects that it uses are read afterwards."""

    def variable(self, cell: CellType, value: Any) -> None:
        """Record the value of a variable of an enclosing function."""

    def name(self, names: Mapping[str, Any], name: str) -> None:
        """Record the object of a name in a namespace, or that the name is missing."""

    def library_object(self, value: Any) -> None:
        """Record an instance of a class of a constant library."""

    # ---- objects of all kinds

    def read(self, value: Any) -> None:
        """Record a value, and all objects that can be reached from it."""
        if type(value) in _NUMBERS_AND_TEXTS:
            self.constant(value)
            return
        if self.is_known(value):
            return
        read = _reader_for(type(value))
        self.other(value) if read is None else read(self, value)
        if isinstance(value, _VALUES):
            self.read_state(value)  # attributes of an instance of a user's subclass

    def read_first_argument(self, fun: FunctionType, value: Any) -> None:
        """Record the attributes that a function reads from its first argument."""
        if isinstance(value, _VALUES) or self.is_constant(value):
            self.read(value)
            return
        for attributes in _reads_of_first_argument(fun.__code__):
            self.reading = f"{'.'.join((fun.__code__.co_varnames[0], *attributes))} in {fun.__qualname__}"
            self._chain(value, attributes)

    def read_held(self, value: Any) -> None:
        """Record an object found in a function or object of a library, if it may come from the user."""
        if isinstance(value, (FunctionType, MethodType, np.ndarray, *_CONTAINERS)) or self._wrapped(value) is not None:
            self.read(value)

    def read_state(self, value: Any) -> None:
        """Record all attributes in the `__dict__` of an object."""
        state = getattr(value, "__dict__", None)
        if state:
            self.container(state, parts_of(state))
            for part in state.values():
                self.read_held(part)

    def other(self, value: Any) -> None:
        """Record an object of a class that isn't in `_READERS`."""
        wrapped = self._wrapped(value)
        if wrapped is not None:
            self.read(wrapped)
        elif hasattr(type(value), "__next__"):
            raise Unknown(f"an iterator, {type(value).__name__}")
        elif not self.is_constant(value) or type(value).__module__ == "builtins" and type(value) is not object:
            raise Unknown(f"an object of type {type(value).__name__}")
        else:
            self.library_object(value)

    def _array(self, value: np.ndarray) -> None:
        if value.dtype.hasobject:
            raise Unknown("an array of objects")
        self.array(value)

    def _container(self, value: Any) -> None:
        parts = parts_of(value)
        self.container(value, parts)
        for part in parts:
            self.read(part)

    def _function(self, value: FunctionType) -> None:
        code, module = value.__code__, value.__globals__.get("__name__", "")
        cells = dict(zip(code.co_freevars, value.__closure__ or ()))
        is_primitive = module == "autograd.tracer"  # `primitive(f)`, where f is NumPy's or the user's
        if is_primitive or _is_in(module, self.constant_modules):  # for example a derivative of a user's function
            self.constant(code)
            for cell in cells.values():
                (self.read if is_primitive else self.read_held)(content_of(cell))
            return
        self.function(value)
        for part in (value.__defaults__, value.__kwdefaults__, value.__dict__):
            self.read(part)
        for is_global, name, attributes in _reads(code):
            self.reading = f"{'.'.join((name, *attributes))} in {value.__qualname__}"
            if not is_global:
                found = content_of(cells[name])
                if found is MISSING:
                    raise Unknown
                self.variable(cells[name], found)
                self._chain(found, attributes)
                continue
            self.name(value.__globals__, name)
            if name in value.__globals__:
                self._chain(value.__globals__[name], attributes)
            elif name in _HIDDEN_READS or not hasattr(builtins, name):
                raise Unknown(name)

    def _method(self, value: MethodType) -> None:
        if self.is_constant(value.__self__):
            self.read(value.__self__)
        elif not isinstance(value.__func__, FunctionType):
            raise Unknown("a method")
        else:
            self.read(value.__func__)
            self.read_first_argument(value.__func__, value.__self__)

    def _module(self, value: ModuleType) -> None:
        if not self.is_constant(value):
            raise Unknown(f"all of module {value.__name__}")
        self.constant(value)

    def _class(self, value: type) -> None:
        self.constant(value)
        if self.is_constant(value) or issubclass(value, BaseException):
            return
        if not issubclass(value, tuple) or not hasattr(value, "_fields"):
            raise Unknown(f"class {value.__name__}")
        for base in value.__mro__:
            for member in vars(base).values():
                member = getattr(member, "fget", getattr(member, "__func__", member))
                if isinstance(member, FunctionType) and member.__module__ == base.__module__:
                    self.read(member)

    def _builtin(self, value: BuiltinFunctionType) -> None:
        owner = value.__self__
        if not isinstance(owner, ModuleType) or not self.is_constant(owner) or value.__name__ in _HIDDEN_READS:
            raise Unknown(f"{value.__name__}, an unknown function")
        self.constant(value)

    # ---- attributes

    def _chain(self, value: Any, attributes: Iterable[str]) -> None:
        """Follow a chain of attributes as far as possible; record the names, and all parts of the last object."""
        for name in attributes:
            found = self.attribute(value, name)
            if found is _UNFOLLOWED:
                break
            value = found
        self.read(value)

    def attribute(self, value: Any, name: str) -> Any:
        """Return a stored attribute, and record its name; `_UNFOLLOWED` if `value` must be recorded with all its parts."""
        kind, is_module = type(value), isinstance(value, ModuleType)
        if self.is_constant(value):
            if is_module and name == "random":
                raise Unknown("random numbers")
            return getattr(value, name, None) if is_module else _UNFOLLOWED
        if kind is ModuleType:
            own, bases = value.__dict__, ()
        elif kind is type:
            own, bases = {}, value.__mro__
        elif kind.__getattribute__ in _STANDARD_LOOKUPS:
            own, bases = getattr(value, "__dict__", {}), kind.__mro__
        else:
            raise Unknown
        common = next((base.__dict__[name] for base in bases if name in base.__dict__), MISSING)
        method = self._wrapped(common) or common
        if isinstance(method, FunctionType) and kind is not type:
            common = MethodType(method, value)
        elif hasattr(type(common), "__get__") or (common is MISSING and name not in own):
            if isinstance(value, _VALUES) and not isinstance(common, property):
                return _UNFOLLOWED  # an attribute of the built-in base class
            raise Unknown
        # The namespace in which the attribute is found, and the namespaces searched before it.
        for names in (own, *(base.__dict__ for base in bases)):
            self.name(names, name)
            if name in names:
                break
        return own.get(name, common)

    # ---- constant libraries

    def is_constant(self, value: Any) -> bool:
        """Return whether a module, a class, or the class of an object belongs to a constant library."""
        if isinstance(value, ModuleType):
            return _is_in(value.__name__, self.constant_modules)
        return _is_in((value if isinstance(value, type) else type(value)).__module__, self.constant_modules)

    def _wrapped(self, value: Any) -> Any:
        """Return the user's function wrapped by an object of a constant library, such as a jitted one; else None."""
        return getattr(value, "__wrapped__", None) if self.is_constant(value) else None


_READERS: tuple[tuple[Any, Any], ...] = (
    (np.ndarray, FunctionReader._array),
    (_CONTAINERS, FunctionReader._container),
    (FunctionType, FunctionReader._function),
    (MethodType, FunctionReader._method),
    (ModuleType, FunctionReader._module),
    (type, FunctionReader._class),
    (BuiltinFunctionType, FunctionReader._builtin),
    ((*_PLAIN, *_FUNCTIONS_IN_C), lambda self, value: self.constant(value)),
)


@lru_cache(maxsize=1024)
def _is_in(module: str, packages: frozenset[str]) -> bool:
    return module.partition(".")[0] in packages and not module.startswith("numpy.random")


@lru_cache(maxsize=256)
def _reader_for(kind: type) -> Any:
    return next((read for kinds, read in _READERS if issubclass(kind, kinds)), None)


def parts_of(container: Any) -> list[Any]:
    """Return the objects in a container; for a dictionary, its keys and values."""
    if isinstance(container, partial):
        return [container.func, container.args, container.keywords]
    if isinstance(container, slice):
        return [container.start, container.stop, container.step]
    if isinstance(container, (dict, MappingProxyType)):
        return [part for pair in container.items() for part in pair]
    return list(container)


def content_of(cell: CellType) -> Any:
    """Return the value of a variable of an enclosing function; MISSING if none has been assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


# Bytecode.

_Chain: TypeAlias = "tuple[str, Any, tuple[str, ...]]"


def _chains(code: CodeType) -> list[_Chain]:
    """Return a code object's instructions: operation, argument, and the chain of attributes read from the result."""
    chains: list[tuple[str, Any, list[str]]] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("IMPORT_NAME", "LOAD_BUILD_CLASS", "LOAD_NAME", "LOAD_CLASSDEREF"):
            raise Unknown
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chains[-1][2].append(instruction.argval)
        else:
            chains.append((instruction.opname, instruction.argval, []))
    return [(operation, name, tuple(attributes)) for operation, name, attributes in chains]


def _nested(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


@lru_cache(maxsize=256)
def _reads(code: CodeType) -> tuple[tuple[bool, str, tuple[str, ...]], ...]:
    """Return the variables that a code object and the functions defined in it read, as (is global, name, attributes).

    These are global variables, and variables of functions that enclose the code object. Raise Unknown for code that imports
    modules or defines classes.
    """
    reads = []
    for operation, name, attributes in _chains(code):
        if operation == "LOAD_GLOBAL" or operation == "LOAD_DEREF" and name in code.co_freevars:
            reads.append((operation == "LOAD_GLOBAL", name, attributes))
    for nested in _nested(code):
        reads += [read for read in _reads(nested) if read[0] or read[1] in code.co_freevars]
    return tuple(dict.fromkeys(reads))


@lru_cache(maxsize=256)
def _reads_of_first_argument(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """Return the chains of attributes that a method reads from its first parameter, `self`.

    Raise Unknown if a nested function uses `self`, or the method assigns to it.
    """
    first = code.co_varnames[:1]
    if not first or first[0] in code.co_cellvars:
        raise Unknown
    reads = []
    for operation, name, attributes in _chains(code):
        if operation in ("LOAD_FAST", "LOAD_FAST_BORROW"):
            reads += [attributes] if name == first[0] else []
        # In newer Pythons an instruction may load two names; it isn't analyzed which one an attribute belongs to.
        elif "FAST" in operation and first[0] in (name if isinstance(name, tuple) else (name,)):
            raise Unknown
    return tuple(dict.fromkeys(reads))


@lru_cache(maxsize=256)
def attributes_of_results(code: CodeType) -> set[str]:
    """Return attributes that code and nested functions read from objects other than global and enclosing variables."""
    found = set()
    for operation, _, attributes in _chains(code):
        found.update(() if operation in ("LOAD_GLOBAL", "LOAD_DEREF") else attributes)
    return found.union(*map(attributes_of_results, _nested(code)))
