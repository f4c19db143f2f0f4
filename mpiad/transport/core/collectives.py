"""Collectives on arrays, without derivatives.

With a CUDA-aware MPI, sums of large arrays are computed by an exchange of blocks, and each rank sums one of them on its
device, since many CUDA-aware MPI libraries reduce on the host. The exchange transfers as many bytes as optimal reductions
of large arrays. One rank sums each block, in the order of the ranks, so the result is bitwise the same on all ranks. The
size of the array alone decides, since a rank doesn't know the devices of the others' arrays.

If all ranks are on one node, they ask each other before sums, gathers, scatters and broadcasts of large arrays whether all
of these are in device memory that the others can read (see `device_messages`). If so, they send each other blocks of them
by messages; sums are computed as described above.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator
from itertools import accumulate
from math import inf, prod
from typing import TypeAlias, TypeVar

import numpy as np
from mpi4py import MPI

from mpiad._typing import Array, Comm, Op, Request, Shape
from mpiad.transport.core.agreement import agreed, fingerprint, raise_first, raise_together
from mpiad.transport.core.buffers import even_lengths, outgoing
from mpiad.transport.core.channels import Channel, on_any_rank
from mpiad.transport.core.messages import exchange
from mpiad.transport.devices import device_messages
from mpiad.transport.devices.device_arrays import Spec, arrays_named, arrays_of, copied
from mpiad.transport.devices.device_settings import exchanges
from mpiad.transport.devices.staging import takes_directly
from mpiad.transport.devices.transfers import HostTransfer, Transfer, communicate, incoming_transfer, outgoing_transfer

T = TypeVar("T")

_INTEGER = ("SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR")
_NAMES = (*_INTEGER, "MINLOC", "MAXLOC", "REPLACE", "NO_OP", "OP_NULL")
_OF_KIND = {
    "b": ("LAND", "LOR", "LXOR"),
    "i": _INTEGER,
    "u": _INTEGER,
    "f": ("SUM", "PROD", "MAX", "MIN"),
    "c": ("SUM", "PROD"),
}


def defined_for(kind: str) -> tuple[str, ...]:
    """Return the names of the reductions for a dtype's `kind`; all names if it isn't a number."""
    return _OF_KIND.get(kind, _NAMES)


def name_of(op: Op) -> str | None:
    """Return the name of one of MPI's own reductions, None for a user's reduction."""
    return next((name for name in _NAMES if op == getattr(MPI, name)), None)


class Summation:
    """A pending sum of arrays."""

    __slots__ = ("_channel", "_incoming", "_requests")

    def __init__(self, channel: Channel, requests: list[Request], incoming: Transfer):
        self._channel, self._requests, self._incoming = channel, requests, incoming

    def finish(self) -> Array:
        """Wait for the sum and return it."""
        self._requests[0].Wait()
        self._channel.release(self._requests)
        return self._incoming.received()


def start_allreduce(channel: Channel, array: Array, comm: Comm = None) -> Summation:
    """Start to sum arrays. A host array mustn't be used before the end; a device array is copied."""
    comm = channel.data if comm is None else comm
    sent, received = outgoing_transfer(array, True, True), incoming_transfer(Spec.of(array), True)
    source, target = sent.buffer, received.buffer
    requests = channel.begin("reduction", (source, target), comm.Iallreduce, (source,), (target,), (MPI.SUM,))
    return Summation(channel, requests, received)


def start_sum_in_place(channel: Channel, array: np.ndarray, comm: Comm) -> Summation:
    """Start to sum host arrays in place; they mustn't be used before the end."""
    requests = channel.begin("reduction", array, comm.Iallreduce, (MPI.IN_PLACE,), (array,), (MPI.SUM,))
    return Summation(channel, requests, HostTransfer(array))


def sum_in_place(comm: Comm, array: np.ndarray) -> None:
    """Sum host arrays in place."""
    comm.Allreduce(MPI.IN_PLACE, array, MPI.SUM)


# Maxima and minima of floating-point numbers, as in NumPy: a NaN on any rank gives NaN on all.
#
# In MPI the result of MAX and MIN for NaN is undefined and may differ between ranks. Therefore NaN is replaced by the
# infinity that wins: inf for a maximum, -inf for a minimum. If the result doesn't contain it, there was no NaN, and one
# reduction is enough. Otherwise a second reduction finds the entries that were NaN. Zeros in the result are set to 0.0,
# since the order of comparisons decides between 0.0 and -0.0.


def _extremum(channel: Channel, array: Array, op: Op) -> Array:
    infinity = array.dtype.type(inf if op == MPI.MAX else -inf)
    arrays, nan = arrays_of(array), np.isnan(array)
    replaced = array if arrays is None and not nan.any() else np.where(nan, infinity, array)
    found = _combined(channel, replaced, op)
    reached = (found == infinity).any()
    found += found.dtype.type(0)  # -0.0 + 0.0 is 0.0
    if not (reached if arrays is None else arrays.to_host(reached)):
        return found
    flat = found.reshape(-1)
    flat[_combined(channel, nan.reshape(-1), MPI.LOR)] = np.nan
    return flat.reshape(found.shape) if found.shape else flat[0]


def allreduce(channel: Channel, x: Array, op: Op, call: str) -> Array:
    """Reduce the ranks' arrays, with the result on all ranks; maximum and minimum of floats propagate NaN."""
    array = outgoing(x, call)
    if op is MPI.SUM or array.dtype.kind != "f" or op not in (MPI.MAX, MPI.MIN):
        return _combined(channel, array, op)
    return _extremum(channel, array, op)


def _combined(channel: Channel, array: Array, op: Op) -> Array:
    if (array.nbytes >= device_messages.LEAST_SHARED or exchanges(array.nbytes)) and name_of(op) == "SUM":
        if (shares := _all_share(channel, Spec.of(array))) or exchanges(array.nbytes):
            return _exchanged_sum(channel, array, None, shares)
    if type(array) is np.ndarray:  # without a further function call, since small sums are frequent
        out = np.empty(array.shape, array.dtype)
        channel.data.Allreduce(array, out, op)
        return out if array.ndim else out[()]
    return communicate(lambda sent, out: channel.data.Allreduce(sent, out, op), array)


def reduce(channel: Channel, x: Array, root: int, call: str) -> Array:
    """Sum the ranks' arrays on the root; return zeros on other ranks."""
    array = outgoing(x, call)
    if (shares := _all_share(channel, Spec.of(array))) or exchanges(array.nbytes):
        return _exchanged_sum(channel, array, root, shares)
    discards = channel.rank != root
    return communicate(lambda sent, out: channel.data.Reduce(sent, out, MPI.SUM, root), array, discards=discards)


def bcast(channel: Channel, x: Array, spec: Spec, root: int, call: str) -> Array:
    """Return the root's array on all ranks, which know its spec."""
    return _bcast(channel, outgoing(x, call) if channel.rank == root else None, spec, root)


def _bcast(channel: Channel, array: Array | None, spec: Spec, root: int) -> Array:
    if _all_share(channel, spec if array is None else Spec.of(array)):
        n, none = prod(spec.shape), [0] * channel.size
        if array is None:
            received = [n if rank == root else 0 for rank in range(channel.size)]
            return _sent_blocks(channel, spec._replace(shape=(0,)).empty(), none, received).reshape(spec.shape)
        _sent_blocks(channel, array.reshape(-1), [n] * channel.size, none, overlap=True)
        return copied(array)
    transfer = incoming_transfer(spec) if array is None else outgoing_transfer(array)
    channel.data.Bcast(transfer.buffer, root)
    return transfer.received() if array is None else copied(array)


def scan(channel: Channel, x: Array, exclusive: bool, backwards: bool, call: str) -> Array:
    """Return the sum over this rank and all lower ranks (higher, if `backwards`); if `exclusive`, without this rank."""
    # Suffix sums are prefix sums over the ranks in reverse order.
    comm = channel.backwards() if backwards else channel.data
    # In MPI the first rank's exclusive sum is undefined.
    return communicate(comm.Exscan if exclusive else comm.Scan, outgoing(x, call), discards=exclusive and comm.rank == 0)


def alltoall(channel: Channel, x: Array, call: str) -> Array:
    """Transpose blocks: block s of rank r becomes block r of rank s."""
    array = outgoing(x, call)
    if _all_share(channel, Spec.of(array)):
        counts = [array.size // channel.size] * channel.size
        return _sent_blocks(channel, array.reshape(-1), counts, counts).reshape(array.shape)
    return communicate(channel.data.Alltoall, array)


def alltoallv(channel: Channel, x: Array, axis: int, sent: list[int], received: list[int], call: str) -> Array:
    """Send blocks of the lengths `sent` along `axis` to the ranks, and concatenate those received, of known lengths."""
    array, own = outgoing(x, call), channel.rank
    if getattr(channel.data, "agreement", None) is not None:
        expected = lengths_of_all(channel, Spec.of(array), axis, call, sent=sent)
        text = f"{call}: received must be the counts of the ranks for this rank, {expected}, but got {received}."
        raise_together(channel, None if received == expected else ValueError(text))
    lead, rest = array.shape[:axis], array.shape[axis + 1 :]
    width, spec = prod((*lead, *rest)), Spec.of(array)._replace(shape=(*lead, sum(received), *rest))

    def exchange(x: Array, out: Array) -> None:
        counts, arriving = [n * width for n in sent], [n * width for n in received]
        starts, places = [0, *accumulate(counts)], [0, *accumulate(arriving)]
        if type(x) is np.ndarray and counts[own] == arriving[own]:
            # A copy takes a fraction of the time of a rank's message to itself.
            out.reshape(-1)[places[own] : places[own + 1]] = x.reshape(-1)[starts[own] : starts[own + 1]]
            counts[own] = arriving[own] = 0
        channel.data.Alltoallv([x, (counts, starts[:-1])], [out, (arriving, places[:-1])])

    return _unpacked(communicate(exchange, _packed(array, sent, axis), spec), received, axis)


def lengths_of_all(
    channel: Channel, like: Spec, axis: int | None, call: str, wrong: Exception | None = None, sent: list[int] | None = None
) -> list[int]:
    """Return the ranks' lengths along `axis` (1 if stacked), or of the blocks for this rank, given `sent`; collective."""
    # All ranks raise `wrong`, an error of one rank, or a ValueError if other dimensions or dtypes differ between ranks.
    shape, dtype = like.shape, like.dtype
    piece = (shape if axis is None else shape[:axis] + shape[axis + 1 :], dtype.str)
    lengths = [1 if axis is None else shape[axis]] if sent is None else sent
    mine, every = np.empty((len(lengths), 2), np.int64), np.empty((channel.size, 2), np.int64)
    mine[:, 0] = lengths if wrong is None else -1
    mine[:, 1] = fingerprint(*piece)
    (channel.data.Allgather if sent is None else channel.data.Alltoall)(mine, every)
    if (every[:, 0] < 0).any():
        raise_first(channel, wrong)
    if (every[:, 1] != every[0, 1]).any():
        arrays = channel.data.allgather((shape, str(dtype)))
        listed = ", ".join(f"rank {rank}: {shape} {dtype}" for rank, (shape, dtype) in enumerate(arrays))
        free = "must be equal on all ranks" if axis is None else f"may differ along axis {axis} only"
        # Axes along which the ranks' arrays can be concatenated.
        ndim = min(len(each) for each, _ in arrays)
        others = [k for k in range(ndim) if len({(each[:k] + each[k + 1 :], dtype) for each, dtype in arrays}) == 1]
        hint = f" Pass axis={others[0]} to concatenate arrays of different lengths." if others else ""
        raise agreed(channel, ValueError(f"{call}: shapes and dtypes {free}, but got {listed}.{hint}"))
    return every[:, 0].tolist()


def gather(channel: Channel, x: Array, root: int | None, axis: int | None, lengths: list[int], call: str) -> Array:
    """Stack (`axis` None) or concatenate the ranks' arrays on the root, or on all ranks if `root` is None."""
    array = outgoing(x, call)
    lead, rest = ((), array.shape) if axis is None else (array.shape[:axis], array.shape[axis + 1 :])
    counts = [length * prod((*lead, *rest)) for length in lengths]
    whole = Spec((*lead, sum(lengths), *rest), array.dtype, arrays_of(array))
    if _all_share(channel, whole):
        takes = root is None or channel.rank == root
        sent = [counts[channel.rank] if root in (None, rank) else 0 for rank in range(channel.size)]
        packed = _sent_blocks(channel, array.reshape(-1), sent, counts if takes else [0] * channel.size, overlap=True)
        if takes:
            return _unpacked(packed.reshape(whole.shape), lengths, len(lead))
        return whole._replace(shape=(*lead, 0, *rest)).empty()
    if root is not None and channel.rank != root:
        channel.data.Gatherv(outgoing_transfer(array).buffer, None, root)
        return whole._replace(shape=(*lead, 0, *rest)).empty()
    if root is None:
        packed = communicate(lambda sent, out: channel.data.Allgatherv(sent, [out, counts]), array, whole)
    else:
        packed = communicate(lambda sent, out: channel.data.Gatherv(sent, [out, counts], root), array, whole)
    return _unpacked(packed, lengths, len(lead))


def gather_in_place(channel: Channel, records: np.ndarray, lengths: list[int]) -> None:
    """Complete a contiguous host array of any dtype, of which each rank has written its part along the first axis."""
    item = MPI.BYTE.Create_contiguous(records.itemsize * prod(records.shape[1:])).Commit()
    try:
        channel.data.Allgatherv(MPI.IN_PLACE, [records.view(np.uint8), lengths, item])
    finally:
        item.Free()


def scatter(
    channel: Channel, x: Array, root: int | None, axis: int | None, lengths: list[int], piece: Spec, call: str
) -> Array:
    """Return this rank's piece of the root's array; every rank knows the spec of its own piece."""
    shape = piece.shape if axis is None else (*piece.shape[:axis], *piece.shape[axis + 1 :])
    if _all_share(channel, piece._replace(shape=(sum(lengths), *shape))):
        own, counts, flat = [0] * channel.size, [0] * channel.size, piece._replace(shape=(0,)).empty()
        own[root] = prod(piece.shape)
        if channel.rank == root:
            counts = [length * prod(shape) for length in lengths]
            flat = _packed(outgoing(x, call), lengths, axis or 0).reshape(-1)
        return _sent_blocks(channel, flat, counts, own).reshape(piece.shape)
    received, sent = incoming_transfer(piece), None
    if channel.rank == root:
        array = outgoing(x, call)
        counts = [length * (array.size // max(sum(lengths), 1)) for length in lengths]
        sent = [outgoing_transfer(_packed(array, lengths, axis or 0)).buffer, counts]
    channel.data.Scatterv(sent, received.buffer, root)
    return received.received()


# MPI counts contiguous entries, so the parts of an array along its first axis are sent without a copy. For other axes the
# entries of each part are packed, one part after the other, in an array of the same shape.


def _packed(array: Array, lengths: list[int], axis: int) -> Array:
    if not axis or prod(array.shape[:axis]) == 1:
        return array
    packed = Spec.of(array).empty()
    for part, entries in _parts(array, packed, lengths, axis):
        entries[...] = part
    return packed


def _unpacked(packed: Array, lengths: list[int], axis: int) -> Array:
    if not axis or prod(packed.shape[:axis]) == 1:
        return packed
    array = Spec.of(packed).empty()
    for part, entries in _parts(array, packed, lengths, axis):
        part[...] = entries
    return array


def _parts(array: Array, packed: Array, lengths: list[int], axis: int) -> Iterator[tuple[Array, Array]]:
    """Yield the part of each rank along an axis, and the same part of the packed array."""
    flat, first, start = packed.reshape(-1), 0, 0
    for length in lengths:
        part = array[(*(slice(None),) * axis, slice(start, start + length))]
        yield part, flat[first : first + part.size].reshape(part.shape)
        start, first = start + length, first + part.size


def reduce_scatter(channel: Channel, x: Array, axis: int | None, lengths: list[int], call: str) -> Array:
    """Sum the ranks' arrays, and return this rank's piece of the sum."""
    array = outgoing(x, call)
    lead, rest = array.shape[: axis or 0], array.shape[(axis or 0) + 1 :]
    shape = rest if axis is None else (*lead, lengths[channel.rank], *rest)
    counts = [length * prod((*lead, *rest)) for length in lengths]
    array = _packed(array, lengths, len(lead))
    if (shares := _all_share(channel, Spec.of(array))) or exchanges(array.nbytes):
        return _own_block(channel, array, counts, None, shares).reshape(shape)
    block = Spec.of(array)._replace(shape=shape)
    return communicate(lambda sent, out: channel.data.Reduce_scatter(sent, out, counts), array, block)


_TAG = 32447  # of messages between devices; it precedes the tags of neighbors


def _all_share(channel: Channel, spec: Spec) -> bool:
    """Return whether the arrays of a collective are in device memory that all ranks can read; collective.

    `spec`: of the whole array, which has the same size on all ranks; its device is that of this rank's array.
    """
    # In debug mode the calls are compared by the collectives of MPI.
    if not device_messages.may_share(channel, spec.nbytes) or getattr(channel.data, "agreement", None) is not None:
        return False
    if not on_any_rank(channel.data, not device_messages.shares(spec.arrays, channel)):
        return True
    device_messages.introduce(spec, channel, range(channel.size))
    return False


def _sent_blocks(channel: Channel, flat: Array, sent: list[int], received: list[int], overlap: bool = False) -> Array:
    """Send blocks of these lengths to the ranks, the same one if they `overlap`, and concatenate those received."""
    places, own = [0, *accumulate(received)], channel.rank
    starts = [0] * channel.size if overlap else [0, *accumulate(sent)]
    parts = {rank: slice(starts[rank], starts[rank] + n) for rank, n in enumerate(sent) if n and rank != own}
    targets = {rank: slice(places[rank], places[rank] + n) for rank, n in enumerate(received) if n and rank != own}
    spec = Spec.of(flat)._replace(shape=(places[-1],))
    out = exchange(channel, _TAG, flat, parts, spec, targets, "a collective")
    if received[own]:
        out[places[own] : places[own] + received[own]] = flat[starts[own] : starts[own] + sent[own]]
    return out


def _exchanged_sum(channel: Channel, array: Array, root: int | None = None, shares: bool = False) -> Array:
    """Sum the ranks' arrays on all ranks, or on the root; return zeros on ranks without the sum."""
    counts = even_lengths(array.size, channel.size)
    block, spec = _own_block(channel, array, counts, root, shares), Spec.of(array)
    if shares:
        takes = root is None or channel.rank == root
        sent = [counts[channel.rank] if root in (None, rank) else 0 for rank in range(channel.size)]
        out = _sent_blocks(channel, block, sent, counts if takes else [0] * channel.size, overlap=True)
        return out.reshape(array.shape) if takes else spec.zeros()
    if root is None:
        return communicate(lambda sent, out: channel.data.Allgatherv(sent, [out, counts]), block, spec)
    gather, discards = channel.data.Gatherv, channel.rank != root
    return communicate(lambda sent, out: gather(sent, [out, counts], root), block, spec, discards=discards)


def sum_of_rows(parts: Array) -> Array:
    """Return the sum of the rows in their order. The order of np.sum depends on the shape and on the device."""
    return functools.reduce(np.add, [parts[row] for row in range(len(parts))])


def _own_block(channel: Channel, array: Array, counts: list[int], root: int | None = None, shares: bool = False) -> Array:
    if shares:
        own = [counts[channel.rank]] * channel.size
        parts = _sent_blocks(channel, array.reshape(-1), counts, own).reshape(channel.size, counts[channel.rank])
        return sum_of_rows(parts)
    if getattr(channel.data, "agreement", None) is not None:  # a watched Alltoallv doesn't compare shapes
        channel.data.agree("Alltoallv", array, MPI.SUM, root)
    own, spec = [counts[channel.rank]] * channel.size, Spec.of(array)._replace(shape=(channel.size, counts[channel.rank]))
    parts = communicate(lambda sent, out: channel.data.Alltoallv([sent, counts], [out, own]), array, spec)
    return sum_of_rows(parts)


# Broadcasts that begin with a header, which contains the shape and dtype, and also the entries of a small array.
#
# An error of the root (an object instead of an array, a shape that can't be divided) is sent in the header, and all ranks
# raise it.


_HEADER_BYTES = 1152  # fixed, since the receivers don't know the array
_ERROR_BYTES = 1000  # maximum length of an error's text
_INLINE_BYTES = 456  # maximum size of an array in the header

# Shape, dtype, name of the device's arrays ("" for the host), and entries of a small array; or name and text of an error.
Header: TypeAlias = "tuple[Shape, str, str, bytes | None] | tuple[str, str]"


def bcast_with_header(channel: Channel, x: Array, root: int, call: str) -> Array:
    """Copy the root's array to all ranks, on the device of the template `x` or, if it is None, on one like the root's."""
    array: Array = None

    def header() -> Header:
        nonlocal array
        array = outgoing(x, call)
        arrays = arrays_of(array)
        # An array that MPI reads on the device isn't copied to the host for the header.
        if array.nbytes > _INLINE_BYTES or (arrays is not None and takes_directly(arrays)):
            return _header_of(Spec.of(array))
        return _header_of(Spec.of(array), (array if arrays is None else arrays.to_host(array)).tobytes())

    spec, entries = _shared_header(channel, header, root, x)
    if entries is None:
        return _bcast(channel, array, spec, root)
    small = np.ndarray(spec.shape, spec.dtype, entries)
    return copied(small) if spec.arrays is None else spec.arrays.to_device(small)


def agree_on_spec(channel: Channel, make: Callable[[], Spec], root: int, template: object) -> Spec:
    """Return on all ranks the spec that `make` returns on the root, with the device of the template, or raise its error."""
    return _shared_header(channel, lambda: _header_of(make()), root, template)[0]


def _header_of(spec: Spec, entries: bytes | None = None) -> Header:
    return spec.shape, spec.dtype.char, "" if spec.arrays is None else spec.arrays.name, entries


def _shared_header(channel: Channel, make: Callable[[], Header], root: int, template: object) -> tuple[Spec, bytes | None]:
    """Return spec and entries in the header that `make` returns on the root, or raise its error."""
    packet, error = np.empty(_HEADER_BYTES, np.uint8), None
    if channel.rank == root:
        try:
            header = make()
        except (TypeError, ValueError) as found:  # the other ranks already wait for the header
            error, text = found, str(found).encode()[:_ERROR_BYTES].decode(errors="replace")
            header = (ValueError if isinstance(error, ValueError) else TypeError).__name__, text
        packet = np.frombuffer(pickle.dumps(header).ljust(_HEADER_BYTES), np.uint8)
    channel.data.Bcast(packet, root)
    if error is not None:
        raise error
    if channel.rank != root:
        header = pickle.loads(packet.data)
    if len(header) == 2:
        kind = ValueError if header[0] == ValueError.__name__ else TypeError
        raise kind(f"{header[1]} (raised on the root, rank {root})")
    shape, dtype, device, entries = header
    arrays = arrays_of(template) if template is not None or not device else arrays_named(device)
    return Spec(shape, np.dtype(dtype), arrays), entries
