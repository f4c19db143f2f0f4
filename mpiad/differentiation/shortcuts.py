"""Traced arrays whose operators go straight to their node.

Autograd's operators look for traced arguments at each level of nesting, twice for each operation. Where both operands are
plain numbers of one trace of ours that answer is known, as is the rule, and the node can be made at once. All else takes
the usual way, so nothing but time depends on it.
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
from mpiad.differentiation.rules import JVP_RULES, VJP_RULES

__all__ = ["BundleBox", "ShortcutBox", "shortened"]

_ndarray = np.ndarray
_numbers = frozenset({float, int, np.float64, np.ndarray})
_new = object.__new__
_getitem: Any = ArrayBox.__getitem__
_KEYWORDS: dict = {}


class ShortcutBox(ArrayBox):
    """A traced array of a trace that is to be run backwards; made by `shortened`, and by its own operators."""

    __slots__ = ()


class BundleBox(ArrayBox):
    """A traced array with tangents in several directions beside it; made as `ShortcutBox` is."""

    __slots__ = ()


def _recorded(rule: Callable, value: Any, args: tuple, argnums: tuple[int, ...], parents: tuple, trace: int) -> Any:
    """Return a result whose step is noted on the tape."""
    inputs = (parents[0].index,) if len(parents) == 1 else (parents[0].index, parents[1].index)
    pull = rule(argnums, value, args, _KEYWORDS)
    return ShortcutBox(value, trace, OrderedNode.placed(parents[0].tape, inputs, pull, None))


def _beside(rule: Callable, value: Any, args: tuple, argnums: tuple[int, ...], parents: tuple, trace: int) -> Any:
    """Return a result with its tangents."""
    node = _new(BundleNode)
    first = parents[0]
    node.tape = first.tape
    if len(parents) == 1:
        node.g = [None if g is None else rule(argnums, (g,), value, args, _KEYWORDS) for g in first.g]
    else:
        node.g = [
            _of_two(rule, gs, value, args)
            if gs[0] is None or gs[1] is None else rule((0, 1), gs, value, args, _KEYWORDS)
            for gs in zip(first.g, parents[1].g)
        ]  # fmt: skip
    return BundleBox(value, trace, node)


def _of_two(rule: Callable, gs: tuple, value: Any, args: tuple) -> Any:
    """Return a tangent of two operands, one of which has none."""
    x, y = gs
    if x is None:
        return None if y is None else rule((1,), (y,), value, args, _KEYWORDS)
    return rule((0,), (x,), value, args, _KEYWORDS)


def _element(kind: type, made: Callable, rule: Callable) -> Callable:
    def __getitem__(self: Any, idx: Any) -> Any:
        node, value = self._node, self._value
        # The element of a vector is a number; these operators are for arrays.
        plain = type(idx) is int and type(value) is _ndarray and value.ndim > 1
        if plain and type(node) is kind and node.tape.record is not None:
            return made(rule, value[idx], (value, idx), (0,), (node,), self._trace)
        return _getitem(self, idx)

    return __getitem__


def _negation(kind: type, made: Callable, rule: Callable) -> Callable:
    def __neg__(self: Any) -> Any:
        node, value = self._node, self._value
        if type(node) is kind and type(value) is _ndarray and node.tape.record is not None:
            return made(rule, -value, (value,), (0,), (node,), self._trace)
        return anp.negative(self)

    return __neg__


def _operator(kind: type, made: Callable, rule: Callable, fun: Any, ufunc: Any, swapped: bool) -> Callable:
    """Return an operator of two operands; `swapped`: the box is the second one."""
    mine = (1,) if swapped else (0,)

    def method(self: Any, other: Any) -> Any:
        node, x, what = self._node, self._value, type(other)
        if type(node) is kind and type(x) is _ndarray and node.tape.record is not None:
            if what in _numbers:
                args = (other, x) if swapped else (x, other)
                return made(rule, ufunc(*args), args, mine, (node,), self._trace)
            if what in _box_types and other._trace == self._trace and type(other._value) is _ndarray:
                partner, y = other._node, other._value
                if type(partner) is kind and partner.tape is node.tape:
                    args, parents = ((y, x), (partner, node)) if swapped else ((x, y), (node, partner))
                    return made(rule, ufunc(*args), args, (0, 1), parents, self._trace)
        return fun(other, self) if swapped else fun(self, other)

    return method


_box_types = frozenset({ArrayBox, ShortcutBox, BundleBox})
_OPERATORS = (
    ("add", anp.add, np.add),
    ("sub", anp.subtract, np.subtract),
    ("mul", anp.multiply, np.multiply),
    ("truediv", anp.true_divide, np.true_divide),
)
for _box, _kind, _made, _rules in (
    (ShortcutBox, OrderedNode, _recorded, VJP_RULES), (BundleBox, BundleNode, _beside, JVP_RULES)
):  # fmt: skip
    _box.__getitem__ = _element(_kind, _made, _rules[_getitem])
    _box.__neg__ = _negation(_kind, _made, _rules[anp.negative])
    for _name, _fun, _ufunc in _OPERATORS:
        setattr(_box, f"__{_name}__", _operator(_kind, _made, _rules[_fun], _fun, _ufunc, False))
        setattr(_box, f"__r{_name}__", _operator(_kind, _made, _rules[_fun], _fun, _ufunc, True))
    # Known as traced, but not what autograd makes of arrays.
    Box.types.add(_box)


def shortened(x: Any) -> Any:
    """Return a traced array whose operators take the short way; anything else as it is."""
    if type(x) is not ArrayBox:
        return x
    box = BundleBox if type(x._node) is BundleNode else ShortcutBox
    return box(x._value, x._trace, x._node)
