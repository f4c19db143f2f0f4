"""Sums over the ranks that are started, and waited for later; and sums of host arrays in their own memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiad._typing import Array
from mpiad.transport.channels import Channel
from mpiad.transport.chunked_staging import of_whole, passing
from mpiad.transport.device_arrays import arrays_of
from mpiad.transport.device_settings import divides
from mpiad.transport.staging import way_of


class Summation:
    """A sum under way: MPI's requests, one for each piece, what takes a piece that is there, and what makes the result."""

    __slots__ = ("_channel", "_home", "_requests", "_take")

    def __init__(
        self, channel: Channel, requests: list[Any], home: Callable[[], Array], take: Callable[[int], Any] | None = None
    ):
        self._channel, self._requests, self._home, self._take = channel, requests, home, take

    def finish(self) -> Array:
        """Wait for the sum and return it."""
        for number, requests in enumerate(self._requests):
            requests[0].Wait()
            self._channel.release(requests)
            if self._take is not None:
                self._take(number)
        return self._home()


def start_allreduce(channel: Channel, array: Array) -> Summation:
    """Start to add up arrays; on the host, such as nobody else uses any more, and on devices copies."""
    if divides(array.nbytes):
        return _start_in_pieces(channel, array)
    arrays = arrays_of(array)
    way = way_of(arrays, nonblocking=True)
    room = way.room(array.shape, array.dtype)
    sent, into = array if arrays is None else way.copied(array), way.buffer(room)
    requests = channel.begin("reduction", (sent, into, room), channel.data.Iallreduce, sent, into, MPI.SUM)
    return Summation(channel, [requests], partial(way.home, room))


def _start_in_pieces(channel: Channel, array: Array) -> Summation:
    """Start one reduction for each piece: MPI adds up the first ones while the others are copied, here and at the end."""
    pieces = of_whole(array.size, array.dtype.itemsize)
    passage, requests = passing(array, pieces, private=True), []
    for number in range(len(pieces)):
        piece = passage.piece(number)
        requests.append(channel.begin("reduction", piece, channel.data.Iallreduce, MPI.IN_PLACE, piece, MPI.SUM))
    return Summation(channel, requests, passage.home, passage.take)


def start_sum_in_place(channel: Channel, array: np.ndarray) -> Summation:
    """Start to add up arrays of the host, on all ranks, in their own memory, which nobody uses meanwhile."""
    requests = channel.begin("reduction", array, channel.data.Iallreduce, MPI.IN_PLACE, array, MPI.SUM)
    return Summation(channel, [requests], lambda: array)


def sum_in_place(channel: Channel, array: np.ndarray) -> None:
    """Add up arrays of the host, on all ranks, in their own memory."""
    channel.data.Allreduce(MPI.IN_PLACE, array, MPI.SUM)
