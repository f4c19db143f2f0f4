"""The signature of a call: structure, shapes and dtypes of the arguments, and the values of untraced arguments."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any, NamedTuple

import numpy as np
from autograd.tracer import Box, getval

from mpiad._typing import Tree
from mpiad.compiling.closure import computes_as_ndarray
from mpiad.pytrees import FIELDS, LEAF_TYPES, flatten
from mpiad.transport.devices.device_arrays import arrays_of, is_device_array

_boxes = Box.types
MOST = 2**62
_ARRAYS_AND_NUMBERS = LEAF_TYPES | {int}
_NUMBERS = (float, np.floating, np.complexfloating, complex)


class Arguments(NamedTuple):
    """The flattened arguments of a call."""

    leaves: list[Any]
    build: Any  # function that assembles (args, kwargs) from leaves
    traced: list[int]  # positions of the leaves that are traced; the other leaves are constants of the trace
    key: tuple[Any, ...]  # the signature; calls with equal keys can use the same program
    form: Hashable  # the structure of the pytree, as a hashable object
    args: tuple  # the arguments of the call
    kwargs: dict[str, Any]

    def constants(self) -> list[Any]:
        """Return what is constant in a trace: leaves, and the classes of containers, which may have methods."""
        return [leaf for place, leaf in enumerate(self.leaves) if place not in self.traced] + _classes_in(self.form)

    def values(self) -> list[Any]:
        """Return the leaves without autograd's boxes."""
        return [getval(leaf) for leaf in self.leaves]


class _Object:
    """An object in a signature, which is compared by identity."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


_COMPARED = (type(None), bool, int, str, bytes, np.generic, np.dtype, type, type(...), slice, range)


def arguments_of(args: tuple, kwargs: dict[str, Any], asked: Collection[tuple[Hashable, int]] = ()) -> Arguments:
    """Flatten a call's arguments; `asked`: integers on which the function branches, as pairs (form, leaf's position)."""
    if not kwargs and _ARRAYS_AND_NUMBERS.issuperset(map(type, args)):  # the most common case
        leaves, build, form = list(args), lambda new: (tuple(new), {}), len(args)
    elif not kwargs:
        (leaves, build_args), form = flatten(args), form_of(args)
        build = lambda new: (build_args(new), {})  # noqa: E731
    else:
        (leaves, build), form = flatten((args, kwargs)), ("keywords", form_of((args, kwargs)))
    traced: list[int] = []
    key: list[Any] = [form]
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, np.ndarray) and computes_as_ndarray(type(leaf)):
            traced.append(place)
            key.append((leaf.shape, leaf.dtype))
            continue
        if type(leaf) in _boxes or is_device_array(leaf):
            traced.append(place)
            arrays = arrays_of(getval(leaf))
            kind = (leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else ()
            key.append(kind if arrays is None else (*kind, arrays))
            continue
        integer = isinstance(leaf, (int, np.integer)) and type(leaf) is not bool and abs(leaf) < MOST
        is_plain = type(leaf).__module__ in ("builtins", "numpy")  # a user's subclass may have methods
        if is_plain and (isinstance(leaf, _NUMBERS) or integer and (form, place) not in asked):
            traced.append(place)
            key.append(type(leaf))
        else:
            # Ranges are equal if their numbers are, and slices aren't hashable before Python 3.12.
            value = leaf.__reduce__()[1] if isinstance(leaf, (range, slice)) else leaf
            key.append((type(leaf), value if isinstance(leaf, _COMPARED) else _Object(leaf)))
    return Arguments(leaves, build, traced, tuple(key), form, args, kwargs)


def form_of(tree: Tree) -> Hashable:
    """Return the structure of a pytree as nested tuples."""
    if isinstance(tree, dict):
        return type(tree), tuple(tree), tuple([form_of(part) for part in tree.values()])
    if isinstance(tree, (list, tuple)):
        return type(tree), tuple([None if type(part) in LEAF_TYPES else form_of(part) for part in tree])
    fields = FIELDS.get(type(tree))
    return fields and (type(tree), tuple([form_of(getattr(tree, name)) for name in fields]))


def _classes_in(form: Hashable) -> list[type]:
    """Return the users' classes in the structure of a pytree."""
    if isinstance(form, type):
        return [] if form in (dict, list, tuple) else [form]
    return [kind for part in form for kind in _classes_in(part)] if isinstance(form, tuple) else []
