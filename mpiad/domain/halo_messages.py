"""The messages of one stage of an exchange: posted together, one to each neighbour, and taken together."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Comm, LocalArray
from mpiad.domain.allocation import empty_beside
from mpiad.domain.routes import Index, Route
from mpiad.primitives import mpi_irecv, mpi_send, mpi_wait
from mpiad.primitives.request import Request

__all__ = ["Coming", "add", "post", "put"]


class Coming(NamedTuple):
    """A message under way to this rank.

    Parameters
    ----------
    parts : tuple of Index
        Where its parts belong.
    """

    parts: tuple[Index, ...]
    request: Request


def post(values: LocalArray, routes: tuple[Route, ...], backwards: bool, tag: int, comm: Comm) -> list[Coming]:
    """Start the messages of a stage.

    Parameters
    ----------
    values : array of shape (..., *padded)
    backwards : bool
        Whether halo cells travel to their owners, instead of owned cells to the halos that copy them.
    comm : mpi4py intracommunicator or None
    """
    # Receives first: what comes then needs no buffer of MPI's.
    coming = []
    for route in routes:
        parts = route.ours if backwards else route.ghosts
        coming.append(Coming(parts, mpi_irecv(_room(values, parts), route.peer, tag, comm)))
    for route in routes:
        mpi_send(_packed(values, route.ghosts if backwards else route.ours), route.peer, tag, comm)
    return coming


def put(values: LocalArray, coming: list[Coming]) -> None:
    """Wait for the messages of a stage and write them where they belong."""
    for index, part in _received(values, coming):
        values[index] = part


def add(values: LocalArray, coming: list[Coming]) -> None:
    """Wait for the messages of a stage and add them where they belong."""
    for index, part in _received(values, coming):
        values[index] += part


def _received(values: LocalArray, coming: list[Coming]) -> Any:
    for parts, request in coming:
        message, start = mpi_wait(request), 0
        for index in parts:
            shape = values[index].shape
            stop = start + math.prod(shape)
            yield index, message[start:stop].reshape(shape)
            start = stop


def _room(values: LocalArray, parts: tuple[Index, ...]) -> LocalArray:
    return empty_beside(values, (sum(values[index].size for index in parts),))


def _packed(values: LocalArray, parts: tuple[Index, ...]) -> LocalArray:
    return np.concatenate([values[index].reshape(-1) for index in parts])
