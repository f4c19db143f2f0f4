"""Runs of a program on a tape that shows each operation, with its value, to a visitor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from autograd.tracer import notrace_primitives

from mpiad._typing import Argnum, Array, Function, Tree
from mpiad.differentiation.rules import VJP_RULES
from mpiad.differentiation.rules.protocol import Primitive, inherited_vjp
from mpiad.differentiation.tape import OrderedNode, OrderedTape, Parents, trace_list
from mpiad.differentiation.trace import Traced, Variables, arguments_with, unfinished
from mpiad.primitives.operation import Recorded
from mpiad.pytrees import flatten
from mpiad.transport.core import calls


def argument(x: Array) -> Array:
    """Return x: the operation of the nodes of variables."""
    return x


class Call(NamedTuple):
    """A call of an operation: of NumPy with keywords as `params`, or a communication with its parameters."""

    fun: Primitive | Recorded
    args: tuple = ()
    params: Any = None
    argnums: Sequence[int] = ()

    @property
    def name(self) -> str:
        """The name of the operation."""
        return getattr(self.fun, "__name__", "") or str(self.fun)

    @property
    def site(self) -> calls.Site:
        """The user's line, while the call is in progress."""
        return calls.site_of(sys._getframe(1))

    @property
    def is_separable(self) -> bool:
        """Whether the operation can be executed alone, without the other operations of the program."""
        return self.fun is not argument and not getattr(self.fun, "point_to_point", False)

    def run(self, args: Sequence[Array]) -> Array:
        """Execute the operation with other arguments."""
        if isinstance(self.fun, Recorded):
            return self.fun.run(tuple(args), self.params)
        return self.fun(*args, **self.params)

    def pull(self, ans: Array) -> Function:
        """Return the function that maps the cotangent of the result to those of the traced arguments."""
        argnums = tuple(self.argnums)
        if isinstance(self.fun, Recorded):
            return self.fun.vjp(ans, self.args, self.params, argnums, -1)
        rule = VJP_RULES.get(self.fun)
        if rule is not None:
            return rule(argnums, ans, self.args, self.params)
        return inherited_vjp(self.fun, argnums, ans, self.args, self.params)


Visit: TypeAlias = Callable[[int, Array, Call], None]
"""``visit(index, value, call)`` is called for each node of a tape, with its index on the tape."""


class _WatchedNode(OrderedNode):
    """A node of a `_WatchedTape`."""

    __slots__ = ()

    def __init__(self, value: Array, fun: Function, args: tuple, kwargs: dict, parent_argnums: tuple, parents: Parents):
        tape = parents[0].tape
        super().__init__(value, fun, args, kwargs, parent_argnums, parents)
        tape.watch(self, value, Call(fun, args, kwargs, tape.traced(parent_argnums, parents)))


notrace_primitives[_WatchedNode] = notrace_primitives[OrderedNode]


class _WatchedTape(OrderedTape):
    """A tape that calls `visit` for each node; `keeps_adjoints`: for a reverse pass.

    Since it unfolds compiled functions and checkpointed loops, all nodes are variables, operations and communications.
    """

    unfolds = True

    def __init__(self, visit: Visit, keeps_adjoints: bool) -> None:
        super().__init__()
        self.visit, self.keeps_adjoints = visit, keeps_adjoints

    def watch(self, node: OrderedNode, value: Array, call: Call) -> None:
        """Visit a node, and make the nodes of operations that read its value visited ones."""
        node.__class__ = _WatchedNode
        if not self.keeps_adjoints:
            node.pull = None  # type: ignore[assignment]  # frees the values that the adjoint holds
        self.visit(node.index, value, call)

    def traced(self, argnums: Sequence[int], parents: Parents) -> list[int]:
        """Return the positions of the arguments that are values of this trace."""
        return [k for k, parent in zip(argnums, parents) if parent.tape is self]

    def communicated(
        self, operator: Recorded, ans: Array, args: tuple, params: object, argnums: Sequence[int], parents: Parents
    ) -> OrderedNode | None:
        """Record a communication."""
        node = super().communicated(operator, ans, args, params, argnums, parents)
        self.watch(self.record[-1], ans, Call(operator, args, params, self.traced(argnums, parents)))
        return node


class Program(NamedTuple):
    """The function, its arguments and its variables."""

    fun: Function
    args: tuple
    argnum: Argnum
    variables: Variables

    @property
    def x(self) -> list[Array]:
        """The values of the variables."""
        return [self.variables.leaves[place] for place in self.variables.places]

    def run(self, x: Sequence[Array], visit: Visit, keeps_adjoints: bool = False) -> Traced:
        """Run the function on a tape, at a point x."""
        tape, builds = _WatchedTape(visit, keeps_adjoints), list[Callable[[list[Array]], Tree]]()

        def called(boxes: list[Array]) -> list[Array]:
            for node, value in zip(list(tape.record), x):
                tape.watch(node, value, Call(argument))
            leaves, build = flatten(self.fun(*arguments_with(self.args, self.argnum, self.variables.filled(boxes))))
            builds.append(build)
            return leaves

        with np.errstate(all="ignore"):
            values, places, recording = trace_list(called, x, tape)
        return Traced(values, places, builds[0], recording, unfinished(tape))
