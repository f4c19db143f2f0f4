"""Nests of dict, list and tuple: their leaves in an order that all ranks agree on, and back."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from typing import Any

import numpy as np
from autograd.builtins import DictBox, SequenceBox
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.tracer import Box, getval

from mpiad._typing import Array, Tree
from mpiad.transport.device_arrays import is_array, is_device_array

_NO_NESTS = frozenset({np.ndarray, ArrayBox, float, np.float64, np.float32})


def flatten(tree: Tree) -> tuple[list[Any], Callable[[list[Any]], Tree]]:
    """Return the leaves of a nest, and the function that builds the nest of other leaves."""
    if type(tree) in _NO_NESTS:  # which is what most functions take and return
        return [tree], _only
    leaves: list[Any] = []
    build = _walk(tree, leaves)
    return leaves, lambda new: build(iter(new))


def _only(leaves: list[Any]) -> Any:
    return leaves[0]


def _walk(tree: Tree, leaves: list[Any]) -> Callable:
    kind = type(tree)
    if kind in _NO_NESTS:
        leaves.append(tree)
        return next
    if kind is list or kind is tuple:  # most nests, walked in every step of a training
        parts = [_walk(part, leaves) for part in tree]
        return lambda new: kind([part(new) for part in parts])
    if isinstance(tree, (dict, DictBox)):
        return _walk_dict(tree, leaves)
    if isinstance(tree, (list, tuple, SequenceBox)):
        parts = [_walk(tree[i], leaves) for i in range(len(tree))]
        make = _maker(tree)
        return lambda new: make([part(new) for part in parts])
    leaves.append(tree)
    return next


def _walk_dict(tree: Tree, leaves: list[Any]) -> Callable:
    keys = list(tree.keys())
    parts = [(key, _walk(tree[key], leaves)) for key in _in_order(tree)]
    # A class with a constructor of its own (a defaultdict) may not take pairs.
    kind = type(tree) if isinstance(tree, dict) and type(tree).__init__ is dict.__init__ else dict

    def build(new: object) -> dict:
        # Leaves come in the order that ranks agree on, and the dict is built in the order of the user's.
        found = {key: part(new) for key, part in parts}
        return kind((key, found[key]) for key in keys)

    return build


def _in_order(tree: Tree) -> list[Any]:
    keys = list(tree.keys())
    try:
        return sorted(keys)  # two ranks may have filled theirs in different orders
    except TypeError:
        return keys


def _maker(tree: Tree) -> Callable[[list[Any]], Any]:
    if hasattr(tree, "_fields"):  # a named tuple
        return lambda items: type(tree)(*items)
    # A traced sequence has lost its type; of tuple and list the one that can't be changed.
    if isinstance(tree, SequenceBox):
        return tuple
    return type(tree)


def named_leaves(tree: Tree, name: str) -> list[tuple[str, Any]]:
    """Return the plain values of the leaves, in the order of `flatten`, each with its path: ``x['w'][0]``.

    A nest that holds nothing counts as a leaf, so that it isn't taken for one that isn't there.
    """
    if isinstance(tree, (dict, DictBox)):
        parts = [(f"{name}[{key!r}]", tree[key]) for key in _in_order(tree)]
    elif isinstance(tree, (list, tuple, SequenceBox)):
        fields = getattr(tree, "_fields", None)
        parts = [(f"{name}.{fields[i]}" if fields else f"{name}[{i}]", tree[i]) for i in range(len(tree))]
    else:
        return [(name, getval(tree))]
    # It has no leaves, but ranks that compare theirs must see that it is there.
    if not parts:
        return [(name, "an empty nest")]
    return [leaf for path, part in parts for leaf in named_leaves(part, path)]


def refuse_objects(tree: Tree, name: str, call: str) -> None:
    """Raise a TypeError if a leaf is an object of another kind, whose numbers would stay as they are without a word."""
    for path, leaf in named_leaves(tree, name):
        plain = isinstance(leaf, (Number, str, bytes, np.generic, type(None))) or is_array(leaf)
        if not plain or getattr(leaf, "dtype", np.dtype(float)).hasobject:
            raise TypeError(
                f"{call}: {path} is {type(leaf).__name__} {leaf!r:.60}, but dicts, lists and tuples of arrays, numbers, "
                "strings and None are expected: what is inside another object can't be varied. Pass its numbers in a "
                "dict, as dataclasses.asdict returns it, or the object as another argument."
            )


def is_variable(leaf: Array) -> bool:
    """Tell whether a leaf can be differentiated: a real or complex number or array of them, traced or not."""
    if isinstance(leaf, (float, complex, np.inexact)):
        return True
    if isinstance(leaf, np.ndarray) or type(leaf) in Box.types or is_device_array(leaf):
        return getattr(leaf, "dtype", np.dtype(object)).kind in "fc"
    return False
