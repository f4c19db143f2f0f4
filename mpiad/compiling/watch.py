"""`Watch`: the conditions under which the objects that a function reads are unchanged, and how to undo its own changes."""

from __future__ import annotations

import gc
import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from types import CellType, FunctionType, MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from mpiad._typing import Array


class MISSING:
    """The value recorded for a variable or attribute that doesn't exist, such as one read in a branch that isn't taken."""


# An expression in the user's code, as the function in which it is, None for a member of a class, and the names in it.
Place: TypeAlias = "tuple[FunctionType | None, tuple[str, ...]]"


def text_of(path: tuple[Place, ...]) -> str:
    """Return the innermost expression of a path as text."""
    fun, names = path[-1] if path else (None, ())
    return " in ".join(filter(None, (".".join(names), fun and fun.__qualname__)))


# The built-in classes of containers, whose own methods ignore those of users' subclasses.
_SEQUENCES, _MAPPINGS = (list, deque), (OrderedDict, dict)


def _class_of(container: object) -> Any:
    return next((kind for kind in (*_SEQUENCES, *_MAPPINGS, tuple, set, frozenset) if isinstance(container, kind)), None)


def parts_of(container: Any) -> list[Any]:
    """Return the objects in a container; for a dictionary, its keys and values."""
    if isinstance(container, partial):
        return [container.func, container.args, container.keywords]
    if isinstance(container, slice):
        return [container.start, container.stop, container.step]
    if isinstance(container, MappingProxyType):
        return [*container, *container.values()]
    kind = _class_of(container)
    if kind in _MAPPINGS:
        return [*kind.keys(container), *kind.values(container)]
    return list(kind.__iter__(container))


def content_of(cell: CellType) -> object:
    """Return the value of a variable of an enclosing function; MISSING if none has been assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


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
    word = np.uint8 if x.nbytes % 8 else np.int64
    return np.array_equal(np.asarray(x).reshape(-1).view(word), np.asarray(y).reshape(-1).view(word))


def is_writable(x: object) -> bool:
    """Return whether an array, or the array of which it is a view, is writable."""
    while isinstance(x, np.ndarray):
        if x.flags.writeable:
            return True
        x = x.base
    return x is not None  # memory not owned by NumPy


class Watch:
    """The conditions under which a closure is unchanged."""

    def __init__(self) -> None:
        self._terms: list[str] = []
        self._values: dict[str, object] = {"gone": MISSING, "same_parts": _same_parts, "same_bits": same_bits}
        # The conditions on the contents of writable arrays, which are checked last; the arrays and copies of them.
        self._terms_of_arrays: list[str] = []
        self._arrays: dict[str, object] = {}
        # For conditions that the function may violate itself, the expressions that are read, and functions that restore
        # the objects.
        self._changeable: list[tuple[str, tuple[Place, ...], Callable[[], object]]] = []
        self.device_arrays: list[Array] = []  # which the function may read; their contents aren't compared

    def note(self, term: str, *values: object) -> str:
        """Add a condition: an expression with the placeholders {0}, {1}, ... for the values."""
        names = [f"x{len(self._values) + k}" for k in range(len(values))]
        self._values.update(zip(names, values))
        self._terms.append(term.format(*names))
        return self._terms[-1]

    def note_array(self, path: tuple[Place, ...], x: Array) -> None:
        """Add the condition that the contents of a writable array are unchanged."""
        k, copy = len(self._terms_of_arrays), x.copy()
        self._arrays |= {f"array{k}": x, f"copy{k}": copy}
        self._terms_of_arrays.append(term := f"same_bits(array{k}, copy{k})")
        self._changeable.append((term, path, partial(_write, x, copy)))

    def note_variable(self, path: tuple[Place, ...], cell: CellType, value: object) -> None:
        """Add the condition that a variable of an enclosing function has a value."""
        if value is MISSING:
            term = self.note("{0}({1}) is gone", content_of, cell)
        else:
            term = self.note("{0}.cell_contents is {1}", cell, value)
        self._changeable.append((term, path, partial(_fill, cell, value)))

    def note_name(self, path: tuple[Place, ...], names: Mapping[str, object], name: str, owner: type | None) -> None:
        """Add the condition that a name in a namespace, that of the class `owner` or a dict, refers to the same object."""
        value = names.get(name, MISSING)
        term = self.note(f"{{0}}({name!r}, gone) is {{1}}", names.get, value)
        self._changeable.append((term, path, partial(_set_name, names if owner is None else owner, name, value)))

    def note_attribute_names(self, path: tuple[Place, ...], names: dict[str, object]) -> None:
        """Add the condition that an object has the same attributes in its `__dict__`."""
        term = self.note("[*{0}] == {1}", names, [*names])
        self._changeable.append((term, path, partial(_drop, names, frozenset(names))))

    def note_slot(self, path: tuple[Place, ...], owner: object, name: str, value: object) -> None:
        """Add the condition that an attribute refers to the same object."""
        term = self.note(f"getattr({{0}}, {name!r}, gone) is {{1}}", owner, value)
        self._changeable.append((term, path, partial(_set_slot, owner, name, value)))

    def note_container(self, path: tuple[Place, ...], container: object, parts: list[object]) -> None:
        """Add the condition that a container contains the same objects, which are `parts_of` it."""
        is_empty = not parts and type(container) in (list, dict, set)
        term = self.note("not {0}" if is_empty else "same_parts({0}, {1})", container, parts)
        self._changeable.append((term, path, partial(_refill, container, parts)))

    def note_members(self, path: tuple[Place, ...], owner: type) -> None:
        """Add the condition that the namespace of a class contains the same objects."""
        term = self.note("same_parts({0}, {1})", vars(owner), parts_of(vars(owner)))
        self._changeable.append((term, path, partial(_refill_class, owner, dict(vars(owner)))))

    def changed(self, restore: bool) -> str:
        """Return the expression of the first variable, container or array that has changed; restore all of them, if asked.

        Return "" if nothing has changed, or if an object that has changed can't be restored.
        """
        names = {**self._values, **self._arrays}
        changed = [(path, undo) for term, path, undo in self._changeable if not _checked(term, names)()]
        if not changed:
            return ""
        try:
            for _, undo in changed if restore else ():
                undo()
        except (TypeError, ValueError, AttributeError):  # for example after a change of an array's shape
            return ""
        return text_of(changed[0][0]) or "a container or an array"

    def without_arrays(self) -> Watch:
        """Return a watch that doesn't compare the contents of arrays, which may be large."""
        watch = Watch()
        watch._terms, watch._values = self._terms, self._values
        return watch

    @cached_property
    def is_the_same(self) -> Callable[[], bool]:
        """A function that checks all conditions, generated as one expression for speed."""
        terms = [*self._terms, *self._terms_of_arrays]
        return _checked(" and ".join(terms) or "True", {**self._values, **self._arrays})


def _checked(expression: str, names: dict[str, Any]) -> Callable[[], bool]:
    # A variable that was deleted has no contents.
    exec(f"def check():\n try:\n  return {expression}\n except ValueError:\n  return False", names)
    return names["check"]


def _same_parts(container: object, parts: list[object]) -> bool:
    found = parts_of(container)
    return len(found) == len(parts) and all(map(operator.is_, found, parts))


# The restoring of objects, by methods of built-in classes.


def _refill_class(owner: type, members: dict[str, object]) -> None:
    for name in {**members, **vars(owner)}:
        if vars(owner).get(name, MISSING) is not (member := members.get(name, MISSING)):
            _set_name(owner, name, member)


def _refill(container: Any, parts: list[Any]) -> None:
    if isinstance(container, MappingProxyType):
        (container,) = gc.get_referents(container)
    found, kind = parts_of(container), _class_of(container)
    if kind in _MAPPINGS:
        middle = len(parts) // 2
        if list(map(id, found[: len(found) // 2])) != list(map(id, parts[:middle])):
            kind.clear(container)
        for key, value in zip(parts, parts[middle:]):
            kind.__setitem__(container, key, value)
    elif kind in _SEQUENCES and len(found) == len(parts):  # which the caller may iterate over
        for k, part in enumerate(parts):
            if part is not found[k]:
                kind.__setitem__(container, k, part)
    else:
        kind.clear(container)
        (kind.update if kind is set else kind.extend)(container, parts)


def _fill(cell: CellType, value: object) -> None:
    if value is not MISSING:
        cell.cell_contents = value
    elif content_of(cell) is not MISSING:
        del cell.cell_contents


def _set_name(owner: Any, name: str, value: object) -> None:
    """Set a name in a dict or in a class."""
    if isinstance(owner, type):
        type.__delattr__(owner, name) if value is MISSING else type.__setattr__(owner, name, value)
    elif value is MISSING:
        owner.pop(name, None)
    else:
        owner[name] = value


def _drop(names: dict[str, object], kept: frozenset[str]) -> None:
    for name in names.keys() - kept:
        del names[name]


def _set_slot(owner: object, name: str, value: object) -> None:
    object.__delattr__(owner, name) if value is MISSING else object.__setattr__(owner, name, value)


def _write(x: Array, copy: Array) -> None:
    x, copy = (np.ndarray.view(each, np.ndarray) for each in (x, copy))
    if x.shape != copy.shape:
        raise ValueError
    x.flags.writeable = True  # of a view that is read-only; an error if the array itself is
    x[...] = copy
