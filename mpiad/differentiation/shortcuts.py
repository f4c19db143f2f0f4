"""Traced arrays whose operators create their node directly, for speed.

The right-hand side of an ODE is traced at each stage of each step, and for a few thousand trajectories the overhead of its
operators dominates. Autograd's operators search for traced arguments twice per operation. If both operands are
numbers or arrays of one of mpiad's traces, no search is needed, and the operators here create the node at once. All other
cases use autograd's operators, with the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.tracer import Box

from mpiad._typing import Array, Function, Index
from mpiad.differentiation.forward import BundleNode
from mpiad.differentiation.rules import VJP_RULES
from mpiad.differentiation.rules.arithmetic import ADD, DIVIDE, MULTIPLY, SUBTRACT, Tangent
from mpiad.differentiation.tape import OrderedNode

_ndarray = np.ndarray
# Exact types only, since subclasses of ndarray may define other operators.
_numbers = frozenset({float, int, np.float64})
_untraced = _numbers | {np.ndarray}
_indices = frozenset({int, tuple})
_new = object.__new__
_getitem: Any = ArrayBox.__getitem__
_NO_KEYWORDS: dict = {}


class _Box(ArrayBox):
    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the elements; Python's default would also try the index after the last element."""
        return iter([self[i] for i in range(len(self._value))])


class ShortcutBox(_Box):
    """A traced array in reverse mode; made by `shortened`, and by operators of this class."""

    __slots__ = ()

    def __getitem__(self, idx: Index) -> Array:
        """Return an element."""
        node, value = self._node, self._value
        # The elements of a vector are numbers, which operators of this class don't support.
        plain = type(idx) is int and type(value) is _ndarray and value.ndim > 1
        if plain and type(node) is OrderedNode and node.tape.record is not None:
            return _recorded(_rule_of_getitem, value[idx], (value, idx), (0,), (node,), self._trace)
        return _getitem(self, idx)

    def __neg__(self) -> Array:
        """Return the negative."""
        node, value = self._node, self._value
        if type(node) is OrderedNode and type(value) is _ndarray and node.tape.record is not None:
            return _recorded(_rule_of_negative, -value, (value,), (0,), (node,), self._trace)
        return anp.negative(self)


def _recorded(rule: Callable, value: Array, args: tuple, argnums: tuple[int, ...], parents: tuple, trace: int) -> Array:
    inputs = (parents[0].index,) if len(parents) == 1 else (parents[0].index, parents[1].index)
    pull = rule(argnums, value, args, _NO_KEYWORDS)
    return ShortcutBox(value, trace, OrderedNode.on_tape(parents[0].tape, inputs, pull, None))


def _operator(rule: Callable, fun: Function, ufunc: Function, swapped: bool) -> Callable:
    """Return a binary operator; if `swapped`, the traced array is the second operand."""
    argnums = (1,) if swapped else (0,)

    def method(self: Any, other: Array) -> Array:
        node, x, kind = self._node, self._value, type(other)
        if type(node) is OrderedNode and type(x) is _ndarray and node.tape.record is not None:
            if kind in _untraced:
                args = (other, x) if swapped else (x, other)
                return _recorded(rule, ufunc(*args), args, argnums, (node,), self._trace)
            if kind in _boxes and other._trace == self._trace and type(other._value) is _ndarray:
                partner, y = other._node, other._value
                if type(partner) is OrderedNode and partner.tape is node.tape:
                    args, parents = ((y, x), (partner, node)) if swapped else ((x, y), (node, partner))
                    return _recorded(rule, ufunc(*args), args, (0, 1), parents, self._trace)
        return fun(other, self) if swapped else fun(self, other)

    return method


class BundleBox(_Box):
    """A traced array with tangents in several directions; made by `shortened`, and by operators of this class."""

    __slots__ = ()

    def __getitem__(self, idx: Index) -> Array:
        """Return a part of the array with its tangents."""
        node, value = self._node, self._value
        if type(node) is BundleNode and type(value) is _ndarray and type(idx) in _indices and node.tape.record is not None:
            part, gs = value[idx], node.g
            if type(part) is _ndarray:  # not a number
                if type(gs) is _ndarray and isinstance(idx, int):
                    return bundle_box(part, gs[:, idx], node.tape, self._trace)
                return bundle_box(part, [None if g is None else g[idx] for g in gs], node.tape, self._trace)
        return _getitem(self, idx)

    def __neg__(self) -> Array:
        """Return the negative."""
        node, value = self._node, self._value
        if type(node) is BundleNode and type(value) is _ndarray and node.tape.record is not None:
            tangents = -node.g if type(node.g) is _ndarray else [None if g is None else -g for g in node.g]
            return bundle_box(-value, tangents, node.tape, self._trace)
        return anp.negative(self)


def bundle_box(value: Array, tangents: list[Array] | Array, tape: object, trace: int) -> BundleBox:
    """Return an array with tangents in several directions."""
    node, box = _new(BundleNode), _new(BundleBox)
    node.tape, node.g = tape, tangents
    box._value, box._trace, box._node = value, trace, node
    return box


def _left_operator(fun: Callable, ufunc: Callable, tangent: Tangent) -> Callable:
    first, second, both = tangent

    def method(self: Any, other: Array) -> Array:
        node, x, kind = self._node, self._value, type(other)
        if type(node) is BundleNode and type(x) is _ndarray and node.tape.record is not None:
            if kind in _untraced:
                z, gs = ufunc(x, other), node.g
                if type(gs) is _ndarray and (kind in _numbers or other.shape == x.shape):
                    return bundle_box(z, first(gs, x, other, z), node.tape, self._trace)
                return bundle_box(z, [None if g is None else first(g, x, other, z) for g in gs], node.tape, self._trace)
            if kind in _bundle_boxes and other._trace == self._trace and type(other._value) is _ndarray:
                partner, y = other._node, other._value
                if type(partner) is BundleNode and partner.tape is node.tape:
                    z = ufunc(x, y)
                    if type(node.g) is type(partner.g) is _ndarray and x.shape == y.shape:
                        return bundle_box(z, both(node.g, partner.g, x, y, z), node.tape, self._trace)
                    tangents = []
                    for g, h in zip(node.g, partner.g):
                        if g is None:
                            tangents.append(None if h is None else second(h, x, y, z))
                        else:
                            tangents.append(first(g, x, y, z) if h is None else both(g, h, x, y, z))
                    return bundle_box(z, tangents, node.tape, self._trace)
        return fun(self, other)

    return method


def _right_operator(fun: Callable, ufunc: Callable, tangent: Tangent) -> Callable:
    second = tangent.second

    def method(self: Any, other: Array) -> Array:
        node, y, kind = self._node, self._value, type(other)
        if kind in _untraced and type(node) is BundleNode and type(y) is _ndarray and node.tape.record is not None:
            z, hs = ufunc(other, y), node.g
            if type(hs) is _ndarray and (kind in _numbers or other.shape == y.shape):
                return bundle_box(z, second(hs, other, y, z), node.tape, self._trace)
            return bundle_box(z, [None if h is None else second(h, other, y, z) for h in hs], node.tape, self._trace)
        return fun(other, self)

    return method


_boxes, _bundle_boxes = frozenset({ArrayBox, ShortcutBox}), frozenset({ArrayBox, BundleBox})
_rule_of_getitem, _rule_of_negative = VJP_RULES[_getitem], VJP_RULES[anp.negative]
for _name, _fun, _ufunc, _tangent in (
    ("add", anp.add, np.add, ADD),
    ("sub", anp.subtract, np.subtract, SUBTRACT),
    ("mul", anp.multiply, np.multiply, MULTIPLY),
    ("truediv", anp.true_divide, np.true_divide, DIVIDE),
):
    setattr(ShortcutBox, f"__{_name}__", _operator(VJP_RULES[_fun], _fun, _ufunc, False))
    setattr(ShortcutBox, f"__r{_name}__", _operator(VJP_RULES[_fun], _fun, _ufunc, True))
    setattr(BundleBox, f"__{_name}__", _left_operator(_fun, _ufunc, _tangent))
    setattr(BundleBox, f"__r{_name}__", _right_operator(_fun, _ufunc, _tangent))
# Autograd recognizes values of these types as traced, but makes boxes of its own type for results and inner traces.
Box.types.update({ShortcutBox, BundleBox})
Box.type_mappings.update({ShortcutBox: ArrayBox, BundleBox: ArrayBox})


def shortened(x: Array) -> Array:
    """Return a traced array with the faster operators of this module; return another object unchanged."""
    if type(x) is not ArrayBox:
        return x
    box = BundleBox if type(x._node) is BundleNode else ShortcutBox
    return box(x._value, x._trace, x._node)
