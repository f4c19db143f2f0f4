"""The objective J of a distributed program: one real number, computed from one number per rank.

One reduction of two numbers computes J and a flag for errors; an error on one rank is therefore raised on all ranks. The
reduction is a differentiable operation, since an outer trace may need derivatives of J.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from types import NotImplementedType
from typing import Any, NamedTuple

import autograd.numpy as anp
import numpy as np
from autograd.tracer import Box, getval

from mpiad._typing import Array, Function, Scalar, Shape
from mpiad.device.transfer import array_to_host
from mpiad.primitives.catalogue import ALLREDUCE, Reduction
from mpiad.primitives.cotangents import spec_like
from mpiad.primitives.operation import Operation, communicate
from mpiad.transport import SUM, Channel, Spec
from mpiad.transport.core.agreement import agreed, fingerprint
from mpiad.transport.devices.device_arrays import is_device_array

_FLOAT64 = np.dtype(np.float64)
_MAX_INTEGER = 2**1023  # larger integers may overflow in the conversion to a float
_OBJECTIVES = ("root", "sum", "mean")


class PendingError(NamedTuple):
    """Type and text of an error that one rank has detected and all ranks will raise."""

    kind: type[Exception]
    text: str


Shapes = tuple[tuple[Shape, np.dtype], ...]


class ObjectiveReduction(NamedTuple):
    """Parameters of the reduction, with this rank's error, and the shapes and dtypes of a shared variable."""

    channel: Channel
    problem: PendingError | None
    shapes: Shapes = ()
    call: str = ""


def check_objective(objective: object, call: str) -> None:
    """Raise a ValueError if `objective` isn't one of the three choices."""
    if not isinstance(objective, str) or objective not in _OBJECTIVES:
        raise ValueError(f"{call}: objective must be one of {', '.join(map(repr, _OBJECTIVES))}, but got {objective!r}.")


def weight_of(objective: str, channel: Channel, root: int) -> float:
    """Return the factor of this rank's number in the sum J."""
    if objective == "root":
        return 1.0 if channel.rank == root else 0.0
    return 1.0 if objective == "sum" else 1.0 / channel.size


_EXPECTED = "the function must return one real number (with objective='root', ranks other than root may return None)"


def problem_with(value: Array, weight: float, call: str, wanted: str = _EXPECTED) -> PendingError | None:
    """Return the problem of a value that isn't one real number; None if there is no problem."""
    if isinstance(value, (float, np.floating, np.integer)) or (type(value) is int and abs(value) < _MAX_INTEGER):
        return None
    if value is None and weight == 0.0:
        return None
    is_array = isinstance(value, np.ndarray) or type(value) in Box.types or is_device_array(value)
    spec = spec_like(value) if is_array else None
    if spec is not None and spec.dtype.kind in "fiu" and math.prod(spec.shape) == 1:
        return None
    got = f"{type(value).__name__} {value!r}"[:80] if spec is None else f"an array of {spec.dtype}, shape {spec.shape}"
    if spec is not None and spec.dtype.hasobject:
        got += " (plain NumPy's, made of traced values? Use autograd.numpy)"
    return PendingError(
        TypeError,
        f"{call}: {wanted}, but returned {got}. Reduce it to a scalar, or use mpiad.jacobian for arrays.",
    )


def reduce_objective(
    value: Array, weight: float, problem: PendingError | None, channel: Channel, shapes: Shapes, call: str
) -> Scalar:
    """Return J on all ranks; raise on all ranks if a rank has a problem, or if `shapes` differ between ranks."""
    term: Any = 0.0
    if type(value) is not np.float64 and problem is None and is_device_array(getval(value)):
        value = array_to_host(value if value.shape == () else value.reshape(()))
    if problem is None and weight != 0.0:
        term = value if np.ndim(value) == 0 else value.reshape(())
        # The dtype must be the same on all ranks, and ranks with weight zero contribute a float64.
        if getattr(term, "dtype", None) != _FLOAT64:
            term = term.astype(np.float64) if hasattr(term, "astype") else float(term)
        term = term if weight == 1.0 else term * weight
    elif problem is None and type(value) in Box.types:
        # Plain autograd runs an adjoint only if the input is traced, and all ranks must run the adjoint of the reduction.
        term = anp.where(False, anp.reshape(value, ()), np.float64(0.0))
    return communicate(OBJECTIVE, term, ObjectiveReduction(channel, problem, shapes, call))


class _Buffers(threading.local):
    """Each thread's message buffers, allocated once to save time."""

    def __init__(self) -> None:
        self.sent, self.received = np.zeros(2), np.zeros(2)
        # MPI adds one complex number faster than two real numbers.
        self.messages = self.sent.view(complex), self.received.view(complex)


_buffers = _Buffers()


def _forward(x: Array, p: ObjectiveReduction) -> Scalar:
    sent, received, messages = _buffers.sent, _buffers.received, _buffers.messages
    if p.shapes:
        sent = np.array([0.0, 0.0, *_digest_words(p.shapes, p.channel.size)])
        received = np.empty_like(sent)
        messages = sent.view(complex), received.view(complex)
    sent[0], sent[1] = p.problem is not None, x
    p.channel.data.Allreduce(*messages)
    if received[0]:
        raise_everywhere(p.channel, p.problem)
    if p.shapes:
        # By the Cauchy-Schwarz inequality, (Σ w)² = P Σ w² over P ranks only if all w are equal.
        sums = [int(word) for word in received[2:]]
        if any(total**2 != p.channel.size * squares for total, squares in zip(sums[::2], sums[1::2])):
            raise agreed(p.channel, copies_error(p.channel.data.allgather(shapes_text(p.shapes)), p.call))
    return received[1]


@functools.lru_cache
def _digest_words(shapes: Shapes, size: int) -> list[int]:
    # Two words of a digest and their squares. The words have few bits, so the sums over the ranks are exact.
    digest, bits = fingerprint(shapes), (53 - size.bit_length()) // 2
    return [word**power for word in (digest % 2**bits, (digest >> 32) % 2**bits) for power in (1, 2)]


def shapes_text(shapes: Shapes) -> str:
    """Return the shapes and dtypes of a variable as a text."""
    return ", ".join(f"{dtype} of shape {shape}" for shape, dtype in shapes)


def copies_error(texts: Sequence[str], call: str) -> ValueError:
    """Return the error for copies of a shared variable whose descriptions differ between ranks."""
    other = next(rank for rank, text in enumerate(texts) if text != texts[0])
    return ValueError(
        f"{call}: with shared=True all ranks must hold copies of one variable, but on rank 0 it is {texts[0]:.200}, and on "
        f"rank {other} {texts[other]:.200}. Pass copies of the same shapes and dtypes on all ranks."
    )


def raise_everywhere(channel: Channel, problem: PendingError | None) -> None:
    """Raise the problem of the lowest rank that has one; all ranks call this function, and raise the same error."""
    problems = [(rank, each) for rank, each in enumerate(channel.data.allgather(problem)) if each]
    rank, first = problems[0]
    others = f" (and on {len(problems) - 1} more ranks)" if len(problems) > 1 else ""
    raise agreed(channel, first.kind(f"{first.text} This happened on rank {rank}{others}."))


def _adjoint(ans: Array, x: Array, p: ObjectiveReduction) -> Function:
    """Return the transpose of a sum whose result is on all ranks: the sum of all ranks' cotangents."""
    return lambda g: communicate(ALLREDUCE, g, Reduction(p.channel, SUM))


def _tangent(dx: Array, ans: Array, x: Array, p: ObjectiveReduction) -> Scalar:
    return communicate(ALLREDUCE, dx, Reduction(p.channel, SUM))


def _abstract(x: Array, p: ObjectiveReduction) -> Spec | NotImplementedType:
    return Spec((), _FLOAT64) if p.problem is None else NotImplemented


OBJECTIVE = Operation("value_and_grad")
OBJECTIVE.define(_forward, _adjoint, _tangent, _abstract)
