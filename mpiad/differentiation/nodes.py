"""Nodes of our traces: they note themselves on the tape in the order in which the program runs.

The type of the traced input's node decides the type of all nodes that follow, so autograd's operators and functions
make these nodes by themselves. Each looks up a rule of ours before autograd's. A node knows its parents by their place
on the tape, not by reference: what outlives the trace (a loss kept in a list) holds no part of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autograd.core import JVPNode, VJPNode, primitive_jvps, primitive_vjps
from autograd.tracer import notrace_primitives

from mpiad.differentiation.rules import JVP_RULES, VJP_RULES
from mpiad.differentiation.rules.transposition import tangent_by_transposition
from mpiad.transport import Spec

__all__ = ["OrderedNode", "TangentNode"]


class OrderedNode(VJPNode):
    """A step of a program that is to be run backwards.

    Attributes
    ----------
    tape : OrderedTape
    index : int
        Place on the tape; -1 for a node of an ended trace, whose value is a constant.
    parents : tuple of int
        Places of its traced inputs.
    vjp : callable or None
        None for the variables.
    like : Spec or None
        None for local steps; for a communication the shape and dtype of its result (`Spec(None, None)` where it has
        none). It is visited always.
    """

    __slots__ = ("index", "like", "tape")

    def __init__(self, value: Any, fun: Any, args: Any, kwargs: Any, parent_argnums: Any, parents: Sequence[Any]):
        tape = parents[0].tape
        record = tape.record
        # The ways are kept apart for speed: one node is made for each operation of the user's.
        if len(parents) == 1:
            if record is None:
                self._end()
                return
            self.parents = (parents[0].index,)
        elif record is not None and _all_on(tape, parents):
            self.parents = tuple([parent.index for parent in parents])
        else:
            # A value that outlived its own trace has met one of this trace: the first is a constant.
            kept = [(argnum, p) for argnum, p in zip(parent_argnums, parents) if p.tape.record is not None]
            if not kept:
                self._end()
                return
            parent_argnums = tuple([argnum for argnum, _ in kept])
            tape, record = kept[0][1].tape, kept[0][1].tape.record
            self.parents = tuple([parent.index for _, parent in kept])
        # Made now and not in the reverse pass, so that an error shows the user's own line.
        rule = VJP_RULES.get(fun)
        if rule is None:
            rule = primitive_vjps.get(fun)
            if rule is None:
                raise NotImplementedError(f"the adjoint of {_name(fun)} for argument {parent_argnums} isn't defined")
        self.vjp = rule(parent_argnums, value, args, kwargs)
        self.tape, self.like, self.index = tape, None, len(record)
        record.append(self)

    def _end(self) -> None:
        self.tape, self.like, self.index, self.parents, self.vjp = _ENDED, None, -1, (), None

    @classmethod
    def variable(cls, tape: Any) -> OrderedNode:
        """Make the node of a variable: the start of the tape."""
        return cls.placed(tape, (), None, None)

    @classmethod
    def placed(cls, tape: Any, parents: tuple[int, ...], vjp: Any, like: Spec | None) -> OrderedNode:
        """Make a node and note it on the tape."""
        node = cls.__new__(cls)
        node.tape, node.parents, node.vjp, node.like = tape, parents, vjp, like
        node.index = len(tape.record)
        tape.record.append(node)
        return node


def _all_on(tape: Any, parents: Sequence[Any]) -> bool:
    for parent in parents:
        if parent.tape is not tape:
            return False
    return True


def _name(fun: Any) -> str:
    return getattr(fun, "__name__", repr(fun))


class _Ended:
    """The tape of what outlived its trace."""

    __slots__ = ()
    record = None


_ENDED = _Ended()


class TangentNode(JVPNode):
    """A step of a program whose tangent is computed beside it."""

    __slots__ = ("tape",)

    def __init__(self, value: Any, fun: Any, args: Any, kwargs: Any, parent_argnums: Any, parents: Sequence[Any]):
        tape = parents[0].tape
        if tape.record is None or not _all_on(tape, parents):
            kept = [(argnum, p) for argnum, p in zip(parent_argnums, parents) if p.tape.record is not None]
            if not kept:
                self.tape, self.g = _ENDED, None
                return
            parent_argnums, parents = tuple([argnum for argnum, _ in kept]), [parent for _, parent in kept]
            tape = parents[0].tape
        tangents = [parent.g for parent in parents]
        rule = JVP_RULES.get(fun) or primitive_jvps.get(fun)
        if rule is not None:
            self.g = rule(parent_argnums, tangents, value, args, kwargs)
        elif fun in primitive_vjps and hasattr(value, "dtype"):
            self.g = tangent_by_transposition(primitive_vjps[fun], parent_argnums, tangents, value, args, kwargs)
        else:
            raise NotImplementedError(f"the tangent of {_name(fun)} for argument {parent_argnums} isn't defined")
        self.tape = tape

    @classmethod
    def placed(cls, tape: Any, tangent: Any) -> TangentNode:
        """Make a node with a tangent that is known."""
        node = cls.__new__(cls)
        node.tape, node.g = tape, tangent
        return node


# What carries no derivative (comparisons, rounding) isn't recorded here either.
notrace_primitives[OrderedNode] = notrace_primitives[VJPNode]
notrace_primitives[TangentNode] = notrace_primitives[JVPNode]
