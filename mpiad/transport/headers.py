"""One-to-all with a header: the receivers learn shape and dtype from the root, in the same message where it is small.

The root's own mistake (an object where an array belongs, a shape that can't be divided) travels too, so that all ranks
raise it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpiad._typing import Array
from mpiad.transport.buffers import Spec, outgoing, result
from mpiad.transport.channels import Channel

__all__ = ["agree_on_spec", "bcast_integers", "bcast_with_header"]

_WORDS = 128
_SHAPE_WORDS = 66  # dtype and number of dimensions, then NumPy's 64 dimensions at most
_CODES = ["?", "b", "h", "i", "l", "q", "B", "H", "I", "L", "Q", "f", "d", "F", "D"]
_INLINE_BYTES = 8 * (_WORDS - _SHAPE_WORDS)
_ERROR = -1


def bcast_with_header(channel: Channel, x: Array, root: int, call: str) -> Array:
    """Copy the root's array to all ranks, which needn't know its shape and dtype."""
    # Of fixed size, since the receivers can't know another; what fits travels in it and needs no second message.
    packet = np.zeros(_WORDS, dtype=np.int64)
    if channel.rank == root:
        return _bcast_from_here(channel, x, root, call, packet)
    channel.data.Bcast(packet, root)
    spec = _unpacked(packet, call, root)
    out = spec.empty()
    if out.nbytes <= _INLINE_BYTES:
        flat = packet[_SHAPE_WORDS:].view(np.uint8)[: out.nbytes]
        return result(flat.view(spec.dtype).reshape(spec.shape).copy())
    channel.data.Bcast(out, root)
    return result(out)


def _bcast_from_here(channel: Channel, x: Array, root: int, call: str, packet: np.ndarray) -> Array:
    try:
        array = outgoing(x, call)
    except TypeError as error:  # the others wait for a header by now
        _send_error(channel, error, root, packet)
        raise
    _pack(packet, Spec(array.shape, array.dtype))
    small = array.nbytes <= _INLINE_BYTES
    if small:
        packet[_SHAPE_WORDS:].view(np.uint8)[: array.nbytes] = array.reshape(-1).view(np.uint8)
    channel.data.Bcast(packet, root)
    if not small:
        channel.data.Bcast(array, root)
    return result(array.copy())


def agree_on_spec(channel: Channel, make: Callable[[], Spec], root: int, call: str) -> Spec:
    """Tell all ranks the spec that `make` returns on the root, or raise its error on all of them."""
    packet = np.zeros(_WORDS, dtype=np.int64)
    if channel.rank != root:
        channel.data.Bcast(packet, root)
        return _unpacked(packet, call, root)
    try:
        spec = make()
    except (TypeError, ValueError) as error:
        _send_error(channel, error, root, packet)
        raise
    _pack(packet, spec)
    channel.data.Bcast(packet, root)
    return spec


def _pack(packet: np.ndarray, spec: Spec) -> None:
    packet[0], packet[1] = _CODES.index(spec.dtype.char), len(spec.shape)
    packet[2 : 2 + len(spec.shape)] = spec.shape


def _unpacked(packet: np.ndarray, call: str, root: int) -> Spec:
    if packet[0] == _ERROR:
        kind, length = (TypeError, ValueError)[packet[1]], packet[2]
        text = packet[3:].view(np.uint8)[:length].tobytes().decode(errors="replace")
        raise kind(f"{text} (raised on the root, rank {root})")
    return Spec(tuple(packet[2 : 2 + packet[1]].tolist()), np.dtype(_CODES[packet[0]]))


def _send_error(channel: Channel, error: Exception, root: int, packet: np.ndarray) -> None:
    text = np.frombuffer(str(error).encode()[: 8 * (_WORDS - 3)], dtype=np.uint8)
    packet[:3] = _ERROR, isinstance(error, ValueError), len(text)
    packet[3:].view(np.uint8)[: len(text)] = text
    channel.data.Bcast(packet, root)


def bcast_integers(channel: Channel, values: list[int], root: int) -> list[int]:
    """Copy the root's list, of one integer for each rank, to all ranks."""
    buffer = np.empty(channel.size, dtype=np.int64)
    if channel.rank == root:
        buffer[:] = values
    channel.data.Bcast(buffer, root)
    return buffer.tolist()
