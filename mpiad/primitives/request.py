"""Requests: started communications, and the state that their adjoints and tangents share.

A request is a plain object; start and wait are each recorded on the tape by themselves. Backwards the wait comes first:
its adjoint starts the message that carries the cotangent, and the adjoint of the start completes it, so that the
message travels while the reverse pass computes. The state that they share is in a `Cell`, one for each nested
trace, since each has a reverse pass of its own.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from mpiad._typing import Array
from mpiad.errors import RequestError
from mpiad.transport import Channel, Envelope, Spec
from mpiad.transport.tracing import tracing


def _by_lane(name: str, doc: str) -> Any:
    """Return a property with a separate value in each lane, None at first."""
    return property(
        lambda cell: cell.left.get((name, tracing.lane)),
        lambda cell, value: cell.left.__setitem__((name, tracing.lane), value),
        doc=doc,
    )


class Cell:
    """The state shared by the adjoint (or tangent) of a wait and that of its start, in each lane."""

    __slots__ = ("left",)
    cotangent = _by_lane("cotangent", "What has come to the wait.")
    request = _by_lane("request", "What is under way.")

    def __init__(self) -> None:
        self.left: dict[tuple[str, int], Any] = {}


class Request:
    """Communication under way, completed by `mpi_wait`.

    Attributes
    ----------
    call : str
        The function that started it.
    value : array or None
        The array sent, or the buffer that is being filled.
    """

    __slots__ = ("call", "cells", "channel", "done", "envelope", "handle", "spec", "tape", "value")

    def __init__(
        self, call: str, channel: Channel | None, handle: object, value: Array, spec: Spec, envelope: Envelope | None = None
    ):
        self.call, self.channel, self.handle, self.value, self.spec = call, channel, handle, value, spec
        self.envelope = envelope
        self.done = False
        self.tape: Any = None
        self.cells: dict[int, Cell] = {}

    def cell(self, level: int) -> Cell:
        """Return the state that start and wait share in the trace of that number."""
        # By the number of the trace: in nested ones the same request has an adjoint, or a tangent, in each.
        return self.cells.setdefault(level, Cell())

    def again(self) -> Request:
        """Return the request as it was started, for a function that runs once more; ended ones aren't waited for again."""
        made = copy(self)
        made.done, made.tape, made.cells = False, None, {}
        return made

    def __repr__(self) -> str:
        partner = "" if self.envelope is None else f", peer {self.envelope.peer}, tag {self.envelope.tag}"
        state = "done" if self.done else "under way"
        return f"<{self.call} of shape {self.spec.shape}, dtype {self.spec.dtype}{partner}: {state}>"


def started(request: Request) -> Request:
    """Note a request of the user's on the current trace, which must not end before it is waited for."""
    request.tape = tracing.tape
    if request.tape is not None:
        # Until it is waited for: a trace that ends before has lost an adjoint.
        request.tape.requests[id(request)] = request
    return request


def claim(request: object, call: str) -> Request:
    """Take a request off its trace before it is completed.

    A TypeError if it isn't one of this library's; a RequestError if it was waited for before, or was started in
    another trace.
    """
    if not isinstance(request, Request):
        raise TypeError(
            f"{call}: expected a request of mpi_isend, mpi_irecv or mpi_iallreduce, but got {type(request).__name__}."
        )
    if request.done:
        raise RequestError(f"{call}: {request!r} was waited for before. Wait for each request once, and keep its value.")
    if request.tape is not tracing.tape:
        where = "outside any trace" if request.tape is None else "in another trace"
        raise RequestError(
            f"{call}: {request!r} was started {where}. Its adjoint belongs between start and wait: "
            "call both inside the same differentiated function, or both outside."
        )
    if request.tape is not None:
        # From here on its trace may end.
        del request.tape.requests[id(request)]
    request.done, request.tape = True, None
    return request
