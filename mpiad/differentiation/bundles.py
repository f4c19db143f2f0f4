"""Forward mode with several tangents: derivatives of a function in several directions, from one evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autograd.core import JVPNode
from autograd.tracer import Box, new_box, notrace_primitives

from mpiad._typing import Array, Function
from mpiad.differentiation.nodes import TangentNode
from mpiad.differentiation.rules import JVP_RULES
from mpiad.differentiation.rules.transposition import tangent_rule
from mpiad.differentiation.tape import TangentTape

_box_types = Box.types


class BundleNode(TangentNode):
    """A node of a forward-mode trace; `g` is a list with one tangent per direction, None for a zero tangent."""

    __slots__ = ()

    def __init__(
        self, value: Array, fun: Function, args: tuple, kwargs: dict, parent_argnums: tuple, parents: Sequence[Any]
    ):
        tape = parents[0].tape
        if tape.record is None:
            return  # `__new__` returned a node of another type, made by `DetachedNode`
        self.tape = tape
        rule = JVP_RULES.get(fun) or tangent_rule(fun, value, parent_argnums)
        if len(parents) == 1:
            self.g = [None if g is None else rule(parent_argnums, (g,), value, args, kwargs) for g in parents[0].g]
            return
        if len(parents) == 2 and parents[1].tape is tape:
            pairs = zip(parents[0].g, parents[1].g)
            self.g = [
                rule(parent_argnums, gs, value, args, kwargs)
                if gs[0] is not None and gs[1] is not None
                else _along(list(zip(parent_argnums, gs)), rule, value, args, kwargs)
                for gs in pairs
            ]
            return
        # Inputs of other traces are constants.
        kept = [(k, parent.g) for k, parent in zip(parent_argnums, parents) if parent.tape is tape]
        self.g = [_along([(k, g[j]) for k, g in kept], rule, value, args, kwargs) for j in range(len(parents[0].g))]


def _along(tangents: list[tuple[int, Any]], rule: Callable, value: Array, args: tuple, kwargs: dict) -> Array:
    known = [(k, g) for k, g in tangents if g is not None]
    if not known:
        return None
    argnums, gs = zip(*known)
    return rule(argnums, gs, value, args, kwargs)


notrace_primitives[BundleNode] = notrace_primitives[JVPNode]


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

    def variable(self, x: Array, tangents: list[Any]) -> Array:
        """Return a traced array with its tangents, one per direction, None for zero tangents."""
        tape = self._tape
        return new_box(x, tape.number, BundleNode.on_tape(tape, tangents))

    def parts(self, value: Array) -> tuple[Any, list[Any] | None]:
        """Return the plain value of a result, and its tangents: one per direction, or None if all are zero."""
        while type(value) in _box_types and value._trace >= self._tape.number:
            node = value._node
            value = value._value
            if getattr(node, "tape", None) is self._tape:
                return value, node.g
        return value, None

    def run(
        self, fun: Callable[[list[Any]], Sequence[Any]], variables: Sequence[Any], tangents: Sequence[Sequence[Any]]
    ) -> tuple[list[Any], list[list[Any]]]:
        """Call a function of a list; return the results, and for each result a list with one tangent per direction."""
        out = fun([self.variable(x, list(gs)) for x, gs in zip(variables, tangents)])
        found = [self.parts(value) for value in out]
        none = [None] * len(tangents[0])
        return [value for value, _ in found], [none if gs is None else gs for _, gs in found]
