"""Recording of communication on tapes, whether or not its input is traced.

The reverse pass of plain autograd visits only steps on which the loss depends. A rank whose loss doesn't use the array that
it sent would then never receive the cotangent, and its partner would hang. So each trace of mpiad has a tape that is
*current* while the function runs, and every communication is recorded on it. In nested traces an operation is recorded on
the innermost tape, and its value is computed with the next outer tape as the current one; this repeats until all arrays
are plain. Adjoints and tangents consist of the same operations, so derivatives of higher order need no further rules.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from types import NotImplementedType, TracebackType
from typing import Any, Protocol, TypeVar

import numpy as np
from autograd.core import JVPNode, VJPNode, primitive_jvps, primitive_vjps
from autograd.tracer import Box, Node, getval, new_box

from mpiad._typing import Array, Shape
from mpiad.primitives.cotangents import conform, spec_like, tangent_of
from mpiad.primitives.foreign import checked_adjoint, raise_for_foreign
from mpiad.transport import Channel, Envelope, Spec
from mpiad.transport.core import calls
from mpiad.transport.core.agreement import mark_left
from mpiad.transport.core.buffers import outgoing
from mpiad.transport.core.calls import Arguments, Call, Site
from mpiad.transport.core.channels import Used, communications
from mpiad.transport.core.collectives import name_of
from mpiad.transport.core.messages import Prepared
from mpiad.transport.core.tracing import restoring_state, tracing
from mpiad.transport.devices.device_arrays import is_device_array
from mpiad.transport.exits.recovery import interruptible

_box_types = Box.types
T = TypeVar("T")


class Tape(Protocol):
    """The attributes and methods of a tape that operations use."""

    number: int  # number of its trace; inner traces have higher numbers
    outer: Tape | None  # the tape that was current before
    channels: set[Used]  # channels on which the trace has communicated
    requests: dict[int, Any]  # requests started and not yet waited for, by identity
    # Whether the tape records a reverse pass (a vector-Jacobian product) whose only variable is the cotangent.
    of_cotangents: bool
    # The reverse passes over the record. "one": one, immediately after the trace. "several": any number, by the library.
    # "together": several, which run together, by the library. "kept": any number, by the user, with any cotangents.
    # "recorded": like "kept", and a pass may be recorded.
    passes: str
    # Whether it also records communications whose results have no derivatives.
    records_constants: bool
    # Whether compiled functions and checkpointed loops run as plain ones, so that the tape records their operations.
    unfolds: bool

    def communicated(
        self, operator: Recorded, ans: Array, args: tuple, params: object, argnums: Sequence[int], parents: Sequence[Node]
    ) -> Node | None:
        """Record a communication; return its node, or None if the result isn't an array or has no derivatives."""


class VectorizedVjp(partial):
    """An adjoint that takes several cotangents, stacked along a first axis, and returns as many for each argument."""


class StackedVjp:
    """The adjoint of a local operation, ``pull(g)``, and ``pull_several(gs)`` for several cotangents, as `VectorizedVjp`.

    `like`: the spec of a cotangent.
    """

    __slots__ = ("_pull", "like", "pull_several")

    def __init__(
        self, pull: Callable[[Array], Sequence[Array]], pull_several: Callable[[Array], Sequence[Array]], like: Spec
    ):
        self._pull, self.pull_several, self.like = pull, pull_several, like

    def __call__(self, g: Array) -> Sequence[Array]:
        """Return the cotangents of the inputs."""
        return self._pull(g)


class BatchedVjp:
    """An adjoint for one lane, ``pull(g)``, and for n lanes at once, ``pull_all(n)``, None if each must run alone."""

    __slots__ = ("_pull", "pull_all")

    def __init__(
        self, pull: Callable[[Array], Sequence[Array]], pull_all: Callable[[int], Sequence[Sequence[Array]] | None]
    ):
        self._pull, self.pull_all = pull, pull_all

    def __call__(self, g: Array) -> Sequence[Array]:
        """Return the cotangents of the inputs."""
        return self._pull(g)


class suspended:
    """A context that replaces the current tape, by None by default, while a function runs that is one node of the tape."""

    __slots__ = ("_is_body", "_is_operator", "_outer_channels", "_outer_tape", "_tape")

    def __init__(self, tape: Tape | None = None, body: bool = True, operator: bool = False):
        # `body`: whether the function is the body of a node, which ends the recording of a compiled program.
        # `operator`: whether it is a user's function, which may raise on some ranks only.
        self._tape, self._is_body, self._is_operator = tape, body, operator

    def __enter__(self) -> None:
        if self._is_body and tracing.recorder is not None:
            tracing.recorder.entered_body()
        # The new set collects the channels of messages that no tape records.
        self._outer_tape, self._outer_channels = tracing.tape, tracing.channels
        tracing.tape, tracing.channels = self._tape, set()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        used = tracing.channels
        tracing.tape, tracing.channels = self._outer_tape, self._outer_channels
        if used and error is not None:
            mark_left([each for each in used if self._is_operator or each[1]], error, "an operator")
        outer = self._outer_channels if self._outer_tape is None else self._outer_tape.channels
        if used and outer is not None:
            outer.update([(channel, False) for channel, _ in used])  # the body has completed its messages


# Recording of calls, with the user's lines, for debugging tools (see `transport.core.calls`). Functions are replaced while
# recording is on, so there is no overhead while it is off.


def recorded_call(begin: Callable[..., Call], arguments: tuple, fun: Callable[..., T], *args: object) -> T:
    """Return ``fun(*args)``, and record the call, which ``begin(*arguments)`` describes."""
    with restoring_state():
        call = begin(*arguments)
        try:
            return fun(*args)
        finally:
            calls.end(call)


def note_rules(kind: type[Recorded]) -> None:
    """Make adjoints and tangents of a class of operations record their calls, with the forward call's line, on request."""
    vjp, jvp = bare = kind.vjp, kind.jvp

    def noted_vjp(self: Recorded, ans: Array, args: tuple, params: object, argnums: Sequence[int], level: int) -> Callable:
        rule = vjp(self, ans, args, params, argnums, level)
        # The forward call is on the stack now, but not when the adjoint runs.
        called, site = _forward_call(self.__name__)
        return lambda g: recorded_call(calls.begin_rule, ("adjoint", called, site, g, params), rule, g)

    def noted_jvp(self: Recorded, tangents: dict, ans: Array, args: tuple, params: object, level: int) -> Array:
        called, site = _forward_call(self.__name__)
        arguments = "tangent", called, site, args[0] if args else None, params
        return recorded_call(calls.begin_rule, arguments, jvp, self, tangents, ans, args, params, level)

    def switch(on: bool) -> None:
        kind.vjp, kind.jvp = (noted_vjp, noted_jvp) if on else bare

    calls.register(switch)


def _forward_call(name: str) -> tuple[str, Site]:
    """Return name and line of the forward call that is in progress."""
    outer = calls.current()
    if outer is not None and outer.forward_site is not None and not outer.is_operator:
        return outer.forward_name or name, outer.forward_site  # an adjoint of an adjoint has the line of the forward call
    # `site_of` skips the library's own frames.
    site = calls.site_of(sys._getframe(2))
    return site.named(name), site


def _arguments_of(x: Array, params: object) -> Arguments:
    candidates = [params, *[getattr(params, name, None) for name in _ADDRESSES]]
    envelopes = tuple([each for each in candidates if isinstance(each, Envelope)])
    address = envelopes[0] if envelopes else None
    channel = getattr(params, "channel", None) or getattr(address, "channel", None)
    if channel is None and isinstance(params, Channel):
        channel = params  # the parameters of a barrier
    label, members = getattr(channel, "label", None), getattr(channel, "members", ())
    peer, tag = getattr(address, "peer", None), getattr(address, "tag", None)
    root, op = getattr(params, "root", None), getattr(params, "op", None)
    reduction = None if op is None else name_of(op) or "user-defined"
    return Arguments(label, root, peer, tag, *_extent(x, params), reduction, members, envelopes)


_ADDRESSES = ("dest", "source", "envelope")


def _extent(x: Array, params: object) -> tuple[Shape | None, np.dtype | None, int]:
    value = getval(x)
    if isinstance(value, (np.ndarray, np.generic)) or is_device_array(value):
        return value.shape, value.dtype, value.nbytes
    if isinstance(value, (bool, int, float, complex)):
        dtype = np.result_type(value)
        return (), dtype, dtype.itemsize
    spec = getattr(params, "spec", None)
    if spec is None or spec.dtype is None:
        return None, None, 0
    return spec.shape, spec.dtype, spec.dtype.itemsize * int(np.prod(spec.shape))


Call.read = staticmethod(_arguments_of)


class Recorded:
    """A communication that is one node of a trace: an operation of the catalogue, or a user's operator.

    - `batched_adjoint`: whether the adjoint takes and returns several cotangents, along leading axes.
    - `point_to_point`: whether two ranks communicate; such operations raise under plain autograd.
    - `params`: all arguments except the arrays.
    """

    batched_adjoint = point_to_point = False

    def __init__(self, name: str):
        self.__name__ = name
        # Plain autograd looks up derivatives in these tables.
        primitive_vjps[self] = self._foreign_vjp
        primitive_jvps[self] = self._foreign_jvp

    @abstractmethod
    def run(self, args: tuple, params: Any) -> Any:
        """Return the result for plain arrays, or record the call in a compiled program."""

    @abstractmethod
    def vjp(self, ans: Array, args: tuple, params: Any, argnums: Sequence[int], level: int) -> Callable[[Array], tuple]:
        """Return the function that maps the cotangent of the result to the cotangents of the arguments `argnums`."""
        ...

    @abstractmethod
    def jvp(self, tangents: dict[int, Array], ans: Array, args: tuple, params: Any, level: int) -> Array:
        """Return the tangent of the result."""

    def _foreign_vjp(self, argnums: Sequence[int], ans: Array, args: tuple, kwargs: dict) -> Callable:
        if self.point_to_point:
            raise_for_foreign(self.__name__)
        # Autograd passes cotangents of any dtype and in any order, but all ranks must send one dtype, and an adjoint that
        # runs too early must raise.
        vjp, spec = self.vjp(ans, args, kwargs["params"], argnums, kwargs["level"]), spec_like(ans)
        return checked_adjoint(lambda g: vjp(conform(g, *spec)), self.__name__, kwargs["level"])

    def _foreign_jvp(self, argnums: Sequence[int], gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
        return self.jvp(dict(zip(argnums, gs)), ans, args, kwargs["params"], kwargs["level"])


class Operation(Recorded):
    """A communication of one array: declared in `catalogue`, defined in the file of its public function.

    - `of_request`: whether the operation starts or completes a request; its rules also take the number of the trace.
    - `prepared`: ``prepared(params, x, out)`` returns None, or, for programs that run repeatedly, the communication from
      array x into array out (None if there is none), whose calls aren't reported to debugging tools. For the start of a
      receive, it is the receive, which is called in place of the wait.
    - `forward`: the forward rule, which reports its calls to debugging tools, while they ask for it.
    - `abstract`: ``abstract(x, params)`` returns the `Spec` of the result, or a result that isn't an array, without
      communication; NotImplemented if only a run can tell it. Arrays are passed for their shapes and dtypes.
    """

    forward: Callable

    def __init__(self, name: str, point_to_point: bool = False, of_request: bool = False, batched_adjoint: bool = False):
        super().__init__(name)
        self.point_to_point, self.of_request, self.batched_adjoint = point_to_point, of_request, batched_adjoint
        self.prepared: Callable[[Any, Array | None, Array | None], Prepared | None] | None = None

    def define(
        self, forward: Callable, adjoint: Callable, tangent: Callable | None = None, abstract: Callable | None = None
    ) -> None:
        """Define the rules of the operation.

        ``forward(x, params) -> ans`` works on plain arrays. ``adjoint(ans, x, params) -> vjp``, and ``vjp(g)`` returns the
        cotangent of x; `g` has the shape and dtype of the result (zeros if nothing depends on it), and is None if the
        result isn't an array. ``tangent(dx, ans, x, params)`` returns the tangent of the result; `dx` has the shape and
        dtype of x (zeros if x isn't traced). The default is the rule of a linear operation: the operation applied to dx.
        For ``abstract(x, params)`` the default is the spec among the parameters.
        """
        self.adjoint, self.abstract = adjoint, abstract or _spec_among
        self.tangent = tangent or (lambda dx, ans, x, params: communicate(self, dx, params))
        forward = interruptible(self.__name__, forward)

        def noted(x: Array, params: object) -> Array:
            return recorded_call(calls.begin, (self.__name__, x, params), forward, x, params)

        def switch(on: bool) -> None:
            self.forward = noted if on else forward

        switch(False)
        calls.register(switch)

    def run(self, args: tuple, params: object) -> Any:
        """Return the result for a plain array, or record the call in a compiled program."""
        recorder = tracing.recorder
        return self.forward(args[0], params) if recorder is None else recorder.communicate(self, args[0], params)

    def vjp(self, ans: Array, args: tuple, params: object, argnums: Sequence[int], level: int) -> Callable[[Array], tuple]:
        """Return the function that maps the cotangent of the result to that of x."""
        x = args[0]
        rule = self.adjoint(ans, x, params, level) if self.of_request else self.adjoint(ans, x, params)
        return lambda g: (rule(g),)

    def jvp(self, tangents: dict[int, Array], ans: Array, args: tuple, params: object, level: int) -> Array:
        """Return the tangent of the result."""
        x = args[0]
        dx = None if x is None else tangent_of(x, tangents.get(0))
        return self.tangent(dx, ans, x, params, *((level,) if self.of_request else ()))

    def __repr__(self) -> str:
        return f"Operation({self.__name__})"


note_rules(Operation)


def _spec_among(x: Array, params: object) -> Spec | NotImplementedType:
    spec = getattr(params, "spec", None)
    return NotImplemented if spec is None else spec


def like_sent(x: Array, params: object) -> Spec:
    """Return the spec of x, the result's spec in sums over ranks."""
    return spec_like(outgoing(x, "a communication"))


def communicate(operation: Operation, x: Array, params: object) -> Any:
    """Apply an operation, and record it on the current tape and the enclosing tapes."""
    next(communications)
    tape = tracing.tape
    # The channels of point-to-point calls are recorded in `point_to_point`.
    used = tracing.channels if tape is None else tape.channels
    if used is not None and not operation.point_to_point:
        used.add((getattr(params, "channel", params), False))  # type: ignore[arg-type]
    if tape is None and type(x) not in _box_types:
        return operation.forward(x, params) if tracing.recorder is None else operation.run((x,), params)
    return apply(operation, tape, (x,), params)


def apply(operator: Recorded, tape: Tape | None, args: tuple, params: object) -> Any:
    """Apply an operator to arguments that may be traced, and record it on a tape and the enclosing tapes."""
    # Inner traces have higher numbers.
    number = level = -1 if tape is None else tape.number
    argnums: list[int] = []
    others = 0  # traced arguments of other traces
    for k, x in enumerate(args):
        if type(x) in _box_types:
            if x._trace > level:
                others += len(argnums)
                level, argnums = x._trace, [k]
            elif x._trace == level:
                argnums.append(k)
            else:
                others += 1
    if level < 0:
        return operator.run(args, params)
    # Recursion to the next outer tape until all arrays are plain. Each tape records the operation after the recursive call.
    inner, parents = list(args), []
    for k in argnums:
        parents.append(args[k]._node)
        inner[k] = value = args[k]._value
        others += type(value) in _box_types
    args = tuple(inner)
    if tape is None or level > number:
        return _apply_above(operator, tape, args, params, argnums, parents, level)
    # Most calls end here: all arrays are plain, and there is no outer tape.
    ans = apply(operator, tape.outer, args, params) if others or tape.outer is not None else operator.run(args, params)
    if not (differentiable(ans) or tape.records_constants):
        return ans
    node = tape.communicated(operator, ans, args, params, argnums, parents)
    return ans if node is None else new_box(ans, number, node)


def _apply_above(
    operator: Recorded, tape: Tape | None, args: tuple, params: object, argnums: list[int], parents: list[Node], level: int
) -> Any:
    """Apply an operator to values of a trace with a higher number: a trace of plain autograd, or an ended trace of ours."""
    for parent in parents:
        refuse_suspended(parent, operator.__name__)
    ans = apply(operator, tape, args, params)
    node_type, is_array = type(parents[0]), hasattr(ans, "dtype")
    # Values of an ended trace are constants. In plain autograd, making the node of a point-to-point operation raises.
    if node_type not in (VJPNode, JVPNode) or not (is_array or operator.point_to_point) or not differentiable(ans):
        return ans
    node = node_type(ans, operator, args, {"params": params, "level": level}, argnums, parents)
    return new_box(ans, level, node) if is_array else ans


def refuse_suspended(node: object, call: str) -> None:
    """Raise a TypeError for a traced value whose trace is suspended or belongs to another thread."""
    tape = getattr(node, "tape", None)
    if tape is not None and tape.record is not None:
        opened = tracing.tapes
        while opened is not None and opened is not tape:
            opened = opened.around
        if opened is None:
            raise TypeError(
                f"{call}: got a traced value in another thread than the traced function, so its derivative would be lost. "
                "Communicate in the thread of the traced function; mpiad.stop_gradient(x) gives the plain value."
            )
        raise TypeError(
            f"{call}: got a traced value inside the body of an operator (a solve, a scan with checkpoints, or a function "
            "made by mpiad.extend.custom_operator), so its derivative would be lost. Pass it to the operator as an "
            "argument, to scan among the params; mpiad.stop_gradient(x) gives its plain value if no derivative is needed."
        )


def differentiable(ans: Array) -> bool:
    """Return whether a result has derivatives: False for an array of integers, or a request for such an array."""
    dtype = getattr(ans, "dtype", None)
    if dtype is None:
        spec = getattr(ans, "spec", None)
        return spec is None or spec.differentiable
    return dtype.kind in "fc"
