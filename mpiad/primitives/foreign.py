"""Communication under plain `autograd.grad`, whose reverse pass doesn't preserve the order of the program.

Point-to-point calls raise. Collectives are numbered, and their adjoints raise if they don't run in reverse order, since
ranks could then combine cotangents of different calls. If no input of a call is traced, an open trace of autograd is
recognized by autograd's counter of traces, which then differs from the number of the current tape. Since autograd doesn't
reset the counter after an exception, the call stack is also searched for such a trace.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from autograd import tracer
from autograd.core import JVPNode, VJPNode

from mpiad._typing import Array
from mpiad.errors import ForeignTraceError

_ADVICE = (
    "Plain autograd's reverse pass follows the expression, not the program, so its communication can hang or go "
    "missing. Use mpiad.grad or mpiad.value_and_grad instead of autograd's."
)


class _Sequence(threading.local):
    def __init__(self) -> None:
        self.last = 0  # number of the last collective
        self.pending: dict[int, set[int]] = {}  # for each trace, the collectives whose adjoints haven't run


_sequence = _Sequence()


def refuse_foreign_trace(tape: Any, call: str) -> None:
    """Raise if a trace of plain autograd is open inside the current tape."""
    # If the numbers are equal, no other trace is open.
    if tracer.trace_stack.top != (-1 if tape is None else tape.number) and _trace_is_open(tape):
        raise_for_foreign(call)


def raise_for_foreign(call: str) -> NoReturn:
    """Raise for a point-to-point call inside a derivative of plain autograd."""
    raise ForeignTraceError(f"{call} was called inside a derivative of plain autograd. {_ADVICE}")


def _trace_is_open(tape: object) -> bool:
    frame: Any = sys._getframe(1)
    foreign = tracer.trace.__code__
    while frame is not None:
        # Forward mode also raises: a receive has no traced input, so its result would have no tangent.
        if frame.f_code is foreign and type(frame.f_locals.get("start_node")) in (VJPNode, JVPNode):
            return True
        # The callers of this frame are outside of the trace of `tape`.
        if tape is not None and frame.f_globals.get("__name__") == "mpiad.differentiation.trace":
            return False
        frame = frame.f_back
    return False


def checked_adjoint(vjp: Callable, call: str, level: int) -> Callable:
    """Return an adjoint that raises if plain autograd runs it before the adjoints of later calls in the trace `level`."""
    pending = _sequence.pending.setdefault(level, set())
    _sequence.last = number = _sequence.last + 1
    pending.add(number)

    def adjoint(g: Array) -> Array:
        later = sum(other > number for other in pending)
        if later:
            pending.clear()
            raise ForeignTraceError(f"{call}: its adjoint runs before those of {later} later communication(s). {_ADVICE}")
        pending.discard(number)
        return vjp(g)

    return adjoint
