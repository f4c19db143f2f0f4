"""What a function reads beside its arguments: one that reads the same as before computes the same as before.

Found is what Python's own names lead to: global names, variables of functions around it, default values, and so on through
the functions that it calls. Values that can't be changed, small arrays and nests of them are compared as they are now.
NumPy, autograd and math are taken to stay what they are. Whatever else a function reads (attributes of objects, modules of
the user's, generators of random numbers) can't be followed, and then nothing is known.
"""

from __future__ import annotations

import builtins
import dis
from functools import lru_cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, TypeAlias

import numpy as np

from mpiad._typing import Function

__all__ = ["Reading", "reading_of"]

# Compared by equality.
Reading: TypeAlias = "tuple[Any, ...]"

_STAY = frozenset({"numpy", "autograd", "math", "cmath", "builtins"})
# They read what no name says.
_UNSEEN = frozenset({"eval", "exec", "globals", "id", "input", "locals", "open", "vars", "__import__"})
# Of arrays, and of all that is read: more takes longer to look at than to trace.
_MOST_ENTRIES, _MOST_VALUES = 1024, 256


def reading_of(f: Function, *given: Any) -> Reading | None:
    """Return all that a function reads beside its arguments, None where that can't be told.

    Parameters
    ----------
    f : callable
    *given
        Values that are read with it: what it is told of its arguments.
    """
    reader = _Reader()
    try:
        reader.read(f)
        for value in given:
            reader.read(value)
    except _Unknown:
        return None
    return tuple(reader.found)


class _Unknown(Exception):
    pass


class _Reader:
    def __init__(self) -> None:
        self.found: list[Any] = []
        self._known: set[int] = set()

    def read(self, value: Any) -> None:
        """Note a value, and all that it leads to."""
        if len(self.found) > _MOST_VALUES:
            raise _Unknown
        _READERS.get(type(value), _Reader._other)(self, value)

    def _plain(self, value: Any) -> None:
        # 1, 1.0 and True are equal, and so are 0.0 and -0.0.
        self.found.append((type(value), value.hex() if type(value) is float else repr(value)))

    def _text(self, value: str | bytes) -> None:
        self.found.append(value)

    def _array(self, value: np.ndarray) -> None:
        if value.size > _MOST_ENTRIES or value.dtype.kind not in "biufc":
            raise _Unknown
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
        self.found.append(value.__code__)
        try:
            self._nest([cell.cell_contents for cell in value.__closure__ or ()])
        except ValueError:  # not assigned yet
            raise _Unknown from None
        if module == "autograd.tracer":
            return
        for part in (value.__dict__, value.__defaults__, value.__kwdefaults__):
            self.read(part)
        for name in _global_names(value.__code__):
            self._named(name, value.__globals__)

    def _named(self, name: str, names: dict[str, Any]) -> None:
        self.found.append(name)
        if name in names:
            self.read(names[name])
        elif name in _UNSEEN or not hasattr(builtins, name):
            raise _Unknown

    def _module(self, value: ModuleType) -> None:
        if not _stays(value.__name__):
            raise _Unknown
        self.found.append(value)

    def _partial(self, value: partial) -> None:
        self.found.append(partial)
        for part in (value.func, value.args, value.keywords):
            self.read(part)

    def _other(self, value: Any) -> None:
        if isinstance(value, np.generic):
            self.found.append((type(value), value.tobytes()))
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            self._nest(value)
        elif isinstance(value, type) or type(value) in _FUNCTIONS_OF_NUMPY:
            if not _stays(getattr(value, "__module__", None) or "numpy"):
                raise _Unknown
            self.found.append(value)
        else:
            raise _Unknown

    def _builtin(self, value: BuiltinFunctionType) -> None:
        # A method of an object, of a generator of random numbers for one, is of this type, too.
        if not isinstance(value.__self__, ModuleType) or value.__name__ in _UNSEEN:
            raise _Unknown
        self._module(value.__self__)
        self.found.append(value)


_FUNCTIONS_OF_NUMPY = frozenset({np.ufunc, type(np.dot)})
_READERS: dict[type, Any] = {
    bool: _Reader._plain, int: _Reader._plain, float: _Reader._plain, type(None): _Reader._plain,
    str: _Reader._text, bytes: _Reader._text, np.ndarray: _Reader._array, list: _Reader._nest, tuple: _Reader._nest,
    dict: _Reader._dict, FunctionType: _Reader._function, ModuleType: _Reader._module, partial: _Reader._partial,
    BuiltinFunctionType: _Reader._builtin,
}  # fmt: skip


def _stays(module: str) -> bool:
    return module.partition(".")[0] in _STAY


@lru_cache(maxsize=256)
def _global_names(code: CodeType) -> tuple[str, ...]:
    """Return the global names that a code reads, and those of functions that are defined in it.

    Raises
    ------
    _Unknown
        Where it imports modules or defines classes.
    """
    names = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("IMPORT_NAME", "LOAD_BUILD_CLASS", "LOAD_NAME"):
            raise _Unknown
        if instruction.opname == "LOAD_GLOBAL":
            names.append(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names += _global_names(constant)
    return tuple(dict.fromkeys(names))
