"""Forward mode: nodes that compute tangents, and their tape.

If autograd has only the adjoint of a function (transforms, factorizations, special functions), the tangent is computed by
transposition. The adjoint w ↦ Jᵀw is linear. For any w, the gradient of ⟨Jᵀw, v⟩ with respect to w is therefore the tangent
Jv.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from autograd.core import JVPNode, primitive_jvps, primitive_vjps
from autograd.tracer import Box, getval, new_box, notrace_primitives

from mpiad._typing import Array, Function
from mpiad.differentiation.advice import itself, refuse_pickling
from mpiad.differentiation.backward import run_backward
from mpiad.differentiation.in_place import is_unusual, note_sharing, noted, raise_stale, register
from mpiad.differentiation.rules import JVP_RULES, VJP_RULES
from mpiad.differentiation.rules.protocol import (
    Argnums,
    JvpMaker,
    Primitive,
    VjpMaker,
    checked_tangent,
    inherited_jvp,
    inherited_vjp,
    refusal,
)
from mpiad.differentiation.tape import DetachedNode, LibraryTape, all_on, refuse_objects, still_traced, trace_list
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.primitives.operation import Recorded, suspended
from mpiad.pytrees import is_variable

_box_types = Box.types
Parents: TypeAlias = "Sequence[TangentNode]"  # the nodes of traced inputs


def tangent_rule(fun: Primitive, value: Array, argnums: Argnums) -> JvpMaker:
    """Return autograd's tangent rule, or one by transposing the adjoint; raise the error of `refusal` if neither exists."""
    if fun in primitive_jvps:
        return partial(inherited_jvp, fun)
    if (fun in primitive_vjps or fun in VJP_RULES) and hasattr(value, "dtype"):
        return partial(checked_tangent, fun, partial(_by_transposition, VJP_RULES.get(fun) or partial(inherited_vjp, fun)))
    raise refusal(fun, f"forwards with respect to argument {argnums}: it has no tangent")


def _by_transposition(rule: VjpMaker, argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    adjoint, w = rule(argnums, ans, args, kwargs), np.zeros_like(getval(ans))
    _, places, recording = trace_list(lambda variables: tuple(adjoint(variables[0])), [w])
    tangent = run_backward(recording, zip(places, gs), 1)[0]
    return w if tangent is None else tangent


class TangentNode(JVPNode):
    """A step of a program in forward mode."""

    __slots__ = ("__weakref__", "memory", "tape")
    stale: Any  # this and `constant`: as of `OrderedNode`
    constant = DetachedNode.constant
    __reduce_ex__, __deepcopy__ = refuse_pickling, itself

    def __new__(
        cls, value: Array, fun: Function, args: tuple, kwargs: dict, parent_argnums: tuple, parents: Parents
    ) -> object:
        """Make a node; if the trace of the first input has ended, call the constructor of `DetachedNode`."""
        if parents[0].tape.record is None:
            return DetachedNode(value, fun, args, kwargs, parent_argnums, parents)
        return object.__new__(cls)

    def __init__(self, value: Array, fun: Function, args: tuple, kwargs: dict, parent_argnums: tuple, parents: Parents):
        tape = parents[0].tape
        if tape.record is None:
            return  # `__new__` returned a node of another type, made by `DetachedNode`
        refuse_objects(value, tape.number, fun, parent_argnums, args, kwargs)
        if kwargs or len(args) > 2 or is_unusual(value, args):
            noted(self, value, fun, args, kwargs, parent_argnums, parents)
        if not all_on(tape, parents):
            parent_argnums, parents = still_traced(parent_argnums, parents)
        tangents = [parent.g for parent in parents]
        rule = JVP_RULES.get(fun) or tangent_rule(fun, value, parent_argnums)
        self.g = rule(parent_argnums, tangents, value, args, kwargs)
        self.tape = tape

    @classmethod
    def on_tape(cls, tape: LibraryTape, tangent: Array) -> TangentNode:
        """Make a node with a given tangent."""
        node = object.__new__(cls)
        node.tape, node.g = tape, tangent
        return node


class StaleTangentNode(TangentNode):
    """The node of a stale array, as `StaleNode`."""

    __slots__ = ()
    tape: Any = property(raise_stale)


TangentNode.stale = StaleTangentNode
register(TangentNode, JVPNode, StaleTangentNode)


class TangentTape(LibraryTape):
    """The tape of a forward-mode trace; it records nothing."""

    def communicated(
        self, operator: Recorded, ans: Array, args: tuple, params: object, argnums: Sequence[int], parents: Parents
    ) -> TangentNode | None:
        """Communicate the tangent, as part of the enclosing trace; return its node."""
        tangents = {k: node.g for k, node in zip(argnums, parents) if node.tape is self}
        # The enclosing trace records the communication of the tangent.
        with suspended(self.outer, body=False):
            tangent = operator.jvp(tangents, ans, args, params, self.number)
        if not hasattr(ans, "dtype"):
            return None
        node = TangentNode.on_tape(self, tangent)
        if args and is_unusual(ans, args):
            note_sharing(node, ans, args, argnums, parents)
        return node

    def variable(self, x: Array, tangent: Array) -> Array:
        """Return a value with a tangent on this tape; x itself if it can't have a tangent."""
        return new_box(x, self.number, TangentNode.on_tape(self, tangent)) if is_variable(x) else x

    def value_and_tangent(self, x: Array) -> tuple[Array, Array]:
        """Return a value and its tangent: zeros if it has none, and the value itself if it can't have one."""
        if type(x) in _box_types and getattr(x._node, "tape", None) is self:
            return x._value, conform(x._node.g, *spec_like(x._value))
        return x, spec_like(x).zeros() if is_variable(x) else x


# Derivatives of a function in several directions, from one evaluation.


# Rules for tangents in all directions at once, arrays whose first axis counts the directions; a rule may return None.
STACKED_JVPS: dict[Primitive, JvpMaker] = {}
_PLAIN = {np.ndarray, type(None)}


class BundleNode(TangentNode):
    """A node of a forward-mode trace; `g` has one tangent per direction: a list, with None for zero, or one array."""

    __slots__ = ()

    def __init__(self, value: Array, fun: Function, args: tuple, kwargs: dict, parent_argnums: tuple, parents: Parents):
        tape = parents[0].tape
        if tape.record is None:
            return  # `__new__` returned a node of another type, made by `DetachedNode`
        refuse_objects(value, tape.number, fun, parent_argnums, args, kwargs)
        if kwargs or len(args) > 2 or is_unusual(value, args):
            noted(self, value, fun, args, kwargs, parent_argnums, parents)
        self.tape = tape
        stacked = STACKED_JVPS.get(fun)
        if stacked and type(value) is np.ndarray and all(parent.tape is tape and parent.stacked() for parent in parents):
            self.g = stacked(parent_argnums, [parent.g for parent in parents], value, args, kwargs)
            if self.g is not None:
                return
        # Inputs of other traces are constants.
        inputs = [(k, parent.g) for k, parent in zip(parent_argnums, parents) if parent.tape is tape]
        rule = JVP_RULES.get(fun) or tangent_rule(fun, value, parent_argnums)
        self.g = []
        for direction in range(len(parents[0].g)):
            nonzero = [(k, tangents[direction]) for k, tangents in inputs if tangents[direction] is not None]
            if nonzero:
                argnums, gs = zip(*nonzero)
                self.g.append(rule(argnums, gs, value, args, kwargs))
            else:
                self.g.append(None)

    def stacked(self) -> bool:
        """Turn `g` into one array and return True, if all tangents are plain arrays on the host, or some are zero."""
        if type(self.g) is not np.ndarray:
            if not {np.ndarray} <= {type(g) for g in self.g} <= _PLAIN:
                return False
            zero = np.zeros_like(next(g for g in self.g if g is not None))
            self.g = np.stack([zero if g is None else g for g in self.g])
        return True


notrace_primitives[BundleNode] = notrace_primitives[TangentNode]


class Bundle:
    """A forward-mode trace with several tangents; many function calls share it, since opening a trace takes time."""

    def __init__(self) -> None:
        self._tape = TangentTape()

    def __enter__(self) -> Bundle:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)
        self._tape.close()

    def variable(self, x: Array, tangents: list[Array]) -> Array:
        """Return a traced array with its tangents, one per direction, None for zero tangents."""
        tape = self._tape
        return new_box(x, tape.number, BundleNode.on_tape(tape, tangents))

    def parts(self, value: Array) -> tuple[Array, list[Array] | None]:
        """Return the plain value of a result, and its tangents: one per direction, or None if all are zero."""
        while type(value) in _box_types and value._trace >= self._tape.number:
            node = value._node
            value = value._value
            if getattr(node, "tape", None) is self._tape:
                return value, list(node.g)
        return value, None
