"""The messages of one stage of an exchange: all are started together, one to each neighbor, and then completed."""

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
from mpiad.transport.buffers import empty_like
from mpiad.transport.prepared_messages import PreparedMessages


class Coming(NamedTuple):
    """A message that this rank is receiving."""

    parts: tuple[Index, ...]  # indices of its parts
    request: Request


def post(values: LocalArray, routes: tuple[Route, ...], backwards: bool, tag: int, comm: Comm) -> list[Coming]:
    """Start the messages of a stage, for values of shape (..., *padded).

    Each rank sends cells of its block to the halos of its neighbors; with `backwards` it sends cells of its halo to the
    ranks that own them.
    """
    # Receives first, so that MPI needn't buffer the messages.
    coming = []
    for route in routes:
        parts = route.ours if backwards else route.ghosts
        coming.append(Coming(parts, mpi_irecv(_buffer_for(values, parts), route.peer, tag, comm)))
    for route in routes:
        parts = route.ghosts if backwards else route.ours
        mpi_send(np.concatenate([values[index].reshape(-1) for index in parts]), route.peer, tag, comm)
    return coming


def complete(values: LocalArray, coming: list[Coming], backwards: bool) -> None:
    """Wait for the messages of a stage, and write them to their cells; with `backwards` add them to these."""
    for parts, request in coming:
        # In the order of the routes, not of arrival: cells that belong to several parts are summed in a fixed order.
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
    """The messages of a stage, for an array with a fixed address that is exchanged repeatedly.

    Parameters are those of `post`.
    """

    def __init__(self, values: np.ndarray, routes: tuple[Route, ...], backwards: bool, tag: int, comm: Comm):
        going = [_Edges(values, route.ghosts if backwards else route.ours) for route in routes]
        # Backwards, received values are added to the cells, so that they need a buffer.
        coming = [_Edges(values, route.ours if backwards else route.ghosts, apart=backwards) for route in routes]
        self._packed = [copy for edges in going for copy in edges.copies]
        self._unpacked = [copy for edges in coming for copy in edges.copies]
        self._combine = _add if backwards else np.copyto
        used, peers = channel(comm, "exchange", collective=False), [route.peer for route in routes]
        self._messages = PreparedMessages(used, peers, tag, [e.message for e in going], [e.message for e in coming])

    def run(self) -> Iterator[None]:
        """Start the messages, yield, and complete them; the cells of active messages mustn't change meanwhile."""
        messages = self._messages
        try:
            for cells, part in self._packed:
                np.copyto(part, cells)
            messages.start()
            yield
            messages.finish("exchange")
        except BaseException as error:
            # A GeneratorExit if the program was abandoned; active messages may still write to the array.
            left = "an exception" if isinstance(error, GeneratorExit) else type(error).__name__
            messages.leave(f"{left} left a program in which messages were under way.")
            raise
        combine = self._combine
        for cells, part in self._unpacked:
            combine(cells, part)


class _Edges:
    """A message of several parts of an array: a view of the array if they are contiguous, else a buffer.

    `copies`: list of pairs: each part of the array, and the corresponding view of the buffer.
    """

    def __init__(self, values: np.ndarray, parts: tuple[Index, ...], apart: bool = False):
        cells = [values[index] for index in parts]
        self.copies: list[tuple[np.ndarray, np.ndarray]] = []
        if len(cells) == 1 and cells[0].flags.c_contiguous and not apart:
            self.message = cells[0]
            return
        self.message, start = _buffer_for(values, parts), 0
        for part in cells:
            self.copies.append((part, self.message[start : start + part.size].reshape(part.shape)))
            start += part.size


def _add(cells: np.ndarray, part: np.ndarray) -> None:
    np.add(cells, part, out=cells)
