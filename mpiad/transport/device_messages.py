"""Messages with arrays of a device: what the sender copies, and large arrays that travel in pieces.

The first message of an array has the address of any other message. Where a sender copies a large array through the host,
it is short and says that the array follows in pieces, on the channel's duplicate for adjoints, under a tag of its own. A
piece is sent while the next one is copied. Receivers expect both: they make room for the whole, and look at how much has
come. So the two ends needn't agree on anything, and either may hold its array on a device or on the host.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from mpi4py import MPI

from mpiad._typing import Array, Buffer, Request, Shape
from mpiad.transport import device_settings
from mpiad.transport.buffers import Spec, result
from mpiad.transport.chunked_staging import arriving, bounds, departing, of_whole
from mpiad.transport.device_arrays import arrays_of
from mpiad.transport.envelopes import Envelope
from mpiad.transport.staging import Staged, way_of

_SAYING = b"mpiad: in pieces"
ANNOUNCEMENT_BYTES = len(_SAYING) + 16


class Announcement(list):
    """What MPI is given for a message that stands for an array: a buffer and its type, with the array's form."""

    def __init__(self, array: Array, chunk: int):
        said = np.frombuffer(_SAYING + np.array([array.nbytes, chunk], np.int64).tobytes(), np.uint8)
        super().__init__([said, MPI.BYTE])
        self.shape: Shape = array.shape
        self.dtype, self.nbytes = array.dtype, array.nbytes


def ship(array: Array, envelope: Envelope, kind: str) -> list[Request]:
    """Start to send a copy of a device's array; return MPI's request."""
    arrays = arrays_of(array)
    way = way_of(arrays)
    chunk = device_settings.present().chunk
    # What is as short as an announcement would be taken for one.
    if isinstance(way, Staged) and array.nbytes > max(chunk, ANNOUNCEMENT_BYTES):
        return _ship_in_pieces(array, envelope, chunk, kind)
    sent = way.copied(array)
    return envelope.channel.begin(kind, sent, envelope.comm.Isend, sent, envelope.peer, envelope.mpi_tag)


def _ship_in_pieces(array: Array, envelope: Envelope, chunk: int, kind: str) -> list[Request]:
    channel = envelope.channel
    pieces = of_whole(array.size, array.dtype.itemsize, chunk)
    going = departing(array, pieces)
    announcement = Announcement(array, chunk)
    announced = channel.begin(kind, announcement, envelope.comm.Isend, announcement, envelope.peer, envelope.mpi_tag)
    for number in range(len(pieces)):
        piece = going.piece(number)
        given = piece.view(np.uint8), envelope.peer, envelope.tag_of_pieces
        channel.leave(channel.begin("blocking send", piece, channel.reverse.Isend, *given))
    return announced


def read_announcement(buffer: Buffer, got: int, spec: Spec) -> tuple[int, int] | None:
    """Return the bytes of the array that is announced, and of a piece; None where the message isn't an announcement.

    A message of `got` bytes is in `buffer`, on a device where MPI has written to one; an array like `spec` was expected.
    """
    if got != ANNOUNCEMENT_BYTES:
        return None
    # On a device: the announcement lies in its first entries, of which the last may be filled in part only.
    if type(buffer) is not np.ndarray:
        buffer = spec.arrays.to_host(buffer.reshape(-1)[: -(-got // spec.dtype.itemsize)])  # type: ignore[union-attr]
    said = buffer.reshape(-1).view(np.uint8)[:got].tobytes()
    if not said.startswith(_SAYING):
        return None
    total, chunk = np.frombuffer(said[len(_SAYING) :], np.int64).tolist()
    return total, chunk


def collect(spec: Spec, envelope: Envelope, chunk: int, room: Array) -> Array:
    """Receive the pieces of an array that was announced, into the room that was made for it, and return it."""
    if spec.arrays is None:
        for _ in _received(room.reshape(-1).view(np.uint8), envelope, chunk):
            pass
        return result(room)
    # An array that MPI would have written to the device comes this way, too, where its sender can't do the same.
    pieces = of_whole(spec.nbytes // spec.dtype.itemsize, spec.dtype.itemsize, chunk)
    coming = arriving(spec, pieces, getattr(room, "loan", None))
    for number, _ in enumerate(_received(coming.memory.view(np.uint8), envelope, chunk)):
        coming.take(number)
    return coming.home()


def _received(memory: np.ndarray, envelope: Envelope, chunk: int) -> Iterator[None]:
    """Receive all pieces, one at each step of the iteration."""
    channel, posted = envelope.channel, []
    for start, end in bounds(memory.size, 1, chunk):
        given = memory[start:end], envelope.peer, envelope.tag_of_pieces
        posted.append(channel.begin("blocking receive", memory, channel.reverse.Irecv, *given))
    for requests in posted:
        requests[0].Wait()
        channel.release(requests)
        yield


def discard(total: int, chunk: int, envelope: Envelope) -> None:
    """Receive and drop the pieces of an array that isn't the expected one: nobody else will."""
    dropped = np.empty(total, np.uint8)
    for _ in _received(dropped, envelope, chunk):
        pass
