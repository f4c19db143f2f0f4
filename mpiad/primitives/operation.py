"""How a communication is recorded: always, whether or not its input is traced.

A define-by-run tape visits only what the loss depends on. A rank whose loss doesn't use what it sent would then never
receive the cotangent that comes back, and its partner would hang. So each trace of ours has a tape that is *current*
while the function runs, and every communication is recorded on it, with its traced input as parent where it has one.
Tapes are nested like traces: an operation records itself on the innermost tape, computes its value with the next outer
one, and so on down to plain arrays. Its adjoint and tangent are made of the same operations, and so are recorded by
whatever tape is current when they run: higher orders need no further rule.

`Operation` is one kind of communication; `communicate` applies it. The tapes themselves live in `differentiation`; here
is only what an operation must know of them: `number`, `outer` and `communicated`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

from autograd.core import JVPNode, VJPNode, primitive_jvps, primitive_vjps
from autograd.tracer import Box, new_box

from mpiad._typing import Array
from mpiad.primitives.cotangents import conform, spec_like, tangent_of
from mpiad.primitives.foreign import checked_adjoint, raise_for_foreign
from mpiad.primitives.noting import apply_to
from mpiad.transport import Channel
from mpiad.transport.channels import communications, operator_body
from mpiad.transport.recovery import interruptible
from mpiad.transport.tracing import tracing

__all__ = [
    "Abreast", "Operation", "Tape", "Together", "communicate", "current", "differentiable", "refuse_suspended", "run",
    "suspended",
]  # fmt: skip

_box_types = Box.types
_NO_PARENTS: tuple = ((), ())


class Tape(Protocol):
    """What an operation needs of a tape."""

    number: int  # that of its trace; the inner of two has the higher
    outer: Tape | None  # the one that was current before
    channels: set[Channel]  # those with point-to-point messages, which an exception can leave unfinished
    requests: dict[int, Any]  # what was started and not yet waited for, by identity
    # Whether it records a product with a transposed Jacobian whose only variable, on every rank, is the cotangent: what the
    # Jacobian depends on is constant.
    of_cotangents: bool
    # How it is run backwards, "one", "several", "kept" or "recorded": once, right after it has ended; as often as whoever
    # has made it knows; by a user, with cotangents of any kind; or by a user, on a tape of products with its transpose.
    passes: str

    def communicated(
        self, operation: Operation, ans: Array, x: Array, params: object, argnums: tuple[int, ...],
        parents: tuple[Any, ...],
    ) -> Any:  # fmt: skip
        """Record a communication and return its node, None where its result isn't an array."""


class _Current(threading.local):
    """The current tape, and which of several reverse passes side by side is under way."""

    tape: Tape | None = None
    lane = 0


current = _Current()


class Together:
    """An adjoint that takes several cotangents at once, along a first axis, and returns as many for each argument."""

    __slots__ = ("_pull",)

    def __init__(self, pull: Callable[[Array], tuple]):
        self._pull = pull

    def __call__(self, g: Array) -> tuple:
        """Return the cotangents of the arguments."""
        return self._pull(g)


class Abreast:
    """A step that communicates several times backwards, and so has the cotangents of all lanes before it is run.

    Parameters
    ----------
    pull : callable
        For one cotangent: as of any other node.
    pull_all : callable
        From the number of lanes to the cotangents of the inputs for each.
    """

    __slots__ = ("_pull", "pull_all")

    def __init__(self, pull: Callable[[Array], Sequence[Any]], pull_all: Callable[[int], Sequence[Sequence[Any]]]):
        self._pull, self.pull_all = pull, pull_all

    def __call__(self, g: Array) -> Sequence[Any]:
        """Return the cotangents of the inputs."""
        return self._pull(g)


class suspended:
    """A context in which the current tape is another one: none, where an operation's body is one node."""

    __slots__ = ("_body", "_is_body", "_kept", "_tape")

    def __init__(self, tape: Tape | None = None, body: bool = True):
        self._tape, self._is_body = tape, body

    def __enter__(self) -> None:
        if self._is_body and tracing.recorder is not None:
            tracing.recorder.entered_body()
        # A set of its own for the channels of messages, which no tape notes meanwhile.
        self._kept, self._body = current.tape, operator_body.channels
        current.tape, operator_body.channels = self._tape, set()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            for channel in operator_body.channels or ():
                channel.mark(f"{kind.__name__} left an operator in which messages were under way.")
        current.tape, operator_body.channels = self._kept, self._body


class Operation:
    """One kind of communication: made in `catalogue`, defined in the file of its public function.

    - `name`: the public function that applies it.
    - `point_to_point`: whether only two ranks take part: refused under plain autograd.
    - `halves`: whether it is the start or the wait of a request, whose rules also take the number of the trace.
    - `prepared`: ``prepared(params, x, out)`` returns the same communication of an array that stays, into one that
      stays, as a function without arguments, for programs that run again and again; None where it can't be had. It
      isn't noted.
    - `several`: whether the adjoint takes several cotangents along a first axis, and returns as many.
    """

    def __init__(self, name: str, point_to_point: bool = False, halves: bool = False, several: bool = False):
        self.__name__, self.point_to_point, self.halves, self.several = name, point_to_point, halves, several
        self.prepared: Callable[[Any, Array, Array], Callable[[], object] | None] | None = None

    def define(self, forward: Callable, adjoint: Callable, tangent: Callable | None = None) -> None:
        """Say what the operation does.

        ``forward(x, params) -> ans`` works on plain arrays. ``adjoint(ans, x, params) -> vjp``, and ``vjp(g)`` returns the
        cotangent of x; `g` has the shape and dtype of the result (zeros, where nothing depends on it), and is None where
        the result isn't an array. ``tangent(dx, ans, x, params)`` returns the tangent of the result; `dx` has the shape and
        dtype of x (zeros, where x isn't traced). By default the operation is linear: the same of dx.
        """
        if tangent is None:
            tangent = lambda dx, ans, x, params: communicate(self, dx, params)  # noqa: E731
        forward = interruptible(self.__name__, forward)
        self.forward, self.adjoint, self.tangent = self.bare = (forward, adjoint, tangent)
        apply_to(self)
        # Plain autograd looks its operations up in tables of its own.
        primitive_vjps[self] = self._foreign_vjp
        primitive_jvps[self] = self._foreign_jvp

    def vjp(self, ans: Array, x: Array, params: object, argnums: tuple[int, ...], level: int) -> Callable:
        """Return the function that maps the cotangent of the result to those of its traced inputs: here, to x's."""
        rule = self.adjoint(ans, x, params, level) if self.halves else self.adjoint(ans, x, params)
        return lambda g: (rule(g),)

    def jvp(self, tangents: dict[int, Any], ans: Array, x: Array, params: object, level: int) -> Any:
        """Return the tangent of the result."""
        dx = None if x is None else tangent_of(x, tangents.get(0))
        return self.tangent(dx, ans, x, params, level) if self.halves else self.tangent(dx, ans, x, params)

    def _foreign_vjp(self, argnums: tuple, ans: Array, args: tuple, kwargs: dict) -> Callable:
        if self.point_to_point:
            raise_for_foreign(self.__name__)
        # Autograd hands on cotangents of any dtype, but what is communicated must be alike on all ranks.
        rule, spec = self.adjoint(ans, args[0], kwargs["params"]), spec_like(ans)
        return checked_adjoint(lambda g: (rule(conform(g, *spec)),), self.__name__, kwargs["level"])

    def _foreign_jvp(self, argnums: tuple, gs: list, ans: Array, args: tuple, kwargs: dict) -> Any:
        return self.jvp({0: gs[0]}, ans, args[0], kwargs["params"], kwargs["level"])

    def __repr__(self) -> str:
        return f"Operation({self.__name__})"


def run(operation: Operation, x: Array, params: object) -> Any:
    """Run an operation on plain arrays: no tape records it, but a compiled program's trace does."""
    recorder = tracing.recorder
    return operation.forward(x, params) if recorder is None else recorder.communicate(operation, x, params)


def communicate(operation: Operation, x: Array, params: object) -> Any:
    """Apply an operation, recorded on the current tape and on those around it."""
    next(communications)
    tape = current.tape
    # Outside of all traces nothing is recorded: a test or two are all that is paid.
    if tape is None and type(x) not in _box_types:
        return run(operation, x, params)
    return _apply(operation, tape, x, params)


def _apply(operation: Operation, tape: Tape | None, x: Array, params: object) -> Any:
    # Numbers of traces say who is inside whom: the higher one is the inner.
    number = -1 if tape is None else tape.number
    level = x._trace if type(x) in _box_types else -1
    if level > number:
        return _apply_above(operation, tape, x, params)
    if tape is None:
        return run(operation, x, params)
    # One level down, with the next outer tape, until the arrays are plain; then recorded on the way back.
    inner, parents = (x._value, ((0,), (x._node,))) if level == number else (x, _NO_PARENTS)
    ans = _apply(operation, tape.outer, inner, params)
    if not differentiable(ans):
        return ans
    node = tape.communicated(operation, ans, inner, params, *parents)
    return ans if node is None else new_box(ans, number, node)


def _apply_above(operation: Operation, tape: Tape | None, x: Array, params: object) -> Any:
    """Apply to a value of a trace inside the current tape: plain autograd's, or an ended one of ours (a constant)."""
    refuse_suspended(x._node, operation.__name__)
    ans = _apply(operation, tape, x._value, params)
    node_type = type(x._node)
    # Of an ended trace of ours: what was traced there is constant.
    if node_type is not VJPNode and node_type is not JVPNode:
        return ans
    if not differentiable(ans):
        return ans
    node = node_type(ans, operation, (x._value,), {"params": params, "level": x._trace}, (0,), (x._node,))
    return new_box(ans, x._trace, node) if hasattr(ans, "dtype") else ans


def refuse_suspended(node: object, call: str) -> None:
    """Raise a TypeError for a value of a trace that goes on outside the body of an operator, where it was used."""
    tape = getattr(node, "tape", None)
    if tape is not None and tape.record is not None:
        raise TypeError(
            f"{call}: got a traced value inside the body of an operator that is one node (a solve, or a function made by "
            "mpiad.extend.communicating), so its derivative would be lost. Pass it to the operator as an argument; "
            "mpiad.stop(x) gives its plain value where no derivative is wanted."
        )


def differentiable(ans: Array) -> bool:
    """Tell whether a result is recorded."""
    # What is no array (a request, the None of a barrier) is recorded too; integers aren't, nor requests for them.
    dtype = getattr(ans, "dtype", None)
    if dtype is None:
        spec = getattr(ans, "spec", None)
        return spec is None or spec.differentiable
    return dtype.kind in "fc"
