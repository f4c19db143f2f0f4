"""Fingerprints of functions: the values that a function reads besides its arguments (see `FunctionReader`).

A function whose fingerprint is unchanged returns the same result for the same arguments. Immutable values and containers of
these enter the fingerprint by value, and arrays by a digest of their content.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from functools import lru_cache, partial
from types import CodeType, FunctionType, MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from mpiad._typing import Function
from mpiad.compiling.closure import FunctionReader, Unknown

Fingerprint: TypeAlias = "tuple[Any, ...]"

_COMMON = frozenset({"mpiad", *sys.stdlib_module_names})
# Floating-point types and dtypes; the part of a fingerprint for such a value begins with its type.
_FLOATS = frozenset({float, complex, np.float64, np.complex128, "<f8", "<c16"})


def fingerprint_of(f: Function, *values: Any, unknown: Callable[[str], None] | None = None) -> Fingerprint | None:
    """Return the fingerprint of a function and of further values; None if the fingerprint can't be determined.

    `unknown` is called with a description of the first object that can't be followed.
    """
    reader = _ValueReader()
    try:
        for value in (f, *values):
            reader.read(value)
    except Unknown as error:
        if unknown is not None:
            unknown(reader.reading or str(error) or "an unknown object")
        return None
    return tuple(reader.entries)


def text_of(f: Function) -> str:
    """Return a text, equal on all processes, of a function's code and the values that it reads (types of unknown ones)."""
    reader = _PortableReader()
    reader.read(f)
    return _text_of_entries(tuple(reader.entries))


@lru_cache(1024)
def _text_of_entries(entries: Fingerprint) -> str:
    return repr(_portable(entries))


def _portable(value: object) -> object:
    if isinstance(value, CodeType):
        return _code_digest(value)
    if isinstance(value, frozenset):
        return sorted(map(repr, value))  # the order of a set varies between processes
    if isinstance(value, tuple):
        return tuple(map(_portable, value))
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    return value if name is None else name  # instead of the repr, which contains the address


@lru_cache(1024)
def _code_digest(code: CodeType) -> str:
    return hashlib.blake2b(repr((code.co_code, code.co_names, _portable(code.co_consts))).encode()).hexdigest()


def without_floats(fingerprint: Fingerprint | None) -> Fingerprint | None:
    """Return a fingerprint without the values of floating-point numbers and arrays."""
    if fingerprint is None:
        return None
    return tuple(x[:-1] if isinstance(x, tuple) and x[:1] and x[0] in _FLOATS else x for x in fingerprint)


@lru_cache(1024)
def is_of_a_package(primitive: object) -> bool:
    """Return whether autograd or this library defines a primitive; its rules then are the derivatives of its body."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(("autograd.", "mpiad."))]
    values = [value for module in modules for value in list(vars(module).values())]
    # A composition of this library wraps the primitive that it replaces.
    return any(value is primitive or getattr(value, "__wrapped__", None) is primitive for value in values)


class _ValueReader(FunctionReader):
    # Tracing takes less time than reading more than so many entries of an array, or values.
    most_entries, most_values = 50_000, 256

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Any] = []
        self._places: dict[int, int] = {}  # by `id`, the indices of functions in `entries`

    def is_known(self, value: object) -> bool:
        if len(self.entries) > self.most_values:
            raise Unknown
        place = len(self.entries)
        # Only functions are recorded once, so that another object read twice has the fingerprint of two equal objects.
        if not isinstance(value, FunctionType):
            return False
        first = self._places.setdefault(id(value), place)
        # Other processes can't compare the identity of a primitive.
        is_constant = type(self) is _ValueReader and value.__module__ == "autograd.tracer" and is_of_a_package(value)
        if first == place and not is_constant:
            return False
        self.entries.append(value if is_constant else ("again", first))
        return True

    def read_held(self, value: object) -> None:
        self.read(value)

    def constant(self, value: object) -> None:
        kind = type(value)
        if kind is np.void or isinstance(value, type) and issubclass(value, BaseException) and not self.is_constant(value):
            raise Unknown
        if isinstance(value, Enum):
            self.entries.append((kind, value.name))
        elif isinstance(value, np.generic):
            self.entries.append((kind, value.tobytes()))
        elif kind in (str, bytes, CodeType) or hasattr(value, "__name__"):
            self.entries.append(value)
        elif kind.__module__ == "builtins" or isinstance(value, np.dtype):
            # The type and the text distinguish values that compare equal: 1, 1.0 and True, or 0.0 and -0.0.
            self.entries.append((kind, value.hex() if isinstance(value, float) else repr(value)))
        else:
            raise Unknown  # a number of a user's type

    def array(self, value: np.ndarray) -> None:
        if type(value) is not np.ndarray or value.size > self.most_entries or value.dtype.kind not in "biufc":
            raise Unknown
        self.entries.append((value.dtype.str, value.shape, hashlib.blake2b(value.tobytes()).digest()))

    def container(self, value: Any, parts: list[Any]) -> None:
        if type(value) not in (list, tuple, dict, partial, MappingProxyType) and not hasattr(value, "_fields"):
            raise Unknown
        self.entries.append((type(value), len(parts)))

    def function(self, value: FunctionType) -> None:
        self.entries.append(value.__code__)

    def name(self, names: Mapping[str, object], name: str, owner: type | None = None) -> None:
        self.entries.append(name)

    def instance(self, value: object) -> None:
        raise Unknown(f"an object of type {type(value).__name__}")

    def library_object(self, value: object) -> None:
        slots = [kind.__dict__.get("__slots__") for kind in type(value).__mro__[:-1]]
        if not hasattr(value, "__dict__") and None in slots:
            raise Unknown  # an object of a class written in C
        self.entries.append(type(value))
        self.read_state(value)


class _PortableReader(_ValueReader):
    """A reader that replaces unknown values by their types."""

    most_entries, most_values = sys.maxsize, 10_000

    def is_known(self, value: object) -> bool:
        # The functions of this library and of Python's are the same in all processes.
        if isinstance(value, FunctionType) and not value.__closure__ and str(value.__module__).partition(".")[0] in _COMMON:
            self.entries.append(value)
            return True
        return super().is_known(value)

    def read(self, value: object) -> None:
        try:
            super().read(value)
        except Unknown:
            self.entries.append(type(value).__name__)
