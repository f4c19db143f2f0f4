"""Nodes of mpiad's traces, which append themselves to the tape in execution order.

Autograd creates the node of an operation's result, with the type of the first traced input's node. A node uses mpiad's rule
for the function, or else autograd's. It refers to its inputs by their positions on the tape: otherwise a value that exists
after the trace would keep the whole record in memory.

When a trace has ended, its values are constants. But a later trace may have the same number, and an operation may then have
inputs from both traces. Therefore the nodes of a trace become `DetachedNode` at its end. The constructor of this type
creates a node of the type of an input that is still traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from autograd.core import VJPNode, primitive_vjps
from autograd.tracer import notrace_primitives

from mpiad._typing import Array, Function
from mpiad.differentiation.advice import itself, refuse_pickling
from mpiad.differentiation.rules import VJP_RULES
from mpiad.differentiation.rules.protocol import inherited_vjp, refusal
from mpiad.transport import Spec


class OrderedNode(VJPNode):
    """A step of a program in reverse mode.

    - `index`, `inputs`: positions of the node and of its traced inputs on the tape. (`parents` is for plain autograd.)
    - `pull`: the function that maps the node's cotangent to the cotangents of its inputs; None for variables.
    - `like`: the spec of the result of a communication (`Spec(None, None)` if it isn't an array); None for local steps.
    """

    __slots__ = ("index", "inputs", "like", "pull", "tape")
    parents: Any = ()
    __reduce_ex__, __deepcopy__ = refuse_pickling, itself

    def __init__(
        self, value: Array, fun: Function, args: tuple, kwargs: dict, parent_argnums: tuple, parents: Sequence[Any]
    ):
        tape = parents[0].tape
        if len(parents) == 1:
            self.inputs = (parents[0].index,)
        else:
            if not all_on(tape, parents):
                parent_argnums, parents = still_traced(parent_argnums, parents)
            self.inputs = tuple([parent.index for parent in parents])
        rule = VJP_RULES.get(fun)
        if rule is not None:
            self.pull = rule(parent_argnums, value, args, kwargs)
        elif fun in primitive_vjps:
            self.pull = inherited_vjp(fun, parent_argnums, value, args, kwargs)
        else:
            raise refusal(fun, f"with respect to argument {parent_argnums}: it has no adjoint")
        record = tape.record
        self.tape, self.like, self.index = tape, None, len(record)
        record.append(self)

    @staticmethod
    def vjp(g: Array) -> tuple:
        """Return no cotangents; plain autograd calls this for a value whose trace has ended."""
        return ()

    @classmethod
    def on_tape(
        cls, tape: Any, inputs: tuple[int, ...] = (), pull: Function | None = None, like: Spec | None = None
    ) -> OrderedNode:
        """Make a node, by default the node of a variable, and append it to the tape."""
        node = cls.__new__(cls)
        node.tape, node.inputs, node.pull, node.like = tape, inputs, pull, like
        node.index = len(tape.record)
        tape.record.append(node)
        return node


def all_on(tape: object, parents: Sequence[Any]) -> bool:
    """Return whether all nodes are on this tape."""
    for parent in parents:
        if parent.tape is not tape:
            return False
    return True


def still_traced(argnums: Sequence[int], parents: Sequence[Any]) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """Return argument numbers and nodes of those inputs whose traces haven't ended."""
    active = [k for k, parent in enumerate(parents) if getattr(parent, "tape", _OPEN).record is not None]
    return tuple([argnums[k] for k in active]), tuple([parents[k] for k in active])


# Substitutes for the tape: `_ENDED` for an ended trace, `_OPEN` for plain autograd, whose traces have no tape.
_ENDED, _OPEN = SimpleNamespace(record=None), SimpleNamespace(record=())


class DetachedNode(OrderedNode):
    """A node of an ended trace; the constructor makes a node of the type of an input that is still traced."""

    __slots__ = ()

    def __new__(cls, value: Array, fun: Function, args: tuple, kwargs: dict, parent_argnums: tuple, parents: Any) -> Any:
        """Make a node of the type of the first input that is still traced; return `_CONSTANT` if no input is."""
        parent_argnums, parents = still_traced(parent_argnums, parents)
        if parents:
            return type(parents[0])(value, fun, args, kwargs, parent_argnums, parents)
        return _CONSTANT

    def __init__(self, *args: Any):
        """Do nothing; Python calls this method also for `_CONSTANT`."""


_CONSTANT: Any = object.__new__(DetachedNode)
_CONSTANT.tape = _ENDED


# As in autograd, functions without a derivative (comparisons, rounding) aren't recorded.
notrace_primitives[OrderedNode] = notrace_primitives[VJPNode]
notrace_primitives[DetachedNode] = notrace_primitives[VJPNode]
