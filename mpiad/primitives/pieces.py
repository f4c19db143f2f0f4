"""The pieces of a gather: their lengths, agreed on, and the mistakes that one rank finds and all raise."""

from __future__ import annotations

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.primitives.checks import axis_of
from mpiad.transport import Channel, Spec, collectives
from mpiad.transport.buffers import outgoing
from mpiad.transport.tracing import settled

__all__ = ["pieces_of_all"]


def pieces_of_all(x: Array, axis: object, used: Channel, call: str) -> tuple[np.ndarray, int | None, list[int]]:
    """Return this rank's piece, the axis counted from the front, and all ranks' lengths along it; collective.

    Raises
    ------
    TypeError, ValueError
        On all ranks, where a piece can't be sent, has no such axis, or doesn't fit the others.
    """
    array, place, wrong = np.zeros(0), None, None
    try:
        array = outgoing(getval(x), call)
        place = axis_of(axis, array.ndim, call)
    except (TypeError, ValueError) as error:  # the others wait for a length by now
        wrong = error
    like = Spec(array.shape, array.dtype)
    return array, place, settled(collectives.lengths_of_all, used, like, place, call, wrong)
