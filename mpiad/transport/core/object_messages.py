"""Messages of Python objects between two ranks.

A message is a pickle, preceded by the lengths of its buffers, and a further message for each buffer. Buffers, left out of
the pickle by protocol 5, are the data of contiguous arrays of 64 KiB or more.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpiad._typing import Comm, Rank, Request
from mpiad.transport.core.channels import Channel
from mpiad.transport.core.fault_tolerance import is_process_failure

_BUFFER_TAG = 1000
_LARGE = 1 << 16
_WORD = np.dtype(np.int64)


class Message(NamedTuple):
    """A received message: its sender, kind, and object."""

    source: Rank
    kind: int
    content: Any


class PackedObject(NamedTuple):
    """An object ready to be sent, possibly several times."""

    head: np.ndarray
    buffers: list[np.ndarray]

    @classmethod
    def of(cls, content: object, shared: bool = False) -> PackedObject:
        """Pack an object; raises the exceptions of pickle. Its arrays may change afterwards, unless `shared`."""
        buffers: list[np.ndarray] = []

        def leave_out(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes < _LARGE:
                return True  # stays in the pickle
            data = np.frombuffer(raw, dtype=np.uint8)
            buffers.append(data if shared else data.copy())
            return False

        body = pickle.dumps(content, protocol=5, buffer_callback=leave_out)
        lengths = np.array([len(buffers), *(buffer.nbytes for buffer in buffers)], dtype=_WORD)
        return cls(np.frombuffer(lengths.tobytes() + body, dtype=np.uint8), buffers)

    def opened(self) -> Any:
        """Unpack the object, as its receiver does."""
        # Unpacked arrays may be changed, and the packed object may be sent once more.
        return _unpacked(self.head, [buffer.copy() for buffer in self.buffers])


def _lengths(head: np.ndarray) -> list[int]:
    count = int(head[: _WORD.itemsize].view(_WORD)[0])
    return head[_WORD.itemsize : _WORD.itemsize * (1 + count)].view(_WORD).tolist()


def _unpacked(head: np.ndarray, buffers: list[np.ndarray]) -> Any:
    return pickle.loads(head[_WORD.itemsize * (1 + len(buffers)) :].data, buffers=buffers)


def _is_over(request: Request) -> bool:
    try:
        return request.Test()
    except MPI.Exception as error:
        if is_process_failure(error):
            return True  # the receiver has died
        raise


class Line:
    """Sends and receives objects on a communicator without other messages, derived from the communicator of a channel."""

    def __init__(self, comm: Comm, used: Channel):
        self.comm, self._used = comm, used
        self._status = MPI.Status()
        self._posted: list[tuple[list[Request], Rank]] = []

    def post(self, dest: Rank, kind: int, parcel: PackedObject) -> None:
        """Send without waiting."""
        self._settle()
        for part, tag in ((parcel.head, kind), *((buffer, _BUFFER_TAG) for buffer in parcel.buffers)):
            self._posted.append((self._used.begin("parcel", part, self.comm.Isend, part, dest, tag), dest))

    def take(self, source: Rank = MPI.ANY_SOURCE) -> Message | None:
        """Return a message that has arrived, or None."""
        status = self._status
        found = self.comm.Improbe(source, MPI.ANY_TAG, status)
        if found is None:
            return None
        sender, kind = status.source, status.tag
        head = np.empty(status.Get_count(MPI.BYTE), dtype=np.uint8)
        found.Recv(head)
        buffers = [self._buffer(sender, length) for length in _lengths(head)]
        return Message(sender, kind, _unpacked(head, buffers))

    def _buffer(self, sender: Rank, length: int) -> np.ndarray:
        buffer = np.empty(length, dtype=np.uint8)
        self.comm.Recv(buffer, sender, _BUFFER_TAG)
        return buffer

    def is_quiet(self) -> bool:
        """Return whether all posted messages have been sent."""
        self._settle()
        return not self._posted

    def _settle(self) -> None:
        self._release(lambda request, dest: _is_over(request))

    def _release(self, ended: Callable[[Request, Rank], bool]) -> None:
        held, self._posted = self._posted, []
        for requests, dest in held:
            if ended(requests[0], dest):
                self._used.release(requests)
            else:
                self._posted.append((requests, dest))

    def forget(self, rank: Rank) -> None:
        """Stop waiting for messages posted to a rank that has died."""
        self._release(lambda request, dest: dest == rank)
