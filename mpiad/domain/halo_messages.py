"""The messages of one stage of an exchange: posted together, one to each neighbor, and taken together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

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
    """Start the messages of a stage of values (..., *padded).

    With `backwards` halo cells are sent to their owners, instead of owned cells to the halos that copy them.
    """
    # Receives first, so that messages need no buffers in MPI.
    coming = []
    for route in routes:
        parts = route.ours if backwards else route.ghosts
        coming.append(Coming(parts, mpi_irecv(_room(values, parts), route.peer, tag, comm)))
    for route in routes:
        mpi_send(_packed(values, route.ghosts if backwards else route.ours), route.peer, tag, comm)
    return coming


def put(values: LocalArray, coming: list[Coming]) -> None:
    """Wait for the messages of a stage and write them to their cells."""
    for index, part in _received(values, coming):
        values[index] = part


def add(values: LocalArray, coming: list[Coming]) -> None:
    """Wait for the messages of a stage and add them to their cells."""
    for index, part in _received(values, coming):
        values[index] += part


def _received(values: LocalArray, coming: list[Coming]) -> Any:
    for parts, request in coming:
        # In the order of the routes, not of arrival: in cells of several parts the order of sums would vary otherwise.
        message, start = mpi_wait(request), 0
        for index in parts:
            shape = values[index].shape
            stop = start + math.prod(shape)
            yield index, message[start:stop].reshape(shape)
            start = stop


def _room(values: LocalArray, parts: tuple[Index, ...]) -> LocalArray:
    return empty_like(values, (sum(values[index].size for index in parts),))


def _packed(values: LocalArray, parts: tuple[Index, ...]) -> LocalArray:
    return np.concatenate([values[index].reshape(-1) for index in parts])


class PreparedStage:
    """The messages of a stage, for an array with a fixed address that is exchanged repeatedly.

    `values`, `routes`, `backwards`, `tag`, `comm`: as of `post`.
    """

    def __init__(self, values: np.ndarray, routes: tuple[Route, ...], backwards: bool, tag: int, comm: Comm):
        going = [_Edges(values, route.ghosts if backwards else route.ours) for route in routes]
        # Backwards, received values are added; otherwise they may be received directly into their cells.
        coming = [_Edges(values, route.ours if backwards else route.ghosts, apart=backwards) for route in routes]
        self._packed = [copy for edges in going for copy in edges.copies]
        self._unpacked = [copy for edges in coming for copy in edges.copies]
        self._combine = _add if backwards else np.copyto
        used, peers = channel(comm, "exchange", collective=False), [route.peer for route in routes]
        self._messages = PreparedMessages(used, peers, tag, [e.message for e in going], [e.message for e in coming])

    def run(self) -> Iterator[None]:
        """Start to send and receive, without waiting; the cells of active messages mustn't change meanwhile."""
        messages = self._messages
        try:
            for cells, part in self._packed:
                np.copyto(part, cells)
            messages.start()
            yield
            messages.finish("exchange")
        except BaseException as error:
            # GeneratorExit: the program was dropped in the middle, and the edges may still be written to.
            left = "an exception" if isinstance(error, GeneratorExit) else type(error).__name__
            messages.leave(f"{left} left a program in which messages were under way.")
            raise
        combine = self._combine
        for cells, part in self._unpacked:
            combine(cells, part)


class _Edges:
    """Parts of an array in one message: the array's own memory, if they are contiguous, or a buffer.

    `copies`, list of (array, array): each part of the array, and its view of the message.
    """

    def __init__(self, values: np.ndarray, parts: tuple[Index, ...], apart: bool = False):
        cells = [values[index] for index in parts]
        self.copies: list[tuple[np.ndarray, np.ndarray]] = []
        # A slab of whole rows is sent and received in place, without a copy.
        if len(cells) == 1 and cells[0].flags.c_contiguous and not apart:
            self.message = cells[0]
            return
        # Several parts for one neighbor, or strided ones, are packed into one contiguous message.
        self.message, start = _room(values, parts), 0
        for part in cells:
            self.copies.append((part, self.message[start : start + part.size].reshape(part.shape)))
            start += part.size


def _add(cells: np.ndarray, part: np.ndarray) -> None:
    np.add(cells, part, out=cells)
