"""The messages of one stage of an exchange, one to each neighbor; all messages start before the first is completed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mpiad._typing import Comm, LocalArray
from mpiad.domain.routes import Index, Route
from mpiad.primitives import mpi_irecv, mpi_send, mpi_wait
from mpiad.primitives.request import Request
from mpiad.transport import channel
from mpiad.transport.core.messages import PreparedMessages
from mpiad.transport.devices.device_arrays import empty_like


class PendingReceive(NamedTuple):
    """A message that this rank is receiving."""

    parts: tuple[Index, ...]  # indices of the message's parts in the array
    request: Request


def post(values: LocalArray, routes: tuple[Route, ...], backwards: bool, tag: int, comm: Comm) -> list[PendingReceive]:
    """Start the messages of a stage for an array (..., *padded), from blocks to halos, or if `backwards` vice versa."""
    # Receives are posted before the sends, so that MPI needn't buffer the messages.
    incoming = []
    for route in routes:
        parts = route.owned if backwards else route.ghosts
        incoming.append(PendingReceive(parts, mpi_irecv(_buffer_for(values, parts), route.peer, tag, comm)))
    for route in routes:
        parts = route.ghosts if backwards else route.owned
        mpi_send(np.concatenate([values[index].reshape(-1) for index in parts]), route.peer, tag, comm)
    return incoming


def complete(values: LocalArray, incoming: list[PendingReceive], backwards: bool) -> None:
    """Wait for the messages of a stage, and write the received values to the cells; if `backwards`, add the values."""
    for parts, request in incoming:
        # Messages are completed in a fixed order, so that contributions to one cell are added in a fixed order.
        message, start = mpi_wait(request), 0
        for index in parts:
            shape = values[index].shape
            stop = start + math.prod(shape)
            part, start = message[start:stop].reshape(shape), stop
            if backwards:
                values[index] += part
            else:
                values[index] = part


def _buffer_for(values: LocalArray, parts: tuple[Index, ...]) -> LocalArray:
    return empty_like(values, (sum(values[index].size for index in parts),))


class PreparedStage:
    """The messages of a stage, for an array with a fixed address that is exchanged repeatedly; arguments as for `post`."""

    def __init__(self, values: np.ndarray, routes: tuple[Route, ...], backwards: bool, tag: int, comm: Comm):
        outgoing = [_Packing(values, route.ghosts if backwards else route.owned) for route in routes]
        # With `backwards`, received values are added to the cells, so they need a buffer.
        incoming = [_Packing(values, route.owned if backwards else route.ghosts, buffered=backwards) for route in routes]
        self._packed = [copy for memory in outgoing for copy in memory.copies]
        self._unpacked = [copy for memory in incoming for copy in memory.copies]
        self._combine = _add if backwards else np.copyto
        group, peers = channel(comm, "exchange", collective=False), [route.peer for route in routes]
        self._messages = PreparedMessages(group, peers, tag, [m.message for m in outgoing], [m.message for m in incoming])

    def run(self) -> Iterator[None]:
        """Start the messages, yield, and complete them; the caller must not change the cells of the messages in between."""
        messages = self._messages
        try:
            for cells, part in self._packed:
                np.copyto(part, cells)
            messages.start()
            yield
            messages.finish("exchange")
        except BaseException as error:
            # A GeneratorExit means that the compiled program was discarded. Active messages may still write to the array.
            name = "an exception" if isinstance(error, GeneratorExit) else type(error).__name__
            messages.leave(f"{name} left a compiled program in which messages were under way.")
            raise
        combine = self._combine
        for cells, part in self._unpacked:
            combine(cells, part)


class _Packing:
    """The memory of a message: a view of the array if the message is one contiguous part, else a buffer."""

    def __init__(self, values: np.ndarray, parts: tuple[Index, ...], buffered: bool = False):
        cells = [values[index] for index in parts]
        self.copies: list[tuple[np.ndarray, np.ndarray]] = []  # parts of the array, with views of the buffer
        if len(cells) == 1 and cells[0].flags.c_contiguous and not buffered:
            self.message = cells[0]
            return
        self.message, start = _buffer_for(values, parts), 0
        for part in cells:
            self.copies.append((part, self.message[start : start + part.size].reshape(part.shape)))
            start += part.size


def _add(cells: np.ndarray, part: np.ndarray) -> None:
    np.add(cells, part, out=cells)
