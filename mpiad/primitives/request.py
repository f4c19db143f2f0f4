"""Requests: communications in progress, and the state that their adjoints and tangents share.

Start and wait are separate nodes on the tape; the request itself isn't traced. In the reverse pass the wait comes first:
its adjoint starts the message with the cotangent, and the adjoint of the start completes this message, which therefore
overlaps with computation. For a sum over the ranks, the adjoint of the start does both, since ranks may wait in different
orders. Both adjoints share the state in a `Cell`; each nested trace has its own cell.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, NoReturn

from mpiad._typing import Array
from mpiad.errors import RequestError
from mpiad.primitives.operation import Tape
from mpiad.transport import Channel, Envelope, Spec
from mpiad.transport.core.tracing import tracing


def _per_lane(name: str, doc: str) -> property:
    """Return a property with one value per lane (simultaneous reverse pass), initially None."""
    return property(
        lambda cell: cell.values.get((name, tracing.lane)),
        lambda cell, value: cell.values.__setitem__((name, tracing.lane), value),
        doc=doc,
    )


class Cell:
    """The state shared by the adjoints (or tangents) of the start and the wait of a request."""

    __slots__ = ("values",)
    cotangent = _per_lane("cotangent", "The cotangent of the result of the wait.")
    request = _per_lane("request", "The active request of the adjoint or tangent.")

    def __init__(self) -> None:
        self.values: dict[tuple[str, int], Any] = {}


class Request:
    """A communication in progress, which `mpi_wait` completes; `call` is the function that started it."""

    __slots__ = ("call", "cells", "channel", "done", "envelope", "handle", "spec", "tape", "value")

    def __init__(
        self, call: str, channel: Channel | None, handle: object, value: Array, spec: Spec, envelope: Envelope | None = None
    ):
        self.call, self.channel, self.handle, self.value, self.spec = call, channel, handle, value, spec
        self.envelope = envelope
        self.done = False
        self.tape: Tape | None = None
        self.cells: dict[int, Cell] = {}

    def cell(self, level: int) -> Cell:
        """Return the state that start and wait share in the trace with the number `level`."""
        return self.cells.setdefault(level, Cell())

    def again(self) -> Request:
        """Return a copy that isn't completed, so that the function that waits for the request can run again."""
        renewed = copy(self)
        renewed.done, renewed.tape, renewed.cells = False, None, {}
        return renewed

    def __getattr__(self, name: str) -> NoReturn:
        text = f"A request has no attribute {name!r}. Complete it by y = mpi_wait(request), or several by mpi_waitall."
        raise AttributeError(text, name=name, obj=self)

    def __repr__(self) -> str:
        partner = "" if self.envelope is None else f", peer {self.envelope.peer}, tag {self.envelope.tag}"
        state = "done" if self.done else "active"
        return f"<{self.call} of shape {self.spec.shape}, dtype {self.spec.dtype}{partner}: {state}>"


# mpi4py's error for `MPI.Request.Waitall` of such requests consists of this name.
Request.__name__ = "mpiad's Request (completed by mpi_wait or mpi_waitall)"


class CombinedRequest:
    """Several requests that `mpi_wait` completes; ``finish(values)`` returns the result, given the values of the parts."""

    __slots__ = ("finish", "parts")

    def __init__(self, parts: list[Request], finish: Callable[[list[Array]], Array]):
        self.parts, self.finish = parts, finish


def started(request: Request) -> Request:
    """Add a request to the current trace, which checks at its end that all its requests were waited for."""
    request.tape = tracing.tape
    if request.tape is not None:
        request.tape.requests[id(request)] = request
    return request


def claim(request: object, call: str) -> Request:
    """Remove a request from its trace, and return it; raise if `request` is invalid, completed, or of another trace."""
    if not isinstance(request, Request):
        raise TypeError(
            f"{call}: expected a request of mpi_isend, mpi_irecv or mpi_iallreduce, but got {type(request).__name__}."
        )
    if request.done:
        raise RequestError(f"{call}: {request!r} was waited for before. Wait once, and store the value.")
    if request.tape is not tracing.tape:
        trace = "outside any trace" if request.tape is None else "in another trace"
        raise RequestError(
            f"{call}: {request!r} was started {trace}. Start and wait must be in the same trace: "
            "call both inside the same differentiated function, or both outside."
        )
    if request.tape is not None:
        del request.tape.requests[id(request)]
    request.done, request.tape = True, None
    return request
