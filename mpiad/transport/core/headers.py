"""Broadcasts with a header that contains shape and dtype, and a small array itself.

An error of the root (an object instead of an array, a shape that can't be divided) is sent in the header, and all ranks
raise it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpiad._typing import Array
from mpiad.transport.core import chunked_collectives
from mpiad.transport.core.buffers import Spec, copied, outgoing, result
from mpiad.transport.core.channels import Channel
from mpiad.transport.devices.device_arrays import arrays_named, arrays_of
from mpiad.transport.devices.device_settings import divides, present
from mpiad.transport.devices.staging import Direct, Staged, communicate, transfer_of

_WORDS = 128
# Words of a header: dtype, number of dimensions, up to 64 dimensions, device, bytes of a piece; then a small array.
_KIND, _CHUNK, _SHAPE_WORDS = 66, 70, 71
_CODES = ["?", "b", "h", "i", "l", "q", "B", "H", "I", "L", "Q", "f", "d", "F", "D"]  # int64 has two of them
_INLINE_BYTES = 8 * (_WORDS - _SHAPE_WORDS)
_ERROR = -1
_INLINE = -1  # in the place of the bytes of a piece: the array is in the header


def bcast_with_header(channel: Channel, x: Array, root: int, call: str) -> Array:
    """Copy the root's array to all ranks, which needn't know its shape and dtype.

    On other ranks the result is on the device of the template `x`, or on a device like the root's if there is none.
    """
    # The header has a fixed size, since the receivers don't know the size of the array.
    packet = np.zeros(_WORDS, dtype=np.int64)
    if channel.rank == root:
        return _bcast_from_here(channel, x, root, call, packet)
    channel.data.Bcast(packet, root)
    spec = _unpacked(packet, root, x)
    if packet[_CHUNK] > 0:
        return chunked_collectives.bcast_to_here(channel, spec, root, int(packet[_CHUNK]))
    if packet[_CHUNK] == _INLINE:
        flat = packet[_SHAPE_WORDS:].view(np.uint8)[: spec.nbytes]
        array = flat.view(spec.dtype).reshape(spec.shape)
        return result(array.copy()) if spec.arrays is None else spec.arrays.to_device(array)
    return communicate(lambda _, out: channel.data.Bcast(out, root), None, spec)


def _bcast_from_here(channel: Channel, x: Array, root: int, call: str, packet: np.ndarray) -> Array:
    try:
        array = outgoing(x, call)
        spec = Spec.of(array)
        transfer = transfer_of(spec.arrays)
    except TypeError as error:  # the others already wait for a header
        _send_error(channel, error, root, packet)
        raise
    _pack(packet, spec)
    # An array that MPI reads on the device isn't copied to the host for the header.
    small = array.nbytes <= _INLINE_BYTES and not isinstance(transfer, Direct)
    if small:
        packet[_CHUNK] = _INLINE
        packet[_SHAPE_WORDS:].view(np.uint8)[: array.nbytes] = transfer.send_buffer(array).reshape(-1).view(np.uint8)
    elif divides(array.nbytes) or (isinstance(transfer, Staged) and array.nbytes > present().chunk):
        packet[_CHUNK] = present().chunk
    channel.data.Bcast(packet, root)
    if packet[_CHUNK] > 0:
        chunked_collectives.bcast_from_here(channel, array, present().chunk)
    elif not small:
        channel.data.Bcast(transfer.send_buffer(array), root)
    return copied(array)


def agree_on_spec(channel: Channel, make: Callable[[], Spec], root: int, template: object) -> Spec:
    """Broadcast the spec that `make` returns on the root to all ranks, or raise its error on all of them.

    On other ranks it has the device of the template, or a device like the root's if there is none.
    """
    packet = np.zeros(_WORDS, dtype=np.int64)
    if channel.rank != root:
        channel.data.Bcast(packet, root)
        return _unpacked(packet, root, template)
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
    if spec.arrays is not None:
        packet[_KIND:_CHUNK].view(np.uint8)[:] = np.frombuffer(spec.arrays.name.encode().ljust(32)[:32], np.uint8)


def _unpacked(packet: np.ndarray, root: int, template: object) -> Spec:
    if packet[0] == _ERROR:
        kind, length = (TypeError, ValueError)[packet[1]], packet[2]
        text = packet[3:].view(np.uint8)[:length].tobytes().decode(errors="replace")
        raise kind(f"{text} (raised on the root, rank {root})")
    spec = Spec(tuple(packet[2 : 2 + packet[1]].tolist()), np.dtype(_CODES[packet[0]]))
    if template is not None:
        return spec._replace(arrays=arrays_of(template))
    kind = packet[_KIND:_CHUNK].tobytes().strip(b"\0 ").decode()
    return spec._replace(arrays=arrays_named(kind)) if kind else spec


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
