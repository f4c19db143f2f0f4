"""Traced arrays whose operators go straight to their node.

Autograd's operators look for traced arguments at each level of nesting, twice for each operation. Where both operands are
plain numbers of one trace of ours that answer is known, and the node can be made at once. All else takes the usual way, so
nothing but time depends on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.tracer import Box

from mpiad.differentiation.bundles import BundleNode
from mpiad.differentiation.nodes import OrderedNode

__all__ = ["shortened"]

_ndarray = np.ndarray
_nodes = frozenset({OrderedNode, BundleNode})
_numbers = frozenset({float, int, np.float64, np.ndarray})


class ShortcutBox(ArrayBox):
    """A traced array; made by `shortened`, and by its own operators."""

    __slots__ = ()

    def __getitem__(self, idx: Any) -> Any:
        node, value = self._node, self._value
        if type(idx) is int and type(node) in _nodes and type(value) is _ndarray and value.ndim > 1:
            return _made(value[idx], _getitem, (value, idx), (0,), (node,), self._trace)
        return _getitem(self, idx)

    def __neg__(self) -> Any:
        node, value = self._node, self._value
        if type(node) in _nodes and type(value) is _ndarray:
            return _made(-value, anp.negative, (value,), (0,), (node,), self._trace)
        return anp.negative(self)


_getitem: Any = ArrayBox.__getitem__
_box_types = frozenset({ArrayBox, ShortcutBox})


def _made(value: Any, fun: Any, args: tuple, argnums: tuple[int, ...], parents: tuple, trace: int) -> Any:
    return ShortcutBox(value, trace, type(parents[0])(value, fun, args, {}, argnums, parents))


def _operator(fun: Any, ufunc: Any, swapped: bool) -> Callable:
    """Return an operator of two operands; `swapped`: the box is the second one."""
    mine, theirs = ((1,), (0, 1)) if swapped else ((0,), (0, 1))

    def method(self: ShortcutBox, other: Any) -> Any:
        node, x, kind = self._node, self._value, type(other)
        if type(node) in _nodes and type(x) is _ndarray and node.tape.record is not None:
            if kind in _numbers:
                args = (other, x) if swapped else (x, other)
                return _made(ufunc(*args), fun, args, mine, (node,), self._trace)
            if kind in _box_types and other._trace == self._trace and type(other._value) is _ndarray:
                partner = other._node
                if type(partner) is type(node) and partner.tape is node.tape:
                    y = other._value
                    args, parents = ((y, x), (partner, node)) if swapped else ((x, y), (node, partner))
                    return _made(ufunc(*args), fun, args, theirs, parents, self._trace)
        return fun(other, self) if swapped else fun(self, other)

    return method


for _name, _fun, _ufunc in (
    ("add", anp.add, np.add),
    ("sub", anp.subtract, np.subtract),
    ("mul", anp.multiply, np.multiply),
    ("truediv", anp.true_divide, np.true_divide),
):
    setattr(ShortcutBox, f"__{_name}__", _operator(_fun, _ufunc, False))
    setattr(ShortcutBox, f"__r{_name}__", _operator(_fun, _ufunc, True))
# Known as traced, but not what autograd makes of arrays.
Box.types.add(ShortcutBox)


def shortened(x: Any) -> Any:
    """Return a traced array whose operators take the short way; anything else as it is."""
    return ShortcutBox(x._value, x._trace, x._node) if type(x) is ArrayBox else x
