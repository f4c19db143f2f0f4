"""Checks of the arguments of several operations, such as ranks, tags and divisions of arrays, and addresses of messages.

An address is an `Envelope`, and contains the number of its message. The creation of an address counts the message, on the
sender and on the receiver separately. So all arguments are checked first: if the call raised an error after counting, the
counts of the two ranks would differ.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Mapping, Sequence
from numbers import Integral

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array, Comm
from mpiad.primitives.catalogue import Dividing
from mpiad.primitives.foreign import refuse_foreign_trace
from mpiad.transport import ANY_SOURCE, ANY_TAG, PROC_NULL, SUM, Channel, Envelope, Op, Spec, channel
from mpiad.transport.core import collectives
from mpiad.transport.core.buffers import even_lengths, outgoing, require_sendable, spec_of
from mpiad.transport.core.collectives import defined_for, name_of
from mpiad.transport.core.tracing import checked_on_replay, tracing


def advice_for(value: object, call: str) -> str:
    """Return the advice for a value in place of another argument, such as a receive buffer as the root; "" without any."""
    function = getattr(sys.modules["mpiad.primitives"], call, None)
    if function is None:  # a function of another package
        return ""
    names = inspect.signature(function).parameters
    if hasattr(value, "Get_rank"):
        return " Pass a communicator by name: comm=comm."
    if isinstance(value, Op):
        other = f"{call} has no operation: leave it out, or call mpi_reduce(x, op) or mpi_allreduce(x, op)"
        return f" {'Pass an operation by name: op=MPI.SUM' if 'op' in names else other}."
    if isinstance(value, Integral) and "root" in names:
        return f" Pass a rank by name: root={value}."
    is_list = isinstance(value, (list, tuple))
    if is_list and value and "axis" in names and all(isinstance(count, Integral) for count in value):
        known = f"{call}(x, axis=0) joins blocks of any lengths, which needn't be passed"
        return f" {f'Pass lengths by name: axis=0, counts={list(value)}' if 'counts' in names else known}."
    if is_list or getattr(value, "ndim", 0):
        return f" Results are returned, not written into an argument: y = {call}(x, ...)."
    return ""


_ADDRESSES = (
    "the receiver gets an array only. If it must know the sender, the tag or the number of entries, send them before as an "
    "array of integers: source, n = mpi_recv(np.zeros(2, int), MPI.ANY_SOURCE), then y = mpi_recv(np.zeros(n), source)."
)
_TAGS = (
    "pass one tag=, which both ends of a message must pass. To send with one tag and receive with another, call "
    "mpi_irecv(like, source, tag=...), mpi_isend(x, dest, tag=...) and mpi_waitall."
)
# Keywords of mpi4py's functions that the functions of this library don't have, and what to write instead.
_OF_MPI4PY = {"status": _ADDRESSES, "sendtag": _TAGS, "recvtag": _TAGS}


def refuse_keywords(keywords: Mapping[str, object], call: str) -> None:
    """Raise a TypeError that says what to write instead of a keyword of mpi4py's function."""
    for name in keywords:
        unexpected = f"{call}() got an unexpected keyword argument {name!r}"
        raise TypeError(f"{unexpected}: {_OF_MPI4PY[name]}" if name in _OF_MPI4PY else unexpected)


def integer_of(value: Array, call: str, argument: str, allowed: str) -> int:
    """Return an integer as an int; raise a TypeError that describes what is `allowed` if it is none."""
    try:
        return operator.index(value)
    except TypeError:
        got = f"{type(value).__name__} {value!r}"
        raise TypeError(f"{call}: {argument} must be {allowed}, but got {got}.{advice_for(value, call)}") from None


def positive_count(value: object, argument: str, least: int = 1) -> int:
    """Return a number of objects as an int; raise a ValueError unless it is an integer above zero, or from `least` on."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        expected = "above zero" if least else "zero or more"
        raise ValueError(f"{argument} must be an integer{' ' if least else ', '}{expected}, but got {value!r:.60}.")
    return int(value)


def root_of(root: object, channel: Channel, call: str) -> int:
    """Return the root as an int; raise a ValueError if there is no such rank."""
    allowed = f"a rank from 0 to {channel.size - 1}"
    if type(root) is not int:
        root = integer_of(root, call, "root", allowed)
    if 0 <= root < channel.size:
        return root
    raise ValueError(f"{call}: root must be {allowed} (the communicator has {channel.size} ranks), but got {root}.")


def partner_of(rank: object, channel: Channel, call: str, argument: str, wildcard: bool = False) -> int | None:
    """Return a partner's rank, or None for no partner; raise a ValueError if there is no such rank."""
    if type(rank) is int and 0 <= rank < channel.size:
        return rank
    if rank is None or rank == PROC_NULL:
        return None
    allowed = f"a rank from 0 to {channel.size - 1} or MPI.PROC_NULL" + (" or MPI.ANY_SOURCE" if wildcard else "")
    rank = integer_of(rank, call, argument, allowed)
    if 0 <= rank < channel.size or (wildcard and rank == ANY_SOURCE):
        return rank
    hint = " Only mpi_recv receives from MPI.ANY_SOURCE." if rank == ANY_SOURCE and argument == "source" else ""
    got = f"(the communicator has {channel.size} ranks), but got {rank}.{hint}"
    raise ValueError(f"{call}: {argument} must be {allowed} {got}")


def tag_of(tag: object, channel: Channel, call: str, wildcard: bool = False) -> int:
    """Return the tag as an int; raise a ValueError if MPI has no such tag."""
    allowed = f"an integer from 0 to {channel.tag_limit}" + (" or MPI.ANY_TAG" if wildcard else "")
    if type(tag) is not int:
        tag = integer_of(tag, call, "tag", allowed)
    if 0 <= tag <= channel.tag_limit or (wildcard and tag == ANY_TAG):
        return tag
    hint = " Only mpi_recv receives messages of MPI.ANY_TAG." if tag == ANY_TAG else ""
    raise ValueError(f"{call}: tag must be {allowed}, but got {tag}.{hint}")


def reduction_of(op: Op, x: Array, call: str) -> Op:
    """Return the reduction; raise a TypeError if `op` isn't a reduction, or isn't defined for the dtype of x."""
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        dtype = np.dtype(type(x) if isinstance(x, (int, float, complex)) else object)
    kind = dtype.kind
    if op is SUM and kind != "b":
        return op
    if not isinstance(op, Op):
        got = f"{type(op).__name__} {op!r}.{advice_for(op, call)}"
        raise TypeError(f"{call}: op must be an mpi4py operation such as MPI.SUM, but got {got}")
    name, allowed = name_of(op), defined_for(kind)
    # User-defined operations have no adjoint, so they are refused for real and complex numbers.
    if name in allowed or (name is None and kind not in "fc"):
        return op
    got = "a user-defined operation" if name is None else f"MPI.{name}"
    hint = " To count, convert x to integers." if kind == "b" else ""
    if name in ("MAXLOC", "MINLOC"):
        owner = "mpi_allreduce(np.where(x == y, mpi_rank(), mpi_size()), op=MPI.MIN)"
        hint = f" With y = mpi_allreduce(x, op=MPI.{name[:3]}), the lowest rank that has it is {owner}."
    raise TypeError(f"{call}: op must be MPI.{', MPI.'.join(allowed)} for x of dtype {dtype}, but got {got}.{hint}")


def axis_of(axis: object, ndim: int, call: str) -> int | None:
    """Return the axis as a nonnegative integer, or None; raise if the array has no such axis."""
    if axis is None:
        return None
    index = axis if type(axis) is int else integer_of(axis, call, "axis", "None or an integer")
    if -ndim <= index < ndim:
        return index % ndim
    raise ValueError(f"{call}: axis must be None or from {-ndim} to {ndim - 1} for {ndim} dimensions, but got {index}.")


def lengths_along(
    axis: int | None, counts: Sequence[int] | None, shape: tuple[int, ...], channel: Channel, call: str
) -> list[int]:
    """Return each rank's length along `axis`, 1 for `axis` None; raise a ValueError if `counts` or `shape` is invalid."""
    size = channel.size
    if axis is None:
        if counts is not None:
            raise ValueError(f"{call}: counts need an axis along which x is divided, but got axis=None, counts={counts!r}.")
        if not shape or shape[0] != size:
            raise ValueError(
                f"{call}: without axis the first axis of x must be the number of ranks, {size}, but x has shape {shape}. "
                "Pass axis= to divide x along an axis of any length."
            )
        return [1] * size
    length = shape[axis]
    if counts is None:
        return even_lengths(length, size)
    lengths = counts_of(counts, size, call, "counts")
    if sum(lengths) != length:
        raise ValueError(
            f"{call}: counts must be {size} integers that add up to {length}, the length of x (shape {shape}) along "
            f"axis {axis}; but got {lengths}, which add up to {sum(lengths)}."
        )
    return lengths


def counts_of(counts: Sequence[int], size: int, call: str, argument: str) -> list[int]:
    """Return one count for each rank as integers; raise if they are invalid."""
    if type(counts) is not list and (np.ndim(counts) != 1 or np.asarray(counts).dtype.kind in "fc"):
        convert = f" Convert counts of floats by {argument}.astype(int)." if np.shape(counts) == (size,) else ""
        got = f"{type(counts).__name__} {counts!r}.{convert}{advice_for(counts, call) if np.ndim(counts) else ''}"
        raise TypeError(f"{call}: {argument} must be a list of {size} integers, but got {got}")
    lengths = [count if type(count) is int else integer_of(count, call, argument, "integers") for count in counts]
    if len(lengths) != size or min(lengths, default=0) < 0:
        raise ValueError(f"{call}: {argument} must be {size} integers, none negative, but got {lengths}.")
    return lengths


def piece_of(spec: Spec, axis: int | None, length: int) -> Spec:
    """Return the spec of one rank's part of a divided array."""
    if axis is None:
        return spec._replace(shape=spec.shape[1:])
    return Spec((*spec.shape[:axis], length, *spec.shape[axis + 1 :]), spec.dtype, spec.arrays)


def pieces_of_all(x: Array, axis: object, channel: Channel, root: int | None, call: str) -> Dividing:
    """Return the division of a whole array into all ranks' arrays; collective. All ranks raise the errors."""
    array, index, own_error = np.zeros(0), None, None
    try:
        array = outgoing(getval(x), call)
        index = axis_of(axis, array.ndim, call)
    except (TypeError, ValueError) as error:  # raised on all ranks by `lengths_of_all`, without a further reduction
        own_error = error
    spec = Spec(array.shape, array.dtype)
    lengths = checked_on_replay(collectives.lengths_of_all, channel, spec, index, call, own_error)
    return Dividing(channel, root, index, lengths, spec_of(array, call))


def gathered(x: Array, p: Dividing) -> Spec:
    """Return the spec of the whole array on a rank that gets it, and of an empty array on other ranks."""
    spec = p.spec if p.axis is not None else p.spec._replace(shape=(1, *p.spec.shape))
    return piece_of(spec, p.axis or 0, sum(p.lengths) if p.root in (None, p.channel.rank) else 0)


def point_to_point(comm: Comm, call: str) -> Channel:
    """Return the channel of a point-to-point call, and record that an exception may leave messages on it."""
    used, tape = channel(comm, call, collective=False), tracing.tape
    refuse_foreign_trace(tape, call)
    if tape is not None:
        tape.channels.add((used, True))
    elif tracing.channels is not None:
        tracing.channels.add((used, True))
    return used


def address_to(x: Array, dest: object, tag: object, comm: Comm, call: str) -> Envelope | None:
    """Return the address of a message with `x` to `dest`; None if there is no receiver."""
    require_sendable(getval(x), call)
    used = point_to_point(comm, call)
    peer, tag = partner_of(dest, used, call, "dest"), tag_of(tag, used, call)
    return None if peer is None else Envelope(used, peer, tag, True)


def addresses(
    x: Array, dest: object, source: object, tag: object, comm: Comm, call: str
) -> tuple[Envelope | None, Envelope | None]:
    """Return the addresses of a message with `x` to `dest` and of a message from `source`; None if there is no partner."""
    require_sendable(getval(x), call)
    used = point_to_point(comm, call)
    receiver, sender = partner_of(dest, used, call, "dest"), partner_of(source, used, call, "source")
    tag = tag_of(tag, used, call)
    return (
        None if receiver is None else Envelope(used, receiver, tag, True),
        None if sender is None else Envelope(used, sender, tag, False),
    )


def address_from(source: object, tag: object, comm: Comm, call: str, wildcard: bool = False) -> Envelope | None:
    """Return the address of a message from `source`; None if there is no sender."""
    used = point_to_point(comm, call)
    peer, tag = partner_of(source, used, call, "source", wildcard), tag_of(tag, used, call, wildcard)
    return None if peer is None else Envelope(used, peer, tag, False)
