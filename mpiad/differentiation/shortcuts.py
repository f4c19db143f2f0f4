"""Traced arrays whose operators go straight to their node.

Autograd's operators look for traced arguments at each level of nesting, twice for each operation. Where both operands are
plain numbers of one trace of ours that answer is known, as is the rule, and the node can be made at once. All else takes
the usual way, so nothing but time depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.tracer import Box

from mpiad._typing import Array, Function
from mpiad.differentiation.bundle_box import BundleBox
from mpiad.differentiation.bundles import BundleNode
from mpiad.differentiation.nodes import OrderedNode
from mpiad.differentiation.rules import VJP_RULES

__all__ = ["ShortcutBox", "shortened"]

_ndarray = np.ndarray
_numbers = frozenset({float, int, np.float64, np.ndarray})
_getitem: Any = ArrayBox.__getitem__
_KEYWORDS: dict = {}


class ShortcutBox(ArrayBox):
    """A traced array of a trace that is to be run backwards; made by `shortened`, and by its own operators."""

    __slots__ = ()

    def __getitem__(self, idx: Any) -> Any:
        """Return an element."""
        node, value = self._node, self._value
        # The element of a vector is a number; these operators are for arrays.
        plain = type(idx) is int and type(value) is _ndarray and value.ndim > 1
        if plain and type(node) is OrderedNode and node.tape.record is not None:
            return _recorded(_rule_of_getitem, value[idx], (value, idx), (0,), (node,), self._trace)
        return _getitem(self, idx)

    def __iter__(self) -> Iterator[Any]:
        """Return the elements; without this Python would ask for one too many."""
        return iter([self[i] for i in range(len(self._value))])

    def __neg__(self) -> Any:
        """Return the negative."""
        node, value = self._node, self._value
        if type(node) is OrderedNode and type(value) is _ndarray and node.tape.record is not None:
            return _recorded(_rule_of_negative, -value, (value,), (0,), (node,), self._trace)
        return anp.negative(self)


def _recorded(rule: Callable, value: Array, args: tuple, argnums: tuple[int, ...], parents: tuple, trace: int) -> Any:
    """Return a result whose step is noted on the tape."""
    inputs = (parents[0].index,) if len(parents) == 1 else (parents[0].index, parents[1].index)
    pull = rule(argnums, value, args, _KEYWORDS)
    return ShortcutBox(value, trace, OrderedNode.placed(parents[0].tape, inputs, pull, None))


def _operator(rule: Callable, fun: Function, ufunc: Any, swapped: bool) -> Callable:
    """Return an operator of two operands; `swapped`: the box is the second one."""
    mine = (1,) if swapped else (0,)

    def method(self: Any, other: Array) -> Any:
        node, x, what = self._node, self._value, type(other)
        if type(node) is OrderedNode and type(x) is _ndarray and node.tape.record is not None:
            if what in _numbers:
                args = (other, x) if swapped else (x, other)
                return _recorded(rule, ufunc(*args), args, mine, (node,), self._trace)
            if what in _boxes and other._trace == self._trace and type(other._value) is _ndarray:
                partner, y = other._node, other._value
                if type(partner) is OrderedNode and partner.tape is node.tape:
                    args, parents = ((y, x), (partner, node)) if swapped else ((x, y), (node, partner))
                    return _recorded(rule, ufunc(*args), args, (0, 1), parents, self._trace)
        return fun(other, self) if swapped else fun(self, other)

    return method


_boxes = frozenset({ArrayBox, ShortcutBox})
_rule_of_getitem, _rule_of_negative = VJP_RULES[_getitem], VJP_RULES[anp.negative]
for _name, _fun, _ufunc in (
    ("add", anp.add, np.add),
    ("sub", anp.subtract, np.subtract),
    ("mul", anp.multiply, np.multiply),
    ("truediv", anp.true_divide, np.true_divide),
):
    setattr(ShortcutBox, f"__{_name}__", _operator(VJP_RULES[_fun], _fun, _ufunc, False))
    setattr(ShortcutBox, f"__r{_name}__", _operator(VJP_RULES[_fun], _fun, _ufunc, True))
# Known as traced, but not what autograd makes of arrays.
Box.types.add(ShortcutBox)


def shortened(x: Array) -> Any:
    """Return a traced array whose operators take the short way; anything else as it is."""
    if type(x) is not ArrayBox:
        return x
    box = BundleBox if type(x._node) is BundleNode else ShortcutBox
    return box(x._value, x._trace, x._node)
